"""Stand-ins of Apptainer and of an srun with pyxis, which run a program on this machine as if it were in an image.

An image is a folder with a ``bin``. As of the real ones, ranks get the environment of the host, but the image's PATH;
where they start and what is mounted is written into a file of the image, a line of JSON for each rank.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

_APPTAINER = """\
#!{python} -I
import json, os, sys
words, flags, options = sys.argv[2:], [], {{}}
assert sys.argv[1] == "exec"
while words[0].startswith("--"):
    name = words.pop(0)
    if name == "--nv":
        flags.append(name)
    else:
        options.setdefault(name, []).append(words.pop(0))
image = words.pop(0)
with open(os.path.join(image, "started"), "a") as file:
    file.write(json.dumps([flags, options, dict(os.environ)]) + "\\n")
os.chdir(options["--pwd"][0])
os.environ["PATH"] = os.path.join(image, "bin") + ":/usr/bin:/bin"
os.environ.pop("LD_LIBRARY_PATH", None)
os.execvp(words[0], words)
"""

_SRUN = """\
#!{python} -I
import json, os, sys
words = [word for word in sys.argv[1:] if not word.startswith("--container-")]
options = dict(word.split("=", 1) for word in sys.argv[1:] if word.startswith("--container-"))
if words == ["--help"]:
    print("      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH\\n                              [pyxis] the")
    sys.exit()
if image := options.get("--container-image"):
    with open(os.path.join(image, "started"), "a") as file:
        file.write(json.dumps([[], options, dict(os.environ)]) + "\\n")
    first = next(k for k, word in enumerate(words) if not word.startswith("-"))
    words[first:first] = ["env", "PATH=" + os.path.join(image, "bin") + ":/usr/bin:/bin"]
os.execv({srun!r}, ["srun", *words])
"""

_PYTHON = """\
#!/bin/sh
env | grep -E '^(PYTHON|VIRTUAL_ENV)' >>{environment}
PYTHONPATH={root} exec {python} "$@"
"""
"""The image's own Python, with the hvdtrain of this folder."""


def make_image(folder: Path) -> Path:
    """Make an image, whose Python notes the variables for Python that reach it in the file ``environment``."""
    image = folder / "image"
    (image / "bin").mkdir(parents=True)
    words = {"environment": image / "environment", "root": ROOT, "python": sys.executable}
    _write(image / "bin/python", _PYTHON.format(**{name: shlex.quote(str(word)) for name, word in words.items()}))
    return image


def make_runtime(folder: Path, name: str = "apptainer", srun: str = "") -> Path:
    """Make a program of Apptainer or, for `srun`, the path of the real one, an srun with pyxis; return its folder."""
    folder = folder / "runtime"
    folder.mkdir(exist_ok=True)
    _write(folder / name, (_SRUN if srun else _APPTAINER).format(python=sys.executable, srun=srun))
    return folder


def starts(image: Path) -> list[tuple[list[str], dict[str, Any], dict[str, str]]]:
    """Return flags, options and environment of each start in the image."""
    return [json.loads(line) for line in (image / "started").read_text().splitlines()]


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
