"""Commands that are shown to be typed again."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def beside(name: str) -> str:
    """A program as a shell finds it that is not in the environment: beside this interpreter, where it is there."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        return name
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def go_on(run_dir: Path, size: int) -> str:
    """What goes on with a run on as many ranks: from its last checkpoint, or from the start where it has none."""
    folder = shlex.quote(str(run_dir))
    again = f"{beside('python')} -m hvdtrain --config {folder}/config.yaml --run_dir {folder}"
    return f"{beside('mpirun')} -np {size} {again}" if size > 1 else again
