"""A Dockerfile carried out without Docker: each stage in a folder of its own, by chroot in a mount namespace.

What Docker would do beside it (layers, caches, limits) is left out. A stage begins as a copy of the one that it names,
or of a Debian that mmdebstrap made. Root is needed.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.host import tool

FIRST = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


@dataclass
class Stage:
    """A root folder, and how commands run in it."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: dict(FIRST))
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    folder: str = "/"
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """What of this machine a build sees: files and folders of it, by their places in the build, and variables."""

    shared: Mapping[str, Path] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, stage: Stage, argv: Sequence[str], *, alone: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command as the stage's user, in its folder, with its environment; `alone`: on a network of its own."""
        lines = ["set -e", *([f"{tool('ip')} link set lo up"] if alone else [])]
        lines.append(shlex.join(["mount", "-t", "proc", "proc", str(stage.root / "proc")]))
        for place, path in {"/dev": Path("/dev"), **self.shared}.items():
            inside = stage.root / place.lstrip("/")
            if path.is_dir():
                inside.mkdir(parents=True, exist_ok=True)
            else:
                inside.parent.mkdir(parents=True, exist_ok=True)
                inside.touch()
            lines.append(shlex.join(["mount", "--rbind", str(path), str(inside)]))
        variables = {**self.variables, **stage.arguments, **stage.environment}
        home = {"HOME": "/root" if stage.user == "0:0" else stage.folder}
        clean = [f"{name}={value}" for name, value in {**home, **variables}.items()]
        inner = ["env", "-i", f"--chdir={stage.folder}", *clean, *argv]
        lines.append("exec " + shlex.join([tool("chroot"), f"--userspec={stage.user}", str(stage.root), *inner]))
        script = "\n".join(lines)
        namespaces = ["--mount", "--pid", "--fork", "--kill-child", *(["--net"] if alone else [])]
        return subprocess.run([tool("unshare"), *namespaces, "sh", "-c", script], capture_output=True, text=True)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction with its arguments; comments left out, lines that go on joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name.upper(), rest.strip()


def build(text: str, context: Path, base: Path, folder: Path, machine: Machine, given: Mapping[str, str]) -> Stage:
    """Carry out a Dockerfile; its last stage.

    Args:
        text: the Dockerfile.
        context: what COPY copies from.
        base: a folder that stands for the base image.
        folder: where the stages' roots come.
        machine: what commands see of this machine.
        given: values for ARG, as of ``--build-arg``.
    """
    stages: dict[str, Stage] = {}
    stage = Stage(base)
    for name, rest in instructions(text):
        if name == "FROM":
            image, _, label = rest.partition(" AS ")
            before = stages.get(image)
            stage = Stage(folder / label, dict(before.environment) if before else dict(FIRST))
            subprocess.run(["cp", "-a", str(before.root if before else base), str(stage.root)], check=True)
            stages[label] = stage
        elif stages:
            _carry_out(name, rest, stage, stages, context, machine, given)
    return stage


def _carry_out(
    name: str,
    rest: str,
    stage: Stage,
    stages: Mapping[str, Stage],
    context: Path,
    machine: Machine,
    given: Mapping[str, str],
) -> None:
    if name == "ARG":
        key, _, default = rest.partition("=")
        stage.arguments[key] = given.get(key, default)
    elif name == "ENV":
        for entry in shlex.split(rest):
            key, _, value = entry.partition("=")
            stage.environment[key] = value.replace("$PATH", stage.environment["PATH"])
    elif name == "WORKDIR":
        stage.folder = rest
        (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
    elif name == "USER":
        stage.user = rest
    elif name == "CMD":
        stage.command = tuple(json.loads(rest))
    elif name == "COPY":
        _copy(rest.split(), stage, stages, context)
    elif name == "RUN":
        done = machine.run(stage, ["/bin/sh", "-c", rest])
        assert done.returncode == 0, f"RUN {rest}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    else:
        raise NotImplementedError(name)


def _copy(words: list[str], stage: Stage, stages: Mapping[str, Stage], context: Path) -> None:
    source = context
    if words[0].startswith("--from="):
        source = stages[words.pop(0).partition("=")[2]].root
    *names, place = words
    target = stage.root / str(Path(stage.folder) / place).lstrip("/")
    for name in names:
        found = source / name.lstrip("/")
        into = target / found.name if place.endswith("/") else target
        into.parent.mkdir(parents=True, exist_ok=True)
        if found.is_dir():
            shutil.copytree(found, into, symlinks=True)
        else:
            shutil.copy2(found, into)
