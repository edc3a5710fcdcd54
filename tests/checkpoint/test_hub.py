"""The hub: names, downloads into the hub's cache, revisions, private models, no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fsdfm
from fsdfm.checkpoint import load_model
from fsdfm.checkpoint.embedded import find_model, name_of
from fsdfm.checkpoint.hub import HubName, find_hub_name, read_hub_name, upload
from fsdfm.run import import_weights
from hub_stand_in import Hub, Repository, run_hub, use_hub
from huggingface_folders import save_family
from tiny_models import save_tiny


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    with run_hub() as hub:
        use_hub(monkeypatch, hub.address, tmp_path / "cache")
        yield hub


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("ann/stories", HubName("ann/stories")),
        ("ann/stories@v1.0", HubName("ann/stories", "v1.0")),
        ("hf:ann/stories@refs/pr/1", HubName("ann/stories", "refs/pr/1")),
        ("here/stories", None),
        ("hf:here/stories", HubName("here/stories")),
        ("runs/stories", None),
        ("./ann/stories", None),
        ("ann/stories/step-1", None),
        ("parent", None),
    ],
)
def test_what_is_here_wins(word: str, name: HubName | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert find_hub_name(word) == name


@pytest.mark.parametrize("word", ["ann", "hf:ann", "ann/../x", "ann/b@", "a/b@../../x", "a b/c", ""])
def test_names_that_are_none(word: str) -> None:
    with pytest.raises(ValueError, match="no name of a model on the hub"):
        read_hub_name(word)


def test_a_model_is_loaded_by_its_name_and_revision(hub: Hub, tmp_path: Path) -> None:
    first, second = save_tiny(tmp_path / "first", seed=1), save_tiny(tmp_path / "second", seed=2)
    old = hub.add("ann/tiny", first)
    hub.add("ann/tiny", second)
    hub.add("ann/tiny", first, branch="v1")
    texts = {where: fsdfm.load(where).generate(length=12, steps=2).text for where in (str(first), str(second))}
    assert texts[str(first)] != texts[str(second)]
    for name, folder in (("ann/tiny", second), ("ann/tiny@v1", first), (f"ann/tiny@{old}", first)):
        lm = fsdfm.load(name)
        assert lm.generate(length=12, steps=2).text == texts[str(folder)]
        assert "from ann/tiny@" in lm.checkpoint.loaded  # not the path of a cache
    assert name_of(find_model("ann/tiny@v1")).startswith("ann/tiny@")


def test_what_was_downloaded_works_without_a_network(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("ann/tiny", save_tiny(tmp_path / "model"))
    text = fsdfm.load("ann/tiny").generate(length=12, steps=2).text
    asked = len(hub.asked)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fsdfm.load("ann/tiny").generate(length=12, steps=2).text == text
    with pytest.raises(ValueError, match="ann/other is no folder here, is not whole in the hub's cache"):
        fsdfm.load("ann/other")
    assert len(hub.asked) == asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")  # nobody listens
    assert fsdfm.load("ann/tiny").generate(length=12, steps=2).text == text
    with pytest.raises(ValueError, match="the hub cannot be reached; connect"):
        fsdfm.load("ann/other")


def test_private_models_are_the_login_s_affair(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("ann/secret", save_tiny(tmp_path / "model"), private=True)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ValueError, match="ann/secret is not on the hub, or is private; .* hf auth login"):
        fsdfm.load("ann/secret")
    use_hub(monkeypatch, hub.address, tmp_path / "cache")
    assert load_model("ann/secret").length == 16


def test_what_is_not_there_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    hub.add("ann/tiny", save_tiny(tmp_path / "model"))
    with pytest.raises(ValueError, match="ann/none is not on the hub"):
        fsdfm.load("ann/none")
    with pytest.raises(ValueError, match="has no revision 'v9'"):
        fsdfm.load("ann/tiny@v9")


def test_strangers_folders_are_checked_as_ever(hub: Hub, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "training.json").write_text("{}")
    hub.add("eve/tiny", folder)
    assert {file.name for file in find_model("eve/tiny").iterdir()}.isdisjoint({"modeling.py", "training.json"})
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    hub.add("eve/damaged", folder)
    with pytest.raises(ValueError, match="is damaged: its content is not what was written"):
        fsdfm.load("eve/damaged")


@pytest.mark.parametrize("load", [fsdfm.load, lambda name: import_weights(name, Path("out"))], ids=["load", "import"])
@pytest.mark.parametrize("listed", ["../../../../x.safetensors", "/x.safetensors", "a/../../x.safetensors"])
def test_files_of_a_repository_stay_in_the_cache(load: Callable[[str], object], listed: str, hub: Hub) -> None:
    """What a stranger's list names outside of the folder is neither asked for nor written."""
    hub.repositories["eve/tiny"] = Repository()
    hub.repositories["eve/tiny"].commit("main", {"config.json": b"{}", listed: b"x", "README.md": b"words"})
    with pytest.raises(ValueError, match="no checkpoint of fsdfm|no weights|safetensors"):
        load("eve/tiny")
    assert {path.name for path in Path.cwd().iterdir()} == {"cache"}
    assert not [*Path.cwd().rglob("x.safetensors")]


def test_other_people_s_weights_are_imported_not_loaded(hub: Hub, tmp_path: Path) -> None:
    save_family("smollm2", tmp_path / "hf")
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(b"a pickle that nobody asked for")
    hub.add("bob/llama", tmp_path / "hf")
    hub.add("ann/tiny", save_tiny(tmp_path / "model"))
    with pytest.raises(ValueError, match="no checkpoint of fsdfm; make one of it: fsdfm import bob/llama"):
        fsdfm.load("bob/llama")
    assert not any("safetensors" in asked for asked in hub.asked)  # told by its config alone
    bundle = import_weights("bob/llama", tmp_path / "out")
    assert bundle.facts["imported"]["file"].startswith("bob/llama@")
    assert not any("pytorch_model" in asked for asked in hub.asked)
    with pytest.raises(ValueError, match="is a checkpoint of fsdfm already"):
        import_weights("ann/tiny", tmp_path / "other")


def test_a_private_upload_never_lands_in_public(hub: Hub, tmp_path: Path) -> None:
    hub.add("ann/open", save_tiny(tmp_path / "model"))
    before = hub.files("ann/open")
    with pytest.raises(ValueError, match="ann/open is public already; nothing was uploaded"):
        upload(tmp_path / "model", HubName("ann/open"), private=True)
    assert hub.files("ann/open") == before
    upload(tmp_path / "model", HubName("ann/closed"), private=True)
    assert hub.repositories["ann/closed"].private
    assert json.loads(hub.files("ann/closed")["config.json"])["format"] == "fsdfm"


def test_an_upload_without_a_login(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ValueError, match="hf auth login"):
        upload(save_tiny(tmp_path / "model"), HubName("ann/new"))
    assert "ann/new" not in hub.repositories
