"""Who is compared: every training can be made, costs what the others cost, and every row can be sampled."""

from pathlib import Path

import pytest

from fsdfm.config import load_recipe
from fsdfm.generate import SamplerConfig
from fsdfm.run.weights import check
from fsdfm.studies.compare.cells import cells_of, recipe_overrides
from fsdfm.studies.compare.setting import QUICK, CompareFiles, CompareSetting
from fsdfm.studies.compare.systems import BASE, SHIPPED, TRAININGS, VARIANTS, chosen_variants

FILES = CompareFiles(Path("out"), Path("parent"), ("train.txt",), "valid.txt", "smollm2")
SETTING = CompareSetting(
    "b", "t", "h", "j", QUICK.train_steps, QUICK.length, QUICK.num, QUICK.temperatures, QUICK.steps, 16
)


def spent(name: str) -> float:
    """The share of the study's training steps that a model has behind it."""
    training = TRAININGS[name]
    return training.share + (0 if training.start == BASE else spent(training.start))


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_is_a_recipe_on_the_same_text(name: str) -> None:
    recipe = load_recipe(TRAININGS[name].recipe, recipe_overrides(TRAININGS[name], FILES, SETTING))
    check(recipe)
    assert (recipe.data.inputs, recipe.data.length) == (("train.txt",), QUICK.length)
    assert recipe.train.steps == round(TRAININGS[name].share * QUICK.train_steps)
    assert recipe.train.batch_size == SETTING.batch_size
    assert recipe.optim.ema <= 1 - 5 / recipe.train.steps


def test_every_measured_model_has_the_same_tokens_behind_it() -> None:
    assert {spent(v.model) for v in VARIANTS if v.model not in (BASE, SHIPPED)} == {1.0}
    assert SETTING.tokens == QUICK.train_steps * 16 * QUICK.length


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_a_row_can_be_sampled(variant) -> None:  # type: ignore[no-untyped-def]
    SamplerConfig(jump=variant.jump, grid=variant.grid, steps=4)


def test_cells_stand_behind_what_they_need() -> None:
    names = [cell.name for cell in cells_of(chosen_variants(["sdtt"]))]
    assert names == ["corpus.0", "mdlm-half.0", "sdtt-1.0", "sdtt.0", "sdtt@.0"]
    assert [cell.name for cell in cells_of(chosen_variants([SHIPPED]))] == ["shipped@.0"]


def test_published_weights_take_the_place_of_trainings() -> None:
    rows = chosen_variants([], ["mdlm", "sdtt/round-7", "llada"])
    assert {row.model for row in rows} == {"weights:mdlm", "weights:sdtt/round-7", "weights:llada"}
    assert {"remdm-cap", "sdtt/round-7", "llada-paper"} <= {row.name for row in rows}
    assert [row.name for row in chosen_variants(["remdm-cap"], ["mdlm"])] == ["remdm-cap"]


@pytest.mark.parametrize(
    ("only", "weights", "message"),
    [(["remdm"], [], "--only is 'remdm'"), ([], ["mdml"], "did you mean 'mdlm'"), ([], ["mdlm/"], "names the system")],
)
def test_unknown_names_are_refused(only, weights, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        chosen_variants(only, weights)
