"""A small world in which every peer's ideal network is known: 3 tokens, 3 positions that depend on each other."""

import torch
from worlds import coupled_data

from fsdfm.flow import ExactDenoiser, MaskSource, UniformSource
from fsdfm.flow import MixturePath as Path
from fsdfm.flow.exact import all_states
from fsdfm.peers.sampling import end_law, released_times

V, L = 3, 3
DATA = coupled_data(V, L)
PADDED = torch.nn.functional.pad(DATA, (0, 1) * L)
MASKED_STATES, STATES = all_states(V + 1, L), all_states(V, L)
MASKED = ExactDenoiser(Path(MaskSource(V + 1)), p_1=PADDED)
UNIFORM = ExactDenoiser(Path(UniformSource(V)), p_1=DATA)
ALL_MASKS = torch.zeros(len(MASKED_STATES), dtype=torch.float64).index_fill(0, torch.tensor([-1 + (V + 1) ** L]), 1.0)
ALL_EVEN = torch.full((len(STATES),), 1 / len(STATES), dtype=torch.float64)


class Hybrid(ExactDenoiser):
    """The exact posterior of noise in which a token a shows z with probability K[z, a] (t)."""

    def __init__(self, likelihood):
        super().__init__(Path(MaskSource(V + 1)), p_1=PADDED)
        self.likelihood = likelihood

    def _likelihood(self, t):
        return self.likelihood(t)


def hybrid_likelihood(masked, replaced):
    """Mask with one probability, else a random token with the other."""
    own = torch.eye(V + 1, dtype=torch.float64)
    own[-1, -1] = 0
    even, mask = torch.zeros(2, V + 1, V + 1, dtype=torch.float64)
    even[:V, :V], mask[-1] = 1 / V, 1
    return masked * mask + (1 - masked) * ((1 - replaced) * own + replaced * even)


def masked_logits(t):
    """What an ideal masked network says in every state, whatever the time."""
    return MASKED(MASKED_STATES, torch.full((len(MASKED_STATES),), 0.5, dtype=torch.float64))


def posterior(exact, states, kappa):
    """log p_{1|t} in every state."""
    return exact(states, torch.full((len(states),), float(kappa), dtype=torch.float64))


def masked_error(rule, steps, *, times=None, say=masked_logits):
    """Total variation to the data of a masked sampler that ends at t = 1."""
    times = released_times(steps, stop=0.0) if times is None else times
    law = end_law(rule, say, ALL_MASKS, times=times, states=MASKED_STATES)
    return float((law - PADDED.flatten()).abs().sum() / 2)
