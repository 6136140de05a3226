"""The image: linted, pinned, and built on a Debian made here, as its base cannot be had everywhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvdtrain.install.build_probe import cache_folder
from hvdtrain.launch.targets.mpijob import IMAGE
from tests.support.host import UnavailableError, beside_python, required, tool

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "launchers/Dockerfile"
COMPILERS = ("g++", "gcc", "make", "cmake", "cc", "nvcc")


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction with its arguments; comments left out, lines that go on joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name.upper(), rest.strip()


def test_it_is_linted() -> None:
    done = subprocess.run([beside_python("hadolint"), DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_it_is_pinned_in_stages_and_runs_as_a_user() -> None:
    steps = list(instructions(DOCKERFILE.read_text()))
    arguments = dict(rest.split("=", 1) for name, rest in steps if name == "ARG")
    assert re.fullmatch(r"debian:\d+\.\d+-slim", arguments["BASE"]) and arguments["SNAPSHOT"] == "yes"
    commands = [part for name, rest in steps if name == "RUN" for part in rest.split(";")]
    installs = [part for part in commands if "pip install" in part]
    assert installs and all("--constraint constraints.txt" in install for install in installs)
    builds = [part for part in commands if "build-horovod" in part]
    assert builds and all("PIP_CONSTRAINT=/source/constraints.txt" in build for build in builds)  # it fetches nvcc
    last = steps[max(index for index, (name, _) in enumerate(steps) if name == "FROM") :]
    assert ("USER", f"{IMAGE.uid}:{IMAGE.uid}") in last and IMAGE.uid > 0
    assert not any(f" {compiler}" in rest for _, rest in last for compiler in COMPILERS)
    assert [name for name, _ in last][-1] == "CMD"


def test_only_copied_files_are_sent_to_the_builder() -> None:
    copied = {
        name
        for step, rest in instructions(DOCKERFILE.read_text())
        if step == "COPY" and not rest.startswith("--from")
        for name in rest.split()[:-1]
    }
    lines = (ROOT / ".dockerignore").read_text().split()
    assert "*" in lines and {line[1:] for line in lines if line.startswith("!")} == copied


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
    (script,) = re.findall(r"sed -i '(.*?)'", DOCKERFILE.read_text())
    subprocess.run(["sed", "-i", script, "list"], cwd=tmp_path, check=True)
    found = re.findall("^URIs: (.*)$", (tmp_path / "list").read_text(), re.MULTILINE)
    assert found == ["http://archive/debian/20250101T000000Z", "http://archive/debian-security/20250101T000000Z"]


CERTIFICATES = "/run/certificates.pem"


def _seen(folder: Path) -> list[str]:
    """What of this machine a build sees: how pip is set up. Certificates lie where no package is.

    pip compiles no modules, which takes minutes: most are never imported here.
    """
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    pairs = [line.partition("=")[::2] for line in listed.splitlines()]
    settings = {name.rpartition(".")[2]: shlex.split(value)[0] for name, value in pairs}
    certificates = settings.get("cert") or os.environ.get("SSL_CERT_FILE")
    if certificates:
        settings["cert"] = CERTIFICATES
    settings["no-compile"] = "no"  # that is pip's yes
    (folder / "pip.conf").write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    words = [word for value in settings.values() for word in value.split() if word != CERTIFICATES]
    places = {word for word in words if word.startswith("/") and Path(word).exists()}
    places |= {str(Path(word.removeprefix("file://")).parent) for word in words if word.startswith("file://")}
    shared = {"/etc/pip.conf": str(folder / "pip.conf"), **{place: place for place in places}}
    if certificates:
        shared[CERTIFICATES] = certificates
    return [f"--volume={here}:{there}:ro" for there, here in shared.items()]


def _built(folder: Path) -> list[str]:
    """What a build has of set-up's wheels of Horovod, if those were built on the same Debian: minutes of two cores."""
    wheels = cache_folder(os.environ) / "horovod"
    if "VERSION_CODENAME=bookworm" not in Path("/etc/os-release").read_text() or not wheels.exists():
        return []
    shutil.copytree(wheels, folder / "wheels")
    return [f"--volume={folder / 'wheels'}:/tmp/cache/hvdtrain/horovod:rw"]


@dataclass(frozen=True)
class Store:
    """Where buildah, which needs no daemon, has images and containers, apart from those of this machine."""

    folder: Path

    def __call__(self, *argv: str) -> str:
        """Run a command of buildah; what it prints."""
        done = self.run(*argv)
        assert done.returncode == 0, f"buildah {argv}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        own = [f"--root={self.folder / 'root'}", f"--runroot={self.folder / 'run'}"]
        return subprocess.run([tool("buildah"), *own, *argv], capture_output=True, text=True)

    def debian(self, release: str) -> str:
        """Make an image of Debian with no more than its packages need, from where this machine has its own packages."""
        sources = [str(path) for path in Path("/etc/apt/sources.list.d").glob("debian.sources")]
        archive = self.folder / "debian.tar"
        make = [tool("mmdebstrap"), "--variant=minbase", "--quiet", release, str(archive), *sources]
        done = subprocess.run(make, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        container = self("from", "scratch")
        self("add", "--quiet", container, str(archive), "/")
        self("commit", "--quiet", "--rm", container, "localhost/base")
        return "localhost/base"


@dataclass(frozen=True)
class Container:
    """A container of an image, and its root folder here."""

    store: Store
    name: str
    root: Path

    def run(self, argv: Sequence[str], *, alone: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command as the image's user, in its folder, with its environment; `alone`: on a network of its own."""
        how = ("--isolation=oci", "--runtime=runc", f"--network={'none' if alone else 'host'}")
        return self.store.run("run", *how, self.name, "--", *argv)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    with required():
        if os.geteuid():
            raise UnavailableError("not root")
        for name in ("mmdebstrap", "buildah", "runc"):
            tool(name)
    folder = tmp_path_factory.mktemp("image")
    store = Store(folder)
    try:
        given = {"BASE": store.debian("bookworm"), "SNAPSHOT": "", "TORCH_INDEX": os.environ.get("TORCH_INDEX", "")}
        arguments = [f"--build-arg={name}={value}" for name, value in given.items()]
        how = ["--isolation=oci", "--runtime=runc", "--network=host", *_seen(folder), *_built(folder)]
        store("bud", *how, *arguments, f"--file={DOCKERFILE}", "--tag=hvdtrain:cpu", str(ROOT))
        name = store("from", "hvdtrain:cpu")
        yield Container(store, name, Path(store("mount", name)))
    finally:
        store.run("rm", "--all")
        subprocess.run(["rm", "-rf", "--one-file-system", str(folder)], check=False)


@pytest.mark.slow
@pytest.mark.xdist_group("builds")
@pytest.mark.timeout(3600)
def test_it_builds_and_trains_as_a_user(image: Container) -> None:
    assert image.run(["id", "-u"]).stdout == f"{IMAGE.uid}\n"
    for compiler in COMPILERS:
        assert image.run(["sh", "-c", f"command -v {compiler}"]).stdout == ""
    assert not list((image.root / "etc/ssh").glob("ssh_host_*"))
    command = json.loads(image.store("inspect", "--type=image", "hvdtrain:cpu"))["OCIv1"]["config"]["Cmd"]
    found = image.run([*command, "--json"])
    assert found.returncode in (0, 1) and "checks" in json.loads(found.stdout), found.stdout + found.stderr
    options = ["--task", "image", "--train.steps", "2", "--observe.tensorboard", "false"]
    command = ["mpirun", "-np", "2", "--oversubscribe", f"{IMAGE.prefix}/bin/python", "-m", "hvdtrain", *options]
    done = image.run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished at step 2 of 2" in done.stdout


@pytest.mark.slow
@pytest.mark.xdist_group("builds")
@pytest.mark.timeout(3600)
def test_its_sshd_serves_the_user_with_the_keys_of_a_job_and_no_others(image: Container) -> None:
    """Keys lie as the MPI operator mounts them: owned by root, readable by all, one pair for hosts and users."""
    keys = image.root / IMAGE.ssh.lstrip("/")
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
    command = ["bash", "-c", f"{shlex.join(IMAGE.sshd)} & ssh -o ConnectionAttempts=20 127.0.0.1 id -u"]
    done = image.run(command, alone=True)
    assert done.stdout == f"{IMAGE.uid}\n", done.stderr
    (keys / "id_rsa.pub").write_bytes((keys / "other.pub").read_bytes())  # then the host's key is not the job's
    done = image.run(command, alone=True)
    assert done.stdout == "" and "Host key verification failed" in done.stderr
