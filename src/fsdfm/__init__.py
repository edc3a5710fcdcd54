"""fsdfm: few-step discrete flow matching for language.

from fsdfm import ExactJump, Grid, Noise, MixturePath, UniformSource, sample

path = MixturePath(UniformSource(vocab_size))
noise = Noise(seed=0, samples=range(4))
x_1 = sample(denoiser, path, path.source.sample(noise, 1024), grid=Grid.uniform(8), jump=ExactJump(), noise=noise)

lm = fsdfm.load("runs/tiny-dfm")  # text in, text out
lm.generate("Once upon a time", steps=8).text
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads: see fsdfm.runtime.threads

from fsdfm.flow import (
    CosineSchedule,
    ExactDenoiser,
    ExactJump,
    ExponentialSchedule,
    Filter,
    Grid,
    InstantJump,
    LowDiscrepancyJump,
    MaskSource,
    MixturePath,
    MixtureSource,
    PolynomialSchedule,
    SingleJump,
    SystematicJump,
    UniformSource,
    sample,
    trajectory,
)
from fsdfm.noise import Noise

if TYPE_CHECKING:
    from fsdfm.generate import Generation, LanguageModel, load

__version__ = "0.1.0"

__all__ = [
    "CosineSchedule",
    "ExactDenoiser",
    "ExactJump",
    "ExponentialSchedule",
    "Filter",
    "Generation",
    "Grid",
    "InstantJump",
    "LanguageModel",
    "LowDiscrepancyJump",
    "MaskSource",
    "MixturePath",
    "MixtureSource",
    "Noise",
    "PolynomialSchedule",
    "SingleJump",
    "SystematicJump",
    "UniformSource",
    "__version__",
    "load",
    "sample",
    "trajectory",
]

_LATER = {"Generation": "fsdfm.generate", "LanguageModel": "fsdfm.generate", "load": "fsdfm.generate"}


def __getattr__(name: str) -> Any:
    """Names whose modules are imported on first use, so that `import fsdfm` stays fast."""
    if name not in _LATER:
        raise AttributeError(f"module 'fsdfm' has no attribute {name!r}")
    import_module("fsdfm.peers")  # a checkpoint may advise one of their rules by name
    return getattr(import_module(_LATER[name]), name)
