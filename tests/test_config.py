import re
from dataclasses import make_dataclass, replace
from pathlib import Path

import pytest

from fsdfm.config import Recipe, differences, find_recipe, load_recipe, parse, recipe_names, to_toml
from fsdfm.learn import OBJECTIVES, NoTeacherConfig, PathConfig, ShortcutConfig, register_objective
from fsdfm.run import make_objective, make_path
from fsdfm.run.history import read_recipe

NAMES = [
    "imported-dfm",
    "novels-canvas",
    "paper-1300m-dfm",
    "paper-1300m-fewstep",
    "paper-1700m-dfm",
    "paper-1700m-fewstep",
    "paper-170m-dfm",
    "paper-170m-fewstep",
    "paper-170m-mask-dfm",
    "paper-170m-mask-fewstep",
    "peer-duo",
    "peer-duo-dcd",
    "peer-hdlm",
    "peer-hdlm-gamma",
    "peer-mdlm",
    "peer-redi",
    "peer-sdtt",
    "peer-sedd",
    "peer-sedd-uniform",
    "stories-causal",
    "stories-crf",
    "stories-dfm",
    "stories-fewstep",
    "stories-inverse",
    "stories-next",
    "stories-onpolicy",
    "stories-paper",
    "stories-reward",
    "tiny-causal",
    "tiny-dfm",
    "tiny-fewstep",
]


def test_the_recipes_ship():
    assert recipe_names() == NAMES


def test_the_table_of_recipes_has_each_once():
    page = (Path(__file__).parents[1] / "docs" / "train.md").read_text("utf-8")
    table = page.partition("| recipe | what |\n| --- | --- |\n")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert sorted(named) == NAMES


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
    assert (child.objective.teacher.tableau, child.objective.weights) == ("rk4", "TB-20")
    assert child.objective.teacher.from_h == 2.0**-9
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
        ("sample.num=0", r"sample\.every is 250 and num 0"),
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
    with pytest.raises(ValueError, match="there are imported-dfm, novels-canvas"):
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


# --- a key that is not used is an error -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "override", "sentence"),
    [
        (
            "tiny-dfm",
            "objective.weights=PU",
            'objective.weights is not used by objective.kind = "path"; remove it, or ',
        ),
        ("tiny-dfm", "objective.teacher.tableau=rk2", 'objective.teacher is not used by objective.kind = "path"'),
        ("tiny-dfm", "objective.kind=pth", "objective.kind is 'pth'; allowed are path, fewstep"),
        ("tiny-dfm", "objective.kind=ahead", "allowed are path, fewstep"),
        ("tiny-dfm", "flow.mask_share=0.5", 'mask_share is not used by flow.source = "uniform"; remove it, or set'),
        ("tiny-dfm", "flow.rate=2.0", 'rate is not used by flow.schedule = "polynomial"'),
        ("tiny-dfm", "objective=3", "objective is 3; it is a section"),
        ("tiny-fewstep", "objective.anneal_every=5", 'anneal_every is not used by objective.weights = "TB-20"'),
        ("tiny-fewstep", "objective.path_below_h=2.0", "it is now objective.teacher.from_h"),
        ("tiny-fewstep", "objective.jump=single", "it is now objective.teacher.jump"),
        ("tiny-fewstep", "objective.teacher=rk4", "a tableau such as rk4 is objective.teacher.tableau"),
        ("tiny-fewstep", "objective.teacher.from_h=2.0", 'objective.teacher = "none" takes the path loss at all'),
        ("tiny-fewstep", "objective.teacher.weights=PU", "did you mean objective.weights?"),
        ("stories-inverse", "objective.teacher.tableau=rk2", 'is not used by objective.teacher.kind = "none"'),
    ],
)
def test_a_key_that_is_not_used_is_an_error(name, override, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        load_recipe(name, [override])


def test_another_kind_begins_its_section_anew():
    """What the file said of the old kind goes; what the user says himself must still be used."""
    path = load_recipe("tiny-fewstep", ["objective.kind=path"]).objective
    assert path == PathConfig()
    none = load_recipe("tiny-fewstep", ["objective.teacher=none"]).objective
    assert none.teacher == NoTeacherConfig()
    assert load_recipe("tiny-fewstep", ["objective.teacher.kind=none"]).objective == none
    back = load_recipe(
        "stories-inverse", ["objective.teacher.kind=shortcut", "objective.teacher.tableau=rk2"]
    ).objective
    assert back.teacher == ShortcutConfig(tableau="rk2")
    assert back.weights == "PU"
    assert load_recipe("tiny-dfm", ["flow.schedule=cosine"]).flow.exponent is None
    assert load_recipe("tiny-dfm", ["flow.schedule=exponential"]).flow.rate == 2.0
    with pytest.raises(ValueError, match='not used by objective.kind = "path"'):
        load_recipe("tiny-fewstep", ["objective.kind=path", "objective.weights=PU"])


def test_other_text_has_a_corpus_of_its_own():
    assert load_recipe("tiny-dfm").data.corpus == "corpora/pydoc-2048"
    assert load_recipe("tiny-dfm", ["data.inputs=mine.txt"]).data.corpus is None
    assert load_recipe("tiny-dfm", ["data.inputs=mine.txt", "data.corpus=corpora/mine"]).data.corpus == "corpora/mine"


# --- what others add --------------------------------------------------------------------------------------------------

PLUGIN = """
from dataclasses import dataclass

from fsdfm.learn import PathObjective, register_objective


@dataclass(frozen=True, kw_only=True)
class MineConfig:
    kind: str = "mine-{name}"
    strength: float = 0.5


register_objective("mine-{name}", MineConfig, lambda config, path: PathObjective(path, h=config.strength))
"""


def test_a_recipe_may_name_plugins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_plugin_of_mine.py").write_text(PLUGIN.format(name="a"))
    (tmp_path / "r.toml").write_text(
        'plugins = ["a_plugin_of_mine"]\nobjective = { kind = "mine-a", strength = 0.25 }\n'
    )
    try:
        recipe = load_recipe(tmp_path / "r.toml")
        assert (recipe.objective.kind, recipe.objective.strength) == ("mine-a", 0.25)
        assert make_objective(recipe.objective, make_path(recipe.flow, 5)).h == 0.25
        (tmp_path / "again.toml").write_text(to_toml(recipe))
        assert load_recipe(tmp_path / "again.toml") == recipe
        with pytest.raises(ValueError, match='objective.weights is not used by objective.kind = "mine-a"'):
            load_recipe(tmp_path / "r.toml", ["objective.weights=PU"])
    finally:
        OBJECTIVES._entries.pop("mine-a", None)
    for name, sentence in (("no_such_module", "cannot be imported"), ("../x", "is no module")):
        with pytest.raises(ValueError, match=sentence):
            load_recipe("tiny-dfm", [f"plugins={name}"])


def test_a_name_that_ships_means_no_file_of_this_folder(tmp_path, monkeypatch):
    """A stranger's folder may hold a file `tiny-dfm` that names a plugin beside it: its code would run."""
    (tmp_path / "a_strangers_module.py").write_text("raise SystemExit('it ran')\n")
    (tmp_path / "tiny-dfm").write_text('plugins = ["a_strangers_module"]\n')
    monkeypatch.chdir(tmp_path)
    assert load_recipe("tiny-dfm").plugins == ()
    assert find_recipe("./tiny-dfm") == Path("tiny-dfm")
    assert find_recipe(tmp_path / "tiny-dfm") == tmp_path / "tiny-dfm"


def test_a_runs_own_recipe_imports_nothing(tmp_path, monkeypatch):
    """The folder of a run may come from a stranger: only the recipe that the user names runs code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_strangers_plugin.py").write_text("raise SystemExit('it ran')")
    text = to_toml(replace(load_recipe("tiny-dfm"), plugins=("a_strangers_plugin",)))
    (tmp_path / "recipe.toml").write_text(text)
    assert read_recipe(tmp_path / "recipe.toml").plugins == ("a_strangers_plugin",)
    (tmp_path / "recipe.toml").write_text(text.replace('kind = "path"', 'kind = "strange"'))
    with pytest.raises(ValueError, match="written by another version of fsdfm and cannot be resumed"):
        read_recipe(tmp_path / "recipe.toml")


@pytest.mark.parametrize("config", [int, type("Wrong", (), {"kind": "wrong"})], ids=["no dataclass", "no fields"])
def test_a_registration_needs_a_config(config):
    with pytest.raises(ValueError, match="must be a frozen dataclass with the field kind"):
        register_objective("mine", config, lambda config, path: None)
    with pytest.raises(ValueError, match="'path' is registered already, by fsdfm.learn.path"):
        register_objective("path", replace_kind("path"), lambda config, path: None)


def replace_kind(name):
    return make_dataclass("Other", [("kind", str, name)], frozen=True)
