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

if TYPE_CHECKING:
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
    from fsdfm.generate import Generation, LanguageModel, load
    from fsdfm.noise import Noise

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

_GENERATE = ("Generation", "LanguageModel", "load")


def __getattr__(name: str) -> Any:
    """Names whose modules are imported on first use: `fsdfm --help` need not wait for torch."""
    if name in ("flow", "noise"):
        return import_module(f"fsdfm.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'fsdfm' has no attribute {name!r}")
    if name in _GENERATE:
        import_module("fsdfm.peers")  # a checkpoint may advise one of their rules by name
        import_module("fsdfm.generate").Generation.html = staticmethod(_timeline_html)
    place = "fsdfm.generate" if name in _GENERATE else "fsdfm.noise" if name == "Noise" else "fsdfm.flow"
    return getattr(import_module(place), name)


def _timeline_html(text: Any) -> str:
    """How a notebook shows a text: `fsdfm.show`, which stands above what makes texts, is imported when one is shown."""
    timeline = import_module("fsdfm.show.timeline")
    return str(timeline.notebook_html(timeline.Timeline.of(text)))


def __dir__() -> list[str]:
    """What there is, imported or not."""
    return sorted({*globals(), *__all__})
