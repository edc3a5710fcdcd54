"""Transitions of a CRF: dynamic ones begin as the static, and say what static ones cannot."""

import pytest
import torch
from torch import Tensor

from fsdfm.checkpoint import load_model, save_model
from fsdfm.flow.exact import all_states, total_variation
from fsdfm.generate import LanguageModel
from fsdfm.model import CRFConfig, DiT, ModelConfig, TransitionTables
from tiny_models import random_bundle

V = 2
SHAPE = {"width": 16, "num_blocks": 1, "num_heads": 2, "cond_width": 8, "dropout": 0.0, "style": "llama"}


def test_a_child_with_gates_says_what_its_parent_says():
    parent = random_bundle(bos_id=1, budgets=(1, 2), transition_rank=4).model.eval()
    child = parent.with_gates(8).eval()
    assert child.config.posterior == CRFConfig(rank=4, gate_width=8)
    x_t, t = torch.randint(257, (3, 9)), torch.tensor([0.1, 0.7, 0.0], dtype=torch.float64)
    h, u = torch.full_like(t, 0.25), torch.rand(3, 9, dtype=torch.float64)
    rows = torch.tensor([2, 3, 20])  # of the first text and the last
    with torch.no_grad():
        told = [model.posterior(x_t, t, h) for model in (parent, child)]
        assert torch.equal(*(each.log_prob(x_t) for each in told))
        assert torch.equal(*(each.draw(torch.arange(3), u) for each in told))
        some = [model.posterior(x_t, t, h, rows=rows).draw(torch.tensor([0, 2]), u[:2]) for model in (parent, child)]
        assert torch.equal(*some)
    with pytest.raises(ValueError, match="none yet"):
        child.with_gates(8)
    with pytest.raises(ValueError, match="gate_width is -1"):
        CRFConfig(gate_width=-1)


def test_a_model_with_gates_is_saved_and_writes_the_same_alone_and_in_a_batch(tmp_path):
    bundle = random_bundle(bos_id=1, budgets=(1, 2, 4), posterior=CRFConfig(rank=4, gate_width=8))
    save_model(tmp_path / "model", bundle)
    again = load_model(tmp_path / "model")
    assert again.model.config.posterior == CRFConfig(rank=4, gate_width=8)
    lm = LanguageModel(again)
    together = lm.generate(["a", "some words"], num=2, steps=3, length=20)
    alone = [one for prompt in ("a", "some words") for one in lm.generate(prompt, num=2, steps=3, length=20)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]


def test_static_transitions_are_written_as_they_were():
    assert CRFConfig(rank=4).to_dict() == {"kind": "crf", "rank": 4}
    assert CRFConfig(rank=4, gate_width=2).to_dict() == {"kind": "crf", "rank": 4, "gate_width": 2}


def _trained(gate_width: int) -> float:
    """How far a head is from a law of pairs: the two agree where x_t begins with 0, as it mostly does, else not.

    The tables begin as a parent's would, not with zeros.
    """
    torch.manual_seed(0)
    model = DiT(ModelConfig(vocab_size=V, posterior=CRFConfig(rank=2, gate_width=gate_width), **SHAPE)).train()
    torch.nn.init.normal_(model.embedding.weight)
    head = model.joint
    assert isinstance(head, TransitionTables)
    with torch.no_grad():
        head.left.copy_(torch.eye(V))
        head.right.copy_(torch.eye(V))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-2)

    def log_prob(x_1: Tensor, x_t: Tensor) -> Tensor:
        t, real = torch.zeros(len(x_1), dtype=torch.float64), torch.ones_like(x_1, dtype=torch.bool)
        features = model.trunk(x_t, t, torch.ones_like(t))
        return head.log_prob(model, features, x_1, t=t, h=torch.ones_like(t), held=torch.full_like(x_1, -1), real=real)

    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        first, other = (torch.rand(32, generator=generator) < 0.3).long(), torch.randint(V, (32,), generator=generator)
        x_1 = torch.stack([other, other ^ first], 1)
        noise = torch.randint(V, (32,), generator=generator)
        loss = -log_prob(x_1, torch.stack([first, noise], 1)).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    texts, worst = all_states(V, 2), 0.0
    for first in (0, 1):
        with torch.no_grad():
            p = log_prob(texts, torch.tensor([[first, 0]]).expand(len(texts), 2)).exp().double()
        worst = max(worst, total_variation(p, ((texts[:, 0] == texts[:, 1]) == (first == 0)).double() / 2))
    return worst


def test_dynamic_transitions_say_what_static_ones_cannot():
    assert _trained(0) > 0.4
    assert _trained(8) < 0.15
