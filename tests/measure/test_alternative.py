"""The autoregressive alternative: the same tokens, a call for every token, its seconds beside its quality."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fsdfm.data import Tokenizer
from fsdfm.measure.alternative import make_alternative
from fsdfm.measure.judges import save_causal
from fsdfm.model import CausalConfig, CausalModel

BYTES = Tokenizer.bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = CausalConfig(vocab_size=257, width=16, num_blocks=1, num_heads=2, max_length=12)
    return save_causal(tmp_path / "ar", CausalModel(config, seed=3), BYTES, bos_id=256)


def test_it_writes_what_the_causal_model_writes(folder: Path) -> None:
    alternative = make_alternative(str(folder), BYTES, length=10, batch_size=2)
    drawn = alternative.draw(5, length=10, bos_id=256, seed=0)
    assert drawn.tokens.shape == (5, 10)
    assert (drawn.tokens[:, 0] == 256).all()
    assert (drawn.columns["seconds"] > 0).all()
    again = make_alternative(str(folder), BYTES, length=10, batch_size=5).draw(5, length=10, bos_id=256, seed=0)
    assert (again.tokens == drawn.tokens).all()  # whatever the batch
    assert (alternative.draw(5, length=10, bos_id=256, seed=1).tokens != drawn.tokens).any()
    assert alternative.name == "ar"
    assert alternative.num_parameters == sum(p.numel() for p in alternative.model.parameters())


def test_without_bos_its_first_token_is_left_out(folder: Path) -> None:
    drawn = make_alternative(str(folder), BYTES, length=8).draw(3, length=8, bos_id=None, seed=0)
    assert drawn.tokens.shape == (3, 8)
    assert len(np.unique(drawn.tokens[:, 0])) > 1


@pytest.mark.parametrize("bos_id", [256, None])
def test_it_continues_rows_with_noise_of_their_own(folder: Path, bos_id: int | None) -> None:
    alternative = make_alternative(str(folder), BYTES, length=8)
    given = np.arange(12, dtype=np.int32).reshape(4, 3)
    first, again, other = (alternative.continue_rows(given, 4, bos_id=bos_id, copy=k, seed=0) for k in (0, 0, 1))
    assert first.shape == (4, 4)
    assert (first == again).all()
    assert (first != other).any()


def test_what_cannot_be_compared_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="knows 12 tokens"):
        make_alternative(str(folder), BYTES, length=13)
    other = Tokenizer.train(["a b c " * 50], 259)
    with pytest.raises(ValueError, match="another tokenizer"):
        make_alternative(str(folder), other, length=8)
    with pytest.raises(ValueError, match="is no file"):
        make_alternative("stories15m:nowhere.bin", BYTES, length=8)
    with pytest.raises(ValueError, match="allowed are a folder"):
        make_alternative(str(tmp_path / "nothing"), BYTES, length=8)
