"""The toy task of a job that sends whoever waits for it a signal, as a person would."""

from __future__ import annotations

import os
import signal

from hvdtrain import Task
from tests.support.toy import toy


def interrupting() -> Task:
    """A small regression; INTERRUPTED holds the name of the signal and the number of the process."""
    if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        name, process = os.environ["INTERRUPTED"].split()
        os.kill(int(process), signal.Signals[name])
    return toy()
