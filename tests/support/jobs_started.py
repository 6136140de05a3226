"""Which processes that tests start are jobs: those that train. `make test` counts them (CONTRIBUTING.md)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "horovodrun", "torchrun", "srun", "sbatch", "salloc"}
_TRAINING_SCRIPTS = {"chaos_rank.py", "own.py", "trainings.py"}
_OTHER_COMMANDS = {"timeline", "doctor", "bundle", "build-horovod"}
_NO_JOB = {"--help", "--version", "-V", "--dry-run", "--print_config", "--mpi=list"}


def job_of(command: Any) -> str | None:
    """The command line of a job; None of a process that trains nothing."""
    words = [os.fsdecode(word) for word in command] if isinstance(command, Sequence) else []
    names = [Path(word).name for word in words]
    if _NO_JOB & set(words):
        return None
    is_ours = "hvdtrain" in names[:6] and not _OTHER_COMMANDS & set(words) and words[-3:-1] != ["verify", "data"]
    # Tests of what launch refuses, or hands to a stand-in, name no task.
    trains = is_ours and ("launch" not in words or any(".py:" in word or "--model." in word for word in words))
    if trains or _LAUNCHERS & set(names[:4]) or _TRAINING_SCRIPTS & set(names):
        text = " ".join(name for name in names if len(name) < 60)[:150]
        return text.encode(errors="backslashreplace").decode()
    return None
