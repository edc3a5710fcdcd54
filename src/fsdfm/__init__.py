"""fsdfm: few-step discrete flow matching for language.

from fsdfm import ExactJump, Grid, Noise, Path, UniformSource, sample

path = Path(UniformSource(vocab_size))
noise = Noise(seed=0, samples=range(4))
x_1 = sample(denoiser, path, path.source.sample(noise, 1024), grid=Grid.uniform(8), jump=ExactJump(), noise=noise)
"""

from fsdfm.flow import (
    CosineSchedule,
    ExactDenoiser,
    ExactJump,
    ExponentialSchedule,
    Filter,
    Grid,
    InstantJump,
    MaskSource,
    MixtureSource,
    Path,
    PolynomialSchedule,
    SingleJump,
    StratifiedJump,
    UniformSource,
    sample,
    trajectory,
)
from fsdfm.noise import Noise

__version__ = "0.1.0"

__all__ = [
    "CosineSchedule",
    "ExactDenoiser",
    "ExactJump",
    "ExponentialSchedule",
    "Filter",
    "Grid",
    "InstantJump",
    "MaskSource",
    "MixtureSource",
    "Noise",
    "Path",
    "PolynomialSchedule",
    "SingleJump",
    "StratifiedJump",
    "UniformSource",
    "__version__",
    "sample",
    "trajectory",
]
