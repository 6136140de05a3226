"""A replacement for a rank's Python: prints its arguments, environment and rank as a line of JSON.

This Python must run it, so `echo_python` writes a script that does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from hvdtrain.runtime.environment import rank_info

ROOT = Path(__file__).parents[2]


def echo_python(folder: Path) -> str:
    """Write the program into a folder of any name, and return its path."""
    path = folder / 'python of "ranks" it\'s'
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support.echo_python import main; main()"
    # A kernel ends the path of an interpreter at a space, so sh starts it.
    path.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{start.replace(chr(39), chr(34))}' \"$@\"\n")
    path.chmod(0o755)
    return str(path)


def main() -> None:
    """Print the line."""
    info = rank_info(os.environ)
    names = json.loads(os.environ.get("TOLD_NAMES", "[]"))
    told = {name: getattr(info, name) for name in ("rank", "size", "local_rank", "host")}
    told |= {
        "argv": sys.argv[1:],
        "cwd": str(Path.cwd()),
        "cores": len(os.sched_getaffinity(0)),
        "variables": {name: os.environ.get(name) for name in names},
    }
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
