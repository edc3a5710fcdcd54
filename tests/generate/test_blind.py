import pytest
import torch
from worlds import SCHEDULES, world

from fsdfm.flow import ExactDenoiser
from fsdfm.flow.exact import all_states
from fsdfm.generate import LanguageModel, consistent_time, expected_agreement
from fsdfm.generate.blind import HALVINGS
from tiny_models import random_bundle, unigram_world


@pytest.mark.parametrize("source", ["uniform", "mixture"])
@pytest.mark.parametrize("schedule", SCHEDULES[:4], ids=str)
@pytest.mark.parametrize("t", [0.0, 0.2, 0.7, 1.0])
def test_the_posterior_of_the_shown_token_averages_to_the_expected_agreement(source, schedule, t):
    path, p_1 = world(source, schedule, vocab=3, length=3)
    size = path.source.vocab_size
    states = all_states(size, 3)
    exact = ExactDenoiser(path, p_1=p_1)
    p_t = exact.marginal(t).flatten()
    possible = p_t > 0
    logits = exact(states[possible], torch.full((int(possible.sum()),), t, dtype=torch.float64))
    shown = torch.softmax(logits, -1).gather(-1, states[possible][..., None])[..., 0]
    real = torch.ones_like(shown) if path.source.mask_token is None else (states[possible] != size - 1).double()
    weight = p_t[possible][:, None] * real
    mean = (weight * shown).sum() / weight.sum()
    assert mean == pytest.approx(float(expected_agreement(path, torch.tensor(t, dtype=torch.float64))), abs=1e-9)


@pytest.mark.parametrize("exponent", [1.0, 2.0])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_the_time_of_a_damaged_text_is_found(exponent, share):
    bundle, p_1 = unigram_world(exponent)
    generator = torch.Generator().manual_seed(1)
    letters = torch.multinomial(p_1, 500, replacement=True, generator=generator)
    lm = LanguageModel(bundle)
    damaged = lm.corrupt(bytes(letters.clamp(max=127).tolist()).decode(), share, seed=3)
    result = lm.repair(damaged.tokens, steps=2)
    # 500 letters, 13 of them likely: the standard error of kappa is about 0.02
    assert float(bundle.path.schedule.kappa(result.start)) == pytest.approx(1 - share, abs=0.06)
    assert result.calls == HALVINGS + 1 + 2


def search(agreement, path, num_tokens):
    """Answer a search for the consistent time until it ends."""
    times = consistent_time(path, num_tokens)
    t = next(times)
    while True:
        try:
            t = times.send(agreement(t))
        except StopIteration as found:
            return found.value


def test_the_ends_of_the_range():
    path = unigram_world()[0].path
    tokens = torch.tensor([10, 10])
    clean = search(lambda t: torch.ones(2), path, tokens)
    assert clean.tolist() == pytest.approx([0.9, 0.9])
    nonsense = search(lambda t: torch.zeros(2), path, tokens)
    assert nonsense.tolist() == pytest.approx([0, 0], abs=2**-HALVINGS)


def test_bisection_finds_the_crossing_of_every_row():
    path = unigram_world()[0].path
    crossing = torch.tensor([0.2, 0.55, 0.9], dtype=torch.float64)
    found = search(lambda t: expected_agreement(path, t) + crossing - t, path, torch.full((3,), 1000))
    assert (found - crossing).abs().max() < 2**-HALVINGS


def test_an_earlier_start_is_a_renoised_text():
    bundle, _ = unigram_world()
    lm = LanguageModel(bundle)
    text = "ten sees" * 40
    states = lm.repair(text, steps=1, start=0.2, keep_states=True).states
    kept = sum(a == b for a, b in zip(states[0].tokens, lm.checkpoint.tokenizer.encode(text), strict=True)) / len(text)
    assert kept == pytest.approx(0.2, abs=0.08)
    assert states[0].t == 0.2


def test_a_mask_model_cannot_repair_blindly():
    lm = LanguageModel(random_bundle(source="mask"))
    with pytest.raises(ValueError, match="say which are damaged"):
        lm.repair("a text")
    assert lm.repair("a text", [(2, 6)], steps=2).text.startswith("a ")
