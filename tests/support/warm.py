"""Processes of Python that have imported torch already: they are forks of a server.

Importing torch and what it needs takes 2 to 8 s of a core, which is most of what a short job takes. `warm_python` is
used in place of `sys.executable`: it starts a small client, which has the server make a fork with the client's
arguments, environment, folder, cores and streams. The client passes on signals and ends as the fork does; where the
client is killed, the server kills the fork. A fork imports hvdtrain itself. Forks share the seed of Python's hashes.
Forks that wait in MPI sleep.

Children of the fork server of `multiprocessing` end without the interpreter's exit handlers.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import multiprocessing.process
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_CLIENT = Path(__file__).with_name("warm_client.py")
_YIELD = Path(__file__).with_name("sleeping_yield.c")
_MOST_STREAMS, _HIGH = 64, 500
_AT_START = ("AUDIT_", "GLIBC_", "HF_", "LD_", "MALLOC_", "OMP_", "TRANSFORMERS_")
_OF_PYTHON = {"PYTHONPATH", "PYTHONWARNINGS", "PYTHONUNBUFFERED"}
"""Variables of Python that a fork follows."""


def is_warm(environment: Mapping[str, str]) -> bool:
    """Return whether a fork can have variables: a program reads some only when it starts, or imports torch."""
    return not any(
        name.startswith(_AT_START) or (name.startswith("PYTHON") and name not in _OF_PYTHON) for name in environment
    )


@cache
def warm_python() -> list[str]:
    """Start the server, if this process has none; return the words that start a fork."""
    folder = tempfile.mkdtemp(prefix="warm-")
    address = f"{folder}/socket"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = subprocess.Popen(
        server_command(address),
        cwd=_CLIENT.parents[2],
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdin is not None and server.stdout is not None

    def end() -> None:
        server.communicate()  # it ends with its input
        Path(address).unlink(missing_ok=True)
        Path(folder).rmdir()

    atexit.register(end)
    assert server.stdout.readline() == b"ready\n"
    return client_command(address)


def server_command(address: str) -> list[str]:
    """Return what starts a server: it says "ready", and ends with its input."""
    return ["env", f"LD_PRELOAD={_sleeping_yield()}", sys.executable, "-m", "tests.support.warm", address]


@cache
def _sleeping_yield() -> str:
    """Compile what `_YIELD` says, if no process has; return where it is, or nothing without a compiler."""
    if (compiler := shutil.which("cc")) is None:
        return ""
    library = _YIELD.parents[2] / f"build/sleeping_yield-{_YIELD.stat().st_mtime_ns}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        own = library.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", own, _YIELD], check=True)
        own.replace(library)
    return str(library)


def client_command(address: str) -> list[str]:
    """Return the words that start a fork of the server at an address."""
    return [sys.executable, "-IS", str(_CLIENT), address]


def _serve(address: str) -> dict[str, Any]:
    """Make forks until the input ends. Return in the forks: what the client asked for."""
    listener, clients = socket.socket(socket.AF_UNIX), dict[int, socket.socket]()
    listener.bind(address)
    listener.listen()
    ended, wake = socket.socketpair()
    for each in (ended, wake):
        each.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a fork may take it for its launcher
    selector = selectors.DefaultSelector()
    for each in (listener, ended, sys.stdin):
        selector.register(each, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                for pid in clients:
                    os.kill(pid, signal.SIGKILL)
                sys.exit()
            elif key.fileobj is ended:
                ended.recv(4096)
                _report(clients, selector)
            elif key.fileobj is listener:
                client = listener.accept()[0]
                try:
                    request, streams = _received(client)
                except (OSError, EOFError):  # it was killed
                    client.close()
                    continue
                if (child := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    for number in (signal.SIGCHLD, signal.SIGTERM):
                        signal.signal(number, signal.SIG_DFL)
                    selector.close()
                    for each in (listener, ended, wake, client, *clients.values()):
                        each.close()
                    high = [fcntl.fcntl(stream, fcntl.F_DUPFD_CLOEXEC, _HIGH) for stream in streams]
                    for stream in streams:  # whose numbers the client's may have
                        os.close(stream)
                    for stream, number in zip(high, request["streams"], strict=True):
                        os.dup2(stream, number)
                        os.close(stream)
                    return request
                for stream in streams:
                    os.close(stream)
                clients[child] = client
                _answer(client, child)
                selector.register(client, selectors.EVENT_READ, child)
            elif key.data in clients:  # a client says nothing more: it has ended
                selector.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)


def _received(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the request and the streams of a client. EOFError: it has ended."""
    head, streams, _, _ = socket.recv_fds(client, 8, _MOST_STREAMS)
    if not head:
        raise EOFError
    missing, parts = int.from_bytes(head, "big"), list[bytes]()
    while missing:
        if not (part := client.recv(missing)):
            raise EOFError
        parts.append(part)
        missing -= len(part)
    return json.loads(b"".join(parts)), streams


def _answer(client: socket.socket, number: int) -> None:
    with suppress(OSError):  # it has ended; its fork is killed then
        client.sendall(b"%d\n" % number)


def _report(clients: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """Send the exit codes of forks that have ended."""
    while clients:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        client = clients.pop(pid)
        if client in (key.fileobj for key in selector.get_map().values()):
            selector.unregister(client)
            _answer(client, os.waitstatus_to_exitcode(status))
        client.close()


def _become(request: dict[str, Any]) -> None:
    """Run the arguments, as Python does."""
    arguments, environment = request["arguments"], request["environment"]
    os.sched_setaffinity(0, request["cores"])
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request["folder"])
    multiprocessing.process.ORIGINAL_DIR = request["folder"]  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream.isatty(), write_through=bool(environment.get("PYTHONUNBUFFERED")))  # type: ignore[union-attr]
    warnings.resetwarnings()
    for action in filter(None, environment.get("PYTHONWARNINGS", "").split(",")):
        warnings.simplefilter(action)  # type: ignore[arg-type]
    is_module = arguments[0] == "-m"
    sys.orig_argv = [sys.executable, *arguments]
    sys.argv = arguments[is_module:]
    first = request["folder"] if is_module else str(Path(arguments[0]).parent)
    sys.path[:1] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if is_module:
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401

    with suppress(ImportError):
        import transformers.models.deepseek_v3.modeling_deepseek_v3  # noqa: F401

    gc.collect()
    gc.freeze()  # else a collection in a fork copies the memory of all objects
    asked = _serve(sys.argv[1])
    _become(asked)
