import math
from dataclasses import replace

import pytest
import torch
from worlds import SCHEDULES, world

from fsdfm.flow import ExactDenoiser, Independent
from fsdfm.flow.exact import all_states
from fsdfm.generate import (
    FALSE_ALARMS,
    LanguageModel,
    consistent_time,
    expected_agreement,
    find_damage,
    find_recurring,
    leave_one_out,
    load,
)
from fsdfm.generate.blind import HALVINGS, RECURRING, SHORT, SLOPE, UPPER
from fsdfm.generate.run import _shown_log_odds
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


@pytest.mark.parametrize("source", ["uniform", "mixture"])
@pytest.mark.parametrize("t", [0.2, 0.6, 0.9])
def test_the_evidence_is_the_law_of_a_place_given_all_others(source, t):
    """Against q_i(x) computed from the joint law of (X_1^i, X_t^-i), without Bayes' rule."""
    path, p_1 = world(source, SCHEDULES[0], vocab=3, length=3)
    size, kappa = path.source.vocab_size, float(path.schedule.kappa(torch.tensor(t, dtype=torch.float64)))
    states = all_states(size, 3)
    p_0 = path.source.probabilities().double()
    exact = ExactDenoiser(path, p_1=p_1)
    real = states[(exact.marginal(t).flatten() > 0) & (states < 3).all(-1)]
    p = torch.softmax(exact(real, torch.full((len(real),), t, dtype=torch.float64)), -1)
    shown = p.gather(-1, real[..., None])[..., 0]
    scores = leave_one_out(path, torch.logit(shown), real, kappa=kappa)
    whole, mass = all_states(p_1.shape[0], 3), p_1.flatten().double()
    for row, score in zip(real, scores, strict=True):
        for i in range(3):
            others = [j for j in range(3) if j != i]
            seen = torch.stack([kappa * (whole[:, j] == row[j]) + (1 - kappa) * p_0[row[j]] for j in others]).prod(0)
            q = (mass * seen)[whole[:, i] == row[i]].sum() / (mass * seen).sum()
            assert float(torch.sigmoid(score[i])) == pytest.approx(float(q), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_a_true_law_gives_no_more_false_alarms_than_allowed(sharpness):
    generator = torch.Generator().manual_seed(0)
    q = torch.softmax(sharpness * torch.randn(400, 64, generator=generator, dtype=torch.float64), -1)
    tokens = torch.multinomial(q, 500, replacement=True, generator=generator)
    scores = torch.logit(q.gather(-1, tokens)).T
    wrong = find_damage(scores, torch.ones_like(scores, dtype=torch.bool), 64)
    assert float(wrong.double().mean()) <= FALSE_ALARMS


def test_the_limit_follows_a_text_that_is_unlikely_all_over():
    limit = torch.tensor(FALSE_ALARMS / 64).log()
    likely = torch.cat([torch.linspace(0, 3, 99), limit[None] - 1])[None]
    free = torch.ones_like(likely, dtype=torch.bool)
    assert find_damage(likely, free, 64).nonzero().tolist() == [[0, 99]]
    low = likely - 6  # the limit falls by more
    assert not find_damage(low, free, 64).any()
    upper = float(low.quantile(UPPER))
    odd = torch.where(torch.arange(100) == 5, limit + SLOPE * upper - SHORT / 100 - 1, low)
    assert find_damage(odd, free, 64).nonzero().tolist() == [[0, 5]]
    assert not find_damage(odd, free & (torch.arange(100) != 5), 64).any()  # what is given is never called wrong


def test_a_short_text_is_judged_by_a_lower_limit():
    limit = float(torch.tensor(FALSE_ALARMS / 64).log())
    scores = torch.full((2, 100), 2.0)
    scores[:, 3] = limit - SHORT / 20
    free = torch.ones_like(scores, dtype=torch.bool)
    free[0, 10:] = False  # ten tokens are free: below the limit, and not by enough
    assert find_damage(scores, free, 64).nonzero().tolist() == [[1, 3]]
    assert not find_damage(scores, torch.zeros_like(free), 64).any()  # nothing to judge


def test_the_parent_leaves_a_lone_sentence_alone():
    text = "Benny hopped behind the tree and Emma stood in front of him."  # below the limit of a long text
    assert not any(load("parent", threads=1).repair(text, steps=1).marked)


def test_what_a_text_does_twice_it_means():
    vocab_size = 1000
    text = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 2, 3, 8, 4, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]])
    assert find_recurring(text, vocab_size)[0].nonzero()[:, 0].tolist() == [1, 2, 7, 8]  # 2 3, and not the lone 4
    assert not find_recurring(text, vocab_size)[1].any()
    assert not find_recurring(text[:, :1], vocab_size).any()
    often = torch.tensor([[1, 2] * 100])  # beside so common a neighbour any token may come back by chance
    assert not find_recurring(often, vocab_size).any()
    assert find_recurring(often, 100 * vocab_size).all()


@pytest.mark.parametrize("vocab_size", [256, 4000])
def test_noise_is_seldom_taken_for_what_a_text_means(vocab_size):
    """The bound of the module's text: at most RECURRING for either neighbour."""
    generator = torch.Generator().manual_seed(0)
    weights = 1 / torch.arange(1, vocab_size + 1, dtype=torch.float64)
    tokens = torch.multinomial(weights, 20 * 1000, replacement=True, generator=generator).view(20, 1000)
    damaged = torch.rand(tokens.shape, generator=generator) < 0.1
    tokens[damaged] = torch.randint(vocab_size, (int(damaged.sum()),), generator=generator)
    assert 0 < float(find_recurring(tokens, vocab_size)[damaged].double().mean()) <= 2 * RECURRING


@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_what_is_wrong_is_found_and_the_rest_stands(exponent):
    bundle, p_1 = unigram_world(exponent)
    lm = LanguageModel(bundle)
    likely = torch.topk(p_1, 4).indices.tolist()
    impossible = int(p_1.argmin())
    tokens = (likely * 10)[:37]
    tokens[5] = tokens[20] = impossible
    result = lm.repair(tokens, steps=2)
    assert [place for place, mark in enumerate(result.marked) if mark] == [5, 20]
    assert all(result.tokens[place] == tokens[place] for place in range(37) if place not in (5, 20))
    assert result.calls == 1 + 2
    clean = lm.repair((likely * 10)[:37], steps=2)
    assert clean.tokens == tuple((likely * 10)[:37])
    assert (clean.calls, clean.start, clean.blocks, sum(clean.changes)) == (1, 1.0, 1, 0)


def test_a_clean_text_and_a_damaged_one_share_a_batch_and_a_stream():
    bundle, p_1 = unigram_world()
    lm = LanguageModel(bundle)
    good = torch.topk(p_1, 4).indices.tolist() * 8
    bad = [*good]
    bad[3] = int(p_1.argmin())
    requests = [lm.encoder.damaged(tokens) for tokens in (good, bad)]
    together = lm.run(requests, steps=2)
    assert [result.tokens for result in together] == [lm.repair(tokens, steps=2).tokens for tokens in (good, bad)]
    stream = lm.stream(requests[0], steps=2)
    assert [state.tokens for state in stream] == [tuple(good)]
    assert stream.result.tokens == tuple(good)


@pytest.mark.parametrize("name", ["parent", "fewstep"])
def test_the_models_that_ship_leave_a_clean_sentence_alone(name):
    lm = load(name, threads=1)
    text = "The cat sat on the mat."
    result = lm.repair(text)
    assert result.text == text
    assert not any(result.marked)


@pytest.mark.parametrize("name", ["parent", "fewstep"])
def test_the_models_that_ship_mend_a_word_that_cannot_be(name):
    result = load(name, threads=1).repair("Once upon a time, there was a little sky who loved to play with her toys.")
    assert [piece for piece, mark in zip(result.pieces, result.marked, strict=True) if mark] == [result.pieces[9]]
    assert result.text.startswith("Once upon a time, there was a little ")
    assert "sky" not in result.text


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


def test_a_draft_has_the_time_of_its_damage_and_an_earlier_start_renoises_it():
    bundle, p_1 = unigram_world()
    lm = LanguageModel(bundle)
    letters = torch.multinomial(p_1, 500, replacement=True, generator=torch.Generator().manual_seed(1))
    damaged = lm.corrupt(bytes(letters.clamp(max=127).tolist()).decode(), 0.3, seed=3)
    draft = replace(lm.encoder.damaged(damaged.tokens), blind=False, draft=True)
    result = lm.run([draft], steps=2)[0]
    # 500 letters, 13 of them likely: the standard error of kappa is about 0.02
    assert float(bundle.path.schedule.kappa(result.start)) == pytest.approx(0.7, abs=0.06)
    assert result.calls == HALVINGS + 1 + 2
    states = lm.run([draft], steps=1, start=0.2, keep_states=True)[0].states
    kept = sum(a == b for a, b in zip(states[0].tokens, damaged.tokens, strict=True)) / 500
    assert kept == pytest.approx(0.2 / 0.7, abs=0.08)
    assert states[0].t == 0.2


def test_a_draft_that_is_renoised_keeps_what_is_frozen():
    lm = LanguageModel(unigram_world(length=60)[0])
    draft = lm.encoder.damaged("e" * 59)  # so likely that its time is late
    frozen = tuple(k % 2 == 0 for k in range(len(draft.tokens)))
    result = lm.run([replace(draft, blind=False, draft=True, frozen=frozen)], steps=2, start=0.01, keep_states=True)[0]
    first, shown = result.states[0].tokens, draft.tokens[draft.num_bos :]
    assert sum(a != b for a, b in zip(first, shown, strict=False)) > 20  # noise elsewhere
    for tokens in (first, result.tokens):
        kept = [a == b for a, b, fixed in zip(tokens, shown, result.given, strict=False) if fixed]
        assert all(kept)
        assert len(kept) > 20


def test_the_mask_is_no_token_that_a_text_could_have_shown():
    logits = torch.tensor([[[1.0, 2.0, 0.0, 9.0]]])  # the last token is the mask
    said = Independent.of_logits(logits)
    found = _shown_log_odds(said, torch.tensor([[1]]), mask_token=3)
    assert float(found) == pytest.approx(2.0 - math.log(math.e + 1))
    assert float(_shown_log_odds(said, torch.tensor([[1]]), mask_token=None)) < -6


def test_a_mask_model_cannot_repair_blindly():
    lm = LanguageModel(random_bundle(source="mask"))
    with pytest.raises(ValueError, match="say which are damaged"):
        lm.repair("a text")
    assert lm.repair("a text", [(2, 6)], steps=2).text.startswith("a ")
