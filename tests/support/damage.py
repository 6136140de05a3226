"""Random damages of a checkpoint on disk, as disks, cables and hands do them.

Each changes the checkpoint in the first folder; it may take from the second, another checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from hvdtrain.state.manifest import MANIFEST, VALUES
from hvdtrain.state.shard_files import INDEX


def flip_a_bit(chance: random.Random, folder: Path, other: Path) -> None:
    """One bit of any file."""
    file = chance.choice(_files(folder))
    content = bytearray(file.read_bytes())
    place = chance.randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    file.write_bytes(content)


def change_bytes(chance: random.Random, folder: Path, other: Path) -> None:
    """A stretch of any file: zeros, as after a power cut, or anything."""
    file = chance.choice(_files(folder))
    content = bytearray(file.read_bytes())
    begin = chance.randrange(len(content))
    count = min(chance.choice([1, 2, 8, 512, 4096]), len(content) - begin)
    content[begin : begin + count] = bytes(count) if chance.random() < 0.5 else chance.randbytes(count)
    file.write_bytes(content)


def cut(chance: random.Random, folder: Path, other: Path) -> None:
    """The end of any file is missing."""
    file = chance.choice(_files(folder))
    os.truncate(file, chance.randrange(file.stat().st_size))


def lengthen(chance: random.Random, folder: Path, other: Path) -> None:
    """Any file goes on after its end."""
    file = chance.choice(_files(folder))
    with file.open("ab") as opened:
        opened.write(chance.choice([b"\0", b" ", b"\n", chance.randbytes(9)]))


def remove(chance: random.Random, folder: Path, other: Path) -> None:
    """Any file is missing."""
    chance.choice(_files(folder)).unlink()


def swap(chance: random.Random, folder: Path, other: Path) -> None:
    """Two files have changed names."""
    one, two = chance.sample(_files(folder), 2)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def take_from_another(chance: random.Random, folder: Path, other: Path) -> None:
    """Any file is that of another checkpoint, of the same names and sizes."""
    file = chance.choice([file for file in _files(folder) if file.name != INDEX])  # which is equal there
    shutil.copyfile(other / file.name, file)


def add(chance: random.Random, folder: Path, other: Path) -> None:
    """A file that does not belong there."""
    name = chance.choice(["extra.safetensors", "model-00001-of-00003.safetensors", ".nfs0001", "optimizer.json", "x"])
    shutil.copyfile(chance.choice(_files(other)), folder / name)


def edit_json(chance: random.Random, folder: Path, other: Path) -> None:
    """A value or a key of `manifest.json` or `state.json` is another one; the file is JSON as before."""
    file = folder / chance.choice([MANIFEST, MANIFEST, VALUES])
    content = json.loads(file.read_text())
    _edit(chance, content)
    file.write_text(json.dumps(content, indent=chance.choice([None, 1, 2])))


def edit_header(chance: random.Random, folder: Path, other: Path) -> None:
    """The header of a tensor file is another one, of the same length: tensors trade names or shapes."""
    file = chance.choice([file for file in _files(folder) if file.suffix == ".safetensors"])
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    if len(header) < 2:
        flip_a_bit(chance, folder, other)
        return
    one, two = chance.sample(sorted(header), 2)
    header[one], header[two] = header[two], header[one]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(end - 8)
    file.write_bytes(content[:8] + text[: end - 8] + content[end:])


DAMAGES = (flip_a_bit, change_bytes, cut, lengthen, remove, swap, take_from_another, add, edit_json, edit_header)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _edit(chance: random.Random, inner: Any) -> None:
    """Change one thing somewhere inside."""
    key = chance.choice(sorted(inner) if isinstance(inner, dict) else range(len(inner)))
    value, what = inner[key], chance.randrange(3)
    if isinstance(value, (dict, list)) and value and chance.random() < 0.8:
        _edit(chance, value)
    elif what == 0:
        del inner[key]
    elif what == 1 and isinstance(inner, dict):
        inner[f"{key}x"] = inner.pop(key)
    else:
        inner[key] = _another(chance, value)


def _another(chance: random.Random, value: Any) -> Any:
    options = [None, True, -1, 0, 1, 2, 1 << 70, 0.5, "", "model.safetensors", [], {}, "../state.json"]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        options += [value + 1, -value, float(value)]
    if isinstance(value, str) and value:
        options += [value[::-1], value[:-1], value.upper()]
    return chance.choice([option for option in options if type(option) is not type(value) or option != value])
