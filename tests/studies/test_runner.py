"""The runner of studies: interrupted, resumed, shared by processes, refused, and wrong in a cell."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import toy_study
from fsdfm.measure.statistics import student_mean
from fsdfm.studies.folder import StudyFolder
from fsdfm.studies.runner import Cell, StoppedError, require_seeds
from toy_study import CELLS, computed, run, toy

NAMES = sorted(cell.name for cell in CELLS)


def start(out, workers, *troubles):
    """The study in a process of its own, as a second command started by hand would be."""
    words = [sys.executable, toy_study.__file__, str(out), str(workers), *troubles]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(file, process):
    deadline = time.monotonic() + 120
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def finished(out):
    return sorted(file.stem for file in (Path(out) / "cells").glob("*.json"))


# --- what a run leaves ------------------------------------------------------------------------------------------------


def test_a_study_is_cells_a_function_and_a_report(tmp_path):
    results = run(tmp_path)
    assert sorted(computed(tmp_path)) == NAMES
    assert [value["error"] for value in results.of("heun")] == [4, 5, 6]
    assert results.interval("heun", "error") == student_mean([4.0, 5.0, 6.0])
    assert (tmp_path / "toy.md").read_text().splitlines()[3] == "| heun | 5.000 [2.516, 7.484] |"
    record = json.loads((tmp_path / "toy.json").read_text())
    assert record["errors"] == {"euler": [5, 6, 7], "heun": [4, 5, 6]}
    assert record["setting"] == {"samples": 10}
    assert record["seconds"] == round(results.seconds, 1)
    assert {"study", "commit", "versions"} <= set(record)
    assert (tmp_path / "names.txt").read_text() == "euler heun"
    assert not list(tmp_path.rglob(".*.json.*"))


def test_the_report_of_a_part_has_its_own_folder(tmp_path):
    run(tmp_path, part="first")
    run(tmp_path, CELLS[:2], part="second")
    assert json.loads((tmp_path / "second" / "toy.json").read_text())["errors"] == {"euler": [5], "heun": [4]}
    assert (tmp_path / "first" / "toy.md").exists()
    assert len(computed(tmp_path)) == len(CELLS)


def test_finished_cells_are_never_computed_anew(tmp_path):
    run(tmp_path)
    (tmp_path / "cells" / "heun.1.json").unlink()
    run(tmp_path)
    assert sorted(computed(tmp_path)) == sorted([*NAMES, "heun.1"])
    run(tmp_path, [*CELLS, Cell("euler", 3)])
    assert computed(tmp_path)[-1] == "euler.3"


def test_a_process_gets_one_thread_and_ours_are_given_back(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert {value["threads"] for value in run(tmp_path).values.values()} == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_needs_come_first_and_units_stay_in_one_process(tmp_path, workers):
    cells = [
        Cell("parent", unit="a"),
        Cell("other", unit="b"),
        Cell("child/1", needs=("parent.0", "other.0"), unit="a"),
        Cell("last", needs=("child/1.0",), unit="b"),
    ]
    results = run(tmp_path, cells, workers=workers)
    assert results.values["child/1.0"]["error"] == 7 + 6 + 5
    assert results.values["last.0"]["error"] == 4 + 18
    assert (tmp_path / "cells" / "child~1.0.txt").read_text() == "child/1"
    assert (results.values["parent.0"]["pid"] == os.getpid()) == (workers == 1)


@pytest.mark.slow
def test_processes_compute_what_one_process_computes(tmp_path):
    alone, pool = (run(tmp_path / str(n), workers=n) for n in (1, 2))
    errors = [{name: value["error"] for name, value in results.values.items()} for results in (alone, pool)]
    assert errors[0] == errors[1]
    assert (tmp_path / "1" / "toy.md").read_text() == (tmp_path / "2" / "toy.md").read_text()


# --- interrupted ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_signal_keeps_what_is_finished_and_the_same_command_resumes(tmp_path, number, workers):
    process = start(tmp_path, workers, "heun.1=waits")
    wait_for(tmp_path / "waiting", process)
    done = finished(tmp_path)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "StoppedError" in said
    assert "heun.1" not in finished(tmp_path)
    assert set(done) <= set(finished(tmp_path))
    assert not (tmp_path / "toy.md").exists()
    before = computed(tmp_path)
    run(tmp_path)
    again = computed(tmp_path)[len(before) :]
    assert "heun.1" in again
    assert not set(done) & set(again)
    assert finished(tmp_path) == NAMES


def test_an_interrupt_keeps_what_is_finished_and_is_still_a_keyboard_interrupt(tmp_path):
    with pytest.raises(KeyboardInterrupt) as caught:
        run(tmp_path, trouble={"heun.1": "interrupted"})
    assert isinstance(caught.value, StoppedError)
    assert "what is finished stands in" in str(caught.value)
    assert finished(tmp_path) == ["euler.0", "euler.1", "heun.0"]
    run(tmp_path)
    assert sorted(computed(tmp_path)) == sorted([*NAMES, "heun.1"])


# --- several processes over one folder --------------------------------------------------------------------------------


def test_what_another_process_is_at_is_left_to_it_and_taken_up_when_it_ends(tmp_path):
    """A lock on a unit is all that others see of a process."""
    folder = StudyFolder(tmp_path)
    folder.claim({"study": "toy", "samples": 10})
    others = [name for name in NAMES if name != "heun.1"]
    with folder.hold("heun.1") as ours:
        assert ours
        assert folder.is_held("heun.1")
        runner = threading.Thread(target=run, args=(tmp_path,))
        runner.start()
        deadline = time.monotonic() + 60
        while finished(tmp_path) != others:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert runner.is_alive()
        assert not (tmp_path / "toy.md").exists()
    runner.join(60)
    assert sorted(computed(tmp_path)) == NAMES
    assert (tmp_path / "toy.md").exists()


@pytest.mark.slow
def test_two_commands_over_one_folder_share_the_cells(tmp_path):
    both = [start(tmp_path, 1, *(f"{name}=meets" for name in NAMES)) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted(computed(tmp_path)) == NAMES  # each of them once
    values = [json.loads((tmp_path / "cells" / f"{name}.json").read_text()) for name in NAMES]
    assert {value["pid"] for value in values} == {process.pid for process in both}
    alone = run(tmp_path / "alone")
    assert (tmp_path / "toy.md").read_text() == (tmp_path / "alone" / "toy.md").read_text()
    assert len(alone.values) == len(values)


@pytest.mark.slow
def test_a_command_waits_for_the_cell_that_another_one_is_at(tmp_path):
    first = start(tmp_path, 1, "heun.1=waits")
    wait_for(tmp_path / "waiting", first)
    second = start(tmp_path, 1)
    others = [name for name in NAMES if name != "heun.1"]
    deadline = time.monotonic() + 120
    while finished(tmp_path) != others:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert second.poll() is None
    (tmp_path / "go").touch()
    for process in (first, second):
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    assert sorted(computed(tmp_path)) == NAMES


@pytest.mark.slow
def test_what_a_killed_process_was_at_is_taken_up_by_another(tmp_path):
    process = start(tmp_path, 1, "heun.1=waits")
    wait_for(tmp_path / "waiting", process)
    process.kill()
    process.communicate()
    run(tmp_path)
    assert finished(tmp_path) == NAMES
    assert computed(tmp_path).count("heun.1") == 2
    assert computed(tmp_path).count("euler.0") == 1


# --- wrong ------------------------------------------------------------------------------------------------------------


def test_a_folder_belongs_to_one_setting(tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match="holds cells of another setting: samples was 10, now it is 20; give the old"):
        run(tmp_path, setting={"samples": 20})
    other = toy_study.Study("moons", CELLS, toy_study.compute, toy_study.report)
    with pytest.raises(ValueError, match='study was "toy", now it is "moons"'):
        toy_study.run_study(other, tmp_path, workers=1)
    assert sorted(computed(tmp_path)) == NAMES


def test_what_a_setting_does_not_use_has_no_say(tmp_path):
    run(tmp_path, setting={"samples": 10, "judge": None})
    run(tmp_path, setting={"samples": 10, "judge": "a"})
    run(tmp_path, setting={"samples": 10, "judge": None})
    with pytest.raises(ValueError, match='judge was "a", now it is "b"'):
        run(tmp_path, setting={"samples": 10, "judge": "b"})


def test_cells_of_nobody_knows_which_setting_are_refused(tmp_path):
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "heun.0.json").write_text("{}")
    with pytest.raises(ValueError, match="holds cells without their setting"):
        run(tmp_path)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("trouble", "error", "message"),
    [
        ("bad", ValueError, "cell heun.0: the moon is not there; choose the sun"),
        ("broken", RuntimeError, "cell heun.0: KeyError: 'gone'"),
    ],
)
def test_the_first_error_ends_the_study_and_names_its_cell(tmp_path, workers, trouble, error, message):
    cells = [*CELLS, Cell("never", needs=("heun.0",))]
    with pytest.raises(error, match=message):
        run(tmp_path, cells, workers=workers, trouble={"heun.0": trouble})
    assert "never.0" not in computed(tmp_path)
    assert not (tmp_path / "toy.md").exists()
    before = finished(tmp_path)
    run(tmp_path, cells)
    assert finished(tmp_path) == sorted([*NAMES, "never.0"])
    assert all(computed(tmp_path).count(name) == 1 for name in before)


@pytest.mark.slow
def test_a_process_that_dies_is_said_to_have_died(tmp_path):
    with pytest.raises(RuntimeError, match="a process died at .*the same command resumes"):
        run(tmp_path, workers=2, trouble={"heun.2": "dies"})


def test_a_cell_that_cannot_be_read_is_named(tmp_path):
    run(tmp_path)
    (tmp_path / "cells" / "heun.1.json").write_text("{")
    with pytest.raises(ValueError, match="heun.1.json cannot be read .*remove it"):
        run(tmp_path)


def test_cells_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match=r"two cells called a\.0"):
        toy([Cell("a"), Cell("a")])
    with pytest.raises(ValueError, match=r"b\.0 needs a\.0, which does not stand before it"):
        toy([Cell("b", needs=("a.0",)), Cell("a")])


def test_numbers_that_no_study_can_have_are_refused(tmp_path):
    with pytest.raises(ValueError, match="workers is 0; allowed are whole numbers >= 1"):
        run(tmp_path / "out", workers=0)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="seeds is 1; allowed are whole numbers >= 2: one seed has no interval"):
        require_seeds(1, least=2)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="choose a folder you may write to"):
        run(tmp_path / "file" / "out")
