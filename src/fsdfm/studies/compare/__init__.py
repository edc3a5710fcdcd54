"""The comparison with the peers: trained for the same tokens from the same base on the same text, and measured alike.

Reading order: systems (who is trained how, and every way of sampling), setting (what all cells share), cells (train and
measure), paper (the paper's own figures), tables (Markdown and JSON), run.
"""

from fsdfm.studies.compare.run import CompareRequest, run_compare

__all__ = ["CompareRequest", "run_compare"]
