import hashlib
import json
import os
import resource
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdfm.checkpoint import (
    Checkpoint,
    load_model,
    load_training,
    make_schedule,
    make_source,
    newest,
    recover,
    save_checkpoint,
    save_model,
)
from fsdfm.checkpoint import folder as module
from fsdfm.data import Tokenizer
from fsdfm.flow import (
    CosineSchedule,
    ExponentialSchedule,
    MaskSource,
    MixturePath,
    MixtureSource,
    PolynomialSchedule,
    UniformSource,
)
from fsdfm.model import DiT, ModelConfig

SHAPE = {"width": 16, "num_blocks": 1, "num_heads": 2, "cond_width": 8}


def bundle_of(path=None, *, seed=0, **options):
    path = path or MixturePath(UniformSource(257))
    model = DiT(ModelConfig(vocab_size=path.source.vocab_size, **SHAPE, **options), seed=seed)
    return Checkpoint(model, path, Tokenizer.bytes(), 32, facts={"objective": {"kind": "path"}})


def save_steps(folder, *steps, keep=2):
    for step in steps:
        tensors = {"model.w": torch.full((3,), float(step)), "optimiser.step.w": torch.tensor(float(step))}
        save_checkpoint(folder, bundle_of(seed=step), tensors, numbers={"training_step": step}, keep=keep)


def flip(path, byte=-10):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "path",
    [
        MixturePath(UniformSource(257), PolynomialSchedule(2.0)),
        MixturePath(MaskSource(258), CosineSchedule()),
        MixturePath(MixtureSource(258, 0.3), ExponentialSchedule(-1.0)),
    ],
    ids=str,
)
def test_a_model_comes_back_as_it_was(tmp_path, path):
    bundle = replace(bundle_of(path, conditioning="step"), budgets=(1, 2, 4), bos_id=3)
    save_model(tmp_path / "model", bundle)
    found = load_model(tmp_path / "model")
    assert (found.path.source, found.path.schedule) == (path.source, path.schedule)
    assert (found.length, found.budgets, found.bos_id) == (32, (1, 2, 4), 3)
    assert found.tokenizer.hash == bundle.tokenizer.hash
    assert found.model.config == bundle.model.config
    assert not found.model.training
    for name, value in bundle.model.state_dict().items():
        assert torch.equal(value, found.model.state_dict()[name]), name
    count = len(bundle.model.state_dict())
    assert f"loaded {count} of {count} tensors" in found.loaded
    assert found.facts["objective"] == {"kind": "path"}
    assert {"fsdfm", "python", "torch"} <= set(found.facts["versions"])
    assert "commit" in found.facts
    assert sum(p.requires_grad for p in found.model.parameters()) == len(list(found.model.parameters()))


def test_half_precision_halves_the_file_and_loads_as_float32(tmp_path):
    bundle = bundle_of()
    save_model(tmp_path / "whole", bundle)
    save_model(tmp_path / "half", bundle, dtype=torch.float16)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "half")]
    assert sizes[1] < 0.6 * sizes[0]
    found = load_model(tmp_path / "half")
    assert "float16" in found.loaded
    for name, value in bundle.model.state_dict().items():
        assert found.model.state_dict()[name].dtype == torch.float32
        assert torch.allclose(value, found.model.state_dict()[name], atol=1e-3), name
    assert load_model(tmp_path / "half", dtype=torch.float16).model.head.weight.dtype == torch.float16


def test_the_folder_describes_itself_without_pickle(tmp_path):
    folder = save_model(tmp_path / "model", bundle_of())
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "checksums.json",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    config = json.loads((folder / "config.json").read_text())
    assert config["format_version"] == module.FORMAT_VERSION
    assert config["source"]["name"] == "uniform"
    assert "32 tokens" in (folder / "README.md").read_text()
    (folder / "README.md").write_text("my own words")
    load_model(folder)


def test_a_model_is_never_written_over_something_else(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not empty"):
        save_model(tmp_path, bundle_of())
    (tmp_path / "empty").mkdir()
    save_model(tmp_path / "empty", bundle_of())
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_loading_is_strict(tmp_path, change):
    folder = save_model(tmp_path / "model", bundle_of())
    tensors = load_file(folder / "model.safetensors")
    if change == "missing":
        tensors.pop("head.bias")
    elif change == "unexpected":
        tensors["extra"] = torch.zeros(1)
    else:
        tensors["head.bias"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors")
    module._write_checksums(folder)
    with pytest.raises(ValueError, match=r"missing \['head.bias'\]|unexpected \['extra'\]|has shape \(1,\)"):
        load_model(folder)


def test_damage_is_found(tmp_path):
    folder = save_model(tmp_path / "model", bundle_of())
    flip(folder / "model.safetensors")
    with pytest.raises(ValueError, match="its content is not what was written"):
        load_model(folder)
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="has 5 bytes"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model.safetensors is missing"):
        load_model(folder)
    (folder / "checksums.json").write_text("{")
    with pytest.raises(ValueError, match="checksums.json cannot be used"):
        load_model(folder)


def test_a_foreign_tokenizer_is_found(tmp_path):
    folder = save_model(tmp_path / "model", bundle_of())
    other = Tokenizer.train(["some text " * 50], 260)
    (folder / "tokenizer.json").write_text(other.definition)
    module._write_checksums(folder)
    with pytest.raises(ValueError, match="not the tokenizer"):
        load_model(folder)


def test_a_newer_format_is_an_error_and_no_damage(tmp_path):
    save_steps(tmp_path / "checkpoints", 1, 2)
    folder = tmp_path / "checkpoints" / "step-0000000002"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "format_version": 99}))
    module._write_checksums(folder)
    for read in (lambda: load_model(tmp_path), lambda: newest(tmp_path / "checkpoints")):
        with pytest.raises(ValueError, match="format 99; this program reads up to 1: update fsdfm"):
            read()


def test_a_run_keeps_its_last_checkpoints(tmp_path):
    folder = tmp_path / "checkpoints"
    save_steps(folder, 1, 2, 3, 10)
    assert sorted(path.name for path in folder.iterdir()) == ["step-0000000003", "step-0000000010"]
    assert newest(folder) == (folder / "step-0000000010", [])
    tensors, numbers = load_training(folder / "step-0000000010")
    assert numbers == {"training_step": 10}
    assert tensors["model.w"].tolist() == [10.0] * 3
    found = load_model(tmp_path)
    assert torch.equal(found.model.embedding.weight, bundle_of(seed=10).model.embedding.weight)
    save_steps(folder, 10)  # the same step again takes its own place
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("file", ["model.safetensors", "training.safetensors", "config.json", "checksums.json"])
@pytest.mark.parametrize("how", ["truncated", "flipped", "gone"])
def test_the_previous_checkpoint_takes_over_from_a_damaged_one(tmp_path, file, how):
    folder = tmp_path / "checkpoints"
    save_steps(folder, 5, 6)
    path = folder / "step-0000000006" / file
    if how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "flipped":
        flip(path, byte=path.stat().st_size // 2)
    else:
        path.unlink()
    (folder / "step-0000000007.unfinished").mkdir()
    (folder / "step-0000000004.trash").mkdir()
    place, problems = recover(folder)
    assert place == folder / "step-0000000005"
    assert "step-0000000006" in problems[0]
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step-0000000005", "step-0000000006.damaged"]
    save_steps(folder, 6)
    assert newest(folder) == (folder / "step-0000000006", [])


def test_without_a_whole_checkpoint_nothing_is_started_over(tmp_path):
    save_steps(tmp_path, 1)
    flip(tmp_path / "step-0000000001" / "model.safetensors")
    with pytest.raises(ValueError, match="no checkpoint in .* is whole"):
        recover(tmp_path)
    assert (tmp_path / "step-0000000001").exists()
    assert newest(tmp_path / "nothing") == (None, [])


def test_a_full_disk_loses_nothing(tmp_path):
    """A real failure in the middle of a write: no file of this process may grow beyond a few kilobytes."""
    save_steps(tmp_path, 1, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(ValueError, match="what was saved before is untouched"):
            save_steps(tmp_path, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000001", "step-0000000002"]
    assert newest(tmp_path) == (tmp_path / "step-0000000002", [])


def test_folders_without_a_model_say_so(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no checkpoint"):
        load_model(tmp_path)
    save_model(tmp_path / "model", bundle_of())
    with pytest.raises(ValueError, match="no training state"):
        load_training(tmp_path / "model")


def test_unknown_parts_are_errors(tmp_path):
    with pytest.raises(ValueError, match="allowed are uniform, mask, mixture"):
        make_source({"name": "tea", "vocab_size": 3})
    with pytest.raises(ValueError, match="allowed are polynomial"):
        make_schedule({"name": "tea"})

    class Mine(UniformSource):
        pass

    with pytest.raises(ValueError, match="no name in checkpoints"):
        save_model(tmp_path / "model", bundle_of(MixturePath(Mine(257))))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_stored_as_safetensors_stores_them(tmp_path, dtype):
    tensors = {
        "step": torch.tensor(3.0),
        "mask": torch.tensor([True, False, True]),
        "ids": torch.arange(5),
        "weight": torch.rand(4, 6).T,
        "bytes": torch.arange(7, dtype=torch.uint8),
        "naïve": torch.zeros(0, 3),
    }
    module._write_tensors(tmp_path / "a", tensors, dtype)
    stored = {name: value.to(dtype if value.is_floating_point() else value.dtype) for name, value in tensors.items()}
    found = load_file(tmp_path / "a")
    assert found.keys() == stored.keys()
    for name, value in stored.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)
    save_file({name: value.contiguous() for name, value in stored.items()}, tmp_path / "b")  # wide types first
    ours, theirs = ((tmp_path / name).read_bytes().partition(b"}}")[2].lstrip(b" ") for name in "ab")
    assert ours == theirs


def test_a_lazy_mapping_of_weights_is_taken_one_by_one(tmp_path):
    bundle = bundle_of(seed=3)
    taken = []

    class Lazy(dict):
        def __getitem__(self, name):
            taken.append(name)
            return super().__getitem__(name)

    with torch.device("meta"):
        shapes = DiT(bundle.model.config)
    weights = Lazy(bundle.model.state_dict())
    save_model(tmp_path / "lazy", replace(bundle, model=shapes), tensors=weights)
    save_model(tmp_path / "whole", bundle)
    assert sorted(taken) == sorted(weights)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("lazy", "whole")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": "32"}, "length is '32'"),
        ({"length": 10**9}, "length is 1000000000"),
        ({"budgets": [0]}, "budgets is"),
        ({"budgets": []}, "budgets is"),
        ({"budgets": [10**400]}, "budgets is"),
        ({"model": {**SHAPE, "vocab_size": 257, "canvas": 2**40}}, "canvas is 1099511627776, longer than its texts"),
        ({"model": {**SHAPE, "vocab_size": 257, "canvas": 8, "window": 2**60}}, "window is 1152921504606846976"),
        ({"model": {**SHAPE, "vocab_size": 257, "rotary_factor": 1e308}}, "rotary scaling is 'ntk' by 1e.308; allowed"),
        ({"model": {**SHAPE, "vocab_size": 257, "rotary_factor": "2"}}, "rotary scaling is 'ntk' by '2'; allowed"),
        ({"bos_id": 257}, "bos_id is 257"),
        ({"source": {"name": "uniform", "vocab_size": 258}}, "source is"),
        ({"source": {"name": "uniform", "vocab_size": "x"}}, "cannot be used"),
        ({"schedule": {"name": "cosine", "exponent": 2}}, "cannot be used"),
        ({"model": {**SHAPE, "vocab_size": 257, "num_blocks": 10**9}}, "too few for 1000000000 blocks"),
        ({"model": {**SHAPE, "vocab_size": 10**18, "width": 2**60}}, "source is|cannot be used"),
    ],
)
def test_a_config_that_nobody_wrote_is_refused(tmp_path, change, words):
    folder = save_model(tmp_path / "model", bundle_of())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    module._write_checksums(folder)
    with pytest.raises(ValueError, match=words):
        load_model(folder)


@pytest.mark.parametrize("budgets", [(), (0,), (2, "4"), (2**30,)])
def test_budgets_of_a_checkpoint_are_steps(budgets):
    with pytest.raises(ValueError, match="budgets is .*; allowed are whole numbers from 1 to 1048576"):
        replace(bundle_of(), budgets=budgets)


def test_whole_numbers_are_no_weights(tmp_path):
    folder = save_model(tmp_path / "model", bundle_of())
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "head.bias": tensors["head.bias"].to(torch.int32)}, folder / "model.safetensors")
    module._write_checksums(folder)
    with pytest.raises(ValueError, match=r"head.bias holds torch.int32"):
        load_model(folder)


def test_checksums_may_not_name_files_elsewhere(tmp_path):
    save_steps(tmp_path / "checkpoints", 1)
    folder = tmp_path / "checkpoints" / "step-0000000001"
    sums = json.loads((folder / "checksums.json").read_text())
    (folder / "checksums.json").write_text(json.dumps({**sums, "/dev/zero": {"bytes": 0, "sha256": ""}}))
    with pytest.raises(ValueError, match="not a file of a checkpoint"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["checksums.json", "config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "zero", "folder"])
def test_a_checkpoint_is_plain_files(tmp_path, name, kind):
    """A pipe would be waited for, /dev/zero read for ever; checksums that agree with them change nothing."""
    folder = save_model(tmp_path / "model", bundle_of())
    sums = json.loads((folder / "checksums.json").read_text())
    sums[name] = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    (folder / "checksums.json").write_text(json.dumps(sums))
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "zero":
        (folder / name).symlink_to("/dev/zero")
    else:
        (folder / name).mkdir()
    with pytest.raises(ValueError, match="not a plain file|not a file of a checkpoint"):
        load_model(folder)


def test_weights_beyond_the_machine_are_not_even_read(tmp_path):
    """A sparse file of a terabyte costs its sender nothing, and its checksum hours."""
    folder = save_model(tmp_path / "model", bundle_of())
    sums = json.loads((folder / "checksums.json").read_text())
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(2**42)
    sums["model.safetensors"]["bytes"] = 2**42
    (folder / "checksums.json").write_text(json.dumps(sums))
    with pytest.raises(ValueError, match="more than this machine's memory"):
        load_model(folder)


def test_every_file_but_the_card_has_its_checksum(tmp_path):
    save_steps(tmp_path / "checkpoints", 1)
    folder = tmp_path / "checkpoints" / "step-0000000001"
    sums = json.loads((folder / "checksums.json").read_text())
    assert set(sums) == {path.name for path in folder.iterdir()} - {"README.md", "checksums.json"}
    assert {"training.json", "training.safetensors", "config.json", "model.safetensors"} <= set(sums)
    for name in ("training.json", "training.safetensors"):
        (folder / "checksums.json").write_text(json.dumps({key: sums[key] for key in sums if key != name}))
        with pytest.raises(ValueError, match=f"no checkpoint .* is whole .*{name}"):
            newest(tmp_path / "checkpoints")
