"""``python -m hvdtrain.launch.restarts N PROGRAM``: run PROGRAM, and run it again up to N times when it fails.

Not after an exit code that would recur (of a wrong option, bad hosts or a missing program), nor after SIGTERM.
Kubernetes can distinguish exit codes by a Job's podFailurePolicy, but the MPI operator has no such field
(https://github.com/kubeflow/mpi-operator/issues/537).
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from hvdtrain.errors import BAD_HOSTS, CANNOT_START, USAGE
from hvdtrain.programs import wait_with_signals

_FIRST_S, _LONGEST_S, _RESET_S = 10.0, 300.0, 600.0
"""The waits of Kubernetes: they double up to the longest, and start again from the first after a run of 10 minutes
(https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#restart-policy).
"""


class Restarts:
    """A program that is started again when it fails. `most`: number of restarts."""

    def __init__(self, program: Sequence[str], most: int, first_s: float = _FIRST_S) -> None:
        self._program, self._most, self._first_s = list(program), most, first_s
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def forward(self, number: int, _: object = None) -> None:
        """Pass a signal to the program. After SIGTERM and SIGINT it is not started again."""
        if number != signal.SIGUSR1:
            self._ended.set()
        if self._process is not None:
            self._process.send_signal(number)

    def run(self) -> int:
        """Return the last exit code of the program, 128 + number where a signal ended it."""
        wait_s = self._first_s
        for restart in range(1, self._most + 2):
            began_s = time.monotonic()
            code = self._run_once()
            if code in (0, USAGE, BAD_HOSTS, CANNOT_START) or restart > self._most or self._ended.is_set():
                break
            if time.monotonic() - began_s >= _RESET_S:
                wait_s = self._first_s
            _say(f"ended with exit code {code}: restart {restart} of {self._most} in {wait_s:g} s")
            if self._ended.wait(wait_s):
                break
            wait_s = min(2 * wait_s, _LONGEST_S)
        return code

    def _run_once(self) -> int:
        try:
            self._process = subprocess.Popen(self._program)
        except OSError as error:
            _say(f"{self._program[0]} cannot be started: {error.strerror}")
            return CANNOT_START
        if self._ended.is_set():  # the signal came before the start
            self._process.terminate()
        return wait_with_signals(self._process)


def _say(text: str) -> None:
    sys.stderr.write(f"hvdtrain launch: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    restarts = Restarts(sys.argv[2:], int(sys.argv[1]))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, restarts.forward)
    sys.exit(restarts.run())
