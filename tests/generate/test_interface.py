"""What a Python user meets: lists, names of options, wrong types, threads, precision."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import fsdfm
from fsdfm.checkpoint import save_model
from fsdfm.cli.output import Output
from fsdfm.generate import SamplerConfig
from tiny_models import random_bundle


@pytest.fixture(scope="module")
def lm():
    return fsdfm.LanguageModel(random_bundle())


def test_a_stream_takes_a_length(lm):
    stream = lm.stream("Once", length=20, steps=2)
    assert [state.step for state in stream] == [0, 1, 2]
    assert stream.result.tokens == lm.generate("Once", length=20, steps=2).tokens
    with pytest.raises(ValueError, match="itself"):
        lm.stream(lm.encoder.continuation("Once", None), length=20)


def test_lists_give_what_each_text_gives_alone(lm):
    gaps, drafts = ["a [[3]] b", "longer [[2]] text"], ["a draft", "another one"]
    assert [each.tokens for each in lm.infill(gaps, steps=2)] == [lm.infill(text, steps=2).tokens for text in gaps]
    assert [each.tokens for each in lm.repair(drafts, steps=2)] == [lm.repair(text, steps=2).tokens for text in drafts]
    assert len(lm.infill(gaps, steps=1, num=2)) == 4
    with pytest.raises(ValueError, match="one text"):
        lm.repair(drafts, [0], steps=1)


def test_help_names_every_option(lm):
    for method in (lm.generate, lm.infill, lm.repair):
        for name in SamplerConfig.__dataclass_fields__:
            assert name in method.__doc__


def test_an_unknown_option_is_refused_with_the_one_that_is_meant(lm):
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        lm.generate("Once", temprature=0.9)
    with pytest.raises(ValueError, match="allowed are steps"):
        lm.stream("Once", qqq=1)


@pytest.mark.parametrize("wrong", [5, [], [1, "a"], b"bytes"])
def test_a_wrong_type_is_a_sentence(lm, wrong):
    with pytest.raises(ValueError, match="allowed are a text and a list of texts"):
        lm.generate(wrong)


def test_threads_share_a_model(lm):
    alone = [lm.generate("Once", steps=3, seed=seed).tokens for seed in range(6)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda seed: lm.generate("Once", steps=3, seed=seed).tokens, range(6)))
    assert together == alone


FORKING = """
import os, signal, sys
import torch
import fsdfm
torch.set_num_threads(2)
lm = fsdfm.load(sys.argv[1], device="cpu", threads=2)
torch.rand(2000, 200) @ torch.rand(200, 2000)  # OpenMP has its threads now
told = lm.generate("Once", steps=2).tokens
read, write = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(120)
    torch.rand(2000, 200) @ torch.rand(200, 2000)
    os.write(write, b"same" if lm.generate("Once", steps=2).tokens == told else b"other")
    os._exit(0)
os.close(write)
assert (os.read(read, 9), os.waitpid(child, 0)[1]) == (b"same", 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_of_a_fork_writes_the_same_text(tmp_path):
    folder = save_model(tmp_path / "model", random_bundle())
    done = subprocess.run([sys.executable, "-c", FORKING, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fast", [True, False])
def test_auto_takes_bfloat16_where_the_cpu_has_it_and_bfloat16_warns_where_not(tmp_path, monkeypatch, fast):
    folder = save_model(tmp_path / "model", random_bundle())
    monkeypatch.setattr("fsdfm.generate.model.multiplies_bfloat16", lambda: fast)
    chosen = fsdfm.load(folder, device="cpu", precision="auto", threads=1)
    assert chosen.checkpoint.model.precision == ("bfloat16" if fast else "float32")
    assert chosen.warnings == ()
    asked = fsdfm.load(folder, device="cpu", precision="bfloat16", threads=1)
    assert bool(asked.warnings) is not fast


def test_a_picture_without_matplotlib_fails_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install"):
        Output(None, tmp_path / "x.png", num=1, states=False)
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", "hot"),
        ("temperature", [0.9]),
        ("final_temperature", "cold"),
        ("top_p", "0.9"),
        ("top_p", {}),
        ("top_k", 2.5),
        ("steps", "8"),
        ("seed", "one"),
        ("seed", 1.5),
        ("jump", 3),
        ("cache", 3),
        ("curve", 3),
        ("target", 3),
        ("grid", 8),
        ("start", "now"),
        ("keep_states", "yes"),
        ("length", "long"),
        ("num", "many"),
        ("suffix", 5),
        ("begin", 5),
    ],
)
def test_a_wrong_type_of_an_option_is_a_sentence(lm, option, value):
    with pytest.raises(ValueError, match=option):
        lm.generate("Once", **{option: value})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": 3}, "the model is 3; allowed are a folder"),
        ({"threads": "2"}, "threads is '2'; allowed are whole numbers >= 0"),
        ({"threads": -1}, "threads is -1; allowed are whole numbers >= 0"),
        ({"precision": "fp16"}, "precision is 'fp16'; allowed are auto, float32, bfloat16, int8"),
        ({"device": 3}, "device is 3"),
    ],
)
def test_a_wrong_type_when_loading_is_a_sentence(options, said):
    with pytest.raises(ValueError, match=said):
        fsdfm.load(**options)


def test_a_rule_that_is_not_known_has_the_one_that_is_meant_beside_it(lm):
    with pytest.raises(ValueError, match=r"jump is 'spaces'; did you mean 'spaced'\? allowed are exact"):
        lm.generate("Once", jump="spaces")


@pytest.mark.parametrize("damaged", [5, "abc", [0.5], [(1,)], [None], [("a", "b")], [(0, 1, 2)], {}])
def test_wrong_damage_is_a_sentence(lm, damaged):
    with pytest.raises(ValueError, match="damaged"):
        lm.repair("a damaged text", damaged)


@pytest.mark.parametrize("text", [5, None, [1.5], ["a", 1], b"bytes"])
def test_a_wrong_text_to_repair_is_a_sentence(lm, text):
    with pytest.raises(ValueError, match="text|token"):
        lm.repair(text)


def test_progress_is_told_of_every_step(lm):
    told = []
    lm.run([lm.encoder.continuation("Once", None, length=60)], steps=2, progress=lambda *each: told.append(each))
    blocks = told[-1][1]
    assert blocks > 1
    assert told == [(block, blocks) for block in range(1, blocks + 1) for _ in range(3)]
