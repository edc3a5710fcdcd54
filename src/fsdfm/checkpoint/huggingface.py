"""Hugging Face folders: the safetensors of Llama, SmolLM2, Qwen2, Qwen3, GPT-2, LLaDA and Dream as a `Transformer`.

    with open_folder("SmolLM2-135M") as weights:
        weights.config                # a TransformerConfig
        weights["embedding.weight"]   # our name; read, joined and checked when it is asked for
        model = weights.build(precision="bfloat16")

Nothing in a folder is run: config.json tells the sizes, the index of the shards where each tensor is. A tensor is read
when it is asked for, so a model is filled part by part (`fsdfm.model.filling`, which states the memory).
"""

from __future__ import annotations

import hashlib
import json
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from fsdfm.data import Tokenizer
from fsdfm.files import file_sha256, read_text, require_plain
from fsdfm.model.filling import Precision, fill_network
from fsdfm.model.stack import Transformer, TransformerConfig

__all__ = [
    "FAMILIES",
    "Family",
    "FolderWeights",
    "find_family",
    "is_folder",
    "open_folder",
    "read_bos_id",
    "read_tokenizer",
]

_CONFIG, _INDEX, _SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_LARGEST_TEXT, _LARGEST_HEADER = 2**26, 2**26  # bytes; a mangled file has more
_IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # tables that others store and we compute
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_Names = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Family:
    """One layout: what its config.json means, what its tensors are called, and what it is for.

    names        our name with {i} for the block -> theirs, joined in this order along the outputs
    transposed   whether Linears are stored as [in, out]
    prefix       what some files put before every name and some do not
    """

    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    names: _Names
    transposed: bool = False
    prefix: str = ""
    autoregressive: bool = True


# --- names ------------------------------------------------------------------------------------------------------------

_LAYER = "model.layers.{i}."
_LLAMA: _Names = {
    "embedding.weight": ("model.embed_tokens.weight",),
    "blocks.{i}.norm_attention.weight": (_LAYER + "input_layernorm.weight",),
    "blocks.{i}.attention.qkv.weight": tuple(f"{_LAYER}self_attn.{part}_proj.weight" for part in "qkv"),
    "blocks.{i}.attention.qkv.bias": tuple(f"{_LAYER}self_attn.{part}_proj.bias" for part in "qkv"),
    "blocks.{i}.attention.norm_q": (_LAYER + "self_attn.q_norm.weight",),
    "blocks.{i}.attention.norm_k": (_LAYER + "self_attn.k_norm.weight",),
    "blocks.{i}.attention.out.weight": (_LAYER + "self_attn.o_proj.weight",),
    "blocks.{i}.attention.out.bias": (_LAYER + "self_attn.o_proj.bias",),
    "blocks.{i}.norm_mlp.weight": (_LAYER + "post_attention_layernorm.weight",),
    "blocks.{i}.mlp.into.weight": (_LAYER + "mlp.gate_proj.weight", _LAYER + "mlp.up_proj.weight"),
    "blocks.{i}.mlp.out.weight": (_LAYER + "mlp.down_proj.weight",),
    "norm.weight": ("model.norm.weight",),
    "head.weight": ("lm_head.weight",),
}
_ROW = "model.transformer.blocks.{i}."
_LLADA: _Names = {
    "embedding.weight": ("model.transformer.wte.weight",),
    "blocks.{i}.norm_attention.weight": (_ROW + "attn_norm.weight",),
    "blocks.{i}.attention.qkv.weight": tuple(f"{_ROW}{part}_proj.weight" for part in "qkv"),
    "blocks.{i}.attention.out.weight": (_ROW + "attn_out.weight",),
    "blocks.{i}.norm_mlp.weight": (_ROW + "ff_norm.weight",),
    "blocks.{i}.mlp.into.weight": (_ROW + "ff_proj.weight", _ROW + "up_proj.weight"),
    "blocks.{i}.mlp.out.weight": (_ROW + "ff_out.weight",),
    "norm.weight": ("model.transformer.ln_f.weight",),
    "head.weight": ("model.transformer.ff_out.weight",),
}
_GPT2: _Names = {
    "embedding.weight": ("wte.weight",),
    "positions.weight": ("wpe.weight",),
    **{
        f"blocks.{{i}}.{ours}.{kind}": (f"h.{{i}}.{theirs}.{kind}",)
        for ours, theirs in {
            "norm_attention": "ln_1",
            "attention.qkv": "attn.c_attn",
            "attention.out": "attn.c_proj",
            "norm_mlp": "ln_2",
            "mlp.into": "mlp.c_fc",
            "mlp.out": "mlp.c_proj",
        }.items()
        for kind in ("weight", "bias")
    },
    "norm.weight": ("ln_f.weight",),
    "norm.bias": ("ln_f.bias",),
    "head.weight": ("lm_head.weight",),
}


# --- sizes ------------------------------------------------------------------------------------------------------------


def _require(config: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> None:
    """Raise where a field says what our stack does not do; a field that is absent has the usual value."""
    if config.get(name, allowed[0]) not in allowed:
        words = " or ".join(map(repr, allowed))
        raise ValueError(f"config.json: {name} is {config[name]!r}; the stack here has {words} only")


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Base and scaling of the angles, in the field names of transformers 4 and 5."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    found: dict[str, Any] = {"rotary_base": float(base)}
    if kind in ("linear", "llama3"):
        found["rotary_factor"] = float(scaling["factor"])
    elif kind != "default":
        raise ValueError(f"config.json: rope_type is {kind!r}; allowed are 'default', 'linear', 'llama3'")
    if kind == "llama3":
        length = scaling["original_max_position_embeddings"]
        found["rotary_bands"] = (scaling["low_freq_factor"], scaling["high_freq_factor"], length)
    return found


def _llama(config: Mapping[str, Any]) -> dict[str, Any]:
    _require(config, "hidden_act", ("silu",))
    _require(config, "mlp_bias", (False,))
    _require(config, "use_sliding_window", (False, None))
    biased = bool(config.get("attention_bias", False))
    return {
        "vocab_size": config["vocab_size"],
        "width": config["hidden_size"],
        "num_blocks": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads"),
        "mlp_width": config["intermediate_size"],
        "head_channels": config.get("head_dim"),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "max_length": config.get("max_position_embeddings", 2048),
        "qkv_bias": biased,
        "out_bias": biased,
        "tied": bool(config.get("tie_word_embeddings", False)),
        **_rotary(config),
    }


def _qwen2(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_llama({**config, "attention_bias": False}), "qkv_bias": True}


def _qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_llama(config), "head_channels": config.get("head_dim", 128), "qk_norm": True}


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    _require(config, "activation_function", ("gelu_new", "gelu_pytorch_tanh"))
    _require(config, "scale_attn_weights", (True,))
    _require(config, "scale_attn_by_inverse_layer_idx", (False,))
    return {
        "vocab_size": config["vocab_size"],
        "width": config["n_embd"],
        "num_blocks": config["n_layer"],
        "num_heads": config["n_head"],
        "mlp_width": config.get("n_inner"),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "max_length": config.get("n_positions", 1024),
        "style": "paper",
        "positions": "learned",
        "tied": bool(config.get("tie_word_embeddings", True)),
        **dict.fromkeys(("qkv_bias", "out_bias", "norm_bias"), True),
    }


def _llada(config: Mapping[str, Any]) -> dict[str, Any]:
    _require(config, "block_type", ("llama",))
    _require(config, "activation_type", ("silu",))
    _require(config, "layer_norm_type", ("rms",))
    for name in ("alibi", "attention_layer_norm", "include_bias", "include_qkv_bias", "input_emb_norm", "scale_logits"):
        _require(config, name, (False,))
    return {
        "vocab_size": config.get("embedding_size") or config["vocab_size"],
        "width": config["d_model"],
        "num_blocks": config["n_layers"],
        "num_heads": config["n_heads"],
        "num_kv_heads": config.get("n_kv_heads"),
        "mlp_width": config["mlp_hidden_size"],
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "max_length": config.get("max_sequence_length", 4096),
        "rotary_base": float(config.get("rope_theta", 10000.0)),
        "tied": bool(config.get("weight_tying", False)),
    }


FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, _LLAMA),
    "qwen2": Family(_qwen2, _LLAMA),
    "qwen3": Family(_qwen3, _LLAMA),
    "gpt2": Family(_gpt2, _GPT2, transposed=True, prefix="transformer."),
    "llada": Family(_llada, _LLADA, autoregressive=False),
    "Dream": Family(lambda config: {**_qwen2(config), "next_token": True}, _LLAMA, autoregressive=False),
}
"""The layouts by the `model_type` of their config.json; SmolLM2 is a Llama."""


# --- reading ----------------------------------------------------------------------------------------------------------


def is_folder(path: Path | str) -> bool:
    """Whether this is a Hugging Face folder of a known family, with weights in safetensors."""
    folder = Path(path)
    if not any((folder / name).is_file() for name in (_INDEX, _SINGLE)):
        return False
    try:
        return find_family(folder)[0] in FAMILIES
    except ValueError:
        return False


def find_family(path: Path | str) -> tuple[str, Family]:
    """The layout of a folder, and its name."""
    config = Path(path) / _CONFIG
    kind = _read_json(config).get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"{config}: model_type is {kind!r:.80}; allowed are {', '.join(FAMILIES)}")
    return kind, FAMILIES[kind]


def open_folder(path: Path | str, **changes: Any) -> FolderWeights:
    """The weights in a Hugging Face folder; `changes` are fields of the config, such as conditioning="time"."""
    folder, (_, family) = Path(path), find_family(path)
    about = _read_json(folder / _CONFIG)
    try:
        settings = family.settings(about)
    except KeyError as error:
        raise ValueError(f"{folder / _CONFIG} lacks {error}; get it again") from None
    return FolderWeights(folder, family, TransformerConfig.from_dict({**settings, **changes}), about=about)


class FolderWeights(Mapping[str, Tensor]):
    """The tensors of a folder under our names, read when they are asked for; a context manager.

    config   the architecture; `keep_tokens` changes its `vocab_size`
    about    the folder's config.json
    """

    def __init__(self, folder: Path, family: Family, config: TransformerConfig, *, about: Mapping[str, Any]):
        self.folder, self.family, self.config, self.about = folder, family, config, about
        self.stored_rows = config.vocab_size  # of embedding and head
        self._added = 0
        self._files = ExitStack()
        self._shards: dict[str, Any] = {}
        self._where = self._index()
        self._names = self._map()

    def keep_tokens(self, num_tokens: int, *, mask: bool = False) -> None:
        """Keep the rows of tokens 0 .. num_tokens-1; with `mask`, add one: its embedding is the mean of theirs."""
        if not 1 <= num_tokens <= self.stored_rows:
            raise ValueError(
                f"the tokenizer has {num_tokens} tokens and {self.folder} only {self.stored_rows} rows; "
                "take the tokenizer that belongs to the weights"
            )
        self.config, self._added = replace(self.config, vocab_size=num_tokens + mask), int(mask)

    def _select(self, value: Tensor) -> Tensor:
        """The rows of the tokens that are kept, and the mask's."""
        kept = value[: self.config.vocab_size - self._added]
        return torch.cat((kept, kept.float().mean(0, keepdim=True).to(kept.dtype))) if self._added else kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of that name among ours, as it is stored (most often bfloat16)."""
        parts = [self._read(theirs) for theirs in self._names[name]]
        if self.family.transposed and name.startswith("blocks.") and parts[0].ndim == 2:
            parts = [part.t() for part in parts]
        value = parts[0] if len(parts) == 1 else torch.cat(parts)
        if value.shape != self._shapes[name]:
            told = f"{tuple(value.shape)}, not {tuple(self._shapes[name])}"
            raise ValueError(f"{self.folder}: {' + '.join(self._names[name])} has shape {told}; get it again")
        return self._select(value) if name in ("embedding.weight", "head.weight") else value

    def __enter__(self) -> FolderWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()
        self._shards.clear()

    def sha256(self) -> str:
        """The SHA-256 of its files' own, by name: all of them are read, once each is known to hold what it says."""
        files = sorted(set(self._where.values()))
        for path in files:
            self._open(path)  # a file without an end is refused by its header
        return hashlib.sha256("".join(f"{path.name} {file_sha256(path)}\n" for path in files).encode()).hexdigest()

    def _index(self) -> dict[str, Path]:
        """Which file holds each tensor."""
        if (self.folder / _INDEX).is_file():
            places = _read_json(self.folder / _INDEX).get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
                raise ValueError(f"{self.folder / _INDEX} has no weight_map; get it again")
            strange = next((name for name in places.values() if Path(name).name != name), None)
            if strange is not None:
                raise ValueError(f"{self.folder / _INDEX} names the file {strange[:80]!r} outside the folder")
            found = {name: self.folder / file for name, file in places.items()}
        else:
            single = self.folder / _SINGLE
            found = dict.fromkeys(self._open(single).keys(), single)
        prefix = self.family.prefix
        self._stored = {name.removeprefix(prefix): name for name in found if not name.endswith(_IGNORED)}
        return found

    def _map(self) -> dict[str, tuple[str, ...]]:
        """Our names and the stored ones they are made of; every tensor must be wanted, and every one be there."""
        with torch.device("meta"):
            wanted = Transformer(self.config).state_dict()
        self._shapes = {name: value.shape for name, value in wanted.items()}
        names: dict[str, tuple[str, ...]] = {}
        for ours, theirs in self.family.names.items():
            for i in range(self.config.num_blocks) if "{i}" in ours else (0,):
                if (own := ours.format(i=i)) in wanted:
                    names[own] = tuple(name.format(i=i) for name in theirs)
        needed = {name for parts in names.values() for name in parts}
        spare = {"lm_head.weight"} if self.config.tied else set()
        missing, unexpected = sorted(needed - set(self._stored)), sorted(set(self._stored) - needed - spare)
        if missing or unexpected:
            raise ValueError(
                f"{self.folder} does not fit its {_CONFIG}: {len(missing)} tensors are missing {missing[:3]}, "
                f"{len(unexpected)} unexpected {unexpected[:3]}; get it again"
            )
        return names

    def _open(self, path: Path) -> Any:
        if str(path) not in self._shards:
            try:
                require_plain(path)
                with path.open("rb") as file:
                    length = int.from_bytes(file.read(8), "little")
                if length > _LARGEST_HEADER:
                    raise ValueError(f"{path} cannot be read: its header has {length} bytes, allowed {_LARGEST_HEADER}")
                self._shards[str(path)] = self._files.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path} cannot be read: {str(error)[:200]}; get it again") from error
        return self._shards[str(path)]

    def _read(self, name: str) -> Tensor:
        stored = self._stored[name]
        path = self._where[stored]
        try:
            value: Tensor = self._open(path).get_tensor(stored)
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {str(error)[:200]}; get it again") from error
        if value.dtype not in _FLOATS:
            raise ValueError(f"{path}: {stored} holds {value.dtype}, which are no weights; take the unquantised files")
        return value

    # Models.

    def new_tensors(self, seed: int = 0) -> dict[str, Tensor]:
        """What the folder has not: the conditioning, drawn from the seed, and its modulations, which are zero."""
        if self.config.conditioning == "none":
            return {}
        small = replace(self.config, vocab_size=1, width=2, num_heads=1, num_kv_heads=1, head_channels=2, mlp_width=1)
        drawn = Transformer(small, seed=seed).state_dict()
        rest = {name: shape for name, shape in self._shapes.items() if name not in self._names}
        return {
            name: drawn[name] if name.startswith("conditioning.") else torch.zeros(shape)
            for name, shape in rest.items()
        }

    def all_tensors(self, seed: int = 0) -> Mapping[str, Tensor]:
        """Every tensor of the network: the folder's, read when they are asked for, and the new ones."""
        return ChainMap(self.new_tensors(seed), self)  # type: ignore[arg-type]  # nobody writes to it

    def build(self, *, precision: Precision = "float32", seed: int = 0) -> Transformer:
        """The network, filled part by part (`fill_network`)."""
        with torch.device("meta"):
            model = Transformer(self.config).eval()
        fill_network(model, self.all_tensors(seed), precision)
        return model


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(read_text(path, _LARGEST_TEXT))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {str(error)[:200]}; get it again") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds no object; get it again")
    return record


# --- tokenizers -------------------------------------------------------------------------------------------------------

# How Qwen2 and Dream cut a text before the BPE: contractions, words, single digits, punctuation, line ends, spaces.
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: its tokenizer.json, else vocab.json with merges.txt; nothing is run.

    A normaliser that only composes accents (NFC) is left out: texts that are composed already, nearly all, have the
    same tokens, and the others come back as they were.
    """
    folder = Path(path)
    about = _read_json(folder / _CONFIG)
    own = folder / "tokenizer_config.json"
    notes = _read_json(own) if own.is_file() else {}
    if (folder / "tokenizer.json").is_file():
        record = _read_json(folder / "tokenizer.json")
    else:
        record = json.loads(_byte_level_bpe(folder, notes, qwen=about.get("model_type") in ("Dream", "qwen2", "qwen3")))
    if isinstance(record.get("normalizer"), dict) and record["normalizer"].get("type") == "NFC":
        record["normalizer"] = None
    definition = json.dumps(record)
    return Tokenizer(definition, _eos_name(definition, about, notes))


def read_bos_id(path: Path | str, tokenizer: Tokenizer) -> int:
    """The token that begins a text: what tokenizer_config.json or config.json say, else the one that ends one."""
    folder = Path(path)
    own = folder / "tokenizer_config.json"
    name = (_read_json(own) if own.is_file() else {}).get("bos_token")
    name = name.get("content") if isinstance(name, dict) else name
    found = Backend.from_str(tokenizer.definition).token_to_id(name) if isinstance(name, str) else None
    found = _read_json(folder / _CONFIG).get("bos_token_id") if found is None else found
    return found if isinstance(found, int) and 0 <= found < tokenizer.vocab_size else tokenizer.eos_id


def _eos_name(definition: str, about: Mapping[str, Any], notes: Mapping[str, Any]) -> str | None:
    """The token that ends a document: by name in tokenizer_config.json, else by id in config.json."""
    name = notes.get("eos_token")
    name = name.get("content") if isinstance(name, dict) else name
    number = about.get("eos_token_id")
    number = number[0] if isinstance(number, list) and number else number
    if name is None and isinstance(number, int):
        name = Backend.from_str(definition).id_to_token(number)
    return name


def _byte_level_bpe(folder: Path, notes: Mapping[str, Any], *, qwen: bool) -> str:
    """A byte-level BPE of vocab.json and merges.txt, with the tokens that tokenizer_config.json adds."""
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    if not vocabulary.is_file() or not merges.is_file():
        raise ValueError(f"{folder} holds no tokenizer; expected tokenizer.json there, or vocab.json with merges.txt")
    try:
        entries, pairs = models.BPE.read_file(str(vocabulary), str(merges))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{vocabulary} and {merges} are not a BPE vocabulary with its merges: {error}") from error
    backend = Backend(models.BPE(vocab=entries, merges=pairs))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not qwen)
    words = pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_only]) if qwen else bytes_only
    backend.decoder = decoders.ByteLevel()
    added = notes.get("added_tokens_decoder", {})
    for number in sorted(added, key=int):
        token = AddedToken(added[number]["content"], special=True, normalized=False)
        backend.add_special_tokens([token])
        if backend.token_to_id(added[number]["content"]) != int(number):
            raise ValueError(f"{folder}: the added token {added[number]['content']!r} does not get its id {number}")
    return str(backend.to_str())
