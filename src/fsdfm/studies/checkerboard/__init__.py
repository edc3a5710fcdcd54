"""The demonstration of appendix B.3: samples on a checkerboard, from noise to data, under every jump rule.

Reading order: board (the world, its exact posterior, a network), cells (what is measured), figures (how it looks),
captions, run (the one call that writes everything into a folder).
"""

from fsdfm.studies.checkerboard.board import Board, CheckerboardDenoiser, CheckerboardNetwork, NetworkFit, train_network
from fsdfm.studies.checkerboard.cells import CaseOutcome, CheckerboardNumbers, NeverReached, SamplingCase
from fsdfm.studies.checkerboard.run import run_checkerboard

__all__ = [
    "Board",
    "CaseOutcome",
    "CheckerboardDenoiser",
    "CheckerboardNetwork",
    "CheckerboardNumbers",
    "NetworkFit",
    "NeverReached",
    "SamplingCase",
    "run_checkerboard",
    "train_network",
]
