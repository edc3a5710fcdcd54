import pytest

import fsdfm
from fsdfm.checkpoint import embedded, load_model, save_model
from tiny_models import random_bundle


@pytest.fixture
def assets(monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "ASSETS", tmp_path / "assets")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "assets"


def test_the_best_embedded_model_is_the_default(assets):
    with pytest.raises(ValueError, match="no embedded model; name the folder"):
        fsdfm.load()
    with pytest.raises(ValueError, match="no embedded model 'parent'; it has: none"):
        fsdfm.load("parent")
    save_model(assets / "parent", random_bundle(length=16))
    assert fsdfm.load(device="cpu").checkpoint.length == 16
    with pytest.raises(ValueError, match="no embedded model 'fewstep'; it has: parent"):
        fsdfm.load("fewstep")
    save_model(assets / "fewstep", random_bundle(length=8, budgets=(1, 2)))
    assert list(embedded.embedded_models()) == ["fewstep", "parent"]
    assert fsdfm.load(device="cpu").checkpoint.length == 8
    assert fsdfm.load("parent", device="cpu").checkpoint.length == 16
    assert load_model("fewstep").loaded.endswith("from fewstep")  # no folder of somebody's machine


def test_a_folder_of_the_same_name_makes_it_ambiguous(assets, tmp_path):
    save_model(assets / "parent", random_bundle(length=16))
    save_model(tmp_path / "parent", random_bundle(length=8))
    with pytest.raises(ValueError, match="embedded model and of .*parent; write that full path"):
        fsdfm.load("parent")
    assert fsdfm.load("./parent", device="cpu").checkpoint.length == 8
    assert fsdfm.load(tmp_path / "parent", device="cpu").checkpoint.length == 8


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fewsteps", r"fewsteps is not a folder, nor an embedded model \(fewstep, parent\); did you mean fewstep\?"),
        ("parnet", r"did you mean parent\?"),
        ("nothing", "nothing is not a folder, nor an embedded model .*; name a checkpoint, or a run"),
        ("runs/parnet", "runs/parnet is not a folder"),
    ],
)
def test_an_unknown_name_gets_the_nearest(assets, name, said):
    with pytest.raises(ValueError, match=said):
        fsdfm.load(name)


def test_what_ships_is_small():
    def size(folder):
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    assert size(embedded.ASSETS / "fewstep") + size(embedded.ASSETS / "parent") < 45e6
    assert size(embedded.stored_demo()) < 450e3
