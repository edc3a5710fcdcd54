"""A model card as the hub reads it: metadata before the text, measured numbers in its `model-index`.

Every number of a result file stands with the number of calls, the temperature, its interval and the judge; a row with a
flag says so in the name of each of its metrics, so that no table of the hub can lose it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fsdfm.measure.results import Evaluation, Row

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

__all__ = ["hub_card"]

_TAGS = ["discrete-flow-matching", "diffusion-language-model", "few-step"]
_METRICS = {  # ours -> the hub's name of its kind, ours in words
    "token_perplexity": ("perplexity", "perplexity (token)"),
    "perplexity": ("perplexity", "perplexity (sequence mean)"),
    "entropy_bits": ("entropy", "unigram entropy, bits"),
    "distinct_2": ("distinct-2", "distinct-2"),
    "repetition": ("repetition", "repetition"),
    "self_bleu": ("self-bleu", "self-BLEU"),
    "mauve": ("mauve", "MAUVE"),
}


def hub_card(text: str, config: Mapping[str, Any], evaluations: Sequence[Evaluation], *, name: str) -> str:
    """A card with the hub's metadata: what its author wrote there stays, the measured part is of these evaluations."""
    from huggingface_hub import ModelCard, ModelCardData

    card = ModelCard(text if text.startswith("---\n") else f"---\nlibrary_name: fsdfm\n---\n{text}")
    written: dict[str, Any] = card.data.to_dict()  # type: ignore[no-untyped-call]
    written.pop("model-index", None)
    known: dict[str, Any] = {"library_name": "fsdfm", "pipeline_tag": "text-generation", **written}
    known["tags"] = [*dict.fromkeys([*_TAGS, *written.get("tags", ())])]
    results = [result for evaluation in evaluations for result in _results(evaluation)]
    if results:
        known |= {"model_name": name, "eval_results": results}
    if (imported := config.get("imported")) and "/" in imported["file"]:
        known.setdefault("base_model", imported["file"].partition("@")[0])
    card.data = ModelCardData(**known)
    return str(card)


def _results(evaluation: Evaluation) -> Iterator[EvalResult]:
    from huggingface_hub import EvalResult

    held_out = str(evaluation.data.get("held_out", "samples alone"))
    for row in _plain_last(evaluation.rows):
        for metric, (kind, words) in _METRICS.items():
            found = row.metrics.get(metric)
            if found is None or not math.isfinite(found.value):
                continue
            judged = f" under {evaluation.judge.get('name')}" if "perplexity" in metric else ""
            yield EvalResult(
                task_type="text-generation",
                dataset_type=held_out,
                dataset_name=f"{held_out} (held out)" if "held_out" in evaluation.data else held_out,
                metric_type=kind,
                metric_name=f"{words}{judged}, {_in_words(row)}",
                metric_value=_short(found.value),
                metric_args={
                    "calls": row.num_calls,
                    "temperature": row.temperature,
                    "samples": row.num_samples,
                    **({"interval_95": [_short(found.low), _short(found.high)]} if found.has_interval else {}),
                },
            )


def _plain_last(rows: Iterable[Row]) -> list[Row]:
    """Few calls first; rows at a matched temperature after the plain ones of their number of calls."""
    return sorted(rows, key=lambda row: (row.num_calls, row.matched is not None))


def _in_words(row: Row) -> str:
    calls = f"{row.num_calls} call{'s' if row.num_calls != 1 else ''}, temperature {row.temperature:.3g}"
    matched = "" if row.matched is None else f", matched to {row.matched.get('to')}"
    return f"{calls}{matched}{'; flagged: ' + '; '.join(row.flags) if row.flags else ''}"


def _short(value: float) -> float:
    return float(f"{value:.5g}")
