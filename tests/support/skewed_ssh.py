"""In the place of ``ssh``: runs what is asked for on this host, by a clock that is wrong.

The host's name says how: ``plus400`` is 400 s ahead, ``minus2`` 2 s behind; ``mute`` says nothing and stays;
``noisy`` greets on stdout, as login scripts do.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

PATCH = "import hvdtrain.doctor.hosts.host_probe as p; now = p.now_ns; p.now_ns = lambda: now() + {ns}; p.main(hello)"


def main(argv: list[str]) -> int:
    """Do as sshd would."""
    host, command = argv[-2:]
    if host == "mute":
        sys.stdin.buffer.read()
        return 0
    if host == "noisy":
        sys.stdout.write("Welcome to noisy!\n{}\n")
        sys.stdout.flush()
    _, python, option, code = shlex.split(command)
    found = re.fullmatch(r"(plus|minus)(\d+)", host)
    seconds = int(found[2]) * (1 if found[1] == "plus" else -1) if found else 0
    code = code.partition("from hvdtrain")[0] + PATCH.format(ns=seconds * 10**9)
    return subprocess.run([python, option, code], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
