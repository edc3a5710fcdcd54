"""The text of a recipe, packed, and the tokenizer that it is packed with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from fsdfm import data
from fsdfm.config import DataConfig, Recipe
from fsdfm.files import write_text

__all__ = ["corpus_folder", "prepare_corpus"]


def prepare_corpus(
    config: DataConfig, folder: Path, tokenizer: data.Tokenizer | None = None, *, processes: int = 1
) -> data.Corpus:
    """The packed corpus in a folder, made from the inputs unless it is there; `tokenizer` wins over the config's.

    processes   that encode text; the corpus is the same, byte for byte

    Without inputs the corpus must be there already, which suits machines that hold the tokens but not the text.
    """
    prepared = (folder / "corpus.json").exists()
    if not config.inputs:
        if not prepared:
            raise ValueError(f"data.inputs is empty and {folder} is no corpus; name inputs, or a corpus as data.corpus")
        return data.Corpus.open(folder, tokenizer)
    documents = data.open_documents(config.inputs, config.separator, config.field, max_documents=config.max_documents)
    if own := tokenizer is None:
        tokenizer = _tokenizer(config, folder, documents, prepared=prepared)
    corpus = data.prepare(documents, tokenizer, folder, processes=processes)
    if own and (kept := _kept_tokenizer(config, folder, documents)) is not None:
        kept.unlink(missing_ok=True)
    return corpus


def _tokenizer(config: DataConfig, folder: Path, documents: data.Documents, *, prepared: bool) -> data.Tokenizer:
    """The tokenizer that the config names; one that is trained is trained once, and kept until the corpus has it."""
    spec = config.tokenizer
    if spec is None:
        raise ValueError(
            "data.tokenizer is missing; name one: bytes, gpt2, bpe:SIZE or a path (a parent brings its own)"
        )
    if not spec.startswith("bpe:"):
        return data.make_tokenizer(spec)
    if prepared:
        corpus = data.Corpus.open(folder)
        if str(corpus.header.vocab_size) != spec.removeprefix("bpe:"):
            raise ValueError(
                f"{folder} was made with {corpus.header.vocab_size} tokens, not with {spec}; delete it, or name another"
            )
        return corpus.tokenizer
    kept = _kept_tokenizer(config, folder, documents)
    assert kept is not None
    if kept.exists():
        return data.Tokenizer.load(kept)
    tokenizer = data.make_tokenizer(spec, data.texts(documents))
    write_text(kept, tokenizer.definition)
    return tokenizer


def _kept_tokenizer(config: DataConfig, folder: Path, documents: data.Documents) -> Path | None:
    """Where a trained tokenizer waits for its corpus: a place of its own for each request."""
    if not (config.tokenizer or "").startswith("bpe:"):
        return None
    request = json.dumps([config.tokenizer, dict(documents.identity)])
    return folder.with_name(f"{folder.name}.{hashlib.sha256(request.encode()).hexdigest()[:12]}.tokenizer.json")


def corpus_folder(recipe: Recipe, out: Path) -> Path:
    """Where the packed tokens of a recipe stand: a folder of its own, or inside the run's."""
    return Path(recipe.data.corpus) if recipe.data.corpus else out / "corpus"
