"""Language models small enough for tests: a random network, and networks whose answer is known."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fsdfm.checkpoint import Checkpoint, save_model
from fsdfm.data import Tokenizer
from fsdfm.flow import MaskSource, MixturePath, MixtureSource, PolynomialSchedule, Schedule, Source, UniformSource
from fsdfm.measure.judges import save_causal
from fsdfm.model import CausalConfig, CausalModel, CRFConfig, DiT, JointConfig, ModelConfig

BYTES = Tokenizer.bytes()
SOURCES: dict[str, Source] = {
    "uniform": UniformSource(257),
    "mask": MaskSource(258),
    "mixture": MixtureSource(258, mask_share=0.5),
}


def random_bundle(
    *,
    source: str = "uniform",
    length: int = 32,
    bos_id: int | None = None,
    budgets: tuple[int, ...] | None = None,
    transition_rank: int = 0,
    posterior: JointConfig | None = None,
    seed: int = 5,
    **shape: Any,
) -> Checkpoint:
    """A random network over bytes, every weight drawn, so that all positions see each other."""
    path = MixturePath(SOURCES[source])
    config = ModelConfig(
        vocab_size=path.source.vocab_size,
        width=32,
        num_blocks=2,
        num_heads=2,
        cond_width=16,
        conditioning="time" if budgets is None else "step",
        next_token=bos_id is not None,
        posterior=CRFConfig(rank=transition_rank) if transition_rank else posterior,
        **shape,
    )
    model = DiT(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    return Checkpoint(model, path, BYTES, length, bos_id=bos_id, budgets=budgets)


def save_tiny(folder: Path, seed: int = 5) -> Path:
    """The folder of a random network over bytes."""
    return save_model(folder, random_bundle(length=16, seed=seed))


class KnownDenoiser(nn.Module):
    """A denoiser that computes its logits itself and remembers what it was told."""

    precision = "float32"

    def __init__(self, answer):
        super().__init__()
        self.answer, self.told = answer, []
        self.config = SimpleNamespace(next_token=False)

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        self.told.append((float(t[0]), float(h[0])))
        return self.answer(x_t, t)

    def logits_at(self, features: Tensor) -> Tensor:
        return features


def known_bundle(answer, *, length: int = 32, **changes) -> Checkpoint:
    """A model of logits = answer(x_t, t): [B, L] and [B] to [B, L, 257]."""
    changes = {"path": MixturePath(SOURCES["uniform"]), **changes}
    return Checkpoint(KnownDenoiser(answer), changes.pop("path"), BYTES, length, **changes)


def wants(*tokens: int):
    """Logits that are sure of these tokens at the first positions, of the last one ever after."""

    def answer(x_t: Tensor, t: Tensor) -> Tensor:
        logits = torch.full((*x_t.shape, 257), -30.0)
        row = torch.tensor([tokens[min(k, len(tokens) - 1)] for k in range(x_t.shape[1])])
        return logits.scatter(-1, row.expand(x_t.shape)[..., None], 30.0)

    return answer


def unigram_world(exponent: float = 1.0, length: int = 600) -> tuple[Checkpoint, Tensor]:
    """Letters drawn independently with known frequencies: the posterior, and so calibration, is exact."""
    schedule: Schedule = PolynomialSchedule(exponent)
    p_1 = torch.full((257,), 1e-6, dtype=torch.float64)
    p_1[torch.tensor(list(b"etaoinshr dlu"))] = torch.arange(13, 0, -1, dtype=torch.float64) ** 2
    p_1 /= p_1.sum()

    def answer(x_t: Tensor, t: Tensor) -> Tensor:
        kappa = schedule.kappa(t)[:, None, None]
        shown = torch.nn.functional.one_hot(x_t, 257)
        return (p_1.log() + torch.log(kappa * shown + (1 - kappa) / 257 + 1e-300)).float()

    return known_bundle(answer, length=length, path=MixturePath(SOURCES["uniform"], schedule)), p_1


def save_judges(folder: Path) -> None:
    """Two random causal models over bytes, as `judge` and `other`."""
    config = CausalConfig(vocab_size=257, width=16, num_blocks=1, num_heads=2, max_length=64, dropout=0.0)
    for seed, name in enumerate(("judge", "other")):
        model = CausalModel(config)
        torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(seed))
        save_causal(folder / name, model, BYTES, bos_id=256)
