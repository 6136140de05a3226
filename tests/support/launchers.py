"""The rendered files of ``launchers/``: examples to copy and adapt. ``make launchers`` writes them.

Site-specific values, such as module names, partition and image, are examples. Files without a value of the package,
such as ``local.sh``, are edited there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hvdtrain.install.venv import EXTRAS
from hvdtrain.launch.spec import Batch, JobSpec, Mpi, Script, Shell, join
from hvdtrain.launch.targets import TARGETS, mpi
from hvdtrain.launch.targets.mpijob import IMAGE

_SETUP = ("# module load openmpi cuda", 'export PATH="$PWD/.venv/bin:$PATH"')
_BASE = "debian:12.11-slim"
"""The image on which that of an MPIJob is built."""

_MPIRUN = Shell('"$(command -v mpirun)"')
"""Open MPI finds its parts on all hosts when it is called by its full path."""


def files() -> Mapping[str, str]:
    """The text of each rendered file by name. The build context of the Dockerfile is the root of the project."""
    return {
        "mpirun.sh": _fill("mpirun.sh.j2", line=_mpirun()),
        "slurm.sbatch": _text("slurm", "SLURM_SUBMIT_DIR"),
        "pbs.sh": _text("pbs", "PBS_O_WORKDIR"),
        "lsf.sh": _text("lsf", "LS_SUBCWD"),
        "mpijob.yaml": _text("mpijob", "", "runs/run.yaml"),
        "Dockerfile": _fill("Dockerfile.j2", image=IMAGE, base=_BASE, extras=EXTRAS),
    }


def _fill(template: str, **values: object) -> str:
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    made = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    return made.get_template(template).render(**values)


def _job(folder: str) -> JobSpec:
    """A job of two hosts with eight GPUs each, in the folder that a variable names."""
    return JobSpec(
        arguments=(),
        ranks=16,
        nodes=2,
        gpus_per_node=8,
        cpus_per_rank=8,
        folder=Shell(f'"${{{folder}:-.}}"'),
        pass_on=("PATH",),
        mpi=Mpi("openmpi", IMAGE.openmpi, _MPIRUN),
        batch=Batch(time_s=7200, setup=_SETUP),
    )


def _text(target: str, folder: str, config: str = "run.yaml") -> str:
    job = replace(_job(folder), arguments=("--config", config))
    start = TARGETS[target].render(replace(job, mpi=None) if target == "slurm" else job)  # without asking for a PMI
    assert isinstance(start, Script)
    return start.text


def _mpirun() -> str:
    job = replace(_job(""), arguments=(Shell('"$@"'),))
    words = list(mpi.argv(job, ("--host", Shell('"$hosts"'))))
    words[words.index("-np") + 1] = Shell('"$np"')
    return join(words)


if __name__ == "__main__":
    for name, text in files().items():
        Path(sys.argv[1], name).write_text(text)
