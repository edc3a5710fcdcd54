"""Published weights of the peers: which file is whose, and their tensors under our names.

    with open_layout("mdlm-owt/") as weights:  # a folder with config.json and one weight file, or the file itself
        weights.system, weights.config, weights.clock
        weights["blocks.0.attention.qkv.weight"]

Layouts: Hugging Face safetensors (`backbone.*`), SEDD's and HDLM's bare state dicts (safetensors or .bin), Lightning's
.ckpt with EMA weights as a list without names, which follows the order of `parameters()`. Nothing in a file is run: a
.ckpt is opened by PyTorch's weights-only reader, and every class that it names beside tensors (its authors' config and
tokenizer) becomes an inert stand-in. Tensors are memory-mapped and handed out one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fsdfm.files import read_json
from fsdfm.model import DiT, ModelConfig
from fsdfm.model.dit import LARGEST_SIGMA, SMALLEST_SIGMA
from fsdfm.model.layers import ROTARY_BASE
from fsdfm.peers.network import Clock
from fsdfm.peers.noising import Geometric, LogLinear

__all__ = ["SYSTEMS", "EmaOrRaw", "PeerWeights", "System", "ema_order", "is_peer", "open_layout", "our_names"]

System = Literal["mdlm", "duo", "sedd-absorb", "sedd-uniform", "sdtt", "hdlm-epsilon", "hdlm-gamma"]
EmaOrRaw = Literal["ema", "raw"]
SYSTEMS: tuple[System, ...] = get_args(System)

_ROTARY = "rotary_emb.inv_freq"
_PREFIXES = ("backbone.", "module.", "model.", "_orig_mod.")
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_LARGEST_CONFIG = 2**20
_MOST_BLOCKS = 1024


def our_names(num_blocks: int) -> dict[str, str]:
    """Our module names -> theirs, for a trunk of so many blocks; tensors are `.weight` and `.bias` of both."""
    names = {
        "embedding": "vocab_embed",
        "conditioning.time.into": "sigma_map.mlp.0",
        "conditioning.time.out": "sigma_map.mlp.2",
        "norm": "output_layer.norm_final",
        "modulation.linear": "output_layer.adaLN_modulation",
        "head": "output_layer.linear",
    }
    for i in range(num_blocks):
        ours, theirs = f"blocks.{i}", f"blocks.{i}"
        names |= {
            f"{ours}.norm_attention": f"{theirs}.norm1",
            f"{ours}.attention.qkv": f"{theirs}.attn_qkv",
            f"{ours}.attention.out": f"{theirs}.attn_out",
            f"{ours}.norm_mlp": f"{theirs}.norm2",
            f"{ours}.mlp.into": f"{theirs}.mlp.0",
            f"{ours}.mlp.out": f"{theirs}.mlp.2",
            f"{ours}.modulation.linear": f"{theirs}.adaLN_modulation",
        }
    return names


def ema_order(num_blocks: int) -> list[str]:
    """The names that a Lightning file's nameless EMA list stands for, in order."""
    both = ("weight", "bias")
    order = ["vocab_embed.embedding", *(f"sigma_map.mlp.{n}.{part}" for n in (0, 2) for part in both)]
    for i in range(num_blocks):
        order += [f"blocks.{i}.{name}.weight" for name in ("norm1", "attn_qkv", "attn_out", "norm2")]
        order += [f"blocks.{i}.{name}.{part}" for name in ("mlp.0", "mlp.2", "adaLN_modulation") for part in both]
    order.append("output_layer.norm_final.weight")
    return order + [f"output_layer.{name}.{part}" for name in ("linear", "adaLN_modulation") for part in both]


# --- files ------------------------------------------------------------------------------------------------------------


class _StandIn:
    """Takes the place of every class a .ckpt names beside tensors: whatever is done to it has no effect."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def _new_dict(*_: Any) -> dict[Any, Any]:
    """An empty dict in the place of every kind of dict."""
    return {}


_DICTS = ("collections.defaultdict",)


def _read_torch(path: Path) -> Any:
    """What a .ckpt or .bin holds, memory-mapped, with stand-ins for whatever is no tensor, number or container."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        inert = [(_new_dict if name in _DICTS else _StandIn, name) for name in names]
        with torch.serialization.safe_globals(inert):  # type: ignore[arg-type]
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many kinds, for a file can be damaged in many ways
        raise ValueError(
            f"{path} is damaged, no file of weights, or one that only running it could read ({type(error).__name__}); "
            "get it from its authors"
        ) from error


def _check_stored(content: Mapping[Any, Any], path: Path) -> None:
    """Raise where tensors say to have more values than the file: a view may repeat one value without end."""
    stored, said, waiting = dict[int, int](), 0, [content]
    seen = set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            stored[storage.data_ptr()] = storage.nbytes()
            said += part.numel() * part.itemsize
        elif isinstance(part, Mapping | list | tuple) and id(part) not in seen:
            seen.add(id(part))
            waiting.extend(part.values() if isinstance(part, Mapping) else part)
    if said > 2 * sum(stored.values()):  # a head may share the embedding's values
        raise ValueError(f"{path} describes {said} bytes of tensors and holds {sum(stored.values())}; get it again")


def _tensors_of(content: Any, kind: EmaOrRaw | None, path: Path) -> tuple[dict[str, Tensor], EmaOrRaw]:
    """The named tensors of a .ckpt or .bin, averaged ones where there are any and nothing else is asked for."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds no weights; expected is a state dict or a Lightning checkpoint")
    _check_stored(content, path)
    state = content.get("state_dict", content)
    raw = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    ema = content.get("ema")
    shadow = ema.get("shadow_params") if isinstance(ema, Mapping) else None
    if kind == "ema" and shadow is None:
        raise ValueError(f"{path} holds no averaged weights; ask for the raw ones")
    if kind == "raw" or shadow is None:
        return _unwrapped(raw, path), "raw"
    named = _unwrapped(raw, path)
    order = ema_order(_count_blocks(named, path))
    if not isinstance(shadow, list) or len(shadow) != len(order):
        raise ValueError(f"{path} has {len(shadow)} averaged tensors; its network has {len(order)}: not this layout")
    for name, value in zip(order, shadow, strict=True):
        if not isinstance(value, Tensor) or name not in named or value.shape != named[name].shape:
            raise ValueError(f"{path}: the averaged tensor in the place of {name} does not have its shape")
    return {**named, **dict(zip(order, shadow, strict=True))}, "ema"


def _unwrapped(tensors: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Names without what wrappers put before them, however often."""
    named: dict[str, Any] = {}
    for name, value in tensors.items():
        while name.startswith(_PREFIXES):
            name = name.partition(".")[2]
        if name in named:
            raise ValueError(f"{path} holds {name} twice, under two wrappers")
        named[name] = value
    return named


def _count_blocks(names: Mapping[str, Any], path: Path) -> int:
    blocks = {name.split(".")[1] for name in names if name.startswith("blocks.")}
    if not 1 <= len(blocks) <= _MOST_BLOCKS or blocks != set(map(str, range(len(blocks)))):
        raise ValueError(f"{path} holds {len(blocks)} blocks that are not 0, 1, 2, ...: no peer's layout")
    return len(blocks)


# --- what the tensors and the config tell -----------------------------------------------------------------------------


@dataclass(frozen=True)
class About:
    """What a config.json says, under names of ours; None: it does not."""

    system: System | None = None
    num_heads: int | None = None
    length: int = 1024
    dropout: float = 0.1
    gamma: float = 0.01
    epsilon: float | None = None
    noise: str | None = None
    sigmas: tuple[float, float] = (1e-4, 20.0)
    scaled: bool | None = None


def read_about(path: Path) -> About:
    """The facts in a peer's config.json; an absent file says nothing."""
    if not path.is_file():
        return About()
    try:
        return _about(read_json(path, _LARGEST_CONFIG))
    except (ValueError, TypeError, AttributeError, KeyError, OSError) as error:
        raise ValueError(f"{path} is no config of a peer ({error!s:.200})") from error


def _about(record: Mapping[str, Any]) -> About:
    model = record.get("model", record)
    graph, noise = record.get("graph", {}), record.get("noise", {})
    training = record.get("training", {})
    system: System | None = None
    kinds: dict[Any, System] = {
        "mdlm": "mdlm",
        "duo": "duo",
        "DUO": "duo",
        "epsilon_hybrid": "hdlm-epsilon",
        "gamma_hybrid": "hdlm-gamma",
    }
    if record.get("model_type") in kinds:
        system = kinds[record["model_type"]]
    elif "sdtt" in str(record.get("parameterization", {}).get("name", "")):
        system = "sdtt"
    elif graph.get("type") == "absorb":
        system = "sedd-absorb"
    elif graph.get("type") == "uniform":
        system = "sedd-uniform"
    return About(
        system,
        num_heads=int(model["n_heads"]) if "n_heads" in model else None,
        length=int(model.get("model_length", model.get("length", 1024))),
        dropout=float(model.get("dropout", 0.1)),
        gamma=float(graph.get("gamma", 0.01)),
        epsilon=float(training["epsilon"]) if "epsilon" in training else None,
        noise=str(noise["type"]) if "type" in noise else None,
        sigmas=(float(noise.get("sigma_min", 1e-4)), float(noise.get("sigma_max", 20.0))),
        scaled=bool(model["scale_by_sigma"]) if "scale_by_sigma" in model else None,
    )


def _guess_system(names: Mapping[str, Any], path: Path) -> System:
    """Whose weights these are, by their tensors and, where those are alike, by the file's name."""
    if not any(name.startswith("sigma_map.") for name in names):
        return "hdlm-epsilon"
    if "output_layer.adaLN_modulation.weight" not in names:
        return "hdlm-gamma"
    said = f"{path.resolve().parent.name}/{path.name}".lower()
    for system in SYSTEMS:
        if system.partition("-")[0] in said:
            return system
    raise ValueError(
        f"{path} has the tensors of MDLM, Duo, SEDD and SDTT alike; put its config.json beside it, or say which: "
        f"{', '.join(SYSTEMS)}"
    )


@dataclass
class PeerWeights(Mapping[str, Tensor], AbstractContextManager["PeerWeights"]):
    """A peer's tensors under our names, read when asked for, float32.

    system, about   whose they are, and what its config says
    config          the network they fit
    kind            averaged ("ema") or as trained ("raw"); Hugging Face files do not say and count as raw
    """

    path: Path
    system: System
    about: About
    config: ModelConfig
    kind: EmaOrRaw
    _read: Callable[[str], Tensor]
    _theirs: dict[str, str]
    _files: ExitStack = field(default_factory=ExitStack)

    @property
    def clock(self) -> Clock:
        """What the network's time input carries."""
        if self.system in ("mdlm", "sdtt", "hdlm-epsilon"):
            return Clock("none")
        if self.geometric:
            return Clock("sigma", Geometric())
        return Clock("sigma", LogLinear(5e-3 if self.system == "hdlm-gamma" else 1e-3))

    @property
    def geometric(self) -> bool:
        """Whether its noise is SEDD's geometric one: what the config says, else that of its graph."""
        if not self.system.startswith("sedd"):
            return False
        return (self.about.noise or ("geometric" if self.system == "sedd-uniform" else "loglinear")) == "geometric"

    @property
    def masked(self) -> bool:
        """Whether its last token is the mask."""
        return self.system not in ("duo", "sedd-uniform")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[str]:
        with torch.device("meta"):
            return iter(DiT(self.config).state_dict())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Tensor:
        """One of our tensors; where the peer has none (epsilon-HDLM knows no time), what makes it do nothing."""
        if name in self._theirs:
            return self._read(self._theirs[name]).to(torch.float32).contiguous()
        with torch.device("meta"):
            shapes = {own: value.shape for own, value in DiT(self.config).state_dict().items()}
        if name not in shapes:
            raise KeyError(name)
        value = torch.zeros(shapes[name])
        if name.startswith("blocks.") and name.endswith("modulation.linear.bias"):
            value.view(6, -1)[2::3] = 1.0  # open gates: the plain block
        return value

    def load(self, *, dtype: torch.dtype = torch.float32) -> DiT:
        """The network itself, in eval mode."""
        with torch.device("meta"):
            model = DiT(self.config)
        model.load_state_dict({name: self[name].to(dtype) for name in self}, assign=True)
        return model.eval()


def open_layout(place: str | Path, *, system: System | None = None, weights: EmaOrRaw | None = None) -> PeerWeights:
    """Open a peer's weights: a folder with a weight file and its config.json, or the weight file itself.

    system    whose weights they are, where the files do not say
    weights   "ema" or "raw" of a Lightning file; None: the averaged ones if there are any
    """
    path = _weight_file(Path(place))
    about = read_about(path.with_name("config.json"))
    files = ExitStack()
    try:
        read, shapes, kind = _open(path, weights, files)
        found = system or about.system or _guess_system(shapes, path)
        if found.startswith("sedd"):
            _check_sedd(path, about, found)
        config = _infer(path, shapes, about)
        theirs = _match(path, shapes, config, system=found)
        _check_rotary(path, shapes, read)
    except BaseException:
        files.close()
        raise
    return PeerWeights(path, found, about, config, kind, read, theirs, files)


def _check_sedd(path: Path, about: About, system: System) -> None:
    """Raise where a config of SEDD says what would be read wrongly: other noise, or other scores of the same graph."""
    ends, scaled = (SMALLEST_SIGMA, LARGEST_SIGMA), system == "sedd-absorb"
    if about.noise not in (None, "loglinear", "geometric"):
        raise ValueError(
            f"{path}: noise.type in its config.json is {about.noise!r}; allowed are loglinear and geometric"
        )
    if about.noise == "geometric" and about.sigmas != ends:
        raise ValueError(
            f"{path}: its geometric noise has sigma from {about.sigmas[0]:g} to {about.sigmas[1]:g}; only SEDD's own, "
            f"{ends[0]:g} to {ends[1]:g}, can be read"
        )
    if about.scaled not in (None, scaled):
        raise ValueError(
            f"{path}: scale_by_sigma in its config.json is {str(about.scaled).lower()}; {system} is read with "
            f"{str(scaled).lower()}, its outputs would be taken for other scores"
        )


def is_peer(place: str | Path) -> bool:
    """Does a file, or the weight file of a folder, hold the table that all of their trunks begin with?"""
    with ExitStack() as files:
        try:
            _, shapes, _ = _open(_weight_file(Path(place)), None, files)
        except ValueError:
            return False
        return "vocab_embed.embedding" in shapes


def _weight_file(place: Path) -> Path:
    if place.is_file():
        return place
    found = [place / name for name in _WEIGHT_FILES if (place / name).is_file()]
    found += sorted(place.glob("*.ckpt")) if place.is_dir() else []
    if not found:
        raise ValueError(
            f"{place} holds no weights; expected is a folder with {' or '.join(_WEIGHT_FILES)} or a .ckpt, or the file"
        )
    return found[0]


def _open(
    path: Path, kind: EmaOrRaw | None, files: ExitStack
) -> tuple[Callable[[str], Tensor], dict[str, tuple[int, ...]], EmaOrRaw]:
    """How to read a tensor, the shapes of all, and which weights they are."""
    if path.suffix == ".safetensors":
        if kind == "ema":
            raise ValueError(f"{path} does not say whether its weights are averaged; leave the choice out")
        try:
            file = files.enter_context(safe_open(path, "pt"))
            full = _unwrapped({name: name for name in file.keys()}, path)  # noqa: SIM118
            shapes = {name: tuple(file.get_slice(theirs).get_shape()) for name, theirs in full.items()}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is no safetensors file ({error!s:.200}); get it again") from error
        return lambda name: file.get_tensor(full[name]), shapes, "raw"
    tensors, which = _tensors_of(_read_torch(path), kind, path)
    return tensors.__getitem__, {name: tuple(value.shape) for name, value in tensors.items()}, which


def _infer(path: Path, shapes: Mapping[str, tuple[int, ...]], about: About) -> ModelConfig:
    """The network, from its tensors' shapes; the heads from the rotary buffer or the config."""
    num_blocks = _count_blocks(shapes, path)
    embedding = shapes.get("vocab_embed.embedding", ())
    if len(embedding) != 2:
        raise ValueError(f"{path} has no table vocab_embed.embedding: no peer's layout; it begins {list(shapes)[:3]}")
    vocab_size, width = embedding
    heads = about.num_heads
    if _ROTARY in shapes and len(shapes[_ROTARY]) == 1 and shapes[_ROTARY][0]:
        heads = max(1, width // (2 * shapes[_ROTARY][0]))
    if heads is None:
        raise ValueError(f"{path} has no {_ROTARY} and no config.json, which tell the number of heads; add the config")
    condition = shapes.get("sigma_map.mlp.0.weight", (1, 256))
    return ModelConfig(
        vocab_size=vocab_size,
        width=width,
        num_blocks=num_blocks,
        num_heads=heads,
        cond_width=condition[0],
        dropout=about.dropout,
    )


def _match(path: Path, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, *, system: System) -> dict[str, str]:
    """Our tensor names -> theirs; every one of theirs has a place, and of ours only what the system lacks is absent."""
    modules = our_names(config.num_blocks)
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in DiT(config).state_dict().items()}
    theirs: dict[str, str] = {}
    problems = []
    for name, shape in wanted.items():
        module, _, part = name.rpartition(".")
        source = "vocab_embed.embedding" if module == "embedding" else f"{modules[module]}.{part}"
        if source in shapes and shapes[source] == shape:
            theirs[name] = source
        elif source in shapes:
            problems.append(f"{source} has shape {shapes[source]}, not {shape}")
        elif not _may_lack(system, module):
            problems.append(f"{source} is missing")
    problems += [f"{name!r} has no place" for name in shapes if name not in {*theirs.values(), _ROTARY}]
    if problems:
        raise ValueError(f"{path} is no layout of {system}: {'; '.join(problems[:3])}")
    return theirs


def _may_lack(system: System, module: str) -> bool:
    if system == "hdlm-epsilon":
        return "modulation" in module or module.startswith("conditioning")
    return system == "hdlm-gamma" and module == "modulation.linear"


def _check_rotary(path: Path, shapes: Mapping[str, Any], read: Callable[[str], Tensor]) -> None:
    if _ROTARY not in shapes:
        return
    found = read(_ROTARY).double()
    expected = ROTARY_BASE ** (-torch.arange(len(found), dtype=torch.float64) / len(found))
    if not torch.allclose(found, expected, rtol=1e-2, atol=0.0):
        raise ValueError(f"{path}: {_ROTARY} is not 10000^(-2i/D): positions would be read wrongly")
