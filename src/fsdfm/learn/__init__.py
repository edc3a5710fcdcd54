"""Training: objectives, teachers, the optimiser and the visible loop. Trains any module that is a split denoiser.

What a recipe may name as a kind is registered here, one line each; see `register_objective` for how to add your own.
"""

from fsdfm.learn.canvas import CanvasConfig, CanvasObjective, make_canvas_objective
from fsdfm.learn.causal import NextTokenConfig, NextTokenObjective
from fsdfm.learn.fewstep import FewStepConfig, FewStepObjective, make_few_step_objective
from fsdfm.learn.objective import (
    OBJECTIVES,
    TEACHERS,
    Objective,
    Outcome,
    Target,
    Teacher,
    TrainableDenoiser,
    register_objective,
    register_teacher,
)
from fsdfm.learn.path import (
    CrossEntropy,
    FineTimes,
    GeneralisedKL,
    MultiplesOfH,
    PathConfig,
    PathLoss,
    PathObjective,
    TimeGrid,
    make_path_objective,
)
from fsdfm.learn.reward import REWARDS, RewardConfig, RewardObjective, make_reward_objective, register_reward
from fsdfm.learn.sweep import (
    AutoregressiveConfig,
    AutoregressiveTeacher,
    SweepConfig,
    SweepObjective,
    make_sweep_objective,
)
from fsdfm.learn.teacher import (
    TABLEAUS,
    NoTeacherConfig,
    ShortcutConfig,
    ShortcutTeacher,
    Stage,
    Tableau,
    make_shortcut_teacher,
)

__all__ = [
    "OBJECTIVES",
    "REWARDS",
    "TABLEAUS",
    "TEACHERS",
    "AutoregressiveConfig",
    "AutoregressiveTeacher",
    "CanvasConfig",
    "CanvasObjective",
    "CrossEntropy",
    "FewStepConfig",
    "FewStepObjective",
    "FineTimes",
    "GeneralisedKL",
    "MultiplesOfH",
    "NextTokenConfig",
    "NextTokenObjective",
    "NoTeacherConfig",
    "Objective",
    "Outcome",
    "PathConfig",
    "PathLoss",
    "PathObjective",
    "RewardConfig",
    "RewardObjective",
    "ShortcutConfig",
    "ShortcutTeacher",
    "Stage",
    "SweepConfig",
    "SweepObjective",
    "Tableau",
    "Target",
    "Teacher",
    "TimeGrid",
    "TrainableDenoiser",
    "register_objective",
    "register_reward",
    "register_teacher",
]

register_objective("path", PathConfig, make_path_objective)
register_objective("fewstep", FewStepConfig, make_few_step_objective)
register_objective("canvas", CanvasConfig, make_canvas_objective)
register_objective("reward", RewardConfig, make_reward_objective)
register_objective("sweep", SweepConfig, make_sweep_objective)
register_objective("next-token", NextTokenConfig, lambda _, __: NextTokenObjective())
register_teacher("none", NoTeacherConfig, lambda _: None)
register_teacher("shortcut", ShortcutConfig, make_shortcut_teacher)
