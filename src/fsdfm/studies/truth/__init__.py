"""Few-step truth: what few-step training gains on small worlds whose every law can be computed exactly.

Reading order: worlds, laws, network, training, methods, cells, summary, figure, tables, run.
"""

from fsdfm.studies.truth.cells import TruthSetting
from fsdfm.studies.truth.run import run_truth
from fsdfm.studies.truth.worlds import WORLDS

__all__ = ["WORLDS", "TruthSetting", "run_truth"]
