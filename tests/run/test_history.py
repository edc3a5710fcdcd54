"""Recipes that runs wrote before are read as today's."""

import pytest

from fsdfm.config import differences, load_recipe, to_toml
from fsdfm.learn import NoTeacherConfig
from fsdfm.run.history import read_recipe

OBJECTIVE = """
[objective]
kind = "{kind}"
loss = "generalised-kl"
times = "multiples-of-h"
smallest_h = -10
teacher = "rk2"
jump = "exact"
weights = "TB-20"
anneal_every = 10000
mirrored = false
path_below_h = {tau}
temperature = 1.0
network = "ema"
spaced_share = 0.0
"""


def before(name, *, kind, tau, change=lambda text: text):
    """The recipe.toml that a run of this recipe had before objectives and teachers had configs of their own."""
    text = to_toml(load_recipe(name))
    start = text.index("[objective]")
    text = text[:start] + OBJECTIVE.format(kind=kind, tau=tau) + "\n" + text[text.index("[optim]") :]
    text = text.replace("[flow]\n", "[flow]\nmask_share = 0.5\nrate = 2.0\n")
    text = text.replace("plugins = []\n", "").replace('separator = "<|endoftext|>"\n', "")
    return change(text.replace("[model]\n", "[model]\nmin_count = 1\nlink_rank = 0\n"))


@pytest.mark.parametrize(("name", "kind"), [("tiny-dfm", "path"), ("tiny-fewstep", "fewstep")])
def test_old_runs_resume(name, kind, tmp_path):
    (tmp_path / "recipe.toml").write_text(before(name, kind=kind, tau=2.0**-9))
    found = differences(read_recipe(tmp_path / "recipe.toml"), load_recipe(name))
    assert found == {"model.transition_rank": (0, None)}  # it was asked for here, to see that it is still known


def test_an_old_run_without_a_teacher_has_none(tmp_path):
    (tmp_path / "recipe.toml").write_text(before("tiny-fewstep", kind="fewstep", tau=2.0))
    assert read_recipe(tmp_path / "recipe.toml").objective.teacher == NoTeacherConfig()


def test_old_text_files_were_one_document(tmp_path):
    text = before("tiny-dfm", kind="path", tau=2.0**-9, change=lambda text: text.replace("builtin:pydoc", "mine.txt"))
    (tmp_path / "recipe.toml").write_text(text)
    assert read_recipe(tmp_path / "recipe.toml").data.separator == ""


def test_what_cannot_be_read_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "recipe.toml").write_text(to_toml(load_recipe("tiny-dfm")) + "\n[novelty]\nx = 1\n")
    with pytest.raises(
        ValueError, match=r"another version of fsdfm.*novelty is not a key.*start another run with out="
    ):
        read_recipe(tmp_path / "recipe.toml")
