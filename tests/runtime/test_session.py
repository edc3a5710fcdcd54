import os
import signal
import subprocess
import threading

import pytest

from fsdfm.runtime import commit, stop_on_signal, versions
from fsdfm.runtime import session as module


def test_a_signal_sets_a_flag_and_a_second_acts_as_usual():
    with stop_on_signal() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_hear_no_signals():
    heard = []

    def listen():
        with stop_on_signal() as stop:
            heard.append(stop())

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert heard == [False]


def test_versions_and_commit_say_what_ran(monkeypatch):
    assert set(versions()) == {"fsdfm", "python", "torch", "platform"}
    commit.cache_clear()

    def fail(*_):
        raise subprocess.CalledProcessError(128, "git")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_git", fail)
        assert commit() == "unknown"
    commit.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_git", lambda *_: "/somewhere/else")
        assert commit() == "unknown"
    commit.cache_clear()
