"""Cells of the comparison that do more than train a recipe."""

from dataclasses import replace
from pathlib import Path

from fsdfm import data
from fsdfm.checkpoint import load_model, save_model
from fsdfm.config import load_recipe
from fsdfm.measure.evaluation import EvaluationRequest
from fsdfm.studies.compare import cells as compare_cells
from fsdfm.studies.compare import systems
from fsdfm.studies.compare.cells import cells_of, compute_cell, recipe_overrides
from fsdfm.studies.compare.setting import CompareFiles, CompareSetting
from fsdfm.studies.compare.systems import chosen_variants
from fsdfm.studies.folder import StudyFolder
from tiny_models import random_bundle


def test_redi_learns_from_pairs_that_its_start_made_of_noised_text(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    save_model(tmp_path / "base", random_bundle(length=16))
    text = tmp_path / "train.txt"
    text.write_text("<|endoftext|>".join(f"the {n} cats sat on a mat and saw {n} dogs run" for n in range(30)))
    files = CompareFiles(tmp_path / "out", tmp_path / "base", (str(text),), "valid.txt", "smollm2", device="cpu")
    setting = CompareSetting("b", "t", "h", "j", 3, 16, 2, (0.7,), (1, 2), batch_size=4)
    few = replace(systems.TRAININGS["redi"], repeats=2)
    monkeypatch.setitem(systems.TRAININGS, "redi", few)
    cells = cells_of(chosen_variants(["redi"]))
    assert [cell.name for cell in cells] == ["corpus.0", "redi.0", "redi@.0"]
    for cell in cells[:2]:
        compute_cell(files, setting, cell, StudyFolder(tmp_path / "out"))
    pairs = data.Pairs(files.pairs("redi"))
    assert (len(pairs.tokens), pairs.header.timed) == (6, True)  # 3 steps of 4 rows, each pair twice
    assert pairs.header.about["steps"] == 16
    assert load_model(files.model("redi")).facts["training_step"] == 3


def test_precision_is_that_of_every_training_and_every_sample(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    files = CompareFiles(tmp_path / "out", tmp_path / "base", ("train.txt",), "valid.txt", "smollm2", device="cpu")
    setting = CompareSetting("b", "t", "h", "j", 3, 16, 2, (0.7,), (1, 2), batch_size=4, precision="bfloat16")
    for name, training in systems.TRAININGS.items():
        recipe = load_recipe(training.recipe, recipe_overrides(training, files, setting))
        assert recipe.runtime.precision == "bfloat16", name
    asked: list[EvaluationRequest] = []

    def measure(request: EvaluationRequest) -> dict[str, object]:
        asked.append(request)
        return {}

    monkeypatch.setattr(compare_cells, "measure_model", measure)
    variants = chosen_variants(["base", "mdlm", "ours"])
    for cell in cells_of(variants)[-3:]:
        compute_cell(files, setting, cell, StudyFolder(tmp_path / "out"))
    assert [(each.precision, each.threads) for each in asked] == [("bfloat16", 1)] * 3
