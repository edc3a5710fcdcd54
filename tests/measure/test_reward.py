"""Rewards that measure."""

import numpy as np
import pytest
import torch

from fsdfm.learn import REWARDS
from fsdfm.measure.distances import mmd
from fsdfm.measure.reward import JudgeRewardConfig, MmdReward, MmdRewardConfig


def embed(texts):
    return np.array([[float(part) for part in text.split()] for text in texts])


def test_the_mmd_reward_is_the_slope_of_the_distance():
    """Moving mass e onto text i changes MMD^2, as a function of the drawn law, by -e r_i up to what all share."""
    real = ["0 1", "1 0", "0.5 2", "1 1"]
    drawn = ["0 0", "2 2", "1 0.5"]
    reward = MmdReward(embed, real)
    r = reward(drawn)
    scaled = [embed(part) / reward.scale for part in (drawn, real)]
    k = reward._kernel(*[torch.from_numpy(part) for part in (scaled[0], scaled[0])])
    own = (k.sum() - k.diagonal().sum()) / (len(drawn) * (len(drawn) - 1))
    y = torch.from_numpy(scaled[1])
    ky = reward._kernel(y, y)
    between = (ky.sum() - ky.diagonal().sum()) / (len(real) * (len(real) - 1))
    # mean r = 2 E k(x, y) - 2 E k(x, x'), so MMD^2 = E k(y, y') - E k(x, x') - mean r
    expected = mmd(scaled[0], scaled[1], bandwidth=reward.bandwidth)
    assert float(between - own - r.mean()) == pytest.approx(expected)
    assert float(r[1]) < float(r[2])  # far from everything real


def test_the_mmd_reward_reads_a_file(tmp_path):
    (tmp_path / "real.txt").write_text("One day, a dog ran.<|endoftext|>The cat sat down.<|endoftext|>She was happy!")
    reward = REWARDS.build(MmdRewardConfig(real=str(tmp_path / "real.txt")))
    found = reward(["One day, a cat sat.", "QQQ 777 ###", "The dog was happy!"])
    assert len(found) == 3
    assert float(found[1]) < float(found[0])
    with pytest.raises(ValueError, match="name a file of real texts"):
        MmdRewardConfig()


def test_the_judges_reward_is_its_log_perplexity(monkeypatch):
    class Judge:
        def score(self, texts):
            return type("S", (), {"perplexities": lambda self: torch.tensor([2.0, 8.0])})()

    monkeypatch.setattr("fsdfm.measure.reward.make_judge", lambda name: Judge())
    found = REWARDS.build(JudgeRewardConfig(judge="any"))(["a", ""])
    torch.testing.assert_close(found, -torch.log(torch.tensor([2.0, 8.0])))
