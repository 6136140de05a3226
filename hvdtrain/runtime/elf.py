"""Read from an ELF file which shared libraries it needs and where the loader looks for them.

It reads the dynamic section (System V ABI, chapter 5) with a few seeks: no child process, and without loading the
library, which for an MPI library could abort the process. Little-endian 64 bit only: x86-64 and AArch64.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_RPATH, _DT_RUNPATH = 0, 1, 5, 10, 15, 29


@dataclass(frozen=True)
class Linkage:
    """Dynamic linkage. needed: sonames; rpath, runpath: folders with ``$ORIGIN`` expanded."""

    needed: tuple[str, ...] = ()
    rpath: tuple[Path, ...] = ()
    runpath: tuple[Path, ...] = ()


def read_linkage(library: Path) -> Linkage:
    """Read the linkage of a shared library; empty for other files. Errors: OSError."""
    with library.open("rb") as file:
        try:
            return _read(file, library.resolve().parent)
        except (struct.error, ValueError):
            return Linkage()


def _read(file: BinaryIO, origin: Path) -> Linkage:
    header = file.read(64)
    if header[:6] != b"\x7fELF\x02\x01":
        return Linkage()
    offset, size, count = struct.unpack_from("<32xQ14xHH", header)
    file.seek(offset)
    table = file.read(size * count)
    # per program header: type, offset in the file, address, size in the file
    segments = [struct.unpack_from("<I4xQQ8xQ", table, index * size) for index in range(count)]
    dynamic = next((segment for segment in segments if segment[0] == _PT_DYNAMIC), None)
    if dynamic is None:
        return Linkage()
    file.seek(dynamic[1])
    section = struct.iter_unpack("<qQ", file.read(dynamic[3]))
    entries: list[tuple[int, int]] = list(takewhile(lambda entry: entry[0] != _DT_NULL, section))
    values = dict(entries)
    address, length = values[_DT_STRTAB], values[_DT_STRSZ]
    home = next(part for part in segments if part[0] == _PT_LOAD and part[2] <= address < part[2] + part[3])
    file.seek(home[1] + address - home[2])
    strings = file.read(length)

    def texts(tag: int) -> Iterator[str]:
        for found, start in entries:
            if found == tag:
                yield strings[start : strings.index(b"\0", start)].decode()

    def folders(tag: int) -> tuple[Path, ...]:
        paths = [part for text in texts(tag) for part in text.split(":") if part]
        return tuple(Path(part.replace("${ORIGIN}", "$ORIGIN").replace("$ORIGIN", str(origin))) for part in paths)

    return Linkage(tuple(texts(_DT_NEEDED)), folders(_DT_RPATH), folders(_DT_RUNPATH))


def find_needed(name: str, linkage: Linkage, library_path: str) -> Path | None:
    """Return the file that the loader would load for a soname; None where only the loader's cache knows.

    The order is ld.so's: RPATH unless there is a RUNPATH, ``LD_LIBRARY_PATH``, RUNPATH, the system's folders.
    """
    rpath = () if linkage.runpath else linkage.rpath
    listed = [Path(part) for part in library_path.replace(";", ":").split(":") if part]
    system = [Path("/lib/x86_64-linux-gnu"), Path("/lib/aarch64-linux-gnu"), Path("/lib64"), Path("/lib")]
    system += [Path("/usr") / folder.relative_to("/") for folder in system]
    for folder in (*rpath, *listed, *linkage.runpath, *system):
        if (folder / name).is_file():
            return folder.resolve() / name
    return None
