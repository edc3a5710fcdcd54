"""Ablations: the paper's tables of one factor at a time, run again on a small scale, with a verdict.

Reading order: factors (each a table of data: variants, the paper's numbers, its claims), setting (what all cells of a
folder share), cells (train and measure one variant with one seed), timing (what a training step costs), summary (paired
intervals and verdicts), tables (Markdown, JSON, PNG), run.
"""

from fsdfm.studies.ablation.factors import FACTORS, Factor
from fsdfm.studies.ablation.run import AblationOutcome, AblationRequest, run_ablation
from fsdfm.studies.ablation.summary import Verdict

__all__ = ["FACTORS", "AblationOutcome", "AblationRequest", "Factor", "Verdict", "run_ablation"]
