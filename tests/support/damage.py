"""Random damages of a checkpoint on disk, as disks, cables and hands do them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.state.manifest import MANIFEST, VALUES
from hvdtrain.state.shard_index import INDEX

Damage = Callable[[random.Random, Path, Path], str]
"""Changes the checkpoint in the first folder; may take from the second, another checkpoint; says what it did."""


def flip_a_bit(chance: random.Random, folder: Path, other: Path) -> str:
    """One bit of any file."""
    file = chance.choice(_files(folder))
    content = bytearray(file.read_bytes())
    place = chance.randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    file.write_bytes(content)
    return f"bit {place} of {file.name}"


def change_bytes(chance: random.Random, folder: Path, other: Path) -> str:
    """A stretch of any file: zeros, as after a power cut, or anything."""
    file = chance.choice(_files(folder))
    content = bytearray(file.read_bytes())
    begin = chance.randrange(len(content))
    count = min(chance.choice([1, 2, 8, 512, 4096]), len(content) - begin)
    content[begin : begin + count] = bytes(count) if chance.random() < 0.5 else chance.randbytes(count)
    file.write_bytes(content)
    return f"{count} bytes at {begin} of {file.name}"


def cut(chance: random.Random, folder: Path, other: Path) -> str:
    """The end of any file is missing."""
    file = chance.choice(_files(folder))
    size = chance.randrange(file.stat().st_size)
    with file.open("r+b") as opened:
        opened.truncate(size)
    return f"{file.name} cut to {size}"


def lengthen(chance: random.Random, folder: Path, other: Path) -> str:
    """Any file goes on after its end."""
    file = chance.choice(_files(folder))
    with file.open("ab") as opened:
        opened.write(chance.choice([b"\0", b" ", b"\n", chance.randbytes(9)]))
    return f"{file.name} is longer"


def remove(chance: random.Random, folder: Path, other: Path) -> str:
    """Any file is missing."""
    file = chance.choice(_files(folder))
    file.unlink()
    return f"no {file.name}"


def swap(chance: random.Random, folder: Path, other: Path) -> str:
    """Two files have changed names."""
    one, two = chance.sample(_files(folder), 2)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    return f"{one.name} and {two.name} swapped"


def take_from_another(chance: random.Random, folder: Path, other: Path) -> str:
    """Any file is that of another checkpoint, of the same names and sizes."""
    file = chance.choice([file for file in _files(folder) if file.name != INDEX])  # which is equal there
    shutil.copyfile(other / file.name, file)
    return f"{file.name} of another checkpoint"


def add(chance: random.Random, folder: Path, other: Path) -> str:
    """A file that does not belong there."""
    name = chance.choice(["extra.safetensors", "model-00001-of-00003.safetensors", ".nfs0001", "optimizer.json", "x"])
    shutil.copyfile(chance.choice(_files(other)), folder / name)
    return f"added {name}"


def edit_json(chance: random.Random, folder: Path, other: Path) -> str:
    """A value or a key of `manifest.json` or `state.json` is another one; the file is JSON as before."""
    file = folder / chance.choice([MANIFEST, MANIFEST, VALUES])
    content = json.loads(file.read_text())
    told = _edit(chance, content)
    file.write_text(json.dumps(content, indent=chance.choice([None, 1, 2])))
    return f"{file.name}: {told}"


def edit_header(chance: random.Random, folder: Path, other: Path) -> str:
    """The header of a tensor file is another one, of the same length: tensors trade names or shapes."""
    file = chance.choice([file for file in _files(folder) if file.suffix == ".safetensors"])
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    if len(header) < 2:
        return flip_a_bit(chance, folder, other)
    one, two = chance.sample(sorted(header), 2)
    header[one], header[two] = header[two], header[one]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(end - 8)
    file.write_bytes(content[:8] + text[: end - 8] + content[end:])
    return f"{file.name}: {one} and {two} swapped"


DAMAGES: tuple[Damage, ...] = (
    flip_a_bit,
    change_bytes,
    cut,
    lengthen,
    remove,
    swap,
    take_from_another,
    add,
    edit_json,
    edit_header,
)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _edit(chance: random.Random, content: Any) -> str:
    """Change one thing somewhere inside."""
    inner = content
    while True:
        keys: list[Any] = sorted(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = chance.choice(keys)
        value = inner[key]
        if isinstance(value, (dict, list)) and value and chance.random() < 0.8:
            inner = value
            continue
        match chance.randrange(3):
            case 0:
                del inner[key]
                return f"no {key}"
            case 1 if isinstance(inner, dict):
                inner[f"{key}x"] = inner.pop(key)
                return f"{key} renamed"
            case _:
                inner[key] = _another(chance, value)
                return f"{key} is {inner[key]!r}"


def _another(chance: random.Random, value: Any) -> Any:
    options = [None, True, -1, 0, 1, 2, 1 << 70, 0.5, "", "model.safetensors", [], {}, "../state.json"]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        options += [value + 1, -value, float(value)]
    if isinstance(value, str) and value:
        options += [value[::-1], value[:-1], value.upper()]
    return chance.choice([option for option in options if type(option) is not type(value) or option != value])
