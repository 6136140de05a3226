"""What the installed Horovod was built for, read without importing Horovod, torch or MPI; and the test of a new build.

Horovod's build appends ``HOROVOD_LOCAL_VERSION`` to its version; `build_plan.plan` sets it to a `Label`. Horovod does
not check torch when it loads: with another torch it fails with undefined symbols, or computes wrong results.

The test: two ranks on this machine sum a tensor. A file next to the package marks a Horovod that was installed and not
tested since.
"""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvdtrain.errors import BuildError, HorovodError
from hvdtrain.files import read_text_or_empty
from hvdtrain.install.build_probe import find_torch
from hvdtrain.install.compiler import FIX_MARKS, PROMPT_MARKS, QUIET_MARK
from hvdtrain.install.prerequisites import FoundMpi, Probe
from hvdtrain.install.versions import Label, MpiBuild, TorchBuild, start_variables

RANKS = 2
MARK = "hvdtrain-untested"
"""Name of the file in the folder of packages. It contains the version of the untested Horovod."""

_MARK = "hvdtrain-proof "
_VALUES = (1.0, 10.0, 100.0)

# The program of each rank. A text, because only comm/horovod.py may import horovod. With two GPUs it uses NCCL.
PROGRAM = f"""
import json, torch, horovod.torch as hvd
hvd.init()
gpus = torch.cuda.device_count() if torch.cuda.is_available() and hvd.nccl_built() else 0
device = f"cuda:{{hvd.local_rank()}}" if gpus >= hvd.local_size() else "cpu"
total = hvd.allreduce(torch.tensor({list(_VALUES)}, device=device) * (hvd.rank() + 1), op=hvd.Sum, name="proof")
if hvd.rank() == 0:
    print("{_MARK}" + json.dumps(dict(size=hvd.size(), mpi=bool(hvd.mpi_enabled()), total=total.tolist())), flush=True)
hvd.shutdown()
"""

BUILD_COMMAND = "hvdtrain build-horovod"
PROVE_NOW = f"{BUILD_COMMAND} --prove now"


def proof_command(probe: Probe, mpi: FoundMpi) -> tuple[str, ...]:
    """Return the command line of the test. Where the MPI has no mpirun, srun starts the ranks by the site's PMI."""
    if mpi.mpirun is None:
        return ("srun", "-N1", f"-n{RANKS}", "--overlap", probe.python.executable, "-c", PROGRAM)
    flags: tuple[str, ...] = ()
    if mpi.build.flavour == "openmpi":
        flags = ("--map-by", ":OVERSUBSCRIBE") if mpi.build.major >= 5 else ("--oversubscribe",)
        flags += ("--bind-to", "none")
    return (str(mpi.mpirun), "-np", str(RANKS), *flags, probe.python.executable, "-c", PROGRAM)


def proof_environment(probe: Probe, mpi: FoundMpi) -> dict[str, str]:
    """Return the variables of the test: one thread, loopback only, idle ranks yield, root allowed, no ssh."""
    values = {
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_btl_tcp_if_include": "lo",
        "OMPI_MCA_oob_tcp_if_include": "lo",
        "HOROVOD_GLOO_IFACE": "lo",
    }
    build = mpi.build
    return values | start_variables(build.flavour, build.major, is_root=probe.is_root, remote_shell=probe.remote_shell)


def can_prove(mpi: FoundMpi, environ: Mapping[str, str]) -> bool:
    """Tell whether ranks can be started here: outside an allocation srun would wait for one."""
    return mpi.mpirun is not None or "SLURM_JOB_ID" in environ


def check_proof(output: str) -> None:
    """Check the sum that rank 0 printed. Errors: BuildError if it is wrong, missing, or was not computed with MPI."""
    lines = [line.partition(_MARK)[2] for line in output.splitlines() if _MARK in line]
    expected = {"size": RANKS, "mpi": True, "total": [value * RANKS * (RANKS + 1) / 2 for value in _VALUES]}
    found: Mapping[str, object] = json.loads(lines[0]) if lines else {}
    if found != expected:
        raise BuildError(
            "Horovod is installed, but an allreduce of two ranks returned a wrong sum.",
            expected=json.dumps(expected),
            found=json.dumps(found) if lines else "no result: " + " ".join(output.split())[-300:],
            next_step="read the log and run its last command by hand; the site's mpirun may need other options",
        )


@dataclass(frozen=True)
class BuildRecord:
    """What the installed Horovod was built for. Unknown fields are None."""

    version: str  # full version of the distribution, including the local part
    torch: TorchBuild | None = None
    mpi: MpiBuild | None = None
    nccl: str | None = None
    has_mpi: bool | None = None
    # Read from the library; all are true of our builds.
    quiet: bool = False  # its Timeline thread sleeps when idle; otherwise it keeps a core busy
    prompt: bool = False  # its threads sleep until there is work; otherwise they poll once per cycle, or all the time
    fixed: bool = False  # for lost and joining ranks; otherwise a rank may wait for a timeout, deadlock or crash
    tested: bool = True  # unless `hvdtrain build-horovod --prove later` left its test out, or the test failed
    source: str | None = None  # URL of the wheel it was installed from, if pip recorded it


def installed(path: Iterable[str] | None = None) -> BuildRecord | None:
    """Describe the installed Horovod; None if there is none. ``path``: folders to search (default: `sys.path`)."""
    found = metadata.distributions(name="horovod", path=list(sys.path if path is None else path))
    distribution = next(iter(found), None)
    if distribution is None:
        return None
    version = distribution.version
    label = Label.parse(version.partition("+")[2])  # None where others built it
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    package = Path(str(distribution.locate_file("horovod")))
    return BuildRecord(
        version,
        torch=label.torch if label else _torch_of_foreign(package),
        mpi=label.mpi if label else None,
        nccl=label.nccl if label else None,
        has_mpi=True if label else _library_holds(package, b"libmpi"),
        quiet=bool(_library_holds(package, QUIET_MARK.encode())),
        prompt=all(_library_holds(package, mark.encode()) for mark in PROMPT_MARKS),
        fixed=all(_library_holds(package, mark.encode()) for mark in FIX_MARKS),
        tested=read_text_or_empty(package.parent / MARK).strip() != version,
        source=direct.get("url"),
    )


def check(*, by_mpi: bool = True) -> None:
    """Check that the installed Horovod can run here. Call it before importing Horovod. Errors: see `check_record`.

    `by_mpi`: whether the ranks use MPI, as under mpirun, or Gloo.
    """
    torch = find_torch()
    if torch is None:
        raise HorovodError("torch is not installed.", next_step="pip install torch")
    check_record(installed(), torch.build, by_mpi=by_mpi)


def check_record(record: BuildRecord | None, torch: TorchBuild, *, by_mpi: bool = True) -> None:
    """Check that Horovod was built for this torch, and with MPI if needed.

    Errors: HorovodError if it is missing, built for another torch, or without MPI.
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
            found="its library is not linked to libmpi",
            next_step=BUILD_COMMAND,
        )


def _torch_of_foreign(package: Path) -> TorchBuild | None:
    """Read the torch in Horovod's metadata.json, if its version includes the flavour."""
    try:
        version = json.loads((package / "metadata.json").read_text())["pytorch"]
    except (OSError, ValueError, KeyError):
        return None
    public, _, local = str(version).partition("+")
    known = local == "cpu" or (local.startswith("cu") and local[2:].isdigit())
    return TorchBuild(public, local) if known else None


def _library_holds(package: Path, text: bytes) -> bool | None:
    """Search Horovod's library for a text; None if there is no library."""
    for library in package.glob("torch/mpi_lib_v2*.so"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text) >= 0
    return None
