"""What cells do with models; trainings and measurements at length are in the tests of the studies."""

from types import SimpleNamespace

import pytest

import fsdfm.studies.models as models
from fsdfm.studies.runner import StoppedError


def test_a_training_that_stops_makes_no_model_and_one_that_is_finished_leaves_no_run(tmp_path, monkeypatch):
    run, model, finished, heard = tmp_path / "a run", tmp_path / "model", [False, True], []

    def train(recipe, overrides, **_):
        heard.append((recipe, overrides))
        run.mkdir(exist_ok=True)
        return SimpleNamespace(finished=finished.pop(0))

    monkeypatch.setattr(models, "train", train)
    monkeypatch.setattr(models, "export", lambda _run, out, *, half: out.mkdir() if half else pytest.fail("not half"))
    with pytest.raises(StoppedError):
        models.train_model("tiny-dfm", ["a=1"], run=run, model=model, half=True)
    assert run.exists()
    assert not model.exists()
    for _ in range(2):  # the second time nothing is trained
        assert models.train_model("tiny-dfm", ["a=1"], run=run, model=model, half=True) == {"model": "model"}
        assert not run.exists()
    assert heard == [("tiny-dfm", ["a=1", f'out="{run}"'])] * 2


def test_rows_of_a_measurement_that_stops_stay_and_those_of_a_finished_one_become_its_value(tmp_path, monkeypatch):
    rows, finished = tmp_path / "rows.json", [False, True]
    rows.write_text("{}")
    monkeypatch.setattr(models, "run_evaluation", lambda *_, **__: SimpleNamespace(finished=finished.pop(0)))
    monkeypatch.setattr(models, "load_evaluation", lambda file: SimpleNamespace(to_json=lambda: {"file": file.name}))
    request = models.EvaluationRequest(model="model", json=rows)
    with pytest.raises(StoppedError):
        models.measure_model(request)
    assert rows.exists()
    assert models.measure_model(request) == {"file": "rows.json"}
    assert not rows.exists()
