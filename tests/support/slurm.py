"""A real Slurm on this machine, on one `Host` or on several: its own munge, controller and node daemons. Needs root.

    with one_node() as slurm:
        job = slurm.submit(script, "--partition=low")          # the text of a batch script, and options of sbatch
        slurm.until(lambda: slurm.state(job) == "COMPLETED", "the job to end")
        slurm.run(["salloc", "-n2", "srun", "hostname"])        # any program, with this Slurm's SLURM_CONF

Each node has two sockets, `SLOTS` cores and `GPUS` GPUs to give, whatever the machine has: the GPUs are other files.

Jobs of partition ``low`` are pre-empted by those of
``high`` after a grace time of `GRACE_S`, at whose beginning their steps get SIGTERM. A job that is cancelled or out of
time is killed `KILL_WAIT_S` after SIGTERM; one that is put back into the queue starts some 6 s later.

Everything lives in the namespaces of its hosts and goes with them, also when this process is killed: see `host`. So
several may be there at once, and nothing is left over. Ports are Slurm's own, since each host has its own network.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.host import LINK, OWN, Host, UnavailableError, one_host, tool
from tests.support.launch import TIMEOUT_S

SLOTS = 8
GRACE_S = 30
KILL_WAIT_S = 10
REQUEUE_S = 5
"""The life of a step's credential, before the end of which Slurm starts no job again."""

_NEEDED = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"}
"""Programs, each with Debian's package of it."""

_HERE = OWN / "slurm"
_NODE, _ADDRESS = "node", "10.78.0.1"

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")
"""Files in the place of GPUs."""
GPUS = len(_DEVICES)
_SHAPE = f"CPUs={SLOTS} Sockets=2 CoresPerSocket={SLOTS // 2} ThreadsPerCore=1 Gres=gpu:{GPUS}"
_CONF = """\
ClusterName=tests
SlurmctldHost={controller.name}({controller.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={here}/munge.socket,cred_expire={requeue_s}
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={kill_wait_s}
MessageTimeout=60
BatchStartTimeout=300
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """A Slurm whose controller is on the first of some hosts, each of which is a node."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = tuple(hosts)
        self.variables = {"SLURM_CONF": str(_HERE / "slurm.conf")}

    @property
    def first(self) -> Host:
        return self.hosts[0]

    def run(
        self, argv: Sequence[str], *, environment: Mapping[str, str] | None = None, **how: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the first host and wait, see `Host.run`; what it wrote."""
        return self.first.run(argv, environment={**self.variables, **(environment or {})}, **how)

    def popen(self, argv: Sequence[str], *, cwd: Path, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """Start a program on the first host; stderr goes where stdout goes."""
        return self.first.popen(argv, cwd=cwd, environment=self.variables, stdout=stdout, stderr=subprocess.STDOUT)

    def submit(self, script: str, *options: str, cwd: Path, environment: Mapping[str, str] | None = None) -> str:
        """Submit the text of a batch script; the number of the job."""
        file = cwd / f"{secrets.token_hex(4)}.sh"
        file.write_text(script)
        argv = ["sbatch", "--parsable", *options, str(file)]
        return self.run(argv, cwd=cwd, environment=environment).stdout.strip()

    def facts(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` says, name by name; nothing once Slurm has forgotten the job."""
        told = self.run(["scontrol", "--oneliner", "show", "job", job], check=False).stdout
        return dict(part.split("=", 1) for part in told.split() if "=" in part)

    def state(self, job: str) -> str:
        """Such as PENDING, RUNNING, COMPLETING, COMPLETED."""
        return self.facts(job).get("JobState", "")

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited {TIMEOUT_S} s for {what}\n{self.told()}"
            time.sleep(0.1)

    def clear(self) -> None:
        """Cancel all jobs and wait until they are gone."""
        self.run(["scancel", "--user=root"], check=False)
        self.until(lambda: not self.run(["squeue", "--noheader"]).stdout.strip(), "all jobs to be gone")

    def told(self) -> str:
        """The queue, and the ends of the daemons' logs."""
        logs = [host.seen(_HERE / name) for host in self.hosts for name in _LOGS]
        ends = [f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs if log.exists()]
        return "\n".join([self.run(["squeue"], check=False).stdout, *ends])


_LOGS = ("munged.log", "slurmctld.log", "slurmd.log")
_FILES = {"socket": "munge.socket", "key-file": "key", "log-file": "munged.log", "pid-file": "munged.pid"}
_MUNGE = [f"--{option}={_HERE / name}" for option, name in {**_FILES, "seed-file": "seed"}.items()]


@contextmanager
def slurm_on(hosts: Sequence[Host]) -> Iterator[Slurm]:
    """Start Slurm on hosts that know each other's names, and have another network interface than the loopback.

    Errors:
        UnavailableError: a program is missing, or a daemon does not come up; with what it has to say.
    """
    for program, package in _NEEDED.items():
        if not shutil.which(program) and not shutil.which(program, path="/usr/sbin:/sbin"):
            raise UnavailableError(f"there is no {program}: sudo apt-get install slurm-wlm munge ({package})")
    key = secrets.token_hex(64)
    nodes = "\n".join(f"NodeName={host.name} NodeAddr={host.address} {_SHAPE}" for host in hosts)
    conf = _CONF.format(
        controller=hosts[0], here=_HERE, nodes=nodes, grace_s=GRACE_S, kill_wait_s=KILL_WAIT_S, requeue_s=REQUEUE_S
    )
    slurm = Slurm(hosts)
    for host in hosts:
        host.write(_HERE / "key", key, 0o400)
        host.write(_HERE / "slurm.conf", conf, 0o644)
        host.write(_HERE / "gres.conf", "".join(f"Name=gpu File={file}\n" for file in _DEVICES), 0o644)
        host.write(_HERE / "mpi.conf", f"PMIxCliTmpDirBase={_HERE}/pmix\n", 0o644)
        for folder in ("state", "spool", "pmix"):
            host.seen(_HERE / folder).mkdir()
        _start(slurm, host, "munged", "--force", *_MUNGE)
    _start(slurm, hosts[0], "slurmctld", "-c")
    for host in hosts:
        _start(slurm, host, "slurmd", "-N", host.name)
    deadline, ask = time.monotonic() + TIMEOUT_S, ["sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D"]
    while slurm.run(ask, check=False).stdout.strip() != str(len(hosts)):
        if time.monotonic() > deadline:
            raise UnavailableError(f"Slurm's nodes do not come up\n{slurm.told()}")
        time.sleep(0.05)
    yield slurm


@contextmanager
def one_node() -> Iterator[Slurm]:
    """Start Slurm on one host of its own. Errors: those of `slurm_on`, and no right to make the host."""
    with one_host(_NODE, _ADDRESS, sorted(os.sched_getaffinity(0))) as host:
        # Slurm asks for addresses of the kinds that the host has besides the loopback.
        host.configure("ip", "link", "add", LINK, "type", "veth", "peer", "name", "other0")
        host.configure("ip", "address", "add", f"{_ADDRESS}/24", "dev", LINK)
        for name in (LINK, "other0"):
            host.configure("ip", "link", "set", name, "up")
        host.write(OWN / "hosts", f"127.0.0.1 localhost\n{_ADDRESS} {_NODE}\n", 0o644)
        host.configure("mount", "--bind", str(OWN / "hosts"), "/etc/hosts")
        with slurm_on([host]) as slurm:
            yield slurm


def _start(slurm: Slurm, host: Host, program: str, *options: str) -> None:
    done = host.run([tool(program), *options], cwd=Path("/"), environment=slurm.variables, check=False)
    if done.returncode != 0:
        raise UnavailableError(f"{program} does not start on {host.name}: {done.stderr.strip()}")
