import os

import pytest

from fsdfm.measure.archive import Archive
from fsdfm.measure.results import load_evaluation


@pytest.mark.parametrize("kind", ["pipe", "zero", "deep"])
@pytest.mark.parametrize("read", [Archive.open, load_evaluation])
def test_a_strangers_file_ends_in_a_sentence(tmp_path, kind, read):
    """Sample files and result files are shared; a pipe would be waited for, a device read without end."""
    file = tmp_path / "a"
    make = {
        "pipe": lambda: os.mkfifo(file),
        "zero": lambda: file.symlink_to("/dev/zero"),
        "deep": lambda: file.write_text("[" * 200_000),
    }
    make[kind]()
    with pytest.raises(ValueError, match="plain file|not a sample file|nested too deeply"):
        read(file)


def test_a_line_of_brackets_is_damage(tmp_path):
    archive = Archive.create(tmp_path / "a", {}, ())
    with archive.file.open("a") as lines:
        lines.write('{"kind": "note", "a": ' + "[" * 200_000 + "\n")
    with pytest.raises(ValueError, match="is damaged: a line is not JSON"):
        archive.records("note")
