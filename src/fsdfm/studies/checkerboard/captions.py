"""The captions of the checkerboard's pictures, every number in them measured."""

from __future__ import annotations

from collections.abc import Iterable

from fsdfm.studies.checkerboard.cells import (
    BUDGETS,
    SHOWN_RULES,
    SOURCES,
    CaseOutcome,
    CheckerboardNumbers,
    NeverReached,
    SamplingCase,
)

__all__ = ["captions"]


def captions(numbers: CheckerboardNumbers) -> str:
    """Markdown: a caption a picture, then the tables they rest on."""
    parts = (_head, _trajectories, _jumps, _never_reached, _few_steps, _films, _tables)
    return "\n\n".join(part(numbers) for part in parts)


def _head(numbers: CheckerboardNumbers) -> str:
    size, square = numbers.board.size, numbers.board.square
    return f"""# The checkerboard of appendix B.3

A {size} x {size} board in squares of {square}: two tokens per sample, {size} tokens in the vocabulary (and [MASK] with
the mask source). {numbers.samples} samples a setting, seed {numbers.seed}, {numbers.seconds:.0f} s; a share of 90 % has
a standard error of {_percent((0.09 / numbers.samples) ** 0.5)}."""


def _trajectories(numbers: CheckerboardNumbers) -> str:
    def ended(source: str) -> str:
        exact, network = (
            _outcome(numbers, denoiser=name, source=source, rule="instant") for name in ("exact", "network")
        )
        return f"{source} source {_percent(exact.on_allowed)} and {_percent(network.on_allowed)}"

    def trained(source: str) -> str:
        entry = numbers.training[source]
        return f"{source} {entry.steps} steps in {entry.seconds:.0f} s, {entry.kl_to_exact:.3f} nats"

    return f"""**trajectories.png** {numbers.frames} frames under the instantaneous rule at kappa = t. On allowed
squares at t = 1, with the exact posterior and with the network: {_list(map(ended, SOURCES), "; ")}. Training and mean
divergence of the network from the exact posterior, a token: {_list(map(trained, SOURCES), "; ")}."""


def _jumps(numbers: CheckerboardNumbers) -> str:
    few = BUDGETS[-1]

    def first(rule: str, steps: int, kappa: str = "t") -> str:
        return _percent(numbers.outcomes[SamplingCase("exact", "mask", rule, steps, kappa)].jumps_per_step[0], digits=2)

    def mean(source: str, steps: int) -> str:
        rules = ("instant", "single", "exact")
        return _list(
            f"{_outcome(numbers, denoiser='exact', source=source, rule=rule, steps=steps).jumps_a_token:.3f} {rule}"
            for rule in rules
        )

    return f"""**jumps.png** Share of tokens that jump in each step. At kappa = t nothing stalls early: in the first of
{numbers.frames} frames of the mask source {first("instant", numbers.frames)} of the tokens jump under the instantaneous
rule and {first("single", numbers.frames)} under the cumulative one, in the first of {few} steps
{first("instant", few)} and {first("single", few)}. At kappa = t^2 the first of {few} steps moves
{first("instant", few, "t^2")} and {first("single", few, "t^2")}. Mean jumps per token, uniform
source: {mean("uniform", numbers.frames)} in {numbers.frames} frames;
{mean("uniform", few)} in {few} steps; mask source: {mean("mask", numbers.frames)}. The paper reports about
1.05 and 1.00; in continuous time they are 1 - 1/V = {1 - 1 / numbers.board.size:.3f} and 1, the integral
of g(t) P(x_1 != x_t) over t."""


def _never_reached(numbers: CheckerboardNumbers) -> str:
    def entries(kappa: str) -> list[NeverReached]:
        return [entry for entry in numbers.never_reached if entry.kappa == kappa]

    def found(kappa: str) -> str:
        measured, predicted = ([getattr(e, name) for e in entries(kappa)] for name in ("measured", "predicted"))
        return f"{_list(map(_percent, measured))} (predicted {_list(map(_percent, predicted))})"

    moved = max(entry.moved_in_first_step for entry in entries("t^2"))
    return f"""**jumps.png, right** The instantaneous rule taken literally, without the redraw in the last step, leaves
positions without a candidate jump. Never reached in {_list(BUDGETS)} steps at kappa = t: {found("t")}, which is e^-H_S;
at kappa = t^2: {found("t^2")}, where the first step moves {_percent(moved)} of the tokens."""


def _few_steps(numbers: CheckerboardNumbers) -> str:
    few = BUDGETS[-1]

    def per_budget(source: str, rule: str) -> str:
        found = (_outcome(numbers, denoiser="exact", source=source, rule=rule, steps=steps) for steps in BUDGETS)
        return _list(_percent(outcome.on_allowed) for outcome in found)

    def shares(source: str) -> str:
        return f"{source} source: {_list((f'{rule} {per_budget(source, rule)}' for rule in SHOWN_RULES), '; ')}"

    def shown_early(rule: str) -> str:
        return _percent(
            sum(_outcome(numbers, denoiser="exact", source="mask", rule=rule, steps=few).jumps_per_step[:-1])
        )

    return f"""**few-steps.png** Share on allowed squares after {_list(BUDGETS)} steps with the exact posterior.
{_list(map(shares, SOURCES), ". ")}. One step is a redraw of both tokens under every rule. Under the mask source the
token shown has no probability, so that Exact and Single are one rule, and Systematic is ahead of the schedule: a masked
position cannot have been a candidate before, so spacing candidates evenly brings its only jump forward. Before the last
of {few} steps {shown_early("systematic")} of the tokens are shown, against {shown_early("exact")} under Exact."""


def _films(numbers: CheckerboardNumbers) -> str:
    return f"""**trajectory-uniform.gif, trajectory-mask.gif** The {numbers.frames} frames of the exact posterior under
the instantaneous rule; a masked coordinate is drawn in the margin."""


def _tables(numbers: CheckerboardNumbers) -> str:
    budgets = tuple(dict.fromkeys((*BUDGETS, numbers.frames)))
    lines = ["## Share on allowed squares / mean jumps per token, by steps (kappa = t)", ""]
    lines += [_row("posterior", "source", "rule", *budgets), _row(*["---"] * (3 + len(budgets)))]
    for denoiser in ("exact", "network"):
        for source in SOURCES:
            for rule in SHOWN_RULES:
                found = [
                    _outcome(numbers, denoiser=denoiser, source=source, rule=rule, steps=steps) for steps in budgets
                ]
                cells = [f"{_percent(outcome.on_allowed)} / {outcome.jumps_a_token:.3f}" for outcome in found]
                lines.append(_row(denoiser, source, rule, *cells))
    lines += ["", "## Positions never reached by the literal instantaneous rule (mask source)", ""]
    lines += [_row("kappa", "steps", "measured", "predicted", "moved in the first step"), _row(*["---"] * 5)]
    for entry in numbers.never_reached:
        shares = (entry.measured, entry.predicted, entry.moved_in_first_step)
        lines.append(_row(entry.kappa, entry.steps, *map(_percent, shares)))
    return "\n".join(lines) + "\n"


def _outcome(
    numbers: CheckerboardNumbers, *, denoiser: str, source: str, rule: str, steps: int | None = None
) -> CaseOutcome:
    return numbers.outcomes[SamplingCase(denoiser, source, rule, steps or numbers.frames)]


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _list(items: Iterable[object], separator: str = ", ") -> str:
    return separator.join(str(item) for item in items)


def _row(*cells: object) -> str:
    return f"| {_list(cells, ' | ')} |"
