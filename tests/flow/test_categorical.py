import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from fsdfm.flow import Filter, categorical, draw
from fsdfm.flow.categorical import CompensatedSums, Float64Sums
from fsdfm.noise import Noise, Purpose

every_sum = pytest.mark.parametrize("sums", [Float64Sums(), CompensatedSums()], ids=lambda s: type(s).__name__)


def interval_middles(logits):
    """For one row of logits: the u in the middle of every token's interval, in float64."""
    p = torch.softmax(logits.double(), -1)
    return p.cumsum(-1) - p / 2


@every_sum
@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, 5000])
def test_every_token_is_returned_for_the_middle_of_its_interval(sums, vocab):
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0))
    u = interval_middles(logits[0])
    drawn = draw(logits, u, rows=torch.zeros(vocab, dtype=torch.int64), sums=sums)
    assert drawn.tokens.tolist() == list(range(vocab))


@every_sum
@pytest.mark.parametrize("place", [1, 100, 255, 256, 700, 999])
def test_a_token_of_probability_1e_minus_12_has_its_own_interval(sums, place):
    logits = torch.full((1, 1000), -math.inf)
    logits[0, 0] = 0.0
    logits[0, place] = math.log(1e-12)
    weight = float(logits[0, place].double().exp())
    for u, expected in [
        ((1 + 0.5 * weight) / (1 + weight), place),  # the middle of its interval
        ((1 - 0.1 * weight) / (1 + weight), 0),  # just before it
        (0.5, 0),
    ]:
        assert int(draw(logits, torch.tensor([u], dtype=torch.float64), sums=sums).tokens) == expected


def test_a_rare_token_in_front_of_a_common_one():
    logits = torch.full((1, 600), -math.inf)
    logits[0, 3], logits[0, 500] = math.log(1e-12), 0.0
    middle = 0.5 * float(logits[0, 3].double().exp())
    assert int(draw(logits, torch.tensor([middle], dtype=torch.float64)).tokens) == 3
    assert int(draw(logits, torch.tensor([5 * middle], dtype=torch.float64)).tokens) == 500


@pytest.mark.slow
def test_a_million_draws_follow_the_probabilities():
    logits = 2 * torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    noise = Noise(0, range(1000))
    tokens = draw(
        logits, noise.uniform(Purpose.DESTINATION, 1000).flatten(), rows=torch.zeros(10**6, dtype=torch.int64)
    )
    counts = torch.bincount(tokens.tokens, minlength=300).double()
    expected = 10**6 * torch.softmax(logits[0].double(), -1)
    common = expected > 20
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    assert chisquare(observed, wanted).pvalue > 1e-3


@every_sum
@given(data=st.data(), vocab=st.integers(2, 600), rows=st.integers(1, 5))
def test_it_is_the_inverse_of_the_cumulative_distribution(sums, data, vocab, rows):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    u = torch.rand(rows, dtype=torch.float64, generator=generator)
    cumulative = torch.softmax(logits.double(), -1).cumsum(-1)
    low = torch.nn.functional.pad(cumulative, (1, 0))
    token = draw(logits, u, sums=sums).tokens[:, None]
    assert bool((low.gather(1, token)[:, 0] <= u + 1e-6).all())
    assert bool((u <= cumulative.gather(1, token)[:, 0] + 1e-6).all())


@every_sum
@given(seed=st.integers(0, 10**6), u=st.floats(2**-53, 1 - 2**-53))
def test_impossible_tokens_are_never_drawn(sums, seed, u):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 700, generator=generator)
    logits[torch.rand(4, 700, generator=generator) < 0.95] = -math.inf
    logits[:, 13] = 0.0
    tokens = draw(logits, torch.full((4,), u, dtype=torch.float64), sums=sums).tokens
    assert bool(torch.isfinite(logits.gather(1, tokens[:, None])).all())
    tokens = draw(logits, torch.full((4,), u, dtype=torch.float64), sums=sums, forbidden=13).tokens
    assert bool((tokens != 13).all())


@every_sum
def test_excluding_a_token_renormalises_the_others_and_reports_its_log_probability(sums):
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2))
    p = torch.softmax(logits[0].double(), -1)
    without = logits.clone()
    without[0, 7] = -math.inf
    u = interval_middles(without[0])[p > 0]
    rows, exclude = torch.zeros(300, dtype=torch.int64), torch.full((300,), 7)
    drawn = draw(logits, u, rows=rows, exclude=exclude, sums=sums)
    expected = torch.arange(300)
    assert torch.equal(drawn.tokens[expected != 7], expected[expected != 7])
    assert torch.allclose(drawn.log_p_excluded.double(), p[7].log().expand(300), rtol=1e-5)


def test_log_p_keeps_its_digits_near_certainty_and_near_impossibility():
    logits = torch.tensor([[0.0, -40.0], [-80.0, 0.0]])
    drawn = draw(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), exclude=torch.tensor([0, 0]))
    assert drawn.tokens.tolist() == [1, 1]
    assert drawn.log_p_excluded.tolist() == pytest.approx([-math.exp(-40), -80], rel=1e-6, abs=0)
    rare = torch.tensor([[0.0, -200.0]], dtype=torch.float64)
    drawn = draw(rare, torch.tensor([0.5], dtype=torch.float64), exclude=torch.tensor([1]))
    assert drawn.log_p_excluded.tolist() == pytest.approx([-200], rel=1e-12)


def test_the_only_possible_token_cannot_be_excluded():
    logits = torch.tensor([[0.0, -math.inf, -math.inf]])
    drawn = draw(logits, torch.tensor([0.5], dtype=torch.float64), exclude=torch.tensor([0]))
    assert (drawn.tokens.tolist(), drawn.log_p_excluded.tolist()) == ([0], [0.0])


def test_chunks_change_nothing(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    logits, u = torch.randn(50, 333, generator=generator), torch.rand(50, dtype=torch.float64, generator=generator)
    exclude = torch.randint(333, (50,), generator=generator)
    whole = draw(logits, u, exclude=exclude, filter=Filter(top_p=0.9))
    monkeypatch.setattr(categorical, "_BUFFER_CPU", 1000)
    parts = draw(logits, u, exclude=exclude, filter=Filter(top_p=0.9))
    assert torch.equal(whole.tokens, parts.tokens)
    assert torch.equal(whole.log_p_excluded, parts.log_p_excluded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_drawn_in_at_least_float32(dtype):
    generator = torch.Generator().manual_seed(4)
    logits = (3 * torch.randn(200, 5000, generator=generator)).to(dtype)
    u = torch.rand(200, dtype=torch.float64, generator=generator)
    for filter in (None, Filter(temperature=0.9)):
        assert torch.equal(draw(logits, u, filter=filter).tokens, draw(logits.float(), u, filter=filter).tokens)


def test_logits_are_left_as_they_were():
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(4))
    before = logits.clone()
    draw(logits, torch.full((3,), 0.5, dtype=torch.float64), forbidden=2, filter=Filter(0.7, top_k=5, top_p=0.8))
    assert torch.equal(logits, before)


class TestFilter:
    logits = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]).log()

    def probs(self, filter):
        return torch.softmax(filter(self.logits.clone()), -1)[0].tolist()

    def test_temperature(self):
        assert self.probs(Filter(0.5)) == pytest.approx([p**2 / 0.325 for p in (0.5, 0.2, 0.15, 0.1, 0.05)], rel=1e-5)
        assert self.probs(Filter(1e-320)) == [1, 0, 0, 0, 0]  # 0 in float32: still the likeliest token, never 0 / 0

    def test_top_k(self):
        assert self.probs(Filter(top_k=2)) == pytest.approx([5 / 7, 2 / 7, 0, 0, 0])
        assert self.probs(Filter(top_k=50)) == pytest.approx([0.5, 0.2, 0.15, 0.1, 0.05])
        assert int(torch.isfinite(Filter(top_k=2)(torch.zeros(1, 5))).sum()) == 2  # ties, too

    def test_a_temperature_near_zero_is_greedy_and_does_not_overflow(self):
        assert self.probs(Filter(1e-39)) == [1, 0, 0, 0, 0]

    @pytest.mark.parametrize(("top_p", "kept"), [(0.001, 1), (0.5, 1), (0.51, 2), (0.8, 3), (0.86, 4), (1.0, 5)])
    def test_top_p_keeps_the_smallest_set_that_reaches_p(self, top_p, kept):
        assert sum(p > 0 for p in self.probs(Filter(top_p=top_p))) == kept

    def test_staying_and_destination_use_the_same_distribution(self):
        drawn = draw(
            self.logits, torch.tensor([0.5], dtype=torch.float64), exclude=torch.tensor([0]), filter=Filter(top_k=2)
        )
        assert drawn.tokens.tolist() == [1]
        assert drawn.log_p_excluded.tolist() == pytest.approx([math.log(5 / 7)])

    @pytest.mark.parametrize(
        "bad",
        [
            {"temperature": 0},
            {"temperature": -1},
            {"temperature": math.nan},
            {"top_k": 0},
            {"top_p": 0.0},
            {"top_p": 1.5},
        ],
    )
    def test_filters_that_leave_nothing_are_errors(self, bad):
        with pytest.raises(ValueError, match="allowed"):
            Filter(**bad)


@pytest.mark.parametrize(
    ("logits", "u"),
    [
        (torch.tensor([[0.0, math.nan]]), [0.5]),
        (torch.tensor([[0.0, math.inf]]), [0.5]),
        (torch.tensor([[-math.inf, -math.inf]]), [0.5]),
        (torch.empty(1, 0), [0.5]),
        (torch.zeros(3), [0.5]),
        (torch.zeros(2, 3), [0.5]),
    ],
)
def test_logits_without_a_distribution_are_errors(logits, u):
    with pytest.raises(ValueError, match="nothing to draw|must be|uniform for each"):
        draw(logits, torch.tensor(u, dtype=torch.float64))


@pytest.mark.parametrize(
    "bad",
    [
        {"u": torch.tensor([1.0])},
        {"u": torch.tensor([0.5]).float()},
        {"u": torch.tensor([math.nan]).double()},
        {"u": torch.tensor([1.0]).double()},
        {"exclude": torch.tensor([3])},
        {"exclude": torch.tensor([0, 1])},
        {"forbidden": -1},
    ],
)
def test_uniforms_and_tokens_out_of_range_are_errors(bad):
    with pytest.raises(ValueError, match="uniform|token"):
        draw(torch.zeros(1, 3), **({"u": torch.tensor([0.5]).double()} | bad))


def test_gradients_do_not_pass_through_a_draw():
    logits = torch.zeros(1, 3, requires_grad=True)
    assert not draw(logits, torch.tensor([0.5]).double(), exclude=torch.tensor([0])).log_p_excluded.requires_grad


@every_sum
def test_interval_edges_in_a_large_vocabulary(sums):
    """u a little inside each end of an interval: the sums must be good to 1e-9 of it."""
    logits = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(5))
    weights = (logits[0] - logits.max()).exp().double()  # the weights as they are drawn from, in float32
    high = weights.cumsum(0)
    tokens = torch.arange(0, 50_000, 97)
    for edge in (1e-3, 1 - 1e-3):
        u = (high - weights * (1 - edge))[tokens] / high[-1]
        assert torch.equal(draw(logits, u, rows=torch.zeros_like(tokens), sums=sums).tokens, tokens)


def test_no_rows_is_no_error():
    drawn = draw(torch.zeros(3, 4), torch.empty(0, dtype=torch.float64), rows=torch.empty(0, dtype=torch.int64))
    assert drawn.tokens.shape == (0,)


def test_a_temperature_goes_evenly_from_first_to_last():
    flat, falling = Filter(0.8, top_k=5), Filter(1.0, top_k=5, final_temperature=0.4)
    assert flat.at(3, 8) is flat
    assert [falling.at(i, 4).temperature for i in range(4)] == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert {(falling.at(i, 4).top_k, falling.at(i, 4).final_temperature) for i in range(4)} == {(5, None)}
    assert falling.at(0, 1) == Filter(1.0, top_k=5), "a single step is the first"
    with pytest.raises(ValueError, match="final_temperature is 0; allowed are finite numbers > 0"):
        Filter(final_temperature=0)
