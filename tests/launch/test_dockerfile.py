"""The image: linted, pinned, and carried out step by step in a Debian of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.launch.dockerfile import render_dockerfile
from hvdtrain.launch.targets.mpijob import IMAGE
from tests.support.dockerfile import Machine, Stage, build, instructions
from tests.support.host import UnavailableError, beside_python, tool

ROOT = Path(__file__).parents[2]
COMPILERS = ("g++", "gcc", "make", "cmake", "cc", "nvcc")


def test_it_is_linted() -> None:
    done = subprocess.run([beside_python("hadolint"), "-"], input=render_dockerfile(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_it_is_pinned_in_stages_and_runs_as_a_user() -> None:
    steps = list(instructions(render_dockerfile()))
    arguments = dict(rest.split("=", 1) for name, rest in steps if name == "ARG")
    assert re.fullmatch(r"debian:\d+\.\d+-slim", arguments["BASE"])
    assert arguments["SNAPSHOT"] == "yes"
    assert arguments["FLAVOUR"] == "cpu"
    stages = [rest for name, rest in steps if name == "FROM"]
    assert stages == ["${BASE} AS system", "system AS build", "system AS runtime"]
    installs = [part for name, rest in steps if name == "RUN" for part in rest.split(";") if "pip install" in part]
    assert len(installs) == 3
    assert all("--constraint constraints.txt" in install for install in installs)
    last = steps[max(index for index, (name, _) in enumerate(steps) if name == "FROM") :]
    assert ("USER", f"{IMAGE.uid}:{IMAGE.uid}") in last and IMAGE.uid > 0
    assert not any(f" {compiler}" in rest for _, rest in last for compiler in COMPILERS)
    assert [name for name, _ in last][-1] == "CMD"


LISTED = """\
Types: deb
# http://archive/debian/20250101T000000Z
URIs: http://mirror/debian
Suites: bookworm

Types: deb
# http://archive/debian-security/20250101T000000Z
URIs: http://mirror/debian-security
Suites: bookworm-security
"""


def test_packages_are_of_the_moment_that_the_base_names(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(LISTED)
    (script,) = re.findall(r"sed -i '(.*?)'", render_dockerfile())
    subprocess.run(["sed", "-i", script, "list"], cwd=tmp_path, check=True)
    found = re.findall("^URIs: (.*)$", (tmp_path / "list").read_text(), re.MULTILINE)
    assert found == ["http://archive/debian/20250101T000000Z", "http://archive/debian-security/20250101T000000Z"]


CERTIFICATES = "/run/certificates.pem"


def _machine() -> Machine:
    """What this machine's pip is set up with, its certificates (elsewhere: a package owns their place), its names."""
    pip = [sys.executable, "-m", "pip", "config"]
    listed = subprocess.run([*pip, "list"], capture_output=True, text=True).stdout
    files = subprocess.run([*pip, "debug"], capture_output=True, text=True).stdout
    words = [word for value in re.findall(r"'([^']*)'", listed) for word in value.split()]
    places = [word for word in words if word.startswith("/") and not word.startswith("/etc/ssl")]
    places += [str(Path(word.removeprefix("file://")).parent) for word in words if word.startswith("file://")]
    places += [*re.findall(r"(/\S+), exists: True", files), "/etc/resolv.conf", "/etc/hosts"]
    variables = {
        name: value for name, value in os.environ.items() if name.upper().startswith(("PIP_", "HTTP_", "HTTPS_"))
    }
    shared = {place: Path(place) for place in places if Path(place).exists()}
    if certificates := os.environ.get("SSL_CERT_FILE"):
        shared[CERTIFICATES] = Path(certificates)
        variables.update(PIP_CERT=CERTIFICATES, SSL_CERT_FILE=CERTIFICATES)
    return Machine(shared, variables)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Stage]]:
    folder = tmp_path_factory.mktemp("image")
    try:
        if os.geteuid():
            raise UnavailableError("not root")
        make = [tool("mmdebstrap"), "--variant=minbase", "--quiet"]
    except UnavailableError as problem:
        if "CI" in os.environ:
            pytest.fail(str(problem))
        pytest.skip(str(problem))
    sources = [str(path) for path in Path("/etc/apt/sources.list.d").glob("debian.sources")]
    base = folder / "base"
    base.mkdir(mode=0o755)
    done = subprocess.run([*make, "bookworm", str(base), *sources], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    machine = _machine()
    given = {"SNAPSHOT": "", "TORCH_INDEX": os.environ.get("TORCH_INDEX", "")}
    try:
        yield machine, build(render_dockerfile(), ROOT, base, folder, machine, given)
    finally:
        subprocess.run(["rm", "-rf", "--one-file-system", str(folder)], check=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_builds_and_trains_as_a_user(image: tuple[Machine, Stage]) -> None:
    machine, stage = image
    assert machine.run(stage, ["id", "-u"]).stdout == f"{IMAGE.uid}\n"
    for compiler in COMPILERS:
        assert machine.run(stage, ["sh", "-c", f"command -v {compiler}"]).stdout == ""
    assert not list((stage.root / "etc/ssh").glob("ssh_host_*"))
    found = machine.run(stage, [*stage.command, "--json"])
    assert found.returncode in (0, 1) and "checks" in json.loads(found.stdout), found.stdout + found.stderr
    options = ["--task", "image", "--train.steps", "2", "--observe.tensorboard", "false"]
    command = ["mpirun", "-np", "2", "--oversubscribe", f"{IMAGE.prefix}/bin/python", "-m", "hvdtrain", *options]
    done = machine.run(stage, command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished at step 2 of 2" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_its_sshd_serves_the_user_with_the_keys_of_a_job_and_no_others(image: tuple[Machine, Stage]) -> None:
    """Keys lie as the MPI operator mounts them: owned by root, readable by all, one pair for hosts and users."""
    machine, stage = image
    keys = stage.root / IMAGE.ssh.lstrip("/")
    for name in ("job", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", str(keys / name)], check=True)
    (keys / "job").rename(keys / "id_rsa")
    (keys / "job.pub").rename(keys / "id_rsa.pub")
    (keys / "authorized_keys").write_bytes((keys / "id_rsa.pub").read_bytes())
    for file in keys.iterdir():
        os.chown(file, 0, 0)
        file.chmod(0o644)
    keys.chmod(0o755)
    # ssh tries once a second until it is there
    command = ["bash", "-c", f"{shlex.join(IMAGE.sshd)} & ssh -o ConnectionAttempts=20 localhost id -u"]
    done = machine.run(stage, command, alone=True)
    assert done.stdout == f"{IMAGE.uid}\n", done.stderr
    (keys / "id_rsa.pub").write_bytes(
        (keys / "other.pub").read_bytes()
    )  # then the host has a key that is not the job's
    done = machine.run(stage, command, alone=True)
    assert done.stdout == "" and "Host key verification failed" in done.stderr
