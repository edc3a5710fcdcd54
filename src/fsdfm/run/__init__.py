"""The composition root: a recipe's names become objects here and nowhere else.

    result = train("tiny-dfm", ["train.steps=100"])  # the same call again resumes

A run's folder holds `recipe.toml` (the effective recipe), `run.json` (commit, versions), `metrics.jsonl`,
`samples.jsonl` and `checkpoints/`.
"""

from fsdfm.run.build import make_feed, make_objective, make_path, make_rows, make_trainer
from fsdfm.run.corpora import prepare_corpus
from fsdfm.run.fitting import Result
from fsdfm.run.huggingface import import_folder
from fsdfm.run.imports import FORMATS, ImportConfig, import_weights
from fsdfm.run.pairs import PairsConfig, make_inverse_pairs, make_pairs, make_timed_pairs
from fsdfm.run.released import import_released
from fsdfm.run.training import train
from fsdfm.run.weights import export, model_config, start
from fsdfm.run.workload import make_workload

__all__ = [
    "FORMATS",
    "ImportConfig",
    "PairsConfig",
    "Result",
    "export",
    "import_folder",
    "import_released",
    "import_weights",
    "make_feed",
    "make_inverse_pairs",
    "make_objective",
    "make_pairs",
    "make_path",
    "make_rows",
    "make_timed_pairs",
    "make_trainer",
    "make_workload",
    "model_config",
    "prepare_corpus",
    "start",
    "train",
]
