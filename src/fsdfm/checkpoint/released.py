"""The paper's released weights: a .pth file of the companion code becomes the tensors of our `DiT`.

    with open_released("FS_DFM_checkpoint.pth", preset_settings("1.3b")) as weights:
        weights.config  # the network's ModelConfig
        weights["blocks.0.attention.qkv.weight"]  # read from the file now, checked, float32

The weights are a mapping from our names to tensors, each read when it is asked for: whoever writes them out one after
the other needs the memory of one of them. The file names its tensors, not its settings; what shapes and the rotary
buffer tell is inferred, and settings that a user gives must agree with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fsdfm.checkpoint.torchfile import StoredTensor, TorchFile
from fsdfm.files import did_you_mean, read_json
from fsdfm.model import PRESETS, DiT, ModelConfig
from fsdfm.model.layers import ROTARY_BASE

__all__ = ["ReleasedConfig", "ReleasedWeights", "WeightsName", "open_released", "preset_settings", "read_settings"]

WeightsName = Literal["ema", "raw", "teacher"]
SourceName = Literal["uniform", "mask"]

_GROUPS: dict[WeightsName, tuple[str, ...]] = {
    "ema": ("student_ema_model", "ema_model"),
    "raw": ("student_model", "model"),
    "teacher": ("teacher_model",),
}
_PAPER_NAMES = {"0.17b": "170m", "1.3b": "1300m", "1.7b": "1700m"}
_WRAPPERS = {"module", "_orig_mod"}  # what data parallelism and torch.compile put into names
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ROTARY = "rotary_emb.inv_freq"
_NOT_WEIGHTS = {_ROTARY, "n_averaged"}  # a table that we compute ourselves; the count of torch's AveragedModel
_MOST_BLOCKS = 1024
_LARGEST = 2**24  # no size of a network is larger; a mangled file's may be
_LARGEST_SETTINGS = 2**20


# --- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReleasedConfig:
    """What is known of a released model beside its tensors; None is not known.

    vocab_size   tokens; under the mask source with or without the mask
    length       tokens of a block in training; the paper's is 1024
    """

    vocab_size: int | None = None
    width: int | None = None
    cond_width: int | None = None
    num_blocks: int | None = None
    num_heads: int | None = None
    step_aware: bool | None = None
    source: SourceName | None = None
    length: int = 1024
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "cond_width", "num_blocks", "num_heads", "length"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= _LARGEST):
                raise ValueError(f"{name} is {value!r}; allowed are whole numbers from 1 to {_LARGEST}")
        if self.step_aware not in (None, True, False) or self.source not in (None, *get_args(SourceName)):
            raise ValueError(
                f"step_aware is {self.step_aware!r} and source {self.source!r}; "
                "allowed are true or false, and 'uniform' or 'mask'"
            )
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout!r}; allowed are 0 <= dropout < 1; the paper has 0.1")


# The companion code's names of our settings, and ours.
_KEYS = {
    "hidden_size": "width",
    "cond_dim": "cond_width",
    "n_blocks": "num_blocks",
    "n_heads": "num_heads",
    **{name: name for name in ReleasedConfig.__dataclass_fields__},
}
_SAY_NOTHING = {"compile"}  # of the weights


def preset_settings(name: str) -> ReleasedConfig:
    """The settings of one of the paper's sizes, by its name or ours: 0.17b (170m), 1.3b (1300m), 1.7b (1700m)."""
    ours = _PAPER_NAMES.get(name.lower(), name.lower())
    if ours not in _PAPER_NAMES.values():
        raise ValueError(f"preset is {name!r}; allowed are {', '.join((*_PAPER_NAMES, *_PAPER_NAMES.values()))}")
    sizes = PRESETS[ours]
    return ReleasedConfig(
        vocab_size=sizes.vocab_size,
        width=sizes.width,
        cond_width=sizes.cond_width,
        num_blocks=sizes.num_blocks,
        num_heads=sizes.num_heads,
        dropout=sizes.dropout,
    )


def read_settings(path: str | Path) -> ReleasedConfig:
    """The settings in a JSON file: `{"model": {"hidden_size": 2048, "n_heads": 32, ...}, "vocab_size": 50257, ...}`."""
    path = Path(path)
    if not path.is_file() or path.stat().st_size > _LARGEST_SETTINGS:
        raise ValueError(f"{path} is not a file of settings; name a small JSON file")
    try:
        record = read_json(path, _LARGEST_SETTINGS)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; name a JSON file with the settings") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("model", {}), dict):
        raise ValueError(f'{path} holds no settings; expected is an object like {{"model": {{"n_heads": 32}}}}')
    flat = {**{key: value for key, value in record.items() if key != "model"}, **record.get("model", {})}
    values: dict[str, Any] = {}
    for key, value in flat.items():
        if key in _SAY_NOTHING:
            continue
        if key not in _KEYS or _KEYS[key] in values:
            hint = did_you_mean(key, _KEYS)
            raise ValueError(f"{path}: {key[:80]!r} is no setting, or stands there twice; {hint}")
        values[_KEYS[key]] = value
    try:
        return ReleasedConfig(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


# --- the file ---------------------------------------------------------------------------------------------------------


class ReleasedWeights(Mapping[str, Tensor], AbstractContextManager["ReleasedWeights"]):
    """The tensors of a released model under our names, each read, converted and checked when it is asked for.

    config          the network they belong to
    settings        what is known beside: source (None: not known) and length
    kind, group     which of the file's weights they are, and the file's name of them
    training_step   the training step the file speaks of, if any
    """

    def __init__(self, file: TorchFile, settings: ReleasedConfig, kind: WeightsName | None, *, dtype: torch.dtype):
        self._file = file
        self.path = file.archive.path
        self.kind, self.group, tensors = _choose(file, kind)
        self._stored = _unwrap(self.path, tensors)
        for tensor in self._stored.values():
            file.check(tensor)
        file.check_shared(self._stored.values())
        found = _infer(self.path, self._stored)
        self.settings = settings
        self.config = _agree(self.path, found, settings)
        self._parts = _our_names(self.config)
        self._check()
        step = file.content.get("step")
        self.training_step = step if type(step) is int and 0 <= step < 2**63 else None
        self.dtype = dtype

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, name: str) -> Tensor:
        """One of our tensors; the file's q, k and v are joined to one."""
        parts = [self._read(theirs) for theirs in self._parts[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, name: str) -> Tensor:
        values = self._file.read(self._stored[name]).to(self.dtype)
        if not all(torch.isfinite(end) for end in torch.aminmax(values)):
            raise ValueError(
                f"{self.path}: {name} of {self.group} holds values that are not finite as {self.dtype}; "
                "the file is damaged, or its training diverged: choose other weights of it, or another file"
            )
        return values

    def _check(self) -> None:
        """Raise, with the first of them, for tensors that are missing, left over, or of another shape or type."""
        with torch.device("meta"):
            ours = {name: tuple(value.shape) for name, value in DiT(self.config).state_dict().items()}
        wanted = {
            theirs: (shape[0] // len(self._parts[name]), *shape[1:])
            for name, shape in ours.items()
            for theirs in self._parts[name]
        }
        found = {name: tensor for name, tensor in self._stored.items() if name not in _NOT_WEIGHTS}
        problems = [f"{name} is missing" for name in wanted if name not in found]
        problems += [f"{name!r} has no place" for name in found if name not in wanted]
        for name, shape in wanted.items():
            if name in found and found[name].shape != shape:
                problems.append(f"{name} has shape {found[name].shape}, not {shape}")
        _raise_first(self.path, f"{self.group} is no released model", problems)
        total = sum(tensor.num_bytes for tensor in found.values())
        if total > self._file.archive.num_bytes:
            raise ValueError(
                f"{self.path} has {self._file.archive.num_bytes} bytes, but {self.group} asks for {total}: its tensors "
                "share memory, as no released file's do"
            )
        self._check_rotary()

    def _check_rotary(self) -> None:
        """Raise unless the file's rotary frequencies are ours, 10000^(-2i/D), to the precision of its numbers."""
        if _ROTARY not in self._stored:
            return
        found = self._file.read(self._stored[_ROTARY]).double()
        steps = torch.arange(len(found), dtype=torch.float64) / len(found)
        if not torch.allclose(found, ROTARY_BASE**-steps, rtol=1e-2, atol=0.0):
            raise ValueError(
                f"{self.path}: {_ROTARY} is not 10000^(-2i/D); positions would be read wrongly: the file is damaged, "
                "or of another architecture"
            )


def open_released(
    path: str | Path,
    settings: ReleasedConfig | None = None,
    weights: WeightsName | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> ReleasedWeights:
    """Open a released .pth file; the result is a context manager, and its tensors are read when they are asked for.

    settings   what is known of the model; what the tensors tell must agree with it
    weights    `ema`, `raw` (as trained) or `teacher`; None: the averaged ones, and those as trained if there are none
    """
    if weights not in (None, *get_args(WeightsName)):
        raise ValueError(f"weights is {weights!r}; allowed are {', '.join(get_args(WeightsName))}")
    file = TorchFile(path)
    try:
        return ReleasedWeights(file, settings or ReleasedConfig(), weights, dtype=dtype)
    except BaseException:
        file.__exit__(None, None, None)
        raise


def _choose(file: TorchFile, kind: WeightsName | None) -> tuple[WeightsName, str, dict[str, Any]]:
    """The weights asked for: their kind, the file's name of them, and the dict they stand in."""
    content, path = file.content, file.archive.path
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no named weights; name a checkpoint of the released models")
    groups: dict[WeightsName, tuple[str, Any]] = {
        name: (group, content[group])
        for name, groups in _GROUPS.items()
        for group in reversed(groups)  # the first wins
        if isinstance(content.get(group), dict)
    }
    if not groups and any(isinstance(value, StoredTensor) for value in content.values()):
        groups = {"raw": ("the file", content)}  # a bare state dict
    if not groups:
        names = [str(key)[:40] for key in content][:6]
        expected = [group for groups in _GROUPS.values() for group in groups]
        raise ValueError(f"{path} holds {names}, but none of {', '.join(expected)}; name a released checkpoint")
    chosen = kind or next(name for name in _GROUPS if name in groups)
    if chosen not in groups:
        raise ValueError(f"{path} has no {chosen} weights; it has {', '.join(groups)}")
    return (chosen, *groups[chosen])


def _unwrap(path: Path, tensors: Mapping[Any, Any]) -> dict[str, StoredTensor]:
    """The tensors by their names without wrappers: `module._orig_mod.blocks.0.qw.weight` is `blocks.0.qw.weight`."""
    stored: dict[str, StoredTensor] = {}
    for key, value in tensors.items():
        name = ".".join(part for part in str(key)[:200].split(".") if part not in _WRAPPERS)
        if not isinstance(value, StoredTensor):
            raise ValueError(f"{path}: {name!r} is no tensor; name a released checkpoint")
        if name in stored:
            raise ValueError(f"{path} holds {name!r} twice, with and without a wrapper's prefix; save one of them")
        stored[name] = value
    return stored


# --- the network ------------------------------------------------------------------------------------------------------


def _infer(path: Path, stored: Mapping[str, StoredTensor]) -> ReleasedConfig:
    """What the tensors tell of the network; the number of heads only the rotary buffer tells."""
    for name, tensor in stored.items():
        if name == "n_averaged":
            continue
        if tensor.dtype not in _FLOATS:
            raise ValueError(f"{path}: {name!r} is {tensor.dtype}; allowed are {', '.join(map(str, _FLOATS))}")
        if tensor.num_values == 0 or not tensor.shape:
            raise ValueError(f"{path}: {name!r} has shape {tensor.shape}; no weights of a released model are empty")
    vocab_size, width = _matrix(path, stored, "vocab_embed.weight")
    cond_width, _ = _matrix(path, stored, "time_embedding.mlp.0.weight")
    blocks = {name.split(".")[1] for name in stored if name.startswith("blocks.")}
    if not 1 <= len(blocks) <= _MOST_BLOCKS or blocks != set(map(str, range(len(blocks)))):
        raise ValueError(
            f"{path} holds {len(blocks)} blocks that are not 0, 1, 2, ... up to {_MOST_BLOCKS - 1} at most"
        )
    num_heads = None
    if _ROTARY in stored:
        head_width = 2 * stored[_ROTARY].num_values
        if width % head_width or len(stored[_ROTARY].shape) != 1:
            raise ValueError(
                f"{path}: {_ROTARY} has shape {stored[_ROTARY].shape}, which fits no heads of width {width}"
            )
        num_heads = width // head_width
    return ReleasedConfig(
        vocab_size=vocab_size,
        width=width,
        cond_width=cond_width,
        num_blocks=len(blocks),
        num_heads=num_heads,
        step_aware="dt_embedding.mlp.0.weight" in stored,
    )


def _matrix(path: Path, stored: Mapping[str, StoredTensor], name: str) -> tuple[int, int]:
    if name not in stored or len(stored[name].shape) != 2:
        found = [key[:40] for key in stored][:3]
        raise ValueError(f"{path} is no released model: {name} is not a matrix in it; its tensors begin with {found}")
    rows, columns = stored[name].shape
    return rows, columns


def _agree(path: Path, found: ReleasedConfig, given: ReleasedConfig) -> ModelConfig:
    """The network that the tensors and the settings agree on."""
    names = ("vocab_size", "width", "cond_width", "num_blocks", "num_heads", "step_aware")
    problems = []
    for name in names:
        theirs, ours = getattr(found, name), getattr(given, name)
        allowed = {ours, None}
        if name == "vocab_size" and ours is not None and given.source != "uniform":
            allowed.add(ours + 1)  # the mask
        if ours is not None and theirs not in allowed:
            problems.append(f"{name} is {theirs} in the file and {ours} in the settings")
    _raise_first(path, "does not fit the settings", problems)
    num_heads = found.num_heads or given.num_heads
    if num_heads is None:
        raise ValueError(f"{path} has no {_ROTARY}, which tells the number of heads; give a preset or a config")
    assert found.vocab_size is not None
    assert found.width is not None
    assert found.num_blocks is not None
    assert found.cond_width is not None
    return ModelConfig(
        vocab_size=found.vocab_size,
        width=found.width,
        num_blocks=found.num_blocks,
        num_heads=num_heads,
        cond_width=found.cond_width,
        dropout=float(given.dropout),
        # Without h the released network is ours: c = SiLU(W_t phi(t)) for all blocks.
        conditioning="fused" if found.step_aware else "time",
    )


def _raise_first(path: Path, what: str, problems: list[str]) -> None:
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"{path}: {what}: {'; '.join(problem[:120] for problem in problems[:3])}{more}")


def _our_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The released names of each of our tensors, which is their concatenation."""
    modules: dict[str, tuple[str, ...]] = {
        "embedding": ("vocab_embed",),
        "norm": ("output_layer.norm_final",),
        "modulation.linear": ("output_layer.adaLN_modulation",),
        "head": ("output_layer.linear",),
        "conditioning.time.into": ("time_embedding.mlp.0",),
        "conditioning.time.out": ("time_embedding.mlp.2",),
    }
    for i in range(config.num_blocks):
        block = f"blocks.{i}"
        modules |= {
            f"{block}.norm_attention": (f"{block}.norm1",),
            f"{block}.attention.qkv": (f"{block}.qw", f"{block}.kw", f"{block}.vw"),
            f"{block}.attention.out": (f"{block}.attn_out",),
            f"{block}.norm_mlp": (f"{block}.norm2",),
            f"{block}.mlp.into": (f"{block}.mlp.0",),
            f"{block}.mlp.out": (f"{block}.mlp.2",),
            f"{block}.modulation.linear": (f"{block}.adaLN_modulation",),
        }
    if config.conditioning == "fused":
        modules |= {
            "conditioning.step.into": ("dt_embedding.mlp.0",),
            "conditioning.step.out": ("dt_embedding.mlp.2",),
            "conditioning.fuser": ("time_condition_fuser",),
            **{f"conditioning.narrow.{i}": (f"blocks.{i}.condition_fuser",) for i in range(config.num_blocks)},
            f"conditioning.narrow.{config.num_blocks}": ("output_layer.condition_fuser",),
        }
    with torch.device("meta"):
        names = DiT(config).state_dict()
    return {
        name: tuple(f"{theirs}.{name.rpartition('.')[2]}" for theirs in modules[name.rpartition(".")[0]])
        for name in names
    }
