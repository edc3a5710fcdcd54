import json
import os

import pytest

from fsdfm.learn.journal import JsonLines


def test_what_was_said_behind_a_step_is_dropped_and_so_is_what_nobody_wrote(tmp_path):
    """The files of a run that is resumed may be a stranger's: a number of 400 digits, brackets without end."""
    file = tmp_path / "metrics.jsonl"
    strange = ['{"training_step": ' + "9" * 400 + "}", "[" * 200_000, "[]", '{"training_step": NaN}', '{"training_st']
    kept = [json.dumps({"training_step": step, "loss": 1.5}) for step in (1, 2)]
    file.write_text("\n".join([kept[0], *strange[:4], kept[1], '{"training_step": 3}', strange[4]]))
    JsonLines(file).rewind(2)
    assert file.read_text() == "".join(line + "\n" for line in kept)


@pytest.mark.parametrize("kind", ["pipe", "zero"])
def test_what_is_no_file_is_not_read(tmp_path, kind):
    file = tmp_path / "metrics.jsonl"
    os.mkfifo(file) if kind == "pipe" else file.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="not a plain file"):
        JsonLines(file).rewind(1)
