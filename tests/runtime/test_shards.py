import os
import pickle
import warnings

import pytest
import torch
from torch.distributed.checkpoint import metadata as stored
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.state_dict_saver import save

from fsdfm.runtime.shards import INDEX, load_shards

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(4, dtype=torch.bfloat16),
    "count": torch.tensor(7, dtype=torch.int64),
}


@pytest.fixture
def folder(tmp_path):
    """A training state as torch writes it, by one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process alone writes it is meant
        save(dict(TENSORS), storage_writer=FileSystemWriter(tmp_path, sync_files=False), no_dist=True)
    return tmp_path


def rewrite(folder, change):
    index = pickle.loads((folder / INDEX).read_bytes())
    change(index)
    (folder / INDEX).write_bytes(pickle.dumps(index))


def test_what_torch_wrote_comes_back(folder):
    found = load_shards(folder)
    assert found.keys() == TENSORS.keys()
    for name, value in found.items():
        assert value.dtype == TENSORS[name].dtype
        assert torch.equal(value, TENSORS[name])


def program(module, name, argument):
    """A pickle that calls module.name(argument)."""
    encoded = argument.encode()
    words = b"".join(b"\x8c" + bytes([len(word)]) + word for word in (module.encode(), name.encode()))
    return b"\x80\x04" + words + b"\x93\x8c" + bytes([len(encoded)]) + encoded + b"\x85R."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "FileSystem"),
        ("torch.distributed.tensor", "torch.os.system"),
        ("torch", "os.system"),
        ("torch", "load"),
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "getattr"),
        ("builtins", "eval"),
        ("torch.serialization", "load"),
    ],
)
def test_an_index_runs_nothing(folder, module, name):
    """A foreign run's index names a function; a prefix of its module, or a dot in its name, does not make it ours."""
    sign = folder / "sign"
    (folder / INDEX).write_bytes(program(module, name, f"touch {sign}"))
    with pytest.raises(ValueError, match="cannot be used"):
        load_shards(folder)
    assert not sign.exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", b"not a pickle", b"\x80\x04]\x94.", b"\x80\x04}\x94h\x07."])
def test_what_is_no_index_is_one_sentence(folder, content):
    (folder / INDEX).write_bytes(content)
    with pytest.raises(ValueError, match="no training state of fsdfm"):
        load_shards(folder)


def with_path(path):
    def change(index):
        for key, entry in index.storage_data.items():
            index.storage_data[key] = _StorageInfo(path, entry.offset, entry.length)

    return change


@pytest.mark.parametrize("path", ["/dev/zero", "../elsewhere", "missing.distcp", "pipe"])
def test_an_index_names_only_files_of_its_folder(folder, path):
    os.mkfifo(folder / "pipe")
    rewrite(folder, with_path(path))
    with pytest.raises(ValueError, match="none of this folder"):
        load_shards(folder)


def test_sizes_are_checked_before_memory_is_taken(folder):
    def grow(index):
        entry = index.state_dict_metadata["a"]
        entry.size = torch.Size([10**6, 10**6])
        entry.chunks = [stored.ChunkStorageMetadata(torch.Size([0, 0]), entry.size)]

    rewrite(folder, grow)
    with pytest.raises(ValueError, match="describes 40000000000"):
        load_shards(folder)


def test_transformed_files_are_refused(folder):
    def change(index):
        for entry in index.storage_data.values():
            entry.transform_descriptors = ["zstd"]

    rewrite(folder, change)
    with pytest.raises(ValueError, match="transformed"):
        load_shards(folder)


@pytest.mark.parametrize("program", [b"\x80\x04Nr\xff\xff\xff\x0f.", b"\x80\x00Np999999999\n."])
def test_a_place_far_away_makes_no_room(tmp_path, program):
    """A pickle of nine bytes made the reader take gigabytes: it notes None at place 2^28."""
    (tmp_path / INDEX).write_bytes(program)
    with pytest.raises(ValueError, match="it notes a value at the place"):
        load_shards(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "zero"])
def test_an_index_is_a_plain_file(tmp_path, kind):
    os.mkfifo(tmp_path / INDEX) if kind == "pipe" else (tmp_path / INDEX).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="not a plain file"):
        load_shards(tmp_path)


def test_sizes_below_zero_do_not_hide_others(folder):
    def change(index):
        index.state_dict_metadata["a"].size = torch.Size((-(2**40),))
        index.state_dict_metadata["half"].size = torch.Size((2**40,))

    rewrite(folder, change)
    with pytest.raises(ValueError, match="of the size"):
        load_shards(folder)
