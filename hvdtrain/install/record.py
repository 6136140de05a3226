"""For which torch and MPI the installed Horovod was built, and how, known without importing any of them.

Horovod's own build writes ``HOROVOD_LOCAL_VERSION`` behind its version number; `plan` sets it to a `Label`. Torch
is not checked by Horovod when it loads: built for another one it ends in undefined symbols, or worse, in none.
"""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvdtrain.errors import HorovodError
from hvdtrain.install.build_probe import torch_at_hand
from hvdtrain.install.compiler import MENDED_MARKS, PROMPT_MARKS, QUIET_MARK
from hvdtrain.install.versions import Label, MpiBuild, TorchBuild

BUILD_COMMAND = "hvdtrain build-horovod"


@dataclass(frozen=True)
class BuildRecord:
    """What the installed Horovod was built for; a field that cannot be known is None."""

    version: str
    """The distribution's whole version, local part included."""
    torch: TorchBuild | None = None
    mpi: MpiBuild | None = None
    nccl: str | None = None
    has_mpi: bool | None = None
    quiet: bool = False
    """Whether the thread that writes its Timeline sleeps while it has nothing to do, as in those built here; it keeps
    a core busy otherwise. Read from the library itself."""
    prompt: bool = False
    """Whether its threads can wake as soon as there is something to do and sleep until then, as in those built here;
    others look once in a cycle, or without end. Read from the library itself."""
    mended: bool = False
    """Whether its faults at ranks that are lost or join are mended, as in those built here; in others a rank may wait
    until a timeout, deadlock or crash. Read from the library itself."""
    source: str | None = None
    """The wheel file it was installed from, as a URL, where pip wrote that down."""

    @property
    def ours(self) -> bool:
        """Whether `hvdtrain build-horovod` built it."""
        return self.mpi is not None

    @classmethod
    def from_version(cls, version: str) -> BuildRecord:
        """Read a distribution's version; one without our label gives a record that knows nothing."""
        label = Label.parse(version.partition("+")[2])
        if label is None:
            return cls(version)
        return cls(version, torch=label.torch, mpi=label.mpi, nccl=label.nccl, has_mpi=True)


def installed(path: Iterable[str] | None = None) -> BuildRecord | None:
    """Describe the installed Horovod; None when there is none. ``path`` as in `sys.path`, which is the default."""
    found = metadata.distributions(name="horovod", path=list(sys.path if path is None else path))
    distribution = next(iter(found), None)
    if distribution is None:
        return None
    record = BuildRecord.from_version(distribution.version)
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    package = Path(str(distribution.locate_file("horovod")))
    return BuildRecord(
        version=record.version,
        torch=record.torch or _torch_of_foreign(package),
        mpi=record.mpi,
        nccl=record.nccl,
        has_mpi=record.has_mpi if record.ours else _library_holds(package, b"libmpi"),
        quiet=bool(_library_holds(package, QUIET_MARK.encode())),
        prompt=all(_library_holds(package, mark.encode()) for mark in PROMPT_MARKS),
        mended=all(_library_holds(package, mark.encode()) for mark in MENDED_MARKS),
        source=direct.get("url"),
    )


def check(*, by_mpi: bool = True) -> None:
    """Refuse the installed Horovod if it cannot run here; call it before importing Horovod.

    Args:
        by_mpi: whether the ranks will talk by MPI, as under mpirun; by Gloo otherwise.

    Raises:
        HorovodError: as `judge`.
    """
    torch = torch_at_hand()
    if torch is None:
        raise HorovodError("There is no torch.", next_step="pip install torch")
    judge(installed(), torch.build, by_mpi=by_mpi)


def judge(record: BuildRecord | None, torch: TorchBuild, *, by_mpi: bool = True) -> None:
    """Compare what Horovod was built for with what it would run with.

    Raises:
        HorovodError: it is missing, built for another torch, or without MPI.
    """
    if record is None:
        raise HorovodError("Horovod is not installed.", expected=f"Horovod built for {torch}", next_step=BUILD_COMMAND)
    if record.torch is not None and record.torch != torch:
        raise HorovodError(
            f"The installed Horovod {record.version} was built for another torch.",
            expected=f"built for {torch}",
            found=f"built for {record.torch}",
            next_step=BUILD_COMMAND,
        )
    if by_mpi and record.has_mpi is False:
        raise HorovodError(
            f"The installed Horovod {record.version} was built without MPI.",
            expected="a Horovod with MPI",
            found="a library that is not linked to libmpi",
            next_step=BUILD_COMMAND,
        )


def _torch_of_foreign(package: Path) -> TorchBuild | None:
    """Read the torch that Horovod's build noted in metadata.json, where its flavour is plain from its version."""
    try:
        version = json.loads((package / "metadata.json").read_text())["pytorch"]
    except (OSError, ValueError, KeyError):
        return None
    public, _, local = str(version).partition("+")
    known = local == "cpu" or (local.startswith("cu") and local[2:].isdigit())
    return TorchBuild(public, local) if known else None


def _library_holds(package: Path, text: bytes) -> bool | None:
    """Look for a text in Horovod's library; None when the library is not there."""
    for library in package.glob("torch/mpi_lib_v2*.so"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text) >= 0
    return None
