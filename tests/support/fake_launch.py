"""``hvdtrain launch`` with `tests.support.fake_rank` instead of training, for tests.

As a program: the options of launch, ``--``, the arguments of the fake rank. Its driver takes nobody who is merely slow
for lost, gives whoever has to end all the time that it needs, and pauses less than usual before it starts one again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hvdtrain.cli import launch, launch_spec
from hvdtrain.launch.job import Limits

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).parents[2]
RANK = Path(__file__).with_name("fake_rank.py")
SILENT = "FAKE_SILENT_S"
PYTHON = "FAKE_PYTHON"
TIMEOUT_S = 300
"""A guard, not a judgement of speed: of a test, and in most limits of the job."""
PATIENT = ("lost_s", "agent_s", "grace_s", "stop_s", "end_s")


class FakeJob:
    """A job in a folder; in its block it runs, at the end nothing of it is left.

    Args:
        folder: where it runs.
        arguments: of this program.
        program: of its ranks.
        python: the words that start it.
        silent_s: how long a rank may say nothing.

    Attributes:
        said: lines of the driver so far.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        program: Path = RANK,
        python: Sequence[str] = (sys.executable,),
        silent_s: float = TIMEOUT_S,
    ) -> None:
        self.folder = folder
        self._python = json.dumps(python)
        self.said: list[str] = []
        self._silent_s = silent_s
        self._command = [sys.executable, str(Path(__file__)), str(program), *arguments]
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        """Start it."""
        own = {"FAKE_FOLDER": str(self.folder), "PYTHONPATH": str(ROOT), SILENT: str(self._silent_s)}
        own[PYTHON] = self._python
        environment = {**os.environ, **own, "PYTHONWARNINGS": "default"}
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = subprocess.Popen(self._command, cwd=self.folder, env=environment, text=True, **streams)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """See that nothing is left; end it where there is."""
        self._process.kill()
        self._process.communicate()
        left = self.processes()
        _, alive = psutil.wait_procs(left, timeout=TIMEOUT_S)
        for process in alive:
            process.kill()
        if error is None:
            assert not alive, f"{alive} are left"

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    def until(self, text: str) -> str:
        """Read what the driver says up to a line that has a text; the line."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said.append(line.rstrip())
            if text in line:
                return line
        raise AssertionError(f"{text!r} was never said:\n" + "\n".join(self.said))

    def end(self) -> tuple[int, str]:
        """Wait for its end; the exit code, and what ranks wrote to stdout."""
        try:
            out, err = self._process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            left = [f"{process.pid} {process.status()} {process.cmdline()[1:3]}" for process in self.processes()]
            self._process.kill()
            said = [*self.said, *self._process.communicate()[1].splitlines()]
            raise AssertionError(f"not over after {TIMEOUT_S} s:\n" + "\n".join([*said, *left])) from None
        self.said += err.splitlines()
        return self._process.returncode, out

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def log(self, word: str = "") -> list[str]:
        """What ranks logged, of those lines that begin with a word."""
        path = self.folder / "log"
        return [line for line in path.read_text().splitlines() if line.startswith(word)] if path.exists() else []

    def sizes(self) -> list[int]:
        """Of the rounds so far, where its options have ``--events events``."""
        events = map(json.loads, (self.folder / "events").read_text().splitlines())
        return [event["size"] for event in events if event["event"] == "round"]

    def processes(self, name: str = "") -> list[psutil.Process]:
        """All processes of the job but the driver; `name`: those with this in their command."""
        return [process for process in job_processes(self.folder, name) if process.pid != self.pid]


def job_processes(folder: Path, name: str = "", ids: Iterable[int] | None = None) -> list[psutil.Process]:
    """Processes of the job in a folder; `name`: those with this in their command; `ids`: those among them."""
    found = []
    for pid in sorted(psutil.pids() if ids is None else ids):
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.environ().get("FAKE_FOLDER") == str(folder) and any(name in w for w in process.cmdline()):
                found.append(process)
    return found


if __name__ == "__main__":
    split = sys.argv.index("--")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    limits = {**dict.fromkeys(PATIENT, TIMEOUT_S), "silent_s": float(os.environ.get(SILENT, TIMEOUT_S))}
    limits |= {"cooldown_s": 0.4}
    launch_spec.Limits = partial(Limits, **limits)  # type: ignore[misc,assignment]
    python = json.loads(os.environ.get(PYTHON, "null")) or [sys.executable]
    launch_spec._rank_program = lambda spec: (*python, sys.argv[1], *sys.argv[split + 1 :])
    sys.exit(launch.main(["--to", "hvdtrain", *sys.argv[2:split]]))
