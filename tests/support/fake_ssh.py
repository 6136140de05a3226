"""A stand-in for ``ssh``: it runs the command on this host.

The host's name says how: ``mute`` says nothing and stays; ``noisy`` greets on stdout, as login scripts do.
"""

from __future__ import annotations

import shlex
import subprocess
import sys


def main(argv: list[str]) -> int:
    """Do as sshd would."""
    host, command = argv[-2:]
    if host == "mute":
        sys.stdin.buffer.read()
        return 0
    if host == "noisy":
        sys.stdout.write("Welcome to noisy!\n{}\n")
        sys.stdout.flush()
    return subprocess.run(shlex.split(command)[1:], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
