"""Few-step truth: what few-step training gains on small worlds whose every law can be computed exactly.

Reading order: worlds, laws, network, training, methods, study, summary, figure, report, run.
"""

from fsdfm.studies.truth.run import run_truth
from fsdfm.studies.truth.study import Setting
from fsdfm.studies.truth.worlds import WORLDS

__all__ = ["WORLDS", "Setting", "run_truth"]
