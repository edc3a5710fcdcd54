from dataclasses import replace

import pytest

from fsdfm.config import Recipe, differences, find_recipe, load_recipe, parse, recipe_names, to_toml

NAMES = [
    "imported-dfm",
    "paper-1300m-dfm",
    "paper-1300m-fewstep",
    "paper-1700m-dfm",
    "paper-1700m-fewstep",
    "paper-170m-dfm",
    "paper-170m-fewstep",
    "paper-170m-mask-dfm",
    "paper-170m-mask-fewstep",
    "stories-coded",
    "stories-dfm",
    "stories-fewstep",
    "stories-linked",
    "stories-paper",
    "tiny-dfm",
    "tiny-fewstep",
]


def test_the_recipes_ship():
    assert recipe_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_reads_back_as_it_was_and_explains_itself(name, tmp_path):
    recipe = load_recipe(name)
    assert recipe.out == f"runs/{name}"
    (tmp_path / "again.toml").write_text(to_toml(recipe))
    assert load_recipe(tmp_path / "again.toml") == recipe
    lines = [line for line in find_recipe(name).read_text().splitlines() if "=" in line and not line.startswith("#")]
    silent = [line for line in lines if " # " not in line]
    assert len(silent) <= 5, silent  # what says itself


@pytest.mark.parametrize(
    ("size", "batch_size"), [("170m", 96), ("170m-mask", 96), ("1300m", 32), ("1700m", 16)], ids=str
)
def test_the_papers_numbers(size, batch_size):
    parent, child = load_recipe(f"paper-{size}-dfm"), load_recipe(f"paper-{size}-fewstep")
    assert (parent.train.steps, parent.train.batch_size, parent.optim.lr) == (1_000_000, 128, 3e-4)
    assert (child.train.steps, child.train.batch_size, child.optim.lr) == (500_000, batch_size, 1e-5)
    assert child.model.parent == parent.out
    assert (child.objective.teacher, child.objective.weights) == ("rk4", "TB-20")
    assert child.objective.path_below_h == 2.0**-9
    for recipe in (parent, child):
        assert recipe.data.length == 1024
        assert recipe.data.tokenizer == "gpt2"
        optim = recipe.optim
        assert (optim.warmup, optim.final, optim.beta1, optim.beta2) == (10_000, 0.1, 0.9, 0.95)
        assert (optim.weight_decay, optim.clip, optim.ema) == (0.03, 1.0, 0.9995)
        assert recipe.flow.source == ("mask" if "mask" in size else "uniform")


def test_overrides():
    recipe = load_recipe(
        "tiny-dfm",
        ["train.steps=7", "optim.lr=1", "out=some/where", "data.inputs=['a b.txt', 'c']", "model.num_blocks=none"],
    )
    assert recipe.train.steps == 7
    assert recipe.optim.lr == 1.0
    assert isinstance(recipe.optim.lr, float)
    assert recipe.out == "some/where"
    assert recipe.data.inputs == ("a b.txt", "c")
    assert recipe.model.num_blocks is None
    assert load_recipe("tiny-dfm", ["data.inputs=story.txt"]).data.inputs == ("story.txt",)
    assert load_recipe("tiny-dfm", ["runtime.compile=true"]).runtime.compile is True


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.stpes=3", r"train\.stpes is not a key of a recipe; did you mean train\.steps\?"),
        ("trian.steps=3", r"trian is not a key of a recipe; did you mean train\?"),
        ("steps=3", r"did you mean train\.steps\?"),
        ("train.lr=3", r"did you mean optim\.lr\?"),
        ("train.steps=ten", r"train\.steps is 'ten'; it must be a whole number"),
        ("train.steps=1.5", "it must be a whole number"),
        ("train.steps=true", "it must be a whole number"),
        ("optim.lr=fast", "it must be a number"),
        ("runtime.compile=1", "it must be true or false"),
        ("data.tokenizer=3", "it must be a string"),
        ("data.inputs=[1]", "it must be a string"),
        ("flow.source=masked", r"allowed are 'uniform', 'mask', 'mixture' \(did you mean 'mask'\?\)"),
        ("train=3", r"train is 3; it is a section"),
        ("out.x=3", "out is a value, not a section"),
        ("train.steps", "is not an override; write section.key=value"),
        ("train.steps=0", r"train\.steps is 0; allowed are"),
        ("optim.lr=-1", r"optim\.lr is -1\.0; allowed are"),
        ("sample.num=0", r"sample\.every is 250, num 0"),
        ("data.completely_unheard_of=1", "allowed here are inputs, tokenizer"),
    ],
)
def test_mistakes_are_named(override, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_recipe("tiny-dfm", [override])


def test_a_missing_key_is_named():
    with pytest.raises(ValueError, match="out is missing"):
        parse(Recipe, {})


def test_recipes_that_are_not_there_or_not_toml(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe 'tiny-dmf'; did you mean 'tiny-dfm'\?"):
        find_recipe("tiny-dmf")
    with pytest.raises(ValueError, match="there are paper-1300m-dfm"):
        find_recipe("zzzz")
    (tmp_path / "broken.toml").write_text("[train\nsteps = ")
    with pytest.raises(ValueError, match=r"broken\.toml is not a TOML file"):
        load_recipe(tmp_path / "broken.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bytes\.toml is not a TOML file"):
        load_recipe(tmp_path / "bytes.toml")


def test_differences_are_dotted():
    recipe = load_recipe("tiny-dfm")
    other = replace(recipe, train=replace(recipe.train, seed=5), out="elsewhere")
    assert differences(recipe, other) == {"out": ("runs/tiny-dfm", "elsewhere"), "train.seed": (0, 5)}
