"""Kubernetes: an MPIJob of the MPI operator, v2beta1.

The operator's behaviour was read in kubeflow/mpi-operator at cbe4f8a (pkg/controller/mpi_job_controller.go,
pkg/apis/kubeflow/v2beta1/types.go). Its script of hosts prints no slots, and its variables for Open MPI are those of
version 4, so the command line names the file of hosts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hvdtrain.install.venv import OPEN_MPI
from hvdtrain.launch.spec import JobSpec, Mpi, Script
from hvdtrain.launch.targets import openmpi
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


IMAGE = Image()
CLAIM = "hvdtrain-runs"
"""The volume shared by all pods, for checkpoints and logs."""


def render(spec: JobSpec) -> Script:
    """Return the manifest of a job."""
    flavour = "cuda" if spec.gpus_per_node else "cpu"
    batch = replace(spec.batch, image=spec.batch.image or f"{IMAGE.name}{flavour}")
    limits: dict[str, int | str] = {}
    if spec.gpus_per_node:
        limits["nvidia.com/gpu"] = spec.gpus_per_node
    if spec.cpus_per_rank:
        limits["cpu"] = spec.cpus_per_rank * spec.ranks_per_node
    if batch.mem_mib:
        limits["memory"] = f"{batch.mem_mib}Mi"
    user = f"{{runAsUser: {IMAGE.uid}, runAsGroup: {IMAGE.uid}, fsGroup: {IMAGE.uid}, runAsNonRoot: true}}"
    words = _elastic(spec) if spec.elastic else _by_mpi(spec)
    values = {"spec": spec, "batch": batch, "image": IMAGE, "limits": limits}
    escaped = [word.replace("$(", "$$(") for word in words]  # Kubernetes would expand variables
    # Kubernetes ends a pod by SIGTERM; by default mpirun kills the ranks a second later.
    variables = {} if spec.elastic else {"OMPI_MCA_odls_base_sigkill_timeout": str(max(1, batch.notice_s - 5))}
    text = fill("mpijob.yaml.j2", **values, words=escaped, variables=variables, security=user, claim=CLAIM)
    return Script(text, ("kubectl", "apply", "-f", "-"))


def _by_mpi(spec: JobSpec) -> tuple[str, ...]:
    """Return the command line of the image's own MPI; variables are those of the launcher's container."""
    own = Mpi("openmpi", IMAGE.openmpi, f"{IMAGE.prefix}/bin/mpirun", IMAGE.prefix)
    there = replace(spec, mpi=own, python=f"{IMAGE.prefix}/bin/python", interface="", ssh_port=None)
    return openmpi.argv(there, ("--hostfile", HOSTS))


def _elastic(spec: JobSpec) -> tuple[str, ...]:
    assert spec.elastic is not None
    least, most = spec.elastic
    python = f"{IMAGE.prefix}/bin/python"
    ranks = ("-np", str(spec.ranks), "--elastic", f"{least}:{most}", "--slots", str(spec.ranks_per_node))
    passed = [word for name in spec.pass_on for word in ("--env", name)]
    return (python, "-m", "hvdtrain", "launch", *ranks, "--discover", DISCOVER, *passed, "--", *spec.own_arguments)


_TAKES = frozenset({"hosts", "nodes", "gpus_per_node", "cpus_per_rank", "time", "queue", "name", "notice", "requeues"})
_TAKES |= {"image", "namespace", "elastic", "env", "mem"}
TARGET = Target("mpijob", render, takes=_TAKES, even=True, elsewhere=True)
