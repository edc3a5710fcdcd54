"""The tables of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdfm.measure.results import Evaluation
from fsdfm.studies.compare.setting import CompareSetting
from fsdfm.studies.compare.systems import Variant
from fsdfm.studies.report import StudyReport

__all__ = ["compare_report"]


def compare_report(
    variants: Sequence[Variant], found: Mapping[str, Evaluation], setting: CompareSetting
) -> StudyReport:
    """compare.md and compare.json."""
    return StudyReport("compare", "", {"results": {v.name: found[v.name].to_json() for v in variants}})
