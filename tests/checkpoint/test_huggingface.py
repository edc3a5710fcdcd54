"""Hugging Face folders: the same logits as the originals, a strict reading, and memory as stated."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsdfm.checkpoint.huggingface import FAMILIES, is_folder, open_folder, read_tokenizer
from fsdfm.model.filling import fill_network, num_bytes
from fsdfm.model.stack import Transformer, TransformerConfig
from huggingface_folders import FAMILY_SETTINGS, save_family, save_tokenizer

GOLDEN = Path(os.environ.get("FSDFM_GOLDEN", Path(__file__).parents[3] / "shared" / "golden")) / "peers" / "llada-dream"
ABSENT = "no golden files: FSDFM_GOLDEN names no folder with peers/llada-dream"


def tokens(rows: int = 3, length: int = 40) -> Tensor:
    return torch.randint(300, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILY_SETTINGS)
def test_logits_under_the_causal_mask_are_the_originals(name: str, tmp_path: Path) -> None:
    original = save_family(name, tmp_path)
    expected = original(tokens()).logits
    assert is_folder(tmp_path)
    with open_folder(tmp_path, future=0.0, conditioning="step", cond_width=8) as weights:
        assert (tmp_path / "model.safetensors.index.json").exists()  # several files
        model = weights.build()
    t = torch.tensor([0.0, 0.3, 0.9])
    found = model(tokens(), t, torch.full_like(t, 0.5))
    assert float(expected.std()) > 0.5  # a comparison of zeros would show nothing
    assert float((found - expected).abs().max()) < 1e-4
    model.see_future(1.0)
    assert float((model(tokens(), t, torch.full_like(t, 0.5)) - expected).abs().max()) > 0.1


@torch.no_grad()
@pytest.mark.parametrize("name", ["smollm2", "gpt2", "qwen3"])
def test_a_part_of_the_vocabulary_and_a_mask(name: str, tmp_path: Path) -> None:
    expected = save_family(name, tmp_path)(tokens()).logits
    with open_folder(tmp_path, future=0.0, next_token=True) as weights:
        weights.keep_tokens(300, mask=True)
        model = weights.build()
        table = weights["embedding.weight"]
    assert model.config.vocab_size == len(table) == 301
    torch.testing.assert_close(table[300], table[:300].mean(0))
    found = model(tokens())
    torch.testing.assert_close(found[:, 1:, :300], expected[:, :-1, :300], atol=1e-4, rtol=0)  # shifted by one
    with open_folder(tmp_path) as weights, pytest.raises(ValueError, match="321 tokens.*320 rows"):
        weights.keep_tokens(321)


@torch.no_grad()
@pytest.mark.parametrize(("precision", "error"), [("bfloat16", 0.03), ("int8", 0.12)])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_smaller_numbers_give_nearly_the_same(name: str, precision: str, error: float, tmp_path: Path) -> None:
    save_family(name, tmp_path)
    with open_folder(tmp_path) as weights:
        exact, small = weights.build()(tokens()), weights.build(precision=precision)  # type: ignore[arg-type]
    difference = float((small(tokens()) - exact).norm() / exact.norm())
    assert 0 < difference < error
    assert small.precision == precision
    assert small.embedding.weight.dtype == torch.bfloat16
    assert not any(value.is_meta for value in small.state_dict().values())


def test_published_sizes() -> None:
    """The numbers of the published indices, from the shapes alone."""
    llada = {"d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288}
    dream = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    cases = {
        "llada": ({**llada, "embedding_size": 126464, "rope_theta": 5e5}, 8_015_581_184, 16.03e9, 8.53e9),
        "Dream": ({**dream, "intermediate_size": 18944, "vocab_size": 152064}, 7_615_616_512, 15.23e9, 8.16e9),
    }
    for name, (about, count, half, quarter) in cases.items():
        config = TransformerConfig.from_dict(FAMILIES[name].settings(about))
        assert num_bytes(config) == 4 * count
        assert num_bytes(config, "bfloat16") == pytest.approx(half, rel=1e-3)
        assert num_bytes(config, "int8") == pytest.approx(quarter, rel=1e-3)


class Counted(Mapping[str, Tensor]):
    """Tensors that, each time one is read, count the numbers that stand in float32 matrices."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors, self.most = tensors, 0

    def __getitem__(self, name: str) -> Tensor:
        alive = [thing for thing in gc.get_objects() if type(thing) is torch.nn.Parameter and not thing.is_meta]
        wide = sum(value.numel() for value in alive if value.ndim == 2 and value.dtype == torch.float32)
        self.most = max(self.most, wide)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_the_whole_never_stands_in_float32(precision: Any, tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    gc.collect()
    before = Counted({"": torch.zeros(0)})
    before[""]
    with open_folder(tmp_path) as weights:
        counted = Counted(weights.all_tensors())
        with torch.device("meta"):
            model = Transformer(weights.config).eval()
        fill_network(model, counted, precision)
    assert 0 < counted.most - before.most <= 3 * 48 * 80  # an MLP, whose matrices are filled together


def test_what_the_folder_has_not_comes_from_the_seed(tmp_path: Path) -> None:
    save_family("qwen2", tmp_path)
    with open_folder(tmp_path, conditioning="time", cond_width=8) as weights:
        one, same, other = weights.build(seed=1), weights.build(seed=1), weights.build(seed=2)
        assert set(weights) | set(weights.new_tensors()) == set(one.state_dict())
    name = "conditioning.time.into.weight"
    assert torch.equal(one.state_dict()[name], same.state_dict()[name])
    assert not torch.equal(one.state_dict()[name], other.state_dict()[name])
    whole = Transformer(one.config, seed=1).state_dict()
    assert torch.equal(one.state_dict()[name], whole[name])
    assert not one.state_dict()["blocks.2.modulation.linear.weight"].any()


# --- damage -----------------------------------------------------------------------------------------------------------


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; allowed are llama, qwen2"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is 'yarn'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"num_hidden_layers": 4}, "12 tensors are missing"),
        ({"num_hidden_layers": 2}, "12 unexpected"),
        ({"intermediate_size": 81}, r"has shape \(160, 48\), not \(162, 48\)"),
        ({"num_attention_heads": 5}, "num_attention_heads|num_heads|num_kv_heads"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    save_family("qwen2", tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message), open_folder(tmp_path) as weights:
        weights.build()


def test_a_shard_that_is_gone_or_cut_is_named(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(ValueError, match=f"{shard.name} cannot be read"), open_folder(tmp_path) as weights:
        weights.build()
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    places["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(places))
    with pytest.raises(ValueError, match="outside the folder"):
        open_folder(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds no object"):
        open_folder(tmp_path)


@pytest.mark.parametrize("kind", ["a terabyte", "pipe"])
def test_a_shard_without_an_end_is_refused_unread(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards were hashed before anything of them was looked at: a sparse file of 200 bytes took an hour."""
    save_family("llama", tmp_path)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
    if kind == "pipe":
        shard.unlink()
        os.mkfifo(shard)
    else:
        os.truncate(shard, 2**40)
    monkeypatch.setattr("fsdfm.checkpoint.huggingface.file_sha256", lambda path: pytest.fail("it is read"))
    with open_folder(tmp_path) as weights:
        for ask in (weights.sha256, weights.build):
            with pytest.raises(ValueError, match=rf"{shard.name} (cannot be read|is not a plain file)"):
                ask()


def test_quantised_files_are_no_weights(tmp_path: Path) -> None:
    save_family("smollm2", tmp_path, shard="1GB")
    state = load_file(tmp_path / "model.safetensors")
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.int8)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="take the unquantised"), open_folder(tmp_path) as weights:
        weights.build()


# --- tokenizers -------------------------------------------------------------------------------------------------------


def test_tokenizers_come_without_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": 0}))
    save_tokenizer(tmp_path, normaliser=True)
    tokenizer = read_tokenizer(tmp_path)
    assert (tokenizer.eos, tokenizer.eos_id, tokenizer.vocab_size) == ("<|end|>", 0, 300)
    assert tokenizer.decode(tokenizer.encode("e\u0301 little dog")) == "e\u0301 little dog"
    (tmp_path / "tokenizer_config.json").unlink()
    assert read_tokenizer(tmp_path).eos == "<|end|>"  # by its number


def test_a_vocabulary_and_its_merges_are_enough(tmp_path: Path) -> None:
    """Dream's and Qwen2's slow files: the same ids as from one tokenizer.json; digits stand alone."""
    save_tokenizer(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    plain = {piece: i for piece, i in model["vocab"].items() if i >= 2}
    (tmp_path / "vocab.json").write_text(json.dumps({piece: i - 2 for piece, i in plain.items()}))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "Dream"}))
    notes = {"eos_token": "<|end|>", "added_tokens_decoder": {"298": {"content": "<|end|>"}, "299": {"content": "<m>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(notes))
    tokenizer = read_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (298, 300)
    text = "a little dog, 2026's ball\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    pieces = tokenizer.pieces
    assert [pieces[i] for i in tokenizer.encode("2026")] == list("2026")
    notes["added_tokens_decoder"] = {"777": {"content": "<|end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(notes))
    with pytest.raises(ValueError, match="does not get its id 777"):
        read_tokenizer(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ValueError, match="holds no tokenizer"):
        read_tokenizer(tmp_path)


# --- LLaDA and Dream --------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.skipif(not GOLDEN.is_dir(), reason=ABSENT)
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_golden_logits(family: str, tmp_path: Path) -> None:
    shutil.copy(GOLDEN / f"{family}_tiny.config.json", tmp_path / "config.json")
    shutil.copy(GOLDEN / f"{family}_tiny.safetensors", tmp_path / "model.safetensors")
    known = load_file(GOLDEN / f"{family}_logits.safetensors")
    with open_folder(tmp_path) as weights:
        model = weights.build()
    if family == "dream":
        torch.testing.assert_close(model(known["input_half"]), known["logits_half_shifted"], atol=1e-4, rtol=0)
        model.config = replace(model.config, next_token=False)
    raw = "_raw" if family == "dream" else ""
    for name in ("masks", "half", "text"):
        torch.testing.assert_close(model(known[f"input_{name}"]), known[f"logits_{name}{raw}"], atol=1e-4, rtol=0)
    seen = known["attention_mask"].bool()
    features = model.trunk(known["input_half"], keys=seen, positions=known.get("position_ids_padded"))
    padded = known[f"logits_half_padded{raw}"]
    torch.testing.assert_close(model.logits_at(features)[seen], padded[seen], atol=1e-4, rtol=0)
    torch.testing.assert_close(model.trunk(known["input_half"]), known["hidden_half"][2], atol=1e-4, rtol=0)
