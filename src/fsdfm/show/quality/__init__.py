"""Result files shown: the paper's tables and figures, with real data in every one.

Reading order: comparison (files side by side, changes with intervals), metrics (names and formats), tables, style and
figures (how they look), report (the one call that writes everything into a folder).
"""

from fsdfm.show.quality.comparison import Change, Comparison, Real, change
from fsdfm.show.quality.report import report_markdown, write_report

__all__ = ["Change", "Comparison", "Real", "change", "report_markdown", "write_report"]
