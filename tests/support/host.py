"""One host of `two_hosts`: namespaces of its own, held by one process, in which further processes are started.

The holder is ``cat``, process 1 of its pid namespace, reading from a pipe that only the owner holds. When the owner
ends, however it ends, the pipe closes, ``cat`` ends, and the kernel ends every process of that namespace and takes
back the network, the mounts and the memory file systems with them: nothing has a name that could be left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from hvdtrain.runtime.tuning import without_our_variables
from tests.support.launch import ROOT, TIMEOUT_S
from tests.support.warm import client_command, server_command

LINK = "link0"
"""The interface that leads to the other host."""
OWN = Path("/run/two_hosts")
"""A folder of each host that no other sees, in memory."""
NEEDED = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "util-linux",
    "taskset": "util-linux",
    "env": "coreutils",
    "hostname": "hostname",
    "ip": "iproute2",
    "tc": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
"""Programs, each with Debian's package of it."""


class UnavailableError(Exception):
    """This machine cannot be made into two hosts; the message says why."""


@contextlib.contextmanager
def required() -> Iterator[None]:
    """Skip the test where this machine cannot do it; CI must."""
    try:
        yield
    except UnavailableError as problem:
        if "CI" in os.environ:
            pytest.fail(f"{problem} (CI needs root, and what .ci/run installs)")
        pytest.skip(str(problem))


def required_tool(name: str, package: str = "") -> str:
    """The path of a program of Debian's `package`, without which the test is skipped."""
    with required():
        return tool(name, package)


def tool(name: str, package: str = "") -> str:
    """The path of a program, also of those that only root has on PATH."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")
    if found is None:
        raise UnavailableError(f"there is no {name}: sudo apt-get install {package or NEEDED.get(name, name)}")
    return found


def beside_python(name: str) -> str:
    """The path of a program of this Python's environment, or of PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise UnavailableError(f"there is no {name}: make setup")
    return found


def variables(further: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of what is started on a host: this process's, without what a launcher, ssh or hvdtrain set."""
    foreign = ("OMPI_", "PMIX_", "PMI_", "HOROVOD_", "SSH_", "SLURM_")
    path = [str(OWN / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin"]
    return {
        **{k: v for k, v in without_our_variables(os.environ).items() if not k.startswith(foreign)},
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join(path),
        "TMPDIR": str(OWN / "tmp"),
        **(further or {}),
    }


class Host:
    """A host with a name, an address, a network, processes, a ``/run``, ``/dev/shm`` and ``/etc/hosts`` of its own.

    Attributes:
        name: what ``hostname`` says.
        address: of `LINK`.
        cores: numbers of the processors that its processes may use.
        files: its root directory, as this process sees it.
        namespace: the kernel's name of what holds its processes.
    """

    def __init__(self, name: str, address: str, cores: Sequence[int], holder: psutil.Process, warm: list[Any]) -> None:
        self.name = name
        self.address = address
        self.cores = tuple(cores)
        self.files = Path(f"/proc/{holder.pid}/root")
        self._holder = holder
        self._warm: list[subprocess.Popen[str]] = warm
        self.namespace = pid_namespace(holder.pid)

    def popen(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[Any] = subprocess.DEVNULL,
        stderr: int | IO[Any] = subprocess.DEVNULL,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[str]:
        """Start a program on the host; `environment` is added to `variables`."""
        place = [tool("env"), f"--chdir={cwd or Path.cwd()}"]
        bound = [tool("taskset"), "--cpu-list", ",".join(map(str, self.cores))]
        return subprocess.Popen(
            [*self._enter(), *bound, *place, *argv],
            env=variables(environment),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )

    def warm_python(self) -> list[str]:
        """Return the words that start a fork of a Python on this host that has imported torch: see `warm`."""
        address = str(OWN / "warm")  # each host has its own behind this name
        if not self._warm:
            pipe = subprocess.PIPE
            server = self.popen(server_command(address), cwd=ROOT, stdin=pipe, stdout=pipe)
            self._warm.append(server)
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
        return client_command(address)

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        check: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the host and wait; what it wrote. What it started is ended when the time is over."""
        others = self.processes()
        pipe = subprocess.PIPE
        with self.popen(argv, cwd=cwd, environment=environment, stdout=pipe, stderr=pipe) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException:
                self.end(self.processes() - others)
                process.kill()
                raise
        done = subprocess.CompletedProcess(list(argv), process.returncode, out, err)
        assert not check or done.returncode == 0, f"{argv} on {self.name}: exit {done.returncode}\n{out}\n{err}"
        return done

    def seen(self, path: Path) -> Path:
        return self.files / path.relative_to("/")

    def write(self, path: Path, text: str, mode: int = 0o600) -> None:
        file = self.seen(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)

    def processes(self) -> set[int]:
        """Ids, as this process sees them, of all processes of the host; the holder's too."""
        return {pid for pid in psutil.pids() if pid_namespace(pid) == self.namespace}

    def end(self, ids: set[int]) -> None:
        for pid in ids & self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()

    def sent_bytes(self) -> int:
        """Bytes that left by the link since the host started, headers included."""
        return int(self._link()["tx"]["bytes"])

    def received_bytes(self) -> int:
        """Bytes that came by the link since the host started, headers included."""
        return int(self._link()["rx"]["bytes"])

    def configure(self, *argv: str) -> None:
        """Run a short system command on the host."""
        self.run([tool(argv[0]), *argv[1:]], cwd=Path("/"))

    def pair(self, other: Host, port: str = LINK) -> None:
        """Lay a cable from a port of this host to another host."""
        # entering only the network: the other's id is not known in this host's pid namespace
        enter = [tool("nsenter"), f"--target={self._holder.pid}", "--net"]
        ends = ["name", port, "type", "veth", "peer", "name", LINK, "netns", str(other._holder.pid)]
        done = subprocess.run([*enter, tool("ip"), "link", "add", *ends], capture_output=True, text=True)
        if done.returncode != 0:
            raise UnavailableError(f"the kernel makes no veth pair: {done.stderr.strip()}")

    def _enter(self) -> list[str]:
        return [tool("nsenter"), f"--target={self._holder.pid}", "--net", "--uts", "--mount", "--pid"]

    def _link(self) -> Any:
        done = self.run([tool("ip"), "-s", "-j", "link", "show", "dev", LINK], cwd=Path("/"))
        return json.loads(done.stdout)[0]["stats64"]


@contextlib.contextmanager
def one_host(name: str, address: str, cores: Sequence[int]) -> Iterator[Host]:
    """A host, without a link yet, for as long as the block lasts.

    Errors:
        UnavailableError: not root, no right to make namespaces, or a tool is missing.
    """
    if os.geteuid() != 0:
        raise UnavailableError("network namespaces need root")
    for needed in NEEDED:
        tool(needed)
    kinds = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    holder = [tool("env"), "--ignore-signal=CHLD", tool("cat")]  # so that it leaves no zombies, as process 1 must
    pipe = subprocess.PIPE
    with subprocess.Popen([tool("unshare"), *kinds, *holder], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as made:
        assert made.stdin and made.stdout and made.stderr
        warm: list[subprocess.Popen[str]] = []
        try:
            with contextlib.suppress(BrokenPipeError):
                made.stdin.write("ready\n")
                made.stdin.flush()
            if not made.stdout.readline():
                raise UnavailableError(f"no namespaces may be made here: {made.stderr.read().strip()}")
            host = Host(name, address, cores, psutil.Process(made.pid).children()[0], warm)
            _furnish(host)
            yield host
        finally:  # the kernel ends all others with process 1, and only then lets `unshare` see its end
            for first in psutil.Process(made.pid).children():
                first.kill()
            for server in warm:
                server.communicate()


def _furnish(host: Host) -> None:
    for folder in ("/run", "/dev/shm"):
        host.configure("mount", "-t", "tmpfs", "tmpfs", folder)
    for folder in ("tmp", "bin"):
        host.seen(OWN / folder).mkdir(parents=True)
    host.configure("hostname", host.name)
    host.configure("ip", "link", "set", "lo", "up")


def command_of(pid: int) -> list[str]:
    """The words by which a process was started; none where it is gone."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return []


def pid_namespace(pid: int) -> str | None:
    """The kernel's name of the namespace that holds a process; None when it has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return None


def until(condition: Any, what: str) -> None:
    """Wait for what another process does soon."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise UnavailableError(f"waited {TIMEOUT_S} s for {what}")
        time.sleep(0.02)
