import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fsdfm.files import (
    did_you_mean,
    file_sha256,
    lock,
    nearest,
    read_bytes,
    read_json,
    read_lines,
    read_text,
    replace_file,
    write_json,
    write_text,
)


def test_a_file_is_the_old_one_or_the_new_one(tmp_path):
    file = tmp_path / "deep" / "a.txt"
    write_text(file, "old")

    def fail(side):
        side.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        replace_file(file, fail)
    assert file.read_text() == "old"
    assert [path.name for path in file.parent.iterdir()] == ["a.txt"]
    write_json(file, {"a": 1.5})
    assert json.loads(file.read_text()) == {"a": 1.5}


def test_a_file_is_synced_before_it_has_its_name(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append(sorted(path.name for path in tmp_path.iterdir())))
    write_text(tmp_path / "a", "x")
    assert len(seen) == 1
    assert "a" not in seen[0]


def test_json_has_no_nan_and_a_link_stays_one(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a", float("nan"), allow_nan=False)
    assert not list(tmp_path.iterdir())
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "a")
    write_text(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a").read_text() == "x"
    write_text(tmp_path / "link", "y")
    assert (tmp_path / "real" / "a").read_text() == "y"


def test_what_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write .*; make room, or choose a folder"):
        write_text(tmp_path / "file" / "a", "x")
    with pytest.raises(ValueError, match="cannot write"):
        write_text(tmp_path, "x")
    write_text(type(tmp_path)("/dev/null"), "x")  # a device is written to, not replaced
    assert not type(tmp_path)("/dev/null").is_file()


def test_threads_that_write_one_file_do_not_meet(tmp_path):
    def write(word):
        for _ in range(50):
            write_text(tmp_path / "a", word * 1000)

    threads = [threading.Thread(target=write, args=(word,)) for word in "xyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "a").read_text() in ["x" * 1000, "y" * 1000, "z" * 1000]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_reads_are_bounded_and_of_plain_files(tmp_path):
    (tmp_path / "a").write_text("12345")
    assert read_text(tmp_path / "a", 5) == "12345"
    with pytest.raises(ValueError, match="more than the 4 bytes"):
        read_text(tmp_path / "a", 4)
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("zero", "pipe", "."):
        with pytest.raises(ValueError, match="not a plain file"):
            read_text(tmp_path / name)
        with pytest.raises(ValueError, match="not a plain file"):
            file_sha256(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none")
    assert file_sha256(tmp_path / "a") == "5994471abb01112afcc18159f6cc74b4f511b99806da59b3caf5a9c173cacfc5"


@pytest.mark.parametrize("beside", [True, False])
def test_a_lock_keeps_others_out_until_it_is_given_back(tmp_path, beside):
    owned = tmp_path / "a"
    holder = f"in use by another run .process {os.getpid()} on .*wait for it"
    with lock(owned, beside=beside), pytest.raises(ValueError, match=holder), lock(owned, beside=beside):
        pass
    with lock(owned, beside=beside):
        pass
    assert not list(tmp_path.rglob("*.lock"))


def test_a_failure_inside_gives_the_lock_back(tmp_path):
    with pytest.raises(RuntimeError), lock(tmp_path):
        raise RuntimeError
    with lock(tmp_path):
        pass


def test_a_link_to_a_folder_is_the_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with (
        lock(tmp_path / "a", beside=True),
        pytest.raises(ValueError, match="in use"),
        lock(tmp_path / "b", beside=True),
    ):
        pass


def test_a_lock_dies_with_its_process(tmp_path):
    code = "import sys,time;from pathlib import Path;from fsdfm.files import lock\n"
    code += "with lock(Path(sys.argv[1])):\n print('held', flush=True)\n time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"process {other.pid} "), lock(tmp_path):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert (tmp_path / ".lock").exists()  # left behind, and locks nothing
    with lock(tmp_path):
        pass


def test_no_two_threads_ever_hold_one_lock(tmp_path):
    """Removing the file on release must not let two in, however the calls fall."""
    inside, most, entries = [0], [0], [0]
    guard = threading.Lock()
    end = time.monotonic() + 0.5

    def enter():
        while time.monotonic() < end:
            try:
                with lock(tmp_path):
                    with guard:
                        inside[0] += 1
                        entries[0] += 1
                        most[0] = max(most[0], inside[0])
                    time.sleep(0)
                    with guard:
                        inside[0] -= 1
            except ValueError:
                pass

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entries[0] > 10
    assert most[0] == 1


def test_a_lock_file_that_leads_elsewhere_destroys_nothing(tmp_path):
    """A foreign run's `.lock` is a link to a file of the user's."""
    (tmp_path / "precious").write_text("x")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match="cannot write to"), lock(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "x"


def test_a_lock_where_nothing_can_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write to .*choose a folder"), lock(tmp_path / "file" / "a"):
        pass


def test_the_name_that_was_meant():
    assert nearest("widht", ["width", "depth"]) == "width"
    assert nearest("x", ["width"]) is None
    assert did_you_mean("widht", ["width", "depth"]) == "did you mean 'width'?"
    assert did_you_mean("x", ["width", "depth"]) == "allowed are width, depth"
    assert did_you_mean("x", ["width"], "name a file") == "name a file"


@pytest.mark.parametrize("kind", ["pipe", "zero", "folder"])
def test_only_plain_files_are_read(tmp_path, kind):
    """A pipe would be waited for, a device read until the memory is full."""
    file = tmp_path / "a"
    {"pipe": lambda: os.mkfifo(file), "zero": lambda: file.symlink_to("/dev/zero"), "folder": file.mkdir}[kind]()
    for read in (read_text, read_bytes, read_json, lambda path: next(read_lines(path)), file_sha256):
        with pytest.raises(ValueError, match="not a plain file"):
            read(file)


def test_json_that_is_too_deep_is_a_value_error(tmp_path):
    (tmp_path / "a").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(tmp_path / "a")


def test_lines_are_read_one_by_one_and_have_an_end(tmp_path):
    file = tmp_path / "a"
    file.write_text("é\n\nlast")
    assert list(read_lines(file)) == ["é\n", "\n", "last"]
    file.write_text("12345\n123456\n")
    lines = read_lines(file, 6)
    assert next(lines) == "12345\n"
    with pytest.raises(ValueError, match="a line of more than 6 bytes"):
        next(lines)
