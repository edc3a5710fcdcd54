"""Threads that share a machine."""

import os
import subprocess
import sys

import pytest

from fsdfm.runtime import free_threads


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)


@pytest.mark.parametrize(("load", "expected"), [(0.0, 4), (0.4, 4), (1.0, 3), (3.2, 1), (40.0, 1)])
def test_as_many_threads_as_cores_are_free(load, expected):
    assert free_threads(8, load=load, environment={}) == expected


def test_never_more_than_torch_has():
    assert free_threads(2, load=0.0, environment={}) == 2


def test_who_set_the_number_has_decided():
    assert free_threads(4, load=40.0, environment={"OMP_NUM_THREADS": "4"}) == 4


@pytest.mark.parametrize(("given", "expected"), [(None, "passive"), ("active", "active")])
def test_threads_wait_without_spinning_unless_told_otherwise(given, expected):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    code = "import fsdfm, os; print(os.environ['OMP_WAIT_POLICY'])"
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == expected
