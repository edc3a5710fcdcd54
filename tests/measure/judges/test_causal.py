"""Judges of our own causal model: its folder, llama2.c files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llama2c_files import Llama, write_vocabulary

from fsdfm.data import Tokenizer
from fsdfm.measure.judges import causal_judge, load_causal, make_judge, save_causal
from fsdfm.model import CausalConfig, CausalModel

TEXTS = ["a fox", "", "Once upon a time there was a fox. " * 3]
CONFIG = CausalConfig(vocab_size=257, width=16, num_blocks=1, num_heads=2, style="llama", max_length=32)


def build() -> CausalModel:
    model = CausalModel(CONFIG)
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    return model


def test_it_scores_as_its_network_does_without_dropout() -> None:
    model = build().train()
    judge = causal_judge(model, Tokenizer.bytes(), name="own", bos_id=256)
    assert not model.training
    scores = judge.score(TEXTS)
    tokens = torch.tensor([[256, *b"a fox"]])
    assert float(scores.nll[0]) == pytest.approx(float(model.nll(tokens).detach().sum()), rel=1e-5)
    assert scores.num_tokens.tolist() == [5, 0, 102]
    assert judge.facts["dtype"] == "float32"
    with pytest.raises(ValueError, match="257 tokens and the model 300"):
        causal_judge(CausalModel(CausalConfig(**{**CONFIG.to_dict(), "vocab_size": 300})), Tokenizer.bytes(), name="x")


def test_a_saved_model_scores_the_same(tmp_path: Path) -> None:
    model = build()
    folder = save_causal(tmp_path / "tiny", model, Tokenizer.bytes(), bos_id=256)
    expected = causal_judge(model, Tokenizer.bytes(), name="own", bos_id=256).score(TEXTS)
    judge = make_judge(str(folder))
    assert judge.name == "tiny"
    assert torch.equal(judge.score(TEXTS).nll, expected.nll)
    with pytest.raises(ValueError, match="not empty"):
        save_causal(folder, model, Tokenizer.bytes())
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="does not fit"):
        load_causal(folder)
    with pytest.raises(ValueError, match="no causal model"):
        load_causal(tmp_path)


def test_a_llama2c_file_is_a_judge(tmp_path: Path) -> None:
    llama = Llama(shared=False)
    file = llama.write(tmp_path / "Stories.bin")
    with pytest.raises(ValueError, match="tokenizer"):
        make_judge(str(file))  # neither beside the weights nor behind them
    write_vocabulary(tmp_path / "tokenizer.bin")
    judge = make_judge(f"stories15m:{file}")
    (ids,) = judge.encode(["The dog"])
    logits = torch.from_numpy(llama.logits([1, *ids])[:-1])
    expected = -logits.log_softmax(-1)[range(len(ids)), ids].sum()
    assert float(judge.score(["The dog"]).nll[0]) == pytest.approx(float(expected), rel=1e-4)
    assert (judge.name, judge.bos_id) == ("stories", 1)
    with pytest.raises(ValueError, match="give the llama2.c file"):
        make_judge("stories15m")
    with pytest.raises(ValueError, match="not a file"):
        make_judge("missing.bin")
