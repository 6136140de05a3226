"""The files of ``launchers/``: examples to copy and adapt, rendered by `targets`.

``make launchers`` writes them. Site-specific values, such as module names, partition and image, are examples.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hvdtrain.install.venv import EXTRAS
from hvdtrain.launch.spec import Batch, JobSpec, Mpi, Script, Shell, join
from hvdtrain.launch.targets import TARGETS, openmpi
from hvdtrain.launch.targets.base import fill
from hvdtrain.launch.targets.mpijob import IMAGE

_SETUP = ("# module load openmpi cuda", 'export PATH="$PWD/.venv/bin:$PATH"')

BASE = "debian:12.11-slim"
"""The image on which that of an MPIJob is built."""

_MPIRUN = Shell('"$(command -v mpirun)"')
"""Open MPI finds its parts on all hosts when it is called by its full path."""


def files() -> Mapping[str, str]:
    """Return the text of each file by name."""
    return {
        "local.sh": fill("local.sh.j2"),
        "mpirun.sh": fill("mpirun.sh.j2", line=_mpirun()),
        "slurm.sbatch": _text("slurm", "SLURM_SUBMIT_DIR"),
        "pbs.sh": _text("pbs", "PBS_O_WORKDIR"),
        "lsf.sh": _text("lsf", "LS_SUBCWD"),
        "mpijob.yaml": _text("mpijob", "", "runs/run.yaml"),
        "elastic-discovery.sh": fill("elastic-discovery.sh.j2"),
        "Dockerfile": render_dockerfile(),
    }


def render_dockerfile() -> str:
    """Return the Dockerfile of an MPIJob's image; its build context is the root of the project."""
    return fill("Dockerfile.j2", image=IMAGE, base=BASE, extras=EXTRAS)


def _job(folder: str) -> JobSpec:
    """Return a job of two hosts with eight GPUs each, in the folder that a variable names."""
    return JobSpec(
        arguments=(),
        ranks=16,
        nodes=2,
        gpus_per_node=8,
        folder=Shell(f'"${{{folder}:-.}}"'),
        pass_on=("PATH",),
        mpi=Mpi("openmpi", IMAGE.openmpi, _MPIRUN),
        batch=Batch(time_s=7200, setup=_SETUP),
    )


def _text(target: str, folder: str, config: str = "run.yaml") -> str:
    start = TARGETS[target].render(replace(_job(folder), arguments=("--config", config)))
    assert isinstance(start, Script)
    return start.text


def _mpirun() -> str:
    job = replace(_job(""), arguments=(Shell('"$@"'),))
    words = list(openmpi.argv(job, ("--host", Shell('"$hosts"'))))
    words[words.index("-np") + 1] = Shell('"$np"')
    return join(words)


def write(folder: Path) -> None:
    """Write the files."""
    folder.mkdir(exist_ok=True)
    for name, text in files().items():
        path = folder / name
        path.write_text(text)
        path.chmod(0o755 if text.startswith("#!") and name != "slurm.sbatch" else 0o644)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
