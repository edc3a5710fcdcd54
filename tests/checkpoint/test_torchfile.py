"""The reader of .pth files: an honest file reads as torch reads it, and nothing in a hostile one is run or believed."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
import time
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fsdfm.checkpoint import pickled
from fsdfm.checkpoint.torchfile import StoredTensor, TorchFile


def write_archive(path: Path, program: bytes, storages: dict[str, bytes] | None = None, *, method: int = 0) -> Path:
    """A .pth file with any pickle."""
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("archive/data.pkl", program)
        for key, content in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", content)
    return path


def assert_same(found: object, expected: object, file: TorchFile) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, StoredTensor)
        value = file.read(found)
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)
        assert value.is_contiguous()
    elif isinstance(expected, dict):
        assert isinstance(found, dict)
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value, file)
    else:
        assert found == expected


# --- honest files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_saves_is_read(protocol: int, tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    content = {
        "numbers": [1, -5, 300, 70_000, 2**40, 1.5, True, None, "naïve", (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {}],
        "whole": base,
        "transposed": base.T,
        "part": base[1:3, 2:5],
        "again": base,
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "half": base.half(),
        "bfloat16": base.bfloat16(),
        "double": base.double(),
        "integers": {5: torch.arange(3), 6: torch.tensor([True, False])},
        "ordered": OrderedDict(a=1),
        "default": defaultdict(int, a=1),
    }
    torch.save(content, tmp_path / "a.pth", pickle_protocol=protocol)
    with TorchFile(tmp_path / "a.pth") as file:
        assert_same(file.content, content, file)
        assert file.content["whole"].storage is not None
        assert file.content["again"].storage == file.content["whole"].storage


def test_modules_parameters_and_what_stands_beside_them_are_read(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    beside = {"best": np.float64(0.5), "array": np.zeros(3), "device": torch.device("cpu"), "dtype": torch.float32}
    torch.save({**beside, "model": module.state_dict(), "w": module.weight}, tmp_path / "a.pth")
    with TorchFile(tmp_path / "a.pth") as file:
        assert_same(file.content["model"], dict(module.state_dict()), file)
        assert_same(file.content["w"], module.weight.detach(), file)
        assert set(file.content) == {*beside, "model", "w"}


def test_zip64_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of members beyond 4 GiB, brought about by calling 50 bytes too many."""
    torch.save({"a": torch.arange(100.0)}, tmp_path / "a.pth")
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 50)
    with zipfile.ZipFile(tmp_path / "a.pth") as old, zipfile.ZipFile(tmp_path / "b.pth", "w") as new:
        for name in old.namelist():
            with new.open(name, "w", force_zip64=True) as member:
                member.write(old.read(name))
    content = (tmp_path / "b.pth").read_bytes()
    assert b"PK\6\6" in content
    assert b"\xff\xff\xff\xff" in content
    with TorchFile(tmp_path / "b.pth") as file:
        assert torch.equal(file.read(file.content["a"]), torch.arange(100.0))
    end = content.rindex(b"PK\5\6")  # whose numbers may stand in the larger record before it, all or some
    for first, width in ((10, 2), (12, 4), (16, 4)):
        (tmp_path / "c.pth").write_bytes(content[: end + first] + b"\xff" * width + content[end + first + width :])
        with TorchFile(tmp_path / "c.pth") as file:
            assert torch.equal(file.read(file.content["a"]), torch.arange(100.0))
    place = content.rindex(b"PK\6\7")
    (tmp_path / "d.pth").write_bytes(
        content[:place] + b"no" + content[place + 2 : end + 10] + b"\xff\xff" + content[end + 12 :]
    )
    with pytest.raises(ValueError, match="the end of its zip directory is broken"):
        TorchFile(tmp_path / "d.pth")


# --- files of another kind --------------------------------------------------------------------------------------------


def test_other_formats_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file.pth"
    torch.save({"a": torch.zeros(3)}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"PyTorch before 1\.6"):
        TorchFile(file)
    with tarfile.open(file, "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO())
    with pytest.raises(ValueError, match=r"PyTorch before 1\.6"):
        TorchFile(file)
    save_file({"a": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match="is a safetensors file"):
        TorchFile(file)
    for content in (b"", b"PK", b"version https://git-lfs.github.com/spec/v1\n", b"\0" * 70_000):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="is no .pth file, or it is cut off"):
            TorchFile(file)
    for path in (tmp_path, tmp_path / "nothing", Path(os.devnull)):
        with pytest.raises(ValueError, match="is not a file"):
            TorchFile(path)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("word/document.xml", "text")
    with pytest.raises(ValueError, match=r"holds data.pkl 0 times"):
        TorchFile(file)


def test_a_big_endian_machines_file_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3)}, tmp_path / "a.pth")
    with zipfile.ZipFile(tmp_path / "a.pth") as old, zipfile.ZipFile(tmp_path / "b.pth", "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("byteorder") else old.read(name))
    with pytest.raises(ValueError, match="little-endian"):
        TorchFile(tmp_path / "b.pth")


# --- hostile files ----------------------------------------------------------------------------------------------------


class Canary:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_no_code_is_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    torch.save({"model": {"a": torch.zeros(3)}, "step": Canary(canary)}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"names '(posix|nt)\.mkdir', which no weights need"):
        TorchFile(tmp_path / "a.pth")
    for program in (
        b"cos\nsystem\n(X\x09\x00\x00\x00touch hoottR.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
        b"(S'1'\nios\nsystem\n.",
        b"\x80\x02c__builtin__\ngetattr\n.",
    ):
        with pytest.raises(ValueError, match="cannot be read safely"):
            TorchFile(write_archive(tmp_path / "b.pth", program))
    assert not canary.exists()
    torch.load(tmp_path / "a.pth", weights_only=False)  # the canary works
    assert canary.exists()


def long_string(size: int) -> bytes:
    return b"X" + struct.pack("<I", size)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (b"", "is broken"),
        (b"S" + b"\xb0" * 10_000 + b"\n.", "is broken"),  # whose content pickletools would quote
        (b".", "is broken"),
        (b"}u.", "is broken"),
        (b"h\x05.", "is broken"),
        (b"\x80\x02]}s.", "is broken"),
        (b"N(K\x01K\x02u.", "sets items of something"),
        (b"NNa.", "appends to something"),
        (b"K\x01)R.", "calls something"),
        (b"K\x01Q.", "arguments are no tuple"),
        (b")Q.", "a storage has another form"),
        (b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b".", "cannot be read safely"),
        (long_string(2**32 - 1) + b"abc.", "cannot be read safely"),
        (b"\x8d" + struct.pack("<Q", 2**63) + b"abc.", "cannot be read safely"),
        (b"\x80\x02" + b"}" * (pickled.MOST_OPCODES + 1) + b".", "more than 1000000 opcodes"),
        (b"\x80\x02" + b"(" * 90_000 + b"t" * 9_000 + b".", "does not end with one object"),
        (b"I" + b"9" * 100_000 + b"\n.", "cannot be read safely"),
        (b"\xff.", "cannot be read safely"),
        (b"\x80\x02]" + long_string(4) + b"\xff\xff\xff\xff.", "cannot be read safely"),
        (b"K\x01" * 3 + b".", "one object"),
        (b" " * (pickled.LONGEST_PROGRAM + 1), "has a pickle of"),
    ],
)
def test_broken_and_huge_programs_are_refused(program: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        TorchFile(write_archive(tmp_path / "a.pth", program))
    assert len(str(caught.value)) < 500


def test_a_huge_memo_index_and_nested_tuples_as_keys_cost_nothing(tmp_path: Path) -> None:
    memo = b"}r" + struct.pack("<I", 2**32 - 1) + b"."
    doubled = b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(1, 60))  # x -> (x, x), 60 times: 2**60 leaves
    start = time.process_time()
    for program in (memo, b"}K\x01" + doubled + b"K\x01s."):
        with TorchFile(write_archive(tmp_path / "a.pth", program)) as file:
            assert file.content == {}
    assert time.process_time() - start < 5


def tensor_program(*, key: bytes = b"0", num_values: int = 6, offset: int = 0, shape: object, stride: object) -> bytes:
    """{"a": tensor} as torch writes it, with any numbers."""

    def raw(value: object) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    return (
        b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n("
        + b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        + raw(key.decode())
        + raw("cpu")
        + raw(num_values)
        + b"tQ"
        + raw(offset)
        + raw(shape)
        + raw(stride)
        + b"\x89}tRs."
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": (2, 3), "stride": (3, 1), "key": b"../0"}, "should have 24 bytes, and none are there"),
        ({"shape": (2**40,), "stride": (1,), "num_values": 2**40}, "should have 4398046511104 bytes"),
        ({"shape": (2, 4), "stride": (3, 1)}, "more values than its storage"),
        ({"shape": (2, 3), "stride": (3, 1), "offset": 1}, "more values than its storage"),
        ({"shape": (2**40, 2**40), "stride": (0, 0)}, "repeats 1 values"),
        ({"shape": (4, 3), "stride": (1, 1)}, "repeats 6 values"),
        ({"shape": (-1, 3), "stride": (3, 1)}, "no whole number in range"),
        ({"shape": (2, 3), "stride": (-3, 1)}, "no whole number in range"),
        ({"shape": (2, 3), "stride": (3, 1), "offset": -1}, "no whole number in range"),
        ({"shape": (2, 3), "stride": (3, 1), "num_values": 2**70}, "no whole number in range"),
        ({"shape": (2, 3), "stride": (3, True)}, "no whole number in range"),
        ({"shape": (2, 3), "stride": (3, 1.0)}, "no whole number in range"),
        ({"shape": (2, 3), "stride": (1,)}, "a tensor has no shape"),
        ({"shape": "23", "stride": "31"}, "a tensor has no shape"),
        ({"shape": (1,) * 9, "stride": (1,) * 9}, "9 dimensions"),
    ],
)
def test_numbers_that_the_file_does_not_hold_are_refused(
    options: dict[str, object], words: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(ValueError, match=words),
        TorchFile(write_archive(tmp_path / "a.pth", tensor_program(**options), {"0": bytes(24)})) as file,  # type: ignore[arg-type]
    ):
        file.read(file.content["a"])


def test_the_program_above_is_honest_where_its_numbers_are(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32)
    program = tensor_program(shape=(3, 2), stride=(1, 3))
    with TorchFile(write_archive(tmp_path / "a.pth", program, {"0": values.tobytes()})) as file:
        assert torch.equal(file.read(file.content["a"]), torch.from_numpy(values).view(2, 3).T)


def test_zip_bombs_are_refused(tmp_path: Path) -> None:
    program = tensor_program(shape=(2**28,), stride=(1,), num_values=2**28)
    bomb = write_archive(tmp_path / "a.pth", program, {"0": bytes(2**24)}, method=zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="compressed or encrypted"):
        TorchFile(bomb)
    write_archive(bomb, program, {"0": bytes(1000), "1": bytes(1000)})
    content = bytearray(bomb.read_bytes())
    second, first = content.rfind(b"PK\1\2"), content.rfind(b"PK\1\2", 0, content.rfind(b"PK\1\2"))
    content[second + 42 : second + 46] = content[first + 42 : first + 46]  # both members begin at the same byte
    bomb.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="share bytes"):
        TorchFile(bomb)


def test_damage_is_found_in_whole_and_partly_read_storages(tmp_path: Path) -> None:
    base = torch.rand(1000)
    torch.save({"whole": base, "part": base[10:20], "other": torch.rand(5)}, tmp_path / "a.pth")
    content = bytearray((tmp_path / "a.pth").read_bytes())
    content[content.find(base.numpy().tobytes()) + 2000] ^= 1  # inside `whole`, outside `part`
    (tmp_path / "a.pth").write_bytes(bytes(content))
    with TorchFile(tmp_path / "a.pth") as file:
        for name in ("whole", "part"):
            with pytest.raises(ValueError, match="not what was written"):
                file.read(file.content[name])
        file.read(file.content["other"])


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    torch.save({"a": torch.rand(100_000)}, tmp_path / "a.pth")
    with TorchFile(tmp_path / "a.pth") as file:
        os.truncate(tmp_path / "a.pth", 5000)
        with pytest.raises(ValueError, match="became shorter"):
            file.read(file.content["a"])
