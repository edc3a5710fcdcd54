"""The tables of a comparison: Markdown for people, JSON with every number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fsdfm.measure.frontier import AtEntropy
from fsdfm.measure.results import Evaluation, Measured, Row
from fsdfm.show.quality.marks import BLIND, UNKNOWN, Marks
from fsdfm.studies.compare import paper
from fsdfm.studies.compare.matching import PeerMatch, compare_at
from fsdfm.studies.compare.setting import CompareSetting
from fsdfm.studies.compare.systems import BASE, GROUPS, OURS, PAPERS, SHIPPED, TRAININGS, SystemRow
from fsdfm.studies.report import StudyReport, markdown_table

__all__ = ["compare_report"]

_Found = Mapping[str, Evaluation]
_Matches = Mapping[str, Mapping[str, Sequence[PeerMatch]]]
_NONE = "-"
_FLAG = "†"
_SHOWN = (("token_perplexity", 1), ("entropy_bits", 2), ("distinct_2", 3))
_DISTANCES = ("energy_style_z", "energy_ngram_z")


def compare_report(variants: Sequence[SystemRow], found: _Found, setting: CompareSetting) -> StudyReport:
    """compare.md and compare.json."""
    matches = {own: _matched(own, variants, found, setting=setting) for own in _own(variants)}
    parts = [
        "# Comparison with the peers",
        "",
        *_about(variants, found, setting),
        *_expanded(variants, found, setting),
        *_by_calls(variants, found, setting),
        *_continued(variants, found, setting),
        *(line for own, each in matches.items() for line in _equal(own, each, variants, setting=setting)),
        *_controls(found, _marks(variants, found)),
    ]
    record = {
        "results": {variant.name: found[variant.name].to_json() for variant in variants},
        "matched": {
            own: {peer: [m.to_json() for m in ms] for peer, ms in each.items()} for own, each in matches.items()
        },
    }
    return StudyReport("compare", "\n".join(parts), record)


def _own(variants: Sequence[SystemRow]) -> list[str]:
    """Whose verdicts are given: our recipe's and the shipped model's; without both, those of the paper's recipe."""
    names = [variant.name for variant in variants]
    return [own for own in (OURS, SHIPPED) if own in names] or [n for n in names if n.partition("/")[0] == PAPERS]


def _matched(
    own: str, variants: Sequence[SystemRow], found: _Found, *, setting: CompareSetting
) -> dict[str, list[PeerMatch]]:
    peers = [variant.name for variant in variants if variant.name not in (own, OURS, SHIPPED) and variant.frontier]
    return {peer: [compare_at(found[peer], found[own], calls) for calls in setting.steps] for peer in peers}


def _about(variants: Sequence[SystemRow], found: _Found, setting: CompareSetting) -> list[str]:
    first = found[variants[0].name]
    trained = "Published weights, as they were imported: other data, sizes and tokens for each."
    if any(variant.model in TRAININGS for variant in variants):
        trained = (
            f"Every system is trained for {setting.train_steps:,} training steps, {setting.tokens:,} tokens, from the "
            "same base on the same text, with its own recipe's learning rate, not tuned further; a distillation spends "
            "half of its tokens on its teacher."
        )
    marks = _marks(variants, found)
    return [
        f"{trained} {setting.num} texts of {setting.length} tokens per row, {setting.precision}, "
        f"judge {first.judge.get('name')}, seed {setting.seed}; entropy in bits per "
        f"text. {_FLAG}: entropy or distinct-n leave the band of real text, so the perplexity does not stand alone. z: "
        "distances to real text (style; n-grams) in deviations of real text from itself. "
        + (f"{BLIND}: text without sense fools this metric, see the controls." if marks.measured else f"{UNKNOWN}."),
        "",
    ]


def _marks(variants: Sequence[SystemRow], found: _Found) -> Marks:
    """The metrics that the controls fool beside any row; they are measured beside one system and lent to the others."""
    return Marks.of([(variant.label, found[variant.name]) for variant in variants])


# --- the paper's expanded-baselines table -----------------------------------------------------------------------------


def _expanded(variants: Sequence[SystemRow], found: _Found, setting: CompareSetting) -> list[str]:
    calls = min(setting.steps, key=lambda steps: abs(steps - paper.EXPANDED_STEPS))
    sign = _marks(variants, found).sign
    ours = [f"PPL{sign('token_perplexity')}", f"entropy{sign('entropy_bits')}", f"distinct-2{sign('distinct_2')}", "z"]
    head = ["model", "M", "k tokens", "calls", *ours, "paper's PPL", "paper's entropy"]
    rows: list[list[str]] = [head, ["real text", "", "", "", *_real(found), "", *map(str, paper.REAL)]]
    for group, title in GROUPS.items():
        members = [variant for variant in variants if variant.group == group]
        rows += [[f"*{title}*", *[""] * (len(head) - 1)]] if members else []
        rows += [_expanded_row(variant, found[variant.name], calls, setting=setting) for variant in members]
    others = [figure for figure in paper.EXPANDED if figure.variant is None]
    rows += [["*Only the paper's*", *[""] * (len(head) - 1)]]
    rows += [[f.label, f"{1000 * f.size:.0f}", *[""] * 6, f"{f.perplexity:.2f}", f"{f.entropy:.2f}"] for f in others]
    return [
        f"## At {calls} calls",
        "",
        "The last two columns are the paper's figures (8 steps, its published models and data, GPT-2-large, GPT-2 "
        "tokens): another scale, for the order of the systems only.",
        "",
        markdown_table(rows),
        "",
    ]


def _real(found: _Found) -> list[str]:
    real = next(iter(found.values())).real
    return [_number(real.get(name), digits) for name, digits in _SHOWN]


def _expanded_row(variant: SystemRow, evaluation: Evaluation, calls: int, *, setting: CompareSetting) -> list[str]:
    row, figure = evaluation.row(calls), paper.paper_figure(variant.name)
    size = float(evaluation.model.get("num_parameters", 0)) / 1e6
    theirs = [_NONE, _NONE] if figure is None else [f"{figure.perplexity:.2f}", f"{figure.entropy:.2f}"]
    tokens = f"{setting.tokens / 1000:.0f}" if variant.model in TRAININGS else "0" if variant.model == BASE else _NONE
    return [variant.label, f"{size:.1f}", tokens, _calls(row), *_numbers(row), _distances(row), *theirs]


def _calls(row: Row | None) -> str:
    """Network calls for a text, as they were made."""
    made = None if row is None else row.facts.get("calls_made")
    return _NONE if made is None else f"{made:.4g}"


def _numbers(row: Row | None) -> list[str]:
    if row is None:
        return [_NONE] * 3
    flag = _FLAG if row.flags else ""
    return [
        _interval(row.metrics.get("token_perplexity")) + flag,
        _number(row.metrics.get("entropy_bits"), 2),
        _number(row.metrics.get("distinct_2"), 3),
    ]


def _distances(row: Row | None) -> str:
    found = [] if row is None else [row.metrics.get(name) for name in _DISTANCES]
    return "; ".join(_number(each, 1) for each in found if each is not None) or _NONE


def _interval(measured: Measured | None) -> str:
    if measured is None:
        return _NONE
    ends = f" [{measured.low:.0f}, {measured.high:.0f}]" if measured.has_interval else ""
    return f"{measured.value:.1f}{ends}"


def _number(measured: Measured | None, digits: int) -> str:
    return _NONE if measured is None else f"{measured.value:.{digits}f}"


# --- by calls ---------------------------------------------------------------------------------------------------------


def _by_calls(variants: Sequence[SystemRow], found: _Found, setting: CompareSetting) -> list[str]:
    sign = _marks(variants, found).sign
    shown = f"perplexity{sign('token_perplexity')} / entropy{sign('entropy_bits')} / distinct-2{sign('distinct_2')}"
    rows = [[f"{shown}, T = 1", *(f"{steps} calls" for steps in setting.steps)]]
    for variant in variants:
        rows.append([variant.label, *(_short(found[variant.name].row(steps)) for steps in setting.steps)])
    return ["## At every number of calls", "", markdown_table(rows), "", *_sweeps(variants, found, setting)]


def _sweeps(variants: Sequence[SystemRow], found: _Found, setting: CompareSetting) -> list[str]:
    """The same at the other temperatures: with the rows above, the frontier."""
    lines: list[str] = []
    for temperature in setting.temperatures:
        rows = [[f"T = {temperature:g}", *(f"{steps} calls" for steps in setting.steps)]]
        for variant in variants:
            if variant.frontier:
                swept = {row.steps: row for row in found[variant.name].frontier if row.temperature == temperature}
                rows.append([variant.label, *(_short(swept.get(steps)) for steps in setting.steps)])
        lines += [markdown_table(rows), ""]
    return lines


def _short(row: Row | None) -> str:
    if row is None:
        return _NONE
    perplexity, entropy, distinct = (row.metrics.get(name) for name, _ in _SHOWN)

    flag = _FLAG if row.flags else ""
    return f"{_number(perplexity, 0)}{flag} / {_number(entropy, 2)} / {_number(distinct, 2).removeprefix('0')}"


# --- the paper's continuation table -----------------------------------------------------------------------------------


def _continued(variants: Sequence[SystemRow], found: _Found, setting: CompareSetting) -> list[str]:
    steps = [each for each in setting.steps if each <= paper.CONTINUED_STEPS[-1]]
    rows: list[list[str]] = [["model: PPL / entropy of the continuation", *(f"{each} calls" for each in steps)]]
    for variant in variants:
        if variant.continued:
            rows.append([variant.label, *(_continuation(found[variant.name].row(each)) for each in steps)])
    if len(rows) == 1:
        return []
    for label, (_, figures) in paper.CONTINUED.items():
        known = dict(zip(paper.CONTINUED_STEPS, figures, strict=True))
        cells = (f"{known[s][0]:,.0f} / {known[s][1]:.2f} / {known[s][2]:.3f}" if s in known else _NONE for s in steps)
        rows.append([f"paper: {label}", *cells])
    half = setting.length // 2
    return [
        f"## Continuations: {half} tokens given, {setting.length - half} scored",
        "",
        f"Real continuations: {_continuation(_as_row(found, variants))}. The paper's rows (512 given, 512 scored, "
        "GPT-2-large; PPL / entropy / MAUVE) are its own figures on another scale; MAUVE of so few texts as ours "
        "would say nothing.",
        "",
        markdown_table(rows),
        "",
    ]


def _as_row(found: _Found, variants: Sequence[SystemRow]) -> Row | None:
    name = next((variant.name for variant in variants if variant.continued), None)
    return None if name is None else Row(steps=1, metrics=found[name].real)


def _continuation(row: Row | None) -> str:
    if row is None or "continuation_token_perplexity" not in row.metrics:
        return _NONE
    entropy = row.metrics.get("continuation_entropy_bits")
    return f"{_number(row.metrics['continuation_token_perplexity'], 1)} / {_number(entropy, 2)}"


# --- at equal entropy and diversity -----------------------------------------------------------------------------------


def _equal(
    own: str, matches: Mapping[str, Sequence[PeerMatch]], variants: Sequence[SystemRow], *, setting: CompareSetting
) -> Iterator[str]:
    labels = {variant.name: variant.label for variant in variants}
    yield from (f"## {labels[own]}, at equal entropy and equal diversity", "")
    yield (
        "Perplexity as a multiple of the peer's, at the entropy and at the distinct-2 where both sweeps come nearest "
        "to real text; below 1 is better. **Bold**: both intervals leave out 1 on the same side. "
        "*apart*: the sweeps do not meet. °: outside of real text's band."
    )
    rows = [["against", *(f"{steps} calls" for steps in setting.steps)]]
    rows += [[labels[peer], *(_match(match) for match in found)] for peer, found in matches.items()]
    yield from ("", markdown_table(rows), "")
    for number, steps in enumerate(setting.steps):
        counts = Counter(found[number].verdict for found in matches.values())
        told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("win", "loss", "undecided", "apart"))
        yield f"- {steps} calls: {told}"
    yield ""


def _match(match: PeerMatch) -> str:
    if match.verdict == "apart":
        return "*apart*"
    text = f"{_ratio(match.entropy)}; {_ratio(match.distinct)}"
    mark = "" if match.inside else "°"
    return f"**{text}**{mark} {match.verdict}" if match.verdict in ("win", "loss") else text + mark


def _ratio(at: AtEntropy | None) -> str:
    return _NONE if at is None else f"{at.ratio.value:.2f} [{at.ratio.low:.2f}, {at.ratio.high:.2f}]"


# --- controls ---------------------------------------------------------------------------------------------------------


def _controls(found: _Found, marks: Marks) -> list[str]:
    """Text without sense, measured as samples are: a metric that likes it cannot tell."""
    evaluation = next((each for each in found.values() if each.controls), None)
    if evaluation is None:
        return []
    rows = [["control", "PPL", "entropy", "distinct-2", "z"]]
    for name, metrics in evaluation.controls.items():
        row = Row(steps=1, metrics=metrics)
        rows.append([name, *_numbers(row), _distances(row)])
    told = marks.notes(("token_perplexity", "entropy_bits", "distinct_2", *_DISTANCES))
    return ["## Controls: text without sense", "", markdown_table(rows), "", *(f"- {note}" for note in told), ""]
