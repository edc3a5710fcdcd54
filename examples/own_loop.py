"""Few-step training in one visible loop: path, network, RK-2 teacher, blend, average, sampling. No fsdfm.learn.

    python examples/own_loop.py

A network of 60,000 weights learns lines such as "cat on mat." letter by letter, in which the first word decides the
last one, and writes them in 1, 2, 4 and 16 calls.
"""

import copy

import torch

from fsdfm import ExactJump, Grid, MixturePath, Noise, UniformSource, sample
from fsdfm.flow import path_loss
from fsdfm.model import DiT, ModelConfig
from fsdfm.noise import Purpose

LINES = [f"{one} on {two}." for one, two in (("cat", "mat"), ("dog", "log"), ("rat", "hat"), ("fox", "box"))]
LETTERS = sorted(set("".join(LINES)))
STEPS, BATCH, LENGTH = 300, 64, len(LINES[0])
SIZES = 2.0 ** -torch.arange(4, -1, -1, dtype=torch.float64)  # h = 1/16, 1/8, 1/4, 1/2, 1


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    lines = torch.tensor([[LETTERS.index(letter) for letter in line] for line in LINES])
    path = MixturePath(UniformSource(len(LETTERS)))
    sizes = {"width": 48, "num_blocks": 2, "num_heads": 2, "cond_width": 32}
    model = DiT(ModelConfig(vocab_size=len(LETTERS), conditioning="step", dropout=0.0, **sizes))
    ema = copy.deepcopy(model).requires_grad_(False).eval()
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(STEPS):
        noise = Noise(0, range(step * BATCH, (step + 1) * BATCH))  # all randomness has an address: seed, sample
        x_1 = lines[noise.integers(Purpose.DATA, 1, len(lines))[:, 0]]
        x_0 = path.source.sample(noise, LENGTH)
        h = SIZES[(torch.arange(BATCH) * 8 // BATCH - 3).clamp(min=0)]  # half of the rows take the smallest step
        t = torch.floor(noise.uniform(Purpose.TIME, 1)[:, 0] / h) * h  # a time that a sampler of steps h visits
        x_t = path.sample(x_0, x_1, t, noise=noise)
        logits = model(x_t, t, h)
        small = h == SIZES[0]
        loss = torch.where(
            small,
            path_loss(logits, x_1, x_t, scalar=scalar(path, t, h)).mean(1),
            distilled(logits, ema, path, x_t=x_t, t=t, h=h),
        ).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}  loss {loss.item():.3f}")
    noise = Noise(1, range(2))
    for calls in (1, 2, 4, 16):
        x_0 = path.source.sample(noise, LENGTH)
        texts = sample(ema, path, x_0, grid=Grid.uniform(calls), rule=ExactJump(), noise=noise)
        print(f"{calls:3d} calls:", *["".join(LETTERS[i] for i in row) for row in texts.tolist()], sep="  |  ")


def scalar(path: MixturePath, t: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """The mean rate of redraws over [t, t+h]; at the last step, where it is infinite, w/h."""
    return torch.where(t + h == 1, path.schedule.redraw(t, t + h) / h, path.schedule.mean_scalar(t, t + h))


def distilled(logits, ema, path, *, x_t, t, h):  # type: ignore[no-untyped-def]
    """KL(teacher || student): the teacher asks at t, takes half a step with the answer, asks there, averages (RK-2)."""
    with torch.no_grad():
        one = ema(x_t, t, h / 2)
        drawn = torch.distributions.Categorical(logits=one).sample()
        moves = torch.rand(x_t.shape) < path.schedule.redraw(t, t + h / 2)[:, None]
        two = ema(torch.where(moves, drawn, x_t), t + h / 2, h / 2)
        target = torch.log_softmax((one + two) / 2, -1)
    return (target.exp() * (target - torch.log_softmax(logits, -1))).sum(-1).mean(1)


if __name__ == "__main__":
    main()
