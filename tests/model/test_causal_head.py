"""The causal head: its law by enumeration, its draws, its start, its training."""

from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from fsdfm.checkpoint import load_model, save_model
from fsdfm.flow import RULES, Filter, Grid, MaskSource, MixturePath, UniformSource, sample
from fsdfm.flow.exact import all_states, total_variation
from fsdfm.generate import LanguageModel
from fsdfm.learn.objective import TrainingBatch
from fsdfm.learn.path import CrossEntropy, PathObjective
from fsdfm.model import CausalConfig, CausalHeadConfig, CausalModel, DiT, ModelConfig
from fsdfm.model.causal_loop import RowStack
from fsdfm.noise import Noise
from tiny_models import random_bundle

V, L = 4, 3
SHAPE = {"width": 16, "num_blocks": 1, "num_heads": 2, "cond_width": 8, "dropout": 0.0, "style": "llama"}


def network(*, vocab: int = V, seed: int = 0, spread: float = 0.2) -> DiT:
    """A network with a causal head, every weight drawn."""
    model = DiT(ModelConfig(vocab_size=vocab, posterior=CausalHeadConfig(cond_width=8), **SHAPE))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(spread * torch.randn(value.shape, generator=generator))
    return model.eval()


def ask(model: DiT, x_t: Tensor):
    t = torch.full((len(x_t),), 0.25, dtype=torch.float64)
    return model.posterior(x_t, t, torch.full_like(t, 0.25))


def law(model: DiT, *, held: Tensor | None = None, forbidden: int | None = None) -> Tensor:
    """p of every text, all asked about one x_t."""
    texts = all_states(V, L)
    x_t = torch.tensor([[1, 0, 2]]).expand(len(texts), L)
    held = torch.full((len(texts), L), -1) if held is None else held.expand(len(texts), L)
    with torch.no_grad():
        return ask(model, x_t).given(held, forbidden=forbidden).log_prob(texts).exp().double()


def test_a_child_says_what_its_parent_says():
    parent = random_bundle(bos_id=1, budgets=(1, 2)).model.eval()
    child = parent.with_posterior(CausalHeadConfig()).eval()
    x_t, t = torch.randint(257, (2, 9)), torch.tensor([0.1, 0.7], dtype=torch.float64)
    h = torch.full_like(t, 0.25)
    with torch.no_grad():
        assert torch.equal(child(x_t, t, h), parent(x_t, t, h))
        x_1 = torch.randint(257, (2, 9))
        expected = torch.log_softmax(parent(x_t, t, h), -1).gather(-1, x_1[..., None])[..., 0].sum(-1)
        torch.testing.assert_close(child.posterior(x_t, t, h).log_prob(x_1), expected)
    with pytest.raises(ValueError, match="already"):
        child.with_posterior(CausalHeadConfig())


@pytest.mark.parametrize("held", [None, [-1, 3, -1], [2, -1, 0]])
def test_the_law_is_normalised_and_knows_what_is_held(held):
    held = None if held is None else torch.tensor(held)
    p = law(network(), held=held)
    assert float(p.sum()) == pytest.approx(1, abs=1e-5)
    if held is not None:
        wrong = ((held >= 0) & (all_states(V, L) != held)).any(-1)
        assert float(p[wrong].sum()) == 0
    assert float(law(network(), forbidden=V - 1)[(all_states(V, L) == V - 1).any(-1)].sum()) == 0


@pytest.mark.parametrize("held", [None, [-1, 3, -1]])
def test_draws_have_the_law(held):
    n, model = 800, network()
    x_t = torch.tensor([[1, 0, 2]]).expand(n, L)
    mask = torch.full((n, L), -1) if held is None else torch.tensor(held).expand(n, L)
    u = Noise(0, range(n)).uniform(3, L)
    drawn = ask(model, x_t).given(mask).draw(torch.arange(n), u)
    counts = torch.bincount((drawn * torch.tensor([16, 4, 1])).sum(1), minlength=V**L).double()
    expected = law(model, held=None if held is None else torch.tensor(held)) * n
    likely = expected > 5
    assert float(counts[expected == 0].sum()) == 0
    seen = torch.cat([counts[likely], counts[~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None]])
    keep = wanted > 0
    assert stats.chisquare(seen[keep], wanted[keep] * seen[keep].sum() / wanted[keep].sum()).pvalue > 1e-4


def test_a_text_is_a_function_of_its_uniforms_whatever_the_guess():
    """Guesses, windows and neighbours in the batch change no token."""
    model = network(vocab=50, spread=0.3)
    u = Noise(1, range(3)).uniform(3, 40)
    features = torch.randn(1, 40, 16, generator=torch.Generator().manual_seed(2)).expand(3, 40, 16)
    posterior = ask(model, torch.zeros(3, 40, dtype=torch.int64))
    texts = []
    for guess in (torch.zeros(3, 40, dtype=torch.int64), torch.randint(50, (3, 40))):
        told = replace(posterior, x_t=guess, features=features)
        texts.append(told.draw(torch.arange(3), u))
        assert torch.equal(told.draw(torch.tensor([1]), u[1:2]), texts[-1][1:2])
        assert torch.equal(replace(told, x_t=texts[-1]).draw(torch.arange(3), u), texts[-1])  # all guessed right
    assert torch.equal(texts[0], texts[1])
    one_by_one = torch.full((1, 40), -1)
    x = torch.zeros(1, 40, dtype=torch.int64)
    told = replace(posterior.part(0, 1), features=features)
    for i in range(40):  # position by position, everything before it held
        x = replace(told, x_t=x).given(one_by_one).draw(torch.tensor([0]), u[:1])
        one_by_one[0, i] = x[0, i]
    assert torch.equal(x, texts[0][:1])


def test_a_cold_draw_is_greedy_and_a_hook_is_heard():
    model, x_t = network(), torch.zeros(2, L, dtype=torch.int64)
    u = Noise(0, range(2)).uniform(3, L)
    posterior = ask(model, x_t)
    greedy = posterior.draw(torch.arange(2), u, filter=Filter(top_k=1))
    cold = posterior.draw(torch.arange(2), u, filter=Filter(temperature=1e-3))
    assert torch.equal(greedy, cold)

    def ban(logits, rows):
        logits[:, int(greedy[0, 0])] = -torch.inf
        assert int(rows.position.max()) < L
        return logits

    banned = posterior.changed(ban, x_t, t=posterior.t, t_next=posterior.t).draw(torch.arange(2), u)
    assert not bool((banned == greedy[0, 0]).any())


def test_the_mask_is_never_drawn_and_the_sampler_runs():
    path, noise = MixturePath(MaskSource(V)), Noise(0, range(20))
    x = sample(network(), path, path.source.sample(noise, L), grid=Grid.uniform(3), noise=noise)
    assert int(x.max()) < V - 1


@pytest.mark.slow
def test_one_call_of_a_trained_head_is_the_law_of_the_data():
    """Two tokens that always agree and one that is their opposite: independent outputs cannot say it, a head can."""
    torch.manual_seed(0)
    path = MixturePath(UniformSource(V))
    data = torch.tensor([[0, 0, 1], [1, 1, 0], [2, 2, 3], [3, 3, 2]])
    model = DiT(ModelConfig(vocab_size=V, posterior=CausalHeadConfig(cond_width=8), **SHAPE)).train()
    objective = PathObjective(path, loss=CrossEntropy(), h=1.0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    torch.nn.init.normal_(model.embedding.weight)
    for step in range(300):
        noise = Noise(step, range(64))
        x_1 = data[noise.integers(9, 1, 4)[:, 0]]
        objective(model, TrainingBatch(x_1), noise, training_step=step, ema=model).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    texts, x_0 = all_states(V, L), torch.tensor([[1, 3, 2]]).expand(V**L, L)
    t = torch.zeros(V**L, dtype=torch.float64)
    with torch.no_grad():
        p = model.eval().posterior(x_0, t, torch.ones_like(t)).log_prob(texts).exp().double()
    truth = torch.zeros(V**L, dtype=torch.float64)
    truth[(data * torch.tensor([16, 4, 1])).sum(1)] = 0.25
    assert total_variation(p, truth) < 0.1


def test_a_model_with_a_causal_head_is_saved_and_writes_the_same_alone_and_in_a_batch(tmp_path):
    bundle = random_bundle(bos_id=1, budgets=(1, 2, 4), posterior=CausalHeadConfig(num_blocks=1, cond_width=8))
    with torch.no_grad():
        bundle.model.joint.combine.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(3))
    save_model(tmp_path / "model", bundle)
    again = load_model(tmp_path / "model")
    assert again.model.config.posterior == CausalHeadConfig(num_blocks=1, cond_width=8)
    lm = LanguageModel(again)
    prompts = ["a", "some words", ""][:2]
    together = lm.generate(prompts, num=2, steps=4, length=20, temperature=0.8)
    alone = [one for prompt in prompts for one in lm.generate(prompt, num=2, steps=4, length=20, temperature=0.8)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert lm.generate("a", jump="single", steps=2, length=12).text.startswith("a")
    assert lm.infill("a[[5]]b", steps=2).text.endswith("b")
    assert lm.repair("some text", steps=2).steps == 2


def test_a_draw_ends_behind_the_last_row_that_was_asked_about():
    model, length, n = network(vocab=9), 12, 4
    x_t = torch.randint(9, (n, length), generator=torch.Generator().manual_seed(2))
    t, u = torch.full((n,), 0.25, dtype=torch.float64), Noise(3, range(n)).uniform(3, length)
    whole = model.posterior(x_t, t, t).draw(torch.arange(n), u)
    ends = [5, 12, 1, 7]
    rows = torch.cat([b * length + torch.arange(end)[-2:] for b, end in enumerate(ends)])
    asked = model.posterior(x_t, t, t, rows=rows)
    for posterior, samples in ((asked, torch.arange(n)), (asked.part(1, 2), torch.arange(2))):
        first = 0 if len(samples) == n else 1
        drawn = posterior.draw(samples, u[first : first + len(samples)])
        for row, end in enumerate(ends[first : first + len(samples)], first):
            assert torch.equal(drawn[row - first, :end], whole[row, :end])
            assert torch.equal(drawn[row - first, end:], x_t[row, end:])


@pytest.mark.parametrize("train", [False, True], ids=["loop", "windows"])
def test_a_beginning_that_is_held_is_read_in_one_pass(monkeypatch, train):
    """The same texts as position by position; `train` because the loop is for networks that do not train."""
    model, length, n = network(vocab=9).train(train), 20, 3
    x_t = torch.randint(9, (n, length), generator=torch.Generator().manual_seed(2))
    t, u = torch.full((n,), 0.25, dtype=torch.float64), Noise(3, range(n)).uniform(3, length)
    held = torch.where(torch.arange(length) < torch.tensor([[13], [4], [0]]), x_t, -1)
    held[0, 15] = 3
    together = model.posterior(x_t, t, t).given(held).draw(torch.arange(n), u)
    monkeypatch.setattr("fsdfm.model.causal_head._WORTH_A_PASS", length + 1)
    assert torch.equal(model.posterior(x_t, t, t).given(held).draw(torch.arange(n), u), together)


def test_a_sweep_draws_every_position_once(monkeypatch):
    """And what one call draws of a whole text is what the other rules draw."""
    monkeypatch.setattr("fsdfm.model.compiled._kernels", lambda: None)
    model, length, n = network(vocab=9), 24, 2
    path, noise = MixturePath(UniformSource(9)), Noise(1, range(n))
    x_0 = path.source.sample(noise, length)
    one = [sample(model, path, x_0, grid=Grid.uniform(1), noise=noise, rule=RULES[name]) for name in ("exact", "sweep")]
    assert torch.equal(*one)
    steps = []
    call = RowStack.__call__
    monkeypatch.setattr(RowStack, "__call__", lambda stack, z, places: steps.append(places) or call(stack, z, places))
    together = sample(model, path, x_0, grid=Grid.uniform(4), noise=noise, rule=RULES["sweep"])
    assert [places.same for places in steps] == list(range(length))
    alone = [
        sample(model, path, x_0[[b]], grid=Grid.uniform(4), noise=noise[[b]], rule=RULES["sweep"]) for b in range(n)
    ]
    assert torch.equal(torch.cat(alone), together)


def test_a_head_begins_with_the_first_blocks_and_the_last():
    sizes = {"vocab_size": V, "width": 16, "num_heads": 2, "style": "llama", "max_length": 8}
    causal = CausalModel(CausalConfig(num_blocks=4, **sizes))
    head = network().joint
    head.start_from(causal)
    for own, other in zip(head.blocks, (causal.blocks[0], causal.blocks[3]), strict=True):
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in own.state_dict().items())


@pytest.mark.parametrize("start", ["fresh", "autoregressive"])
def test_a_head_that_grows_says_what_it_said(start):
    small, causal = network(), None
    if start == "autoregressive":
        sizes = {"vocab_size": V, "width": 16, "num_heads": 2, "style": "llama", "max_length": 8}
        causal = CausalModel(CausalConfig(num_blocks=4, **sizes), seed=5)
    config = replace(small.config.posterior, num_blocks=4)
    large = small.with_larger_posterior(config, causal=causal)
    x_t, t = torch.randint(V, (3, L), generator=torch.Generator().manual_seed(0)), torch.full((3,), 0.25).double()
    h, x_1 = torch.full_like(t, 0.5), x_t.flip(1)
    expected = small.posterior(x_t, t, h).log_prob(x_1)
    assert torch.equal(large.posterior(x_t, t, h).log_prob(x_1), expected)
    new = large.joint.blocks[1:3]
    assert not any(bool(block.attention.out.weight.any() or block.mlp.out.weight.any()) for block in new)
    assert all(bool(block.attention.qkv.weight.any()) for block in new)
    if causal is not None:
        assert torch.equal(new[0].attention.qkv.weight, causal.blocks[1].attention.qkv.weight)
        assert torch.equal(new[1].attention.qkv.weight, causal.blocks[2].attention.qkv.weight)
    for block in new:  # and it can learn to say more
        nn.init.normal_(block.mlp.out.weight)
    assert not torch.allclose(large.posterior(x_t, t, h).log_prob(x_1), expected)


def test_a_head_cannot_shrink():
    model = network()
    with pytest.raises(ValueError, match="cannot grow from one of 2"):
        model.with_larger_posterior(replace(model.config.posterior, num_blocks=1))
    plain = DiT(ModelConfig(vocab_size=V, **SHAPE))
    with pytest.raises(ValueError, match="no joint head"):
        plain.with_larger_posterior(model.config.posterior)
