"""Independent posteriors: log-probabilities and draws against the softmax itself, however the logits are made."""

from __future__ import annotations

import pytest
import torch

from fsdfm.flow import Independent

B, L, V = 3, 5, 7
GENERATOR = torch.Generator().manual_seed(2)
LOGITS = torch.randn(B, L, V, generator=GENERATOR, dtype=torch.float64)
X_1 = torch.randint(0, V - 1, (B, L), generator=GENERATOR)


class Identity:
    """A network whose features are its logits."""

    def trunk(self, x_t, t, h):
        return LOGITS

    def logits_at(self, features):
        return features


MADE = {
    "logits": lambda: Independent.of_logits(LOGITS),
    "features": lambda: Independent.of_features(LOGITS, Identity()),
    "rows": lambda: Independent.of_rows(LOGITS.flatten(0, 1), torch.arange(B * L), Identity(), length=L),
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("forbidden", [None, V - 1, 2])
def test_log_prob_is_the_sum_of_log_softmax(made, forbidden):
    logits = LOGITS.clone()
    if forbidden is not None:
        logits[..., forbidden] = -torch.inf
    log_p = torch.log_softmax(logits, -1).gather(-1, X_1[..., None])[..., 0]
    posterior = MADE[made]().given(torch.full_like(X_1, -1), forbidden=forbidden)
    assert torch.allclose(posterior.log_prob(X_1), log_p.sum(-1), atol=1e-12)
    held = torch.where(torch.arange(L) < 2, X_1, -1)
    held[0, 0] = (X_1[0, 0] + 1) % V  # says otherwise
    found = MADE[made]().given(held, forbidden=forbidden).log_prob(X_1)
    assert found[0] == -torch.inf
    assert torch.allclose(found[1:], log_p[1:, 2:].sum(-1), atol=1e-12)


@pytest.mark.parametrize("made", MADE)
def test_some_samples_are_the_same_samples_alone(made):
    posterior, part = MADE[made](), MADE[made]().part(1, 2)
    u = torch.rand(B, L, generator=torch.Generator().manual_seed(4), dtype=torch.float64).clamp(1e-9, 1 - 1e-9)
    whole = posterior.draw(torch.arange(B), u)
    assert torch.equal(part.draw(torch.arange(2), u[1:]), whole[1:])
    assert int(MADE[made]().given(torch.full_like(X_1, -1), forbidden=2).draw(torch.arange(B), u).eq(2).sum()) == 0
    cumulative = torch.softmax(LOGITS, -1).cumsum(-1)
    assert torch.equal(whole, (cumulative <= u[..., None]).sum(-1))
