"""A bundle installed where no network is, and two ranks trained there.

Horovod is compiled there only where set-up has left no wheel of it: that takes minutes of two cores.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.install.build_probe import cache_folder
from hvdtrain.install.versions import ROOT_MAY_RUN
from hvdtrain.observe.past_journal import read_steps
from tests.support.host import Host, one_host, required, tool

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("builds"), pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
PYTHON = str(getattr(sys, "_base_executable", sys.executable))
COMPILING_S = 1800


@pytest.fixture
def nowhere() -> Iterator[Host]:
    """A host whose only network is its own loopback."""
    with required(), one_host("nowhere", "127.0.0.1", sorted(os.sched_getaffinity(0))) as host:
        yield host


def only(home: Path, path: str, *argv: str) -> list[str]:
    """A command with no other variables than these: none of pip's, none of this environment's."""
    return [tool("env"), "-i", f"HOME={home}", f"PATH={path}", *(f"{k}={v}" for k, v in ROOT_MAY_RUN.items()), *argv]


def test_it_trains_where_no_network_is(nowhere: Host, tmp_path: Path) -> None:
    bundled, venv, home = tmp_path / "offline", tmp_path / "a" / "venv", tmp_path / "home"
    (home / ".config/pip").mkdir(parents=True)
    (home / ".config/pip/pip.conf").write_text("[install]\nno-compile = no\n")  # pip's yes; most are never imported
    wheels = cache_folder(os.environ) / "horovod"
    if wheels.exists():
        shutil.copytree(wheels, home / ".cache/hvdtrain/horovod")
    argv = [sys.executable, "-m", "hvdtrain", "bundle", str(bundled)]
    subprocess.run(argv, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=1800)
    system = "/usr/local/bin:/usr/bin:/bin"
    links = nowhere.run([tool("ip"), "-j", "link"]).stdout
    assert [link["ifname"] for link in json.loads(links) if "UP" in link["flags"]] == ["lo"]
    reach = "import socket; socket.create_connection(('192.0.2.1', 443), 5)"
    assert "unreachable" in nowhere.run(only(home, system, PYTHON, "-c", reach), check=False).stderr

    install = only(home, system, "/bin/sh", str(bundled / "install.sh"), str(venv), PYTHON)
    said = nowhere.run(install, timeout_s=COMPILING_S).stdout
    assert "Two ranks summed a tensor" in said and (wheels.exists() or "compiling Horovod" in said), said

    shutil.copy(ROOT / "tests" / "support" / "toy.py", tmp_path)
    job = ["mpirun", "-np", "2", "--oversubscribe", "python", "-m", "hvdtrain", "--task=toy.py:toy"]
    path = f"{venv / 'bin'}:{system}"
    flags = ["--train.steps=5", f"--run_dir={tmp_path / 'run'}"]
    done = nowhere.run(only(home, path, *job, *flags), cwd=tmp_path)
    assert "on 2 rank(s)" in done.stdout, done.stdout
    assert list(read_steps(tmp_path / "run" / "journal.jsonl")) == [1, 2, 3, 4, 5]

    (tmp_path / "a").rename(tmp_path / "b")  # Horovod finds its libraries beside itself, wherever that is
    moved = tmp_path / "b" / "venv" / "lib"
    libraries = list(moved.glob("python*/site-packages/horovod/torch/mpi_lib_v2*.so"))
    linked = subprocess.run(["ldd", *libraries], capture_output=True, text=True, check=True).stdout
    found = dict(line.split(" => ") for line in linked.replace("\t", "").splitlines() if " => " in line)
    for name in ("libmpi.so.40", "libtorch_cpu.so", "libc10.so"):
        assert Path(found[name].split()[0]).resolve().is_relative_to(tmp_path / "b"), found[name]

    wheel = next((bundled / "packages").glob("torch-*.whl"))
    with wheel.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        content[len(content) // 2] ^= 1
    refused = nowhere.run([*install[:-2], str(tmp_path / "third"), PYTHON], check=False)
    assert refused.returncode == 1 and f"packages/{wheel.name}: FAILED" in refused.stderr, refused.stderr
    assert not (tmp_path / "third").exists()
