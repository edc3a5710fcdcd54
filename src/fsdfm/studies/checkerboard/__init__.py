"""The demonstration of appendix B.3: samples on a checkerboard, from noise to data, under every jump rule.

Reading order: board (the world, its exact posterior, a network), study (what is measured), figures (how it looks),
report (the one call that writes everything into a folder).
"""

from fsdfm.studies.checkerboard.board import Board, CheckerboardDenoiser, CheckerboardNetwork, Training, train_network
from fsdfm.studies.checkerboard.report import run_checkerboard
from fsdfm.studies.checkerboard.study import CheckerboardNumbers, NeverReached, Outcome, Setting

__all__ = [
    "Board",
    "CheckerboardDenoiser",
    "CheckerboardNetwork",
    "CheckerboardNumbers",
    "NeverReached",
    "Outcome",
    "Setting",
    "Training",
    "run_checkerboard",
    "train_network",
]
