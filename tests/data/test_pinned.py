"""Bytes, tokens and rows that data becomes; see tests/pinned.py."""

import json
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from fsdfm.data import Tokenizer, TrainingBatch
from fsdfm.data.batches import BeginWith, Blocks, batches, begin_with, permute
from fsdfm.data.corpus import Corpus, Header, prepare
from fsdfm.data.documents import (
    Chunk,
    JsonLinesFile,
    Parquet,
    PythonDocs,
    TextFile,
    _docstrings,
    _library_modules,
    cut,
    open_documents,
    texts,
)
from fsdfm.data.pairs import PairHeader, Pairs, PairsAndText, PairWriter, StepPairs, pair_times
from fsdfm.data.tokenizer import make_tokenizer
from fsdfm.noise import Noise, Purpose
from pinned import Cases, chosen, odd, said

cases = Cases("data")
TEXT = (
    "Once there was a cat.<|endoftext|>\n The dog ran.\n\n<|endoftext|><|endoftext|> über 世界! <|endoftext|>"
    + "a long tale of woe " * 30
)
BYTES = Tokenizer.bytes()


def files_of(folder) -> object:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "corpus.json"}


def trained() -> Tokenizer:
    return Tokenizer.train(["the cat and the dog was in the house and there was a mouse " * 9], 280)


@cases
def corpora(folder) -> object:
    (folder / "a.txt").write_text(TEXT)
    (folder / "b.jsonl").write_text(
        "\n".join(json.dumps({"text": t, "n": 1}) for t in ("one", "", None, "two words")) + "\n\n"
    )
    found: list[object] = []
    for number, (tokenizer, options) in enumerate(
        ((BYTES, {}), (trained(), {}), (BYTES, {"max_documents": 2}), (BYTES, {"separator": ""}))
    ):
        documents = open_documents([folder / "a.txt", folder / "b.jsonl"], **options)
        corpus = prepare(documents, tokenizer, folder / f"c{number}", progress=False)
        header = json.loads((folder / f"c{number}" / "corpus.json").read_text())
        found += [
            header,
            files_of(folder / f"c{number}"),
            corpus.starts,
            len(corpus),
            [bytes(corpus.document(k).astype(np.uint32)) for k in range(len(corpus.starts))],
        ]
        found += [
            corpus.count_followers(tokenizer.vocab_size),
            corpus.count_followers(tokenizer.vocab_size, most=9),
            documents.identity,
            documents.weight,
            corpus.verify(),
        ]
        found += [
            [list(part.starts), len(part), bytes(np.asarray(part.tokens))]
            for share in (0.1, 0.5, 0.9)
            if len(corpus.starts) > 1
            for part in corpus.split(share)
        ]
        found += [prepare(documents, tokenizer, folder / f"c{number}", progress=False).header == corpus.header]
    corpus = Corpus.open(folder / "c0")
    found += [said(lambda i=i: corpus.document(i).tolist()) for i in (-1, len(corpus.starts) - 1, len(corpus.starts))]
    found += [said(lambda s=s: len(corpus.split(s)[0])) for s in (0.0, 1.0, 0.999)]
    found += [
        said(lambda: Corpus.open(folder / "c3").split(0.5)),
        said(lambda: prepare(open_documents(folder / "a.txt"), BYTES, folder / "c0", progress=False)),
    ]
    found += [
        said(
            lambda: prepare(
                open_documents([folder / "a.txt", folder / "b.jsonl"]), trained(), folder / "c0", progress=False
            )
        ),
        said(lambda: prepare(documents, BYTES, folder / "x", processes=0)),
    ]
    found += [said(lambda: corpus.require_tokenizer(trained())) if hasattr(corpus, "require_tokenizer") else None]
    with (folder / "c1" / "tokens.bin").open("r+b") as file:
        file.write(b"\x01")
    (folder / "c2" / "starts.bin").write_bytes(b"12345678")
    found += [said(lambda: Corpus.open(folder / "c1").verify()), said(lambda: Corpus.open(folder / "c2"))]
    head = Header.read(folder / "c0")
    for change in (
        {"dtype": "O"},
        {"dtype": "<u8"},
        {"version": 9},
        {"num_tokens": -1},
        {"eos_id": 999},
        {"complete": False},
        {"num_tokens": 3.5},
    ):
        (folder / "c0" / "corpus.json").write_text(
            json.dumps(
                {**json.loads((folder / "c0" / "corpus.json").read_text()), **vars(head), **change}, default=dict
            )
        )
        found.append(said(lambda: len(Corpus.open(folder / "c0"))))
    return found


@cases
def documents(folder) -> object:
    found: list[object] = []
    pieces = ["", " ", "a b", "word " * 20, "x" * 50, "a\n b  c\t d e f g h i j k l m n o p"]
    for size in (4, 16, 40):
        for parts in (1, 3):
            chunks = [
                Chunk(
                    text[k::1] if parts == 1 else text[k * len(text) // parts : (k + 1) * len(text) // parts],
                    k == parts - 1,
                    k / parts,
                )
                for text in pieces
                for k in range(parts)
            ]
            found.append(list(cut(chunks, size)))
    (folder / "t.txt").write_text(TEXT)
    for separator in (None, "<|endoftext|>", "\n\n", "a"):
        file = TextFile(folder / "t.txt", separator)
        found += [list(file.chunks()), file.identity, file.weight]
    found += [list(texts(open_documents(folder / "t.txt", max_documents=n))) for n in (1, 3)]
    for name, lines in {
        "ok": '{"text": "a"}\n\n{"text": null}\n{"text": "b", "x": 1}',
        "no": '{"txt": "a"}',
        "list": "[1]",
        "num": '{"text": 3}',
        "bad": "{",
        "half": '{"text": "\\ud800"}',
    }.items():
        (folder / f"{name}.jsonl").write_text(lines)
        file = JsonLinesFile(folder / f"{name}.jsonl")
        found += [said(lambda f=file: list(f.chunks())), file.weight]
    found += [
        list(JsonLinesFile(folder / "ok.jsonl", "x").identity.items()),
        said(lambda: list(JsonLinesFile(folder / "ok.jsonl", "x").chunks())),
    ]
    (folder / "latin.txt").write_bytes(b"abc\xe4def")
    found += [said(lambda: list(TextFile(folder / "latin.txt").chunks()))]
    for name in ("builtin:x", "hf:", "hf:a:b:c:d", "nowhere", "hf:a", "hf:a:b", "hf:a:b:c"):
        found.append(said(lambda n=n if (n := name) else "": [repr(part) for part in open_documents(n).parts]))
    found += [
        said(lambda: open_documents([])),
        said(lambda: open_documents(folder / "t.txt", max_documents=0)),
        open_documents([folder / "t.txt", folder / "ok.jsonl"]).weight,
    ]
    (folder / "big.txt").write_text("".join(chr(65 + k % 26) for k in range(2_500_000)))
    found += [TextFile(folder / "big.txt").identity, sum(len(c.text) for c in TextFile(folder / "big.txt").chunks())]
    return found


class Fixed:
    def __init__(self, lengths, eos_id=9):
        self.header = type("H", (), {"eos_id": eos_id, "vocab_size": eos_id + 1})()
        self.tokens = np.concatenate([np.r_[np.arange(n) % 9, eos_id] for n in lengths]).astype(np.uint16)
        self.starts = np.cumsum([0, *(n + 1 for n in lengths[:-1])])

    def __len__(self):
        return len(self.tokens)


def told(batch: TrainingBatch) -> object:
    return [
        batch.x_1,
        batch.x_0,
        batch.real,
        batch.given,
        batch.t,
        list(batch.larger),
        batch.samples,
        batch.next_sample,
        batch.size,
        batch.processes,
    ]


@cases
def rows() -> object:
    corpus, found = Fixed([13, 5, 40, 2, 22]), []
    for options in (
        {},
        {"short_share": 0.5, "shortest": 2},
        {"document_starts": 0.7},
        {"given_share": 0.8},
        {"short_share": 1.0, "document_starts": 0.5, "given_share": 1.0, "shortest": 7},
    ):
        blocks = Blocks(corpus, 8, seed=3, **options)
        found += [len(blocks), told(blocks.rows(range(40))), told(blocks.rows([7, 2**33])), told(blocks.rows([]))]
        found += [told(BeginWith(4, blocks).rows(range(6)))]
    for options in ({"portions": 2}, {"rank": 1, "num_ranks": 2}, {"start": 12}):
        found += [told(part) for part in islice(batches(blocks, 4, **options), 3)]
    for wrong in (
        {"length": 0},
        {"length": 88},
        {"length": 1},
        {"length": 8, "short_share": 1.1},
        {"length": 8, "short_share": 0.5, "shortest": 8},
        {"length": 8, "short_share": 0.5, "shortest": 7},
        {"length": 8, "given_share": -0.1},
        {"length": 80, "document_starts": 0.1},
        {"length": 70, "document_starts": 0.1},
        {"length": 8, "document_starts": 1.01},
        {"length": 87},
    ):
        found.append(
            said(lambda w=wrong: len(Blocks(corpus, w["length"], **{k: v for k, v in w.items() if k != "length"})))
        )
    for wrong in (
        (0, {}),
        (4, {"portions": 3}),
        (4, {"rank": 2, "num_ranks": 2}),
        (4, {"rank": -1}),
        (4, {"start": -1}),
        (4, {"portions": 0}),
        (4, {"num_ranks": 4, "rank": 3}),
    ):
        found.append(said(lambda w=wrong: told(next(batches(blocks, w[0], **w[1])))))
    for size in (1, 2, 7, 64, 1000):
        index = torch.arange(size)
        found += [permute(index, size, index * 0 + epoch, seed=5) for epoch in (0, 1, 2**33)]
    found += [
        said(lambda: permute(torch.tensor([3]), 3, torch.tensor([0]), seed=0)),
        said(lambda: permute(torch.tensor([-1]), 3, torch.tensor([0]), seed=0)),
        said(lambda: permute(torch.tensor([0]), 0, torch.tensor([0]), seed=0)),
    ]
    return [*found, begin_with(5, torch.arange(6).view(2, 3)), told(blocks.rows(range(3)).to(torch.device("cpu")))]


@cases
def pairs(folder) -> object:
    noise, found = Noise(0, range(9)), []
    x_0, x_1 = noise.integers(Purpose.SOURCE, 8, 9), noise.integers(Purpose.DATA, 8, 9)
    for name, header in (
        ("a", PairHeader(8, 9, {"seed": 4})),
        ("b", PairHeader(8, 9, {"seed": 4, "timed": True})),
        ("c", PairHeader(8, 2**16 + 1, {"seed": 1})),
    ):
        with PairWriter(folder / name, header) as writer:
            writer.append(x_0[:4], x_1[:4])
            found += [
                writer.count,
                said(lambda: writer.append(x_0[:, :3], x_1[:, :3])),
                said(lambda: writer.append(x_0 - 1, x_1)),
                said(lambda: writer.append(x_0, x_1 + 2**17)),
            ]
            found += ["is in use" in str(said(lambda n=name, h=header: PairWriter(folder / n, h)))]
        with (folder / name / "pairs.bin").open("ab") as file:
            file.write(b"half")
        with PairWriter(folder / name, header) as writer:
            found += [writer.count]
            writer.append(x_0[4:], x_1[4:])
        files = {path.name: path.read_bytes() for path in sorted((folder / name).iterdir())}
        made = Pairs(folder / name, seed=2)
        found += [
            files,
            len(made),
            told(made.rows(range(12))),
            told(made.rows([])),
            header.dtype.str,
            header.row_bytes,
            header.timed,
        ]
    text = Blocks(Fixed([13, 5, 40]), 8, seed=2, given_share=0.5, short_share=0.3)
    first, second = Pairs(folder / "a", 2), Pairs(folder / "c", 5)
    found += [told(PairsAndText(first, text, share).rows(range(10))) for share in (0.0, 0.4, 1.0)]
    found += [
        told(StepPairs(text, ((0.5, first), (0.25, second))).rows(range(4))),
        told(BeginWith(3, PairsAndText(first, text, 0.5)).rows(range(8))),
    ]
    found += [
        pair_times(3, [0, 5]),
        said(lambda: PairsAndText(first, text, 1.1)),
        said(lambda: PairsAndText(first, text, -0.1)),
        said(lambda: PairWriter(folder / "a", PairHeader(4, 9, {}))),
    ]
    found += [
        said(lambda a=a: PairHeader(*a, {}).dtype.str)
        for a in ((0, 9), (8, 0), (8, 2**16), (8, 2**16 + 1), (True, 9), (1, 1))
    ]
    (folder / "e").mkdir()
    found += [said(lambda: Pairs(folder / "e"))]
    record = json.loads((folder / "a" / "pairs.json").read_text())
    for change in ({"version": 2}, {"more": 1}):
        (folder / "a" / "pairs.json").write_text(json.dumps({**record, **change}))
        found.append(said(lambda: Pairs(folder / "a")))
    (folder / "c" / "pairs.bin").write_bytes(b"")
    return [*found, said(lambda: Pairs(folder / "c"))]


@cases
def tokenizers(folder) -> object:
    word, found = trained(), []
    words = ["the cat", " the mouse", "über 世界", "a<|endoftext|>b", "", "  two  spaces\n"]
    for tokenizer in (BYTES, word, make_tokenizer("bytes")):
        ids = [tokenizer.encode(text) for text in words]
        found += [
            ids,
            tokenizer.encode_batch(words),
            [tokenizer.decode(i) for i in ids],
            [tokenizer.continuation(text) for text in words],
            tokenizer.vocab_size,
            tokenizer.eos_id,
            tokenizer.eos,
            tokenizer.hash,
            len(tokenizer.pieces),
            tokenizer.pieces[-5:],
        ]
        found += [
            tokenizer.decode([65, tokenizer.eos_id, 66]),
            tokenizer.decode([65, tokenizer.eos_id], skip_special=False),
            repr(tokenizer),
        ]
        found += [
            said(lambda t=tokenizer, i=i: t.decode([i])) for i in (-1, tokenizer.vocab_size - 1, tokenizer.vocab_size)
        ]
    word.save(folder)
    again = Tokenizer.load(folder)
    found += [
        again.hash == word.hash,
        said(lambda: Tokenizer.train(["ab"], 300)),
        said(lambda: Tokenizer.train(["ab"], 256)),
        said(lambda: Tokenizer.train(["ab"], 257).vocab_size),
        said(lambda: make_tokenizer("nowhere")),
        said(lambda: make_tokenizer("bpe:300")),
        said(lambda: make_tokenizer("bpe:275", ["the cat sat on the mat and the dog sat " * 9]).vocab_size),
    ]
    record = json.loads(word.definition)
    for change in (
        {"model": {**record["model"], "dropout": 0.1}},
        {"added_tokens": []},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}},
        {"normalizer": {"type": "Lowercase"}},
        {"post_processor": None},
        {"truncation": {"max_length": 3}},
    ):
        found.append(
            said(
                lambda c=change: [
                    Tokenizer(json.dumps({**record, **c})).vocab_size,
                    Tokenizer(json.dumps({**record, **c})).hash == word.hash,
                ]
            )
        )
    return [
        *found,
        said(lambda: Tokenizer("{")),
        said(lambda: Tokenizer("[]")),
        said(lambda: replace(PairHeader(1, 1, {}), length=2).length),
    ]


@cases
def other_sources(folder) -> object:
    """Vocabularies in two files, the documentation of modules, and tables."""
    record, found = json.loads(trained().definition)["model"], []
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in record["merges"]]
    for vocab, rules in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        place = folder / vocab
        place.mkdir()
        (place / vocab).write_text(json.dumps(record["vocab"]))
        found.append(said(lambda p=place: Tokenizer.load(p)).rpartition("/")[2])
        (place / rules).write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
        read = Tokenizer.load(place)
        found += [read.hash, read.eos, read.eos_id, read.vocab_size, read.encode(" the mouse")]
        eos = max(record["vocab"], key=len)
        found += [
            Tokenizer.load(place, "<|endoftext|>").eos_id,
            eos,
            said(lambda p=place, e=eos: Tokenizer.load(p, e).eos_id),
        ]
        found += [str(said(lambda p=place: Tokenizer.load(p, "<nobody>"))).rpartition("/")[2]]
        found += [str(said(lambda p=place: Tokenizer.gpt2(p))).rpartition("/")[2]]
    (folder / "m.py").write_text(
        '"""Of a module."""\nimport os\n\ndef f():\n    """Of f."""\n    def g():\n        """Of g."""\n\n'
        'class A:\n    """Of A."""\n    def b(self):\n        """Of b."""\n    def c(self): pass\n\n'
        'def d(): pass\nx = "no"\n'
    )
    (folder / "bad.py").write_text("def\n")
    found += [list(_docstrings(folder / name)) for name in ("m.py", "bad.py", "none.py")]
    modules = _library_modules()
    found += [name in modules for name in ("json/decoder.py", "argparse.py", "test/support/__init__.py", "numpy.py")]
    docs = PythonDocs()
    found += [docs.weight, sorted(docs.identity), [docs.identity["kind"]]]
    assert all(path.is_file() for path in [*modules.values()][:20])
    return found


@cases
def tables(folder) -> object:
    parquet = pytest.importorskip("pyarrow.parquet", reason="reading Parquet")
    import pyarrow

    texts = [f"row {k}" for k in range(130)]
    parquet.write_table(pyarrow.table({"text": texts, "n": list(range(130))}), folder / "a.parquet")
    parquet.write_table(pyarrow.table({"text": [{"a": "b"}], "odd": [None]}), folder / "b.parquet")
    (folder / "c.parquet").write_text("PAR1")
    found: list[object] = []
    for name, field in (("a", "text"), ("a", "n"), ("a", "no"), ("b", "text"), ("b", "odd"), ("c", "text")):
        made = Parquet(folder / f"{name}.parquet", field)
        found.append(str(said(lambda m=made: [list(chunk) for chunk in m.chunks()])).replace(str(folder), ""))
    return found


@cases
def what_is_allowed() -> object:
    return odd("fsdfm.data")


@cases
def numbers_that_were_chosen() -> object:
    return chosen("fsdfm.data")


test_what_is_computed = cases.test()
