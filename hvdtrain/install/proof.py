"""Test a built Horovod: two ranks on this machine sum a tensor.

A file next to the package marks a Horovod that was installed and not tested since.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.errors import BuildError
from hvdtrain.install.build_facts import FoundMpi, Probe
from hvdtrain.install.mpirun import start_variables

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


def command(probe: Probe, mpi: FoundMpi) -> tuple[str, ...]:
    """Return the command line of the test. Where the MPI has no mpirun, srun starts the ranks by the site's PMI."""
    if mpi.mpirun is None:
        return ("srun", "-N1", f"-n{RANKS}", "--overlap", probe.python.executable, "-c", PROGRAM)
    flags: tuple[str, ...] = ()
    if mpi.build.flavour == "openmpi":
        flags = ("--map-by", ":OVERSUBSCRIBE") if mpi.build.major >= 5 else ("--oversubscribe",)
        flags += ("--bind-to", "none")
    return (str(mpi.mpirun), "-np", str(RANKS), *flags, probe.python.executable, "-c", PROGRAM)


def environment(probe: Probe, mpi: FoundMpi) -> dict[str, str]:
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


def is_possible(mpi: FoundMpi, environ: Mapping[str, str]) -> bool:
    """Tell whether ranks can be started here: outside an allocation srun would wait for one."""
    return mpi.mpirun is not None or "SLURM_JOB_ID" in environ


def mark(site: Path, version: str) -> None:
    """Mark the Horovod of this version, in this folder of packages, as not tested."""
    (site / MARK).write_text(version + "\n")


def unmark(site: Path) -> None:
    """Mark the Horovod in this folder of packages as tested."""
    (site / MARK).unlink(missing_ok=True)


def is_marked(site: Path, version: str) -> bool:
    """Tell whether the Horovod of this version is marked as not tested."""
    try:
        return (site / MARK).read_text().strip() == version
    except OSError:
        return False


def check_output(output: str) -> None:
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
