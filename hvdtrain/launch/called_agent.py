"""``python -m hvdtrain.launch.called_agent [--interface IF] pbs_tmrsh HOST COMMAND``: give COMMAND stdin and stdout.

pbs_tmrsh forwards neither, as its task gets those of the batch job:
https://github.com/openpbs/openpbs/blob/master/src/cmds/pbs_tmrsh.c

COMMAND gets a file in this folder as one more argument, which only this user can read: an address of this process and
two secrets. It connects there, sends the first secret, and expects the second one, so each end knows the other. Then
this process forwards its own stdin and stdout. It accepts one connection with the secret and removes the file. The
connection is not encrypted.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hvdtrain.errors import USAGE, LaunchError
from hvdtrain.launch.srun_job import store_address

CONNECT = (
    "import json,os,socket,sys;f=open(sys.argv[1]);os.fstat(f.fileno()).st_uid==os.getuid() or sys.exit(1);"
    'at=json.load(f);s=socket.create_connection(at["address"]);'
    's.sendall(at["first"].encode());n=len(at["second"]);'
    's.recv(n,socket.MSG_WAITALL)==at["second"].encode() or sys.exit(1);os.dup2(s.fileno(),0);os.dup2(s.fileno(),1);'
)
"""Python code of COMMAND that connects stdin and stdout, by a file of this user; it needs no hvdtrain."""

_STRANGER_S = 5.0
_POLL_S = 0.5


def main(argv: Sequence[str]) -> int:
    """Start COMMAND and forward until it closes the connection; return the exit code of pbs_tmrsh."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # for pbs_tmrsh too; the driver ends it by its stdin
        signal.signal(number, signal.SIG_IGN)
    interface, rest = (argv[1], argv[2:]) if argv[:1] == ["--interface"] else ("", argv)
    try:
        listener = socket.create_server((store_address(rest[1], interface), 0))
    except LaunchError as error:
        sys.stderr.write(f"{error}\n")
        return USAGE
    first, second = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    file_number, name = tempfile.mkstemp(prefix=".hvdtrain-agent-", dir=".")
    try:
        with os.fdopen(file_number, "w") as file:
            json.dump({"address": listener.getsockname(), "first": first, "second": second}, file)
        process = subprocess.Popen([*rest, str(Path(name).absolute())], stdin=subprocess.DEVNULL, stdout=2)
        link = _accept(listener, first.encode(), process)
    finally:
        Path(name).unlink()
        listener.close()
    if link is not None:
        link.sendall(second.encode())
        threading.Thread(target=_forward_stdin, args=(link,), daemon=True).start()
        with suppress(OSError):
            while data := link.recv(1 << 16):
                while data:
                    data = data[os.write(1, data) :]
    return process.wait()


def _accept(listener: socket.socket, secret: bytes, process: subprocess.Popen[bytes]) -> socket.socket | None:
    """Return the connection that sends the secret, None where the process ends before."""
    listener.settimeout(_POLL_S)
    while process.poll() is None:
        with suppress(OSError):
            link, _ = listener.accept()
            link.settimeout(_STRANGER_S)
            with suppress(OSError):
                if hmac.compare_digest(link.recv(len(secret), socket.MSG_WAITALL), secret):
                    link.settimeout(None)
                    return link
            link.close()
    return None


def _forward_stdin(link: socket.socket) -> None:
    with suppress(OSError):
        while data := os.read(0, 1 << 16):
            link.sendall(data)
        link.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
