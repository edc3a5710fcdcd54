"""The study on tiny boards: cells, resumption, report, a board filled in; network and rules by their invariants."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdfm.flow import RULES, Grid, MixturePath
from fsdfm.flow.sampler import trajectory
from fsdfm.noise import Noise
from fsdfm.studies.sudoku import study
from fsdfm.studies.sudoku.board import is_solution, make_puzzle, make_solutions
from fsdfm.studies.sudoku.methods import (
    METHODS,
    BoardData,
    BoardSetting,
    adaptive_rules_of,
    make_network,
    rules_of,
    train_method,
)
from fsdfm.studies.sudoku.network import BoardNetwork, DigitSource, make_source
from fsdfm.studies.sudoku.solving import ConfidentRule, fill_boards, fill_counting, make_puzzles, score_boards
from fsdfm.studies.sudoku.study import run_sudoku

TINY = replace(BoardSetting.quick(), width=16, blocks=1, train_steps=8, batch_size=8, puzzles=4, budgets=(1, 4))
SIZE = 16


def boards(count: int) -> tuple[torch.Tensor, list]:
    puzzles = [make_puzzle(2, noise=Noise(1, [k])) for k in range(count)]
    return torch.from_numpy(np.array([p.givens for p in puzzles])), puzzles


def test_a_child_starts_as_its_parent_for_every_step_size() -> None:
    network = BoardNetwork(2, 8, width=16, blocks=1)
    x_t, t = torch.randint(0, 8, (3, SIZE)), torch.rand(3)
    logits = [network(x_t, t, torch.full((3,), h)) for h in (1.0, 0.25, 2.0**-10)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("source", ["uniform", "mask"])
def test_the_network_never_says_a_given_digit_or_the_mask(source: str) -> None:
    vocab_size = make_source(source, 2).vocab_size
    logits = BoardNetwork(2, vocab_size, width=16, blocks=1)(torch.zeros(1, SIZE).long(), torch.zeros(1), torch.ones(1))
    assert logits.shape == (1, SIZE, vocab_size)
    assert torch.softmax(logits, -1)[..., 4:].max() == 0


def test_heads_see_rows_columns_and_boxes_only() -> None:
    seen = BoardNetwork(2, 8, width=16, blocks=1).seen[0]
    assert seen.sum((1, 2)).tolist() == [SIZE * 4] * 3 + [SIZE * SIZE]
    assert seen[2, 0].nonzero()[:, 0].tolist() == [0, 1, 4, 5]


def test_noise_is_never_given() -> None:
    source = DigitSource(4)
    x_0 = source.sample(Noise(0, range(50)), SIZE)
    assert x_0.min() == 0
    assert x_0.max() == 3
    assert float(source.probabilities().sum()) == 1
    with pytest.raises(ValueError, match="source is 'ring'"):
        make_source("ring", 2)


def test_every_difficulty_has_its_own_score(monkeypatch: pytest.MonkeyPatch) -> None:
    _, puzzles = boards(5)
    given = {"easy": puzzles[:2], "hard": puzzles[2:]}

    def only_easy(_: object, __: object, givens: torch.Tensor, **___: object) -> torch.Tensor:
        answers = torch.from_numpy(np.array([p.solution for p in puzzles]))
        answers[2:] = torch.where(givens[2:] > 0, answers[2:], answers[2:] % 4 + 1)
        return answers

    monkeypatch.setattr(study, "fill_boards", only_easy)
    network = make_network(METHODS[0], TINY, 0)
    found = study._score(network, METHODS[0], given, rule="exact", steps=1, seed=0)
    assert found == {"easy": {"solved": 1.0, "cells": 1.0}, "hard": {"solved": 0.0, "cells": 0.0}}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_what_is_given_stays_and_every_cell_is_a_digit(method) -> None:
    givens, _ = boards(5)
    network, path = make_network(method, TINY, 0), MixturePath(make_source(method.source, 2))
    for rule in rules_of(method).values():
        filled = fill_boards(network, path, givens, steps=3, rule=rule, noise=Noise(0, range(5)))
        assert (filled[givens > 0] == givens[givens > 0]).all()
        assert (filled.min(), filled.max()) >= (1, 1)
        assert filled.max() <= 4


def test_the_confident_rule_shows_the_surest_first() -> None:
    """A network that is surer of some cells than of others, and never wrong about the order."""
    path = MixturePath(make_source("mask", 2))
    strength = torch.linspace(1, 3, SIZE)[torch.randperm(SIZE, generator=torch.Generator().manual_seed(0))]

    def denoiser(x_t: torch.Tensor, t: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        logits = torch.full((len(x_t), SIZE, 9), -1e4)
        logits[..., :4] = 0
        logits[..., 0] = 4 * strength
        return logits

    x_0 = path.source.sample(Noise(0, [0]), SIZE)
    steps = list(trajectory(denoiser, path, x_0, grid=Grid.uniform(4), noise=Noise(0, [0]), rule=ConfidentRule()))
    assert [int(step.jumps.sum()) for step in steps] == [4, 4, 4, 4]
    assert set(steps[0].jumps[0].nonzero()[:, 0].tolist()) == set(strength.argsort(descending=True)[:4].tolist())
    uniform = MixturePath(make_source("uniform", 2))
    with pytest.raises(ValueError, match="needs the mask source"):
        list(trajectory(denoiser, uniform, x_0 * 0, grid=Grid.uniform(2), noise=Noise(0, [0]), rule=ConfidentRule()))


def test_a_network_that_knows_the_answer_solves_every_board() -> None:
    givens, puzzles = boards(6)
    solution = torch.from_numpy(np.array([p.solution for p in puzzles]))

    class Knows(BoardNetwork):
        def posterior(self, x_t, t, h, *, rows=None):  # type: ignore[no-untyped-def]
            from fsdfm.flow.posterior import Independent

            logits = torch.full((len(x_t), SIZE, 8), -1e4).scatter(-1, (solution - 1)[..., None], 0.0)
            return Independent.of_logits(logits)

    filled = fill_boards(
        Knows(2, 8, width=16, blocks=1),
        MixturePath(make_source("uniform", 2)),
        givens,
        steps=1,
        rule=RULES["exact"],
        noise=Noise(0, range(6)),
    )
    solved, right, empty = score_boards(filled, puzzles)
    assert solved.all()
    assert (right == empty).all()
    filled[0, int((givens[0] == 0).nonzero()[0])] %= 4
    filled += filled == 0
    assert score_boards(filled, puzzles)[0].tolist()[1:] == [True] * 5


def test_training_data_are_solutions_with_a_share_given() -> None:
    batch = BoardData(2).batch(Noise(0, range(200)))
    assert batch.given is not None
    assert 0.35 < batch.given.float().mean() < 0.55
    digits = (batch.x_1 % 4 + 1).numpy()
    assert all(is_solution(board, 2) for board in digits)
    assert ((batch.x_1 >= 4) == batch.given).all()
    assert (digits == make_solutions(2, Noise(0, range(200)))).all()


def test_every_method_trains() -> None:
    weights = {}
    for method in METHODS:
        network = train_method(method, TINY, seed=0, parent=weights.get(method.start))
        weights[method.name] = network.state_dict()
        assert all(torch.isfinite(value).all() for value in weights[method.name].values())
    assert (weights["rk2"]["step.weight"] != 0).any()  # it knows its step size
    assert (weights["path-only"]["step.weight"] == 0).all()
    assert (weights["crf"]["joint.right"] != 0).any()
    assert (weights["causal"]["joint.combine.weight"] != 0).any()


def test_there_are_puzzles_of_every_difficulty_that_a_board_has() -> None:
    found = make_puzzles(2, 3, seed=0)
    assert "easy" in found
    assert all(len(puzzles) == 3 for puzzles in found.values())
    assert all(p.difficulty == name for name, puzzles in found.items() for p in puzzles)


@pytest.mark.slow
def test_the_study_runs_resumes_and_fills_in_a_board(tmp_path: Path) -> None:
    numbers = run_sudoku(tmp_path, seeds=2, methods=("mask", "rk2"), setting=TINY, workers=1)
    assert {path.name for path in tmp_path.glob("*.*")} >= {"sudoku.md", "sudoku.json", "sudoku.png", "board.png"}
    written = (tmp_path / "sudoku.md").read_text()
    assert "mask, confident" in written
    assert [method.name for method in numbers.methods] == ["dfm", "mask", "rk2"]  # rk2 starts from dfm

    def mean(cell, rule: str, what: str) -> float:  # type: ignore[no-untyped-def]
        return float(np.mean([cell["scores"][f"{rule}/{k}/easy"][what] for k in (1, 4)]))

    written_gains = []
    for what in ("solved", "cells"):
        gain = numbers.gain("mask", "confident", over=("mask", "exact"), what=what)
        by_seed = [mean(cell, "confident", what) - mean(cell, "exact", what) for cell in numbers.results.of("mask")]
        assert gain.value == pytest.approx(np.mean(by_seed))
        written_gains.append(f"{100 * gain.value:+.1f}")
    (line,) = [line for line in numbers.verdicts() if line.startswith("`mask, confident` against `mask, exact`")]
    assert [part.partition(" [")[0] for part in line.split(": ")[1].split("; cells ")] == written_gains
    found = numbers.at("dfm", "exact", 4, difficulty="easy", what="cells")
    assert 0 < found.value < 1
    record = json.loads((tmp_path / "sudoku.json").read_text())
    assert record["numbers"]["dfm/exact/4/easy/cells"]["value"] == found.value
    assert "## Calls by difficulty" in written
    assert [method.name for method in numbers.adaptive_methods()] == ["dfm", "mask"]
    calls = numbers.adaptive_at("mask", "certain", 4, difficulty="easy", what="calls").value
    solved = numbers.adaptive_at("mask", "certain", 4, difficulty="easy").value
    assert record["numbers"]["mask/certain/4/easy/calls"]["value"] == calls == 4
    (row,) = [line for line in written.splitlines() if line.startswith("| mask, certain | 4 |")]
    assert row.split(" | ")[2].startswith(f"{100 * solved:.0f} [")
    assert row.split(" | ")[2].endswith("] % in 4.0")
    over, gain = numbers.gain_of_adapting("mask", "bound 0.5", 4) or (0, None)
    assert over == (1 if numbers.mean_calls("mask", "bound 0.5", 4) == 1 else 4)
    by_seed = [
        cell["adaptive"]["bound 0.5/4/easy"]["solved"] - cell["adaptive"][f"certain/{over}/easy"]["solved"]
        for cell in numbers.results.of("mask")
    ]
    assert gain.value == pytest.approx(np.mean(by_seed))
    assert f"{100 * gain.value:+.1f} " in next(
        line for line in written.splitlines() if "| mask, bound 0.5 | 4 |" in line
    )
    assert numbers.gain_of_adapting("mask", "certain", 4) is None
    assert numbers.gain_of_adapting("dfm", "stop 0.1", 4)[0] in (1, 4)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "cells").iterdir()}
    run_sudoku(tmp_path, seeds=2, methods=("mask", "rk2"), setting=TINY, workers=1)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cells").iterdir()} == before
    assert sorted(place.name for place in (tmp_path / "models").iterdir()) == [
        f"{name}.{seed}" for name in ("dfm", "mask", "rk2") for seed in (0, 1)
    ]
    with pytest.raises(ValueError, match="allowed are dfm, mask"):
        run_sudoku(tmp_path, methods=("magic",), setting=TINY)


@pytest.mark.parametrize("method", [m for m in METHODS if adaptive_rules_of(m)], ids=lambda method: method.name)
def test_boards_that_are_sure_take_fewer_calls(method) -> None:
    """A network that knows boards 0 and 1 and nothing of the others."""
    givens, puzzles = boards(4)
    solution = torch.from_numpy(np.array([p.solution for p in puzzles]))

    class Knows(BoardNetwork):
        def posterior(self, x_t, t, h, *, rows=None):  # type: ignore[no-untyped-def]
            from fsdfm.flow.posterior import Independent

            logits = torch.full((len(x_t), SIZE, self.vocab_size), -1e4)
            logits[..., :4] = 0.0
            known = (solution - 1)[:2, :, None]
            logits[:2] = torch.full_like(logits[:2], -1e4).scatter(-1, known, 0.0)
            return Independent.of_logits(logits)

    path = MixturePath(make_source(method.source, 2))
    network = Knows(2, path.source.vocab_size, width=16, blocks=1)
    taken = {}
    for name, rule in adaptive_rules_of(method).items():
        filled, calls = fill_counting(network, path, givens, steps=6, rule=rule, noise=Noise(0, range(4)))
        assert torch.equal(filled[:2], solution[:2])
        assert (filled[givens > 0] == givens[givens > 0]).all()
        taken[name] = calls.tolist()
    assert taken == {"certain": [6] * 4, "bound 0.1": [1, 1, 6, 6], "bound 0.5": [1, 1, 6, 6], "stop 0.1": [2, 2, 6, 6]}


def test_boards_drawn_together_are_those_drawn_one_by_one() -> None:
    """A causal draw is a function of its uniforms, whoever is drawn beside it."""
    method = next(method for method in METHODS if method.joint == "causal")
    network, path = make_network(method, TINY, 0).eval(), MixturePath(make_source("uniform", 2))
    torch.nn.init.normal_(network.joint.combine.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    givens, _ = boards(4)
    options = {"steps": 2, "rule": RULES["exact"]}
    together = fill_boards(network, path, givens, noise=Noise(0, range(4)), **options)
    alone = [fill_boards(network, path, givens[k : k + 1], noise=Noise(0, [k]), **options) for k in range(4)]
    assert torch.equal(together, torch.cat(alone))
