"""Result files: written whole, read back the same, and refused in one sentence."""

import json
import math
import os

import pytest

from fsdfm.measure.results import FORMAT, FORMAT_VERSION, Evaluation, Measured, Row, load_evaluation, save_evaluation

NAN = float("nan")


def full():
    row = Row(
        steps=8,
        calls=16,
        num_samples=256,
        seconds=12.5,
        seconds_per_sample=0.05,
        temperature=0.9,
        flags=("entropy below the band of real text",),
        metrics={
            "token_perplexity": Measured(31.5, 30.2, 32.9),
            "mauve": Measured(0.9, 0.8, 0.95, {"n": 256, "seeds": 5}),
        },
        facts={"note": ["kept", 1]},
    )
    return Evaluation(
        model={"name": "FS-DFM", "num_parameters": 7},
        sampler={"jump": "exact", "top_k": None},
        judge={"name": "gpt2", "real": {"token_perplexity": 24.0}},
        data={"held_out": "valid.txt"},
        rows=(row, Row(steps=8, temperature=1.1, matched={"to": "data", "entropy_bits": 7.9})),
        real={"entropy_bits": Measured(7.9, 7.8, 8.0, {"band": (7.5, 8.2)})},
        bound=Measured(3.2, 3.1, 3.3, {"nats_per_token": 3.2}),
        frontier=(Row(steps=8, temperature=0.8),),
        facts={"seed": 0, "commit": "abc", "versions": {"torch": "2"}},
    )


def minimal(**changes):
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "model": {"name": "m"}, "rows": [], **changes}


def test_a_file_is_read_back_as_it_was_written(tmp_path):
    file = tmp_path / "new" / "folder" / "result.json"
    save_evaluation(full(), file)
    assert load_evaluation(file) == full()
    assert [path.name for path in file.parent.iterdir()] == ["result.json"]


def test_metrics_stand_flat_in_their_row():
    record = full().to_json()
    assert record["rows"][0]["token_perplexity"] == {"value": 31.5, "low": 30.2, "high": 32.9}
    assert record["rows"][0]["mauve"]["seeds"] == 5
    assert record["seed"] == 0
    assert record["bound"]["nats_per_token"] == 3.2


def test_what_json_cannot_hold_survives(tmp_path):
    metrics = {"a": Measured(math.inf, -math.inf, math.inf), "b": Measured(NAN)}
    save_evaluation(Evaluation(model={"name": "m"}, rows=(Row(steps=1, metrics=metrics),)), tmp_path / "x")
    text = (tmp_path / "x").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    read = load_evaluation(tmp_path / "x").rows[0].metrics
    assert (read["a"].value, read["a"].low) == (math.inf, -math.inf)
    assert math.isnan(read["b"].value)
    assert not read["a"].has_interval


def test_python_s_own_nan_and_missing_ends_are_read(tmp_path):
    rows = [{"steps": 1, "a": {"value": NAN, "low": None, "extra": 1}}]
    (tmp_path / "x").write_text(json.dumps(minimal(rows=rows, unknown={"value": "not a metric"})))
    evaluation = load_evaluation(tmp_path / "x")
    assert math.isnan(evaluation.rows[0].metrics["a"].low)
    assert evaluation.facts["unknown"] == {"value": "not a metric"}


def test_rows_are_added_and_replaced_by_their_kind():
    evaluation = Evaluation(model={"name": "m"})
    for steps, seconds in ((4, 1.0), (1, 2.0), (4, 3.0)):
        evaluation = evaluation.with_row(Row(steps=steps, seconds=seconds))
    evaluation = evaluation.with_row(Row(steps=4, temperature=1.2, matched={"to": "data"}))
    evaluation = evaluation.with_row(Row(steps=4, temperature=1.3, matched={"to": "data"}))
    assert [(row.steps, row.seconds) for row in evaluation.rows[:2]] == [(4, 3.0), (1, 2.0)]
    assert [row.steps for row in evaluation.plain] == [1, 4]
    assert [row.temperature for row in evaluation.matched] == [1.3]
    assert evaluation.row(4).seconds == 3.0
    assert evaluation.row(2) is None
    assert evaluation.row(4).num_calls == 4


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "result.json"
    save_evaluation(full(), file)
    before = file.read_text()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ValueError, match="cannot write .*No space left"):
        save_evaluation(full().with_row(Row(steps=2)), file)
    assert file.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


BAD = {
    "not JSON": ("{", "is not JSON"),
    "an array": ("[]", "the file is \\[\\]; it must be an object"),
    "another format": (json.dumps({"format": "x"}), "format is 'x'"),
    "no format": ("{}", "format is None"),
    "a later version": (json.dumps(minimal(format_version=9)), "format_version is 9"),
    "no model": (json.dumps(minimal(model=None)), "model is missing"),
    "no name": (json.dumps(minimal(model={"name": " "})), "name is ' '"),
    "rows no list": (json.dumps(minimal(rows={"a": 1})), "rows is .*must be a list"),
    "a row no object": (json.dumps(minimal(rows=[3])), r"rows\[0\] is 3"),
    "no steps": (json.dumps(minimal(rows=[{}])), r"rows\[0\]: steps is missing"),
    "steps a text": (json.dumps(minimal(rows=[{"steps": "8"}])), "steps is '8'; it must be a whole number"),
    "steps true": (json.dumps(minimal(rows=[{"steps": True}])), "steps is True"),
    "steps 0": (json.dumps(minimal(rows=[{"steps": 0}])), "steps is 0; allowed"),
    "steps endless": (json.dumps(minimal(rows=[{"steps": 10**400}])), "steps is 1000"),
    "flags a text": (json.dumps(minimal(rows=[{"steps": 1, "flags": "x"}])), "flags is 'x'; it must be a list"),
    "twice": (json.dumps(minimal(rows=[{"steps": 1}] * 2)), "rows holds steps 1 twice"),
    "value a text": (
        json.dumps(minimal(rows=[{"steps": 1, "mauve": {"value": "high"}}])),
        r"rows\[0\]: mauve: value is 'high'; it must be a number",
    ),
    "value endless": (json.dumps(minimal(real={"a": {"value": 10**400}})), "a: value is 1000"),
    "interval reversed": (json.dumps(minimal(real={"a": {"value": 1, "low": 3, "high": 2}})), r"interval \[3, 2\]"),
    "bound without value": (json.dumps(minimal(bound={})), 'bound: it has no "value"'),
    "bad band": (json.dumps(minimal(real={"a": {"value": 1, "band": 3}})), "band is 3"),
    "temperature": (json.dumps(minimal(rows=[{"steps": 1, "temperature": -1}])), "temperature is -1"),
    "matched": (json.dumps(minimal(rows=[{"steps": 1, "matched": "data"}])), "matched is 'data'"),
    "deep": ("[" * 100_000, "nested too deeply|not JSON"),
    "many digits": ("1" * 5000, "is not a result file"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path, case):
    text, message = BAD[case]
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_evaluation(file)
    assert "bad.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_files_that_are_none_are_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path, message in ((tmp_path / "binary", "not text"), (tmp_path, "cannot read"), (tmp_path / "no", "No such")):
        with pytest.raises(ValueError, match=message):
            load_evaluation(path)
