"""The yardstick of MPIJobs: it takes a right one, and none with something that a cluster refuses or drops."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.support.mpijob_schema import problems


def _job() -> dict[str, Any]:
    """A job that uses each field of the operator's own."""
    resources = {"limits": {"nvidia.com/gpu": 2, "memory": "8Gi"}}
    container = {"name": "main", "image": "registry/train:1", "command": ["sshd", "-De"], "resources": resources}
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [container]}}
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": "train", "namespace": "team"},
        "spec": {
            "slotsPerWorker": 2,
            "runLauncherAsWorker": False,
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "ttlSecondsAfterFinished": 60,
                "activeDeadlineSeconds": 3600,
                "backoffLimit": 3,
                "schedulingPolicy": {"minAvailable": 2, "queue": "q", "minResources": {"cpu": "2", "memory": "1Gi"}},
                "suspend": False,
                "managedBy": "kubeflow.org/mpi-operator",
            },
            "sshAuthMountPath": "/home/train/.ssh",
            "launcherCreationPolicy": "WaitForWorkersReady",
            "mpiImplementation": "OpenMPI",
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "restartPolicy": "OnFailure", "template": copy.deepcopy(template)},
                "Worker": {"replicas": 2, "restartPolicy": "Never", "template": copy.deepcopy(template)},
            },
        },
    }


def test_a_valid_job_is_accepted() -> None:
    assert problems(_job()) == []
    small = _job()
    template = small["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]
    small["spec"] = {"mpiReplicaSpecs": {"Launcher": {"template": template}}}
    assert problems(small) == []


_MISSING = object()

_WORKER = ("spec", "mpiReplicaSpecs", "Worker")
_LAUNCHER = ("spec", "mpiReplicaSpecs", "Launcher")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("apiVersion",), "kubeflow.org/v1"),
        (("metadata", "name"), _MISSING),
        (("metadata", "nam"), "x"),
        (("metadata", "name"), "Train"),
        (("metadata", "name"), "t" * 55),  # -worker-1 behind it makes 64 characters
        (("spec", "slots"), 2),
        (("spec", "waitForWorkers"), True),
        (("spec", "slotsPerWorker"), "2"),
        (("spec", "mpiImplementation"), "OpenMPI5"),
        (("spec", "launcherCreationPolicy"), "AfterWorkers"),
        (("spec", "sshAuthMountPath"), ""),
        (("spec", "runPolicy", "cleanPodPolicy"), "Always"),
        (("spec", "runPolicy", "backoffLimit"), -1),
        (("spec", "runPolicy", "restarts"), 1),
        (("spec", "runPolicy", "schedulingPolicy", "minavailable"), 1),
        (("spec", "runPolicy", "schedulingPolicy", "minResources"), {"cpu": [2]}),
        ((*_LAUNCHER, "replicas"), 2),
        ((*_LAUNCHER, "restartPolicy"), "Always"),
        (_LAUNCHER, _MISSING),
        ((*_WORKER, "replicas"), 0),
        (("spec", "mpiReplicaSpecs", "Workers"), {}),
        ((*_WORKER, "template"), _MISSING),
        ((*_WORKER, "template", "spec"), _MISSING),
        ((*_WORKER, "template", "spec", "containers"), []),
        ((*_WORKER, "template", "spec", "restartPolicy"), "Never"),
        ((*_WORKER, "template", "spec", "containers", 0, "comand"), ["a"]),
        ((*_WORKER, "template", "spec", "containers", 0, "command"), "sshd -De"),
        ((*_WORKER, "template", "spec", "containers", 0, "env"), [{"name": "A", "value": 1}]),
        ((*_WORKER, "template", "spec", "containers", 0, "resources", "limits"), {"cpu": True}),
    ],
    ids=lambda part: ".".join(map(str, part)) if isinstance(part, tuple) else None,
)
def test_a_wrong_job_is_refused(path: tuple[str | int, ...], value: object) -> None:
    job = _job()
    place: Any = job
    for key in path[:-1]:
        place = place[key]
    if value is _MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    named = [key for key in path if isinstance(key, str)][-1]
    found = problems(job)
    assert found
    assert all(named in problem for problem in found)
