"""Stands where a rank's Python would: prints, as a line of JSON, what it was told and who it is.

It must be run by this Python, so `told_python` writes a script that does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from hvdtrain.runtime.environment import rank_info

ROOT = Path(__file__).parents[2]


def told_python(folder: Path) -> str:
    """Write the program into a folder, whose name may be any; its path."""
    path = folder / 'python of "ranks" it\'s'
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support.told_python import main; main()"
    # A kernel reads no further than a space in the path of an interpreter: sh goes between.
    path.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{start.replace(chr(39), chr(34))}' \"$@\"\n")
    path.chmod(0o755)
    return str(path)


def main() -> None:
    """Tell."""
    info = rank_info(os.environ)
    names = json.loads(os.environ.get("TOLD_NAMES", "[]"))
    told = {
        "rank": info.rank,
        "size": info.size,
        "local_rank": info.local_rank,
        "host": info.host,
        "argv": sys.argv[1:],
        "cwd": str(Path.cwd()),
        "cores": len(os.sched_getaffinity(0)),
        "variables": {name: os.environ.get(name) for name in names},
    }
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
