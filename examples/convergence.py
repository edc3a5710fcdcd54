"""How fast each jump rule converges: the sampler's law computed exactly on a small world, no sampling noise.

    python examples/convergence.py

Two positions, three tokens, the true posterior as denoiser. Prints the total variation to the data and S times it: a
constant means order 1/S, equal growth with every doubling means ln S / S, growth without end means no convergence.
"""

import torch

from fsdfm import ExactDenoiser, ExactJump, Grid, InstantJump, MixturePath, SingleJump, UniformSource
from fsdfm.flow import LiteralJump, sampler_law, total_variation

STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def main() -> None:
    torch.set_num_threads(1)
    weights = torch.rand(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 4
    p_1 = weights / weights.sum()
    path = MixturePath(UniformSource(3))
    exact = ExactDenoiser(path, p_1=p_1)
    print("rule".ljust(26), *[f"S={steps}".rjust(8) for steps in STEPS])
    for rule in (ExactJump(), SingleJump(), InstantJump(), LiteralJump(SingleJump())):
        laws = [sampler_law(exact, path, exact.marginal(0.0), grid=Grid.uniform(s), jump=rule) for s in STEPS]
        errors = [total_variation(law, p_1.flatten()) for law in laws]
        name = str(rule).replace("rule=", "")
        print(name.ljust(26), *[f"{error:8.4f}" for error in errors])
        print("  times S".ljust(26), *[f"{steps * error:8.3f}" for steps, error in zip(STEPS, errors, strict=True)])


if __name__ == "__main__":
    main()
