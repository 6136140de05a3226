"""The client of warm.py: ``python -IS warm_client.py ADDRESS ARGUMENTS``."""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path


def is_inherited(number):
    with suppress(OSError):  # it is not open
        return os.get_inheritable(number)
    return False


def pass_on(number, frame):
    with suppress(ProcessLookupError):  # it has ended
        os.kill(child, number)


streams = [number for number in range(64) if is_inherited(number)]
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
request = json.dumps(
    {
        "arguments": sys.argv[2:],
        "folder": str(Path.cwd()),
        "environment": dict(os.environ),
        "cores": sorted(os.sched_getaffinity(0)),
        "streams": streams,
    }
).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], streams)
server.sendall(request)
answers = server.makefile()
child = int(answers.readline())
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, pass_on)
code = int(answers.readline())
if code < 0:
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
