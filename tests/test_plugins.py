import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdfm.config import load_recipe
from fsdfm.plugins import import_plugin, imported_plugins

ROOT = Path(__file__).parents[1]


def run(*arguments, folder, **environment):
    """The real command in a process of its own, in a folder."""
    command = [sys.executable, "-m", "fsdfm", *arguments]
    environment = {"PATH": "", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_file_is_imported_once_with_its_neighbours(tmp_path, monkeypatch):
    (tmp_path / "neighbour_of_it.py").write_text("VALUE = 3\n")
    (tmp_path / "a_file_of_mine.py").write_text("import neighbour_of_it\nBOTH = [neighbour_of_it.VALUE]\n")
    before = list(sys.path)
    import_plugin(str(tmp_path / "a_file_of_mine.py"))
    module = sys.modules["a_file_of_mine"]
    assert module.BOTH == [3]
    monkeypatch.chdir(tmp_path)
    import_plugin("a_file_of_mine.py")
    import_plugin("a_file_of_mine")
    assert sys.modules["a_file_of_mine"] is module
    assert imported_plugins()[-2:] == (str(tmp_path / "a_file_of_mine.py"), "a_file_of_mine")
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("missing.py", None, "there is no plugin .*missing.py; give the path of a Python file"),
        ("no_such_module", None, "cannot be imported .ModuleNotFoundError.*in the current folder or be installed"),
        ("../there", None, "is no module; give a file such as my_network.py"),
        (3, None, "the plugin 3 is no module"),
        ("half_written.py", "def f(:\n", "cannot be imported .SyntaxError.*half_written.py, line 1.+mend it"),
        ("it_raises.py", "x = 1\nx.y\n", "cannot be imported .AttributeError.*it_raises.py, line 2.; mend it"),
        ("json.py", "", "has the name of another module, .*json.__init__.py; rename the file"),
    ],
)
def test_what_cannot_be_imported_is_one_sentence(name, text, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    before = imported_plugins(), list(sys.path)
    with pytest.raises(ValueError, match=sentence) as caught:
        import_plugin(name)
    assert "\n" not in str(caught.value)
    assert (imported_plugins(), sys.path) == before


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a checkpoint of an own network, made by the example; the example's file stands elsewhere."""
    folder = tmp_path_factory.mktemp("own")
    subprocess.run([sys.executable, ROOT / "examples" / "own_network.py"], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_an_own_network_goes_the_whole_way_on_the_command_line(trained):
    plugin = str(ROOT / "examples" / "own_network.py")
    unknown = run("generate", "the ", "--model", "conv", folder=trained)
    assert unknown.returncode == 2
    assert "architecture is 'conv'" in unknown.stderr
    assert "fsdfm --plugin FILE.py COMMAND" in unknown.stderr
    assert unknown.stderr.count("\n") == 1
    done = run("--plugin", plugin, "generate", "the ", "--model", "conv", "--steps", "4", folder=trained)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the ")
    named = run("generate", "the ", "--model", "conv", "--steps", "4", folder=trained, FSDFM_PLUGINS=plugin)
    assert named.stdout == done.stdout
    measured = ["evaluate", "conv", "--steps", "2", "--num", "4", "--metrics", "diversity", "--processes", "2"]
    done = run("--plugin", plugin, *measured, "--json", "result.json", folder=trained)
    assert done.returncode == 0, done.stderr
    assert (trained / "result.json").exists()


@pytest.mark.parametrize("beside", ["run.json", "checkpoints", "metrics.jsonl", "training.safetensors"])
@pytest.mark.parametrize("spelt", ["a_strangers_run_{}.py", "a_strangers_run_{}"])
def test_a_runs_own_recipe_names_nothing_to_import(beside, spelt, tmp_path, monkeypatch, capsys):
    """A run's folder of a stranger runs no code on `fsdfm train FOLDER/recipe.toml`, `fsdfm plan` and the like."""
    monkeypatch.chdir(tmp_path)
    name = f"{beside[:3]}{len(spelt)}"
    plugin, file = spelt.format(name), Path(f"a_strangers_run_{name}.py")
    file.write_text("import pathlib\npathlib.Path('it_ran').touch()\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text(f"plugins = [{plugin!r}]\n")
    (tmp_path / "run" / beside).write_text("{}")
    with pytest.raises(ValueError, match=f"stands in a run's folder and names the plugin '{plugin}'.*--plugin FILE.py"):
        load_recipe("run/recipe.toml")
    assert not Path("it_ran").exists()
    import_plugin(str(file))  # the user's own word
    assert load_recipe("run/recipe.toml").plugins == (plugin,)
    assert capsys.readouterr().err == ""


def test_a_recipe_says_what_it_imports(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("told_before.py").write_text("print('imported')\n")
    Path("mine.toml").write_text('plugins = ["told_before.py"]\n')
    for _ in range(2):  # once: then it is imported
        assert load_recipe("mine.toml").plugins == ("told_before.py",)
    told = capsys.readouterr()
    assert (told.err, told.out) == ("mine.toml names the plugin told_before.py: importing it\n", "imported\n")


def test_a_bad_plugin_is_one_sentence_before_the_command(tmp_path):
    done = run("--plugin", "missing.py", "generate", "--model", "nowhere", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no plugin missing.py")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["plugin", "plugins", "module", "architecture"])
def test_a_checkpoint_names_no_module_to_import(key, trained, tmp_path):
    """What a stranger's config.json says is never imported, whatever it calls it."""
    shutil.copytree(trained / "conv", tmp_path / "conv")
    (tmp_path / "a_strangers_module.py").write_text("open('it_ran', 'w')\n")
    file = tmp_path / "conv" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: "a_strangers_module"}))
    done = run("generate", "the ", "--model", "conv", folder=tmp_path)
    assert done.returncode == 2, done.stdout
    assert not (tmp_path / "it_ran").exists()
