"""Mangle files, load them, and watch: `python tests/convert/mangle.py COUNT SEED FOLDER` prints a JSON summary.

Every file must load correctly or give a ValueError of one sentence; nothing else may happen. It runs in a process of
its own with a bound on its memory, so that a crash or a blow-up is seen as one.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
import struct
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from fsdfm.checkpoint import Checkpoint, load_model, open_released, save_model
from fsdfm.data import Tokenizer
from fsdfm.flow import MixturePath, UniformSource
from fsdfm.model import DiT, ModelConfig
from released_files import Released

MORE_MEMORY = 400 * 2**20  # what loading a file of a few kilobytes may take, far more than it does
LARGEST = (0, 1, -1, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
OPCODES = bytes(range(256))
NAMES = [b"os system", b"builtins eval", b"posix mkdir", b"torch load", b"torch._utils _rebuild_tensor_v2"]
JUNK: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    10**30,
    1.5,
    float("inf"),
    "x",
    "",
    [],
    {},
    [[1]],
    {"a": 1},
    "9" * 50,
)
Random = random.Random


# --- bytes ------------------------------------------------------------------------------------------------------------


def cut(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data))]


def flip(data: bytes, rng: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def smear(data: bytes, rng: Random) -> bytes:
    start, length = rng.randrange(len(data)), rng.choice((1, 4, 8, 64, 1000))
    return data[:start] + rng.randbytes(length) + data[start + length :]


def number(data: bytes, rng: Random) -> bytes:
    """Another number somewhere: a size, an offset, a count."""
    size = rng.choice((2, 4, 8))
    value = (rng.choice(LARGEST) % 2 ** (8 * size)).to_bytes(size, "little")
    start = rng.randrange(len(data))
    return data[:start] + value + data[start + size :]


def insert(data: bytes, rng: Random) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + rng.randbytes(rng.choice((1, 7, 100))) + data[start:]


def drop(data: bytes, rng: Random) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.choice((1, 7, 100)) :]


BYTES = (cut, flip, smear, number, insert, drop)


def at_the_end(data: bytes, rng: Random) -> bytes:
    """In the zip directory."""
    kept = len(data) - rng.choice((22, 100, 3000))
    return data[:kept] + rng.choice(BYTES)(data[kept:], rng)


# --- .pth -------------------------------------------------------------------------------------------------------------


def members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pack(parts: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def repacked(change: Callable[[bytes, Random], bytes]) -> Callable[[bytes, Random], bytes]:
    """Change the pickle and make the archive right again, checksums too: only the pickle is wrong."""

    def mangle(data: bytes, rng: Random) -> bytes:
        parts = members(data)
        name = next(name for name in parts if name.endswith("data.pkl"))
        return pack({**parts, name: change(parts[name], rng)})

    mangle.__name__ = f"pickle_{change.__name__}"
    return mangle


def opcodes(program: bytes, rng: Random) -> bytes:
    changed = bytearray(program)
    for _ in range(rng.choice((1, 2, 5))):
        start = rng.randrange(len(changed))
        changed[start : start + rng.randrange(2)] = bytes([rng.choice(OPCODES)])
    return bytes(changed)


def names(program: bytes, rng: Random) -> bytes:
    """Name something else where a function or class is named, and call it on a canary."""
    module, name = rng.choice(NAMES).split(b" ")
    call = b"c" + module + b"\n" + name + b"\n(X\x06\x00\x00\x00canarytR"
    if rng.random() < 0.5:
        return program[:-1] + call + b"0."
    start = program.find(b"ccollections\nOrderedDict\n")
    return program[:start] + b"c" + module + b"\n" + name + b"\n" + program[start + 25 :]


def bomb(program: bytes, rng: Random) -> bytes:
    kind = rng.randrange(6)
    if kind == 0:  # a memo index beyond all memory
        return b"}r" + struct.pack("<I", 2**32 - 1 - rng.randrange(9)) + program[1:]
    if kind == 1:  # long strings and integers that are not there
        return program[:2] + rng.choice((b"X", b"B", b"\x8b")) + struct.pack("<I", 2**31 - 1) + program[2:]
    if kind == 2:  # x -> (x, x), many times, and a key of it
        doubled = b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(200, 255))
        return b"\x80\x02}K\x01" + doubled + b"K\x01s."
    if kind == 3:  # many empty things
        return b"\x80\x02(" + rng.choice((b"}", b"]", b"(", b"N")) * rng.randrange(10**5) + b"t."
    if kind == 4:  # lists within lists
        return b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
    return program[:2] + b"\x8d" + struct.pack("<Q", rng.choice((2**40, 2**62, 2**64 - 1))) + program[2:]


def declared(program: bytes, rng: Random) -> bytes:
    """Other numbers behind the opcodes for numbers: sizes, strides, offsets."""
    places = [i for i in range(len(program)) if program[i : i + 1] in (b"K", b"M")]
    changed = bytearray(program)
    for _ in range(rng.choice((1, 1, 3))):
        place = rng.choice(places)
        value = rng.choice((2**8, 2**31 - 1, -1))
        changed[place : place + 2] = b"J" + struct.pack("<i", value)
    return bytes(changed)


def compressed(data: bytes, rng: Random) -> bytes:
    parts = members(data)
    name = rng.choice([name for name in parts if "/data/" in name])
    return pack({**parts, name: bytes(rng.choice((0, 10**6)))}, zipfile.ZIP_DEFLATED)


def swapped(data: bytes, rng: Random) -> bytes:
    parts = members(data)
    one, two = rng.sample(list(parts), 2)
    return pack({**parts, one: parts[two], two: parts[one]})


def missing(data: bytes, rng: Random) -> bytes:
    parts = members(data)
    del parts[rng.choice(list(parts))]
    return pack(parts)


def other_tensor(data: bytes, rng: Random) -> bytes:
    """A tensor of another type or shape, or with values that are no numbers."""
    content = torch.load(io.BytesIO(data), weights_only=True)
    weights = content["student_ema_model"]
    name = rng.choice(list(weights))
    kinds = (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float16, torch.bfloat16, torch.float64)
    changes: list[Callable[[torch.Tensor], object]] = [
        lambda value: value.to(rng.choice(kinds)),
        lambda value: value[None],
        lambda value: value[:1].expand(value.shape),
        lambda value: value[..., :-1],
        lambda value: torch.full_like(value, rng.choice((torch.inf, torch.nan))),
        lambda _: rng.choice(JUNK),
    ]
    weights[name] = rng.choice(changes)(weights[name])
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


RAW = (*BYTES, at_the_end, at_the_end, at_the_end)
REMADE = (
    *(repacked(change) for change in (*BYTES, opcodes, opcodes, names, names, bomb, bomb, declared, declared)),
    *(compressed, swapped, missing, other_tensor, other_tensor),
)


def load_pth(path: Path) -> dict[str, torch.Tensor]:
    with open_released(path) as weights:
        return dict(weights)


# --- checkpoint folders -----------------------------------------------------------------------------------------------


def header(data: bytes, rng: Random) -> bytes:
    """Another header of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    record = json.loads(data[8 : 8 + length])
    name = rng.choice([name for name in record if name != "__metadata__"])
    kind = rng.randrange(6)
    if kind == 0:
        record[name]["dtype"] = rng.choice(("F64", "I32", "I64", "F16", "BF16", "BOOL", "F8_E4M3", "X", 3))
    elif kind == 1:
        record[name]["shape"] = rng.choice(([2**62, 2**62], [-1], [0], [], "x", [1.5], [2**64]))
    elif kind == 2:
        record[name]["data_offsets"] = rng.choice(([0, 0], [0, 2**62], [5, 1], [-1, 4], [0], "x", [2**64, 2**65]))
    elif kind == 3:
        record[f"extra{rng.random()}"] = record[name]
    elif kind == 4:
        del record[name]
    else:
        record = rng.choice(([], {}, {"__metadata__": 3}, {name: 3}))
    text = json.dumps(record).encode()
    size = rng.choice((len(text), len(text), 2**62, 2**40, 2**27, len(text) + 1, 0))
    return size.to_bytes(8, "little") + text + data[8 + length :]


def record(data: bytes, rng: Random) -> bytes:
    """Another value anywhere in a JSON file."""
    content = json.loads(data)
    place = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = rng.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.8:
            place = place[key]
            continue
        if rng.random() < 0.2:
            del place[key]
        else:
            place[key] = rng.choice(JUNK)
        break
    return json.dumps(content).encode()


def no_record(_: bytes, rng: Random) -> bytes:
    return rng.choice((b"", b"3", b"null", b"[]", b"[" * 10**5, b"9" * 10**4, b'{"a":' * 10**5, b"\xff", b"NaN"))


def right_checksums(folder: Path) -> None:
    """As if the file had been written so."""
    import hashlib

    files = [path for path in folder.iterdir() if path.name not in ("README.md", "checksums.json")]
    sums = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in files
    }
    (folder / "checksums.json").write_text(json.dumps(sums))


def mangle_folder(folder: Path, rng: Random) -> tuple[str, bool]:
    """Mangle one file of a checkpoint; with checksums that are right again, or not."""
    name = rng.choice(("model.safetensors",) * 3 + ("config.json",) * 3 + ("tokenizer.json", "checksums.json"))
    kinds: list[Callable[[bytes, Random], bytes]] = [*BYTES]
    kinds += [header] * 6 if name == "model.safetensors" else [record] * 10 + [no_record]
    change, mended = rng.choice(kinds), rng.random() < 0.85
    path = folder / name
    path.write_bytes(change(path.read_bytes(), rng))
    if mended and name != "checksums.json":
        right_checksums(folder)
    return f"{name} {change.__name__}", not mended and name == "model.safetensors"


# --- the watch --------------------------------------------------------------------------------------------------------


def limit_memory() -> None:
    """Bound the process's address space at what it has now and a little more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY, resource.RLIM_INFINITY))


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def watch(load: Callable[[], dict[str, torch.Tensor]], expected: dict[str, torch.Tensor] | None) -> str:
    """The outcome of a load; anything but `loaded` and `refused` is a failure."""
    try:
        found = load()
    except ValueError as error:
        words = str(error)
        return "refused" if 20 < len(words) < 700 and "\n" not in words else f"unclear: {words[:300]!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:300]!r}"
    return "loaded" if expected is None or same(found, expected) else "loaded wrongly"


def main(count: int, seed: int, folder: Path) -> None:
    """Mangle and load `count` files, half of them .pth files."""
    torch.set_num_threads(1)
    os.chdir(folder)
    whole = Released(vocab_size=257, width=8, cond_width=4, num_blocks=1, num_heads=2).save(folder / "whole.pth")
    pth, weights = whole.read_bytes(), load_pth(whole)
    network = ModelConfig(vocab_size=257, width=8, num_blocks=1, num_heads=2, cond_width=4)
    save_model(folder / "whole", Checkpoint(DiT(network), MixturePath(UniformSource(257)), Tokenizer.bytes(), 16))
    stored = dict(load_model(folder / "whole").model.state_dict())
    limit_memory()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: Counter[str] = Counter()
    failures = []
    for index in range(count):
        rng = Random(f"{seed}/{index}")
        if index % 2:
            change = rng.choice(RAW if rng.random() < 0.4 else REMADE)
            what, path = f".pth {change.__name__}", folder / "mangled.pth"
            path.write_bytes(change(pth, rng))
            outcome = watch(lambda: load_pth(folder / "mangled.pth"), weights if change in RAW else None)
        else:
            shutil.rmtree(folder / "mangled", ignore_errors=True)
            shutil.copytree(folder / "whole", folder / "mangled")
            what, strict = mangle_folder(folder / "mangled", rng)
            outcome = watch(lambda: dict(load_model(folder / "mangled").model.state_dict()), stored if strict else None)
        outcomes[outcome if outcome in ("loaded", "refused") else "failed"] += 1
        if outcome not in ("loaded", "refused"):
            failures.append([index, what, outcome])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    canary = sorted(
        path.name for path in folder.iterdir() if path.name not in ("whole.pth", "whole", "mangled.pth", "mangled")
    )
    print(json.dumps({**outcomes, "failures": failures[:20], "canary": canary, "grown_mib": grown}))  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
