"""Runs commands of one rank in forks of a Python that has imported torch already.

Importing torch takes 1 to 4 s of a core, which is most of what a command takes that only reports an error. A fork has
its own arguments, environment, folder, streams and exit code, and imports hvdtrain itself. Children of the fork server
of `multiprocessing` end without the interpreter's exit handlers.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S


def run_warm(
    arguments: Sequence[str], *, cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m hvdtrain ARGUMENTS`` and wait."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        request = {
            "arguments": list(arguments),
            "folder": str(cwd),
            "environment": {**ENVIRONMENT, **(environment or {})},
            "streams": [f"/proc/{os.getpid()}/fd/{stream.fileno()}" for stream in (out, err)],
        }
        print(json.dumps(request), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, *(_text(stream) for stream in (out, err)))


def _text(stream: Any) -> str:
    stream.seek(0)
    return str(stream.read())


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.warm"],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)  # it ends with its input
    return server


def _serve() -> None:
    """Answer each request by the exit code of a fork; return in the forks."""
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            _become(json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()


def _become(request: dict[str, Any]) -> None:
    signal.alarm(TIMEOUT_S)
    for number, path in enumerate([os.devnull, *request["streams"]]):
        os.dup2(os.open(path, os.O_RDWR), number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]
    sys.argv[1:] = request["arguments"]
    warnings.resetwarnings()
    warnings.simplefilter(request["environment"]["PYTHONWARNINGS"])


if __name__ == "__main__":
    import torch  # noqa: F401

    gc.freeze()  # else a collection in a fork copies the memory of all objects

    _serve()
    runpy.run_module("hvdtrain", run_name="__main__", alter_sys=True)
