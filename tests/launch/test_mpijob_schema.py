"""The schema that judges our MPIJobs takes none with something that a cluster refuses or drops."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from hvdtrain.launch.targets import TARGETS
from tests.support.jobs import JOBS
from tests.support.mpijob_schema import problems

_MISSING = object()
_PODS = "spec.mpiReplicaSpecs"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("apiVersion", "kubeflow.org/v1"),
        ("metadata.name", _MISSING),
        ("metadata.nam", "x"),
        ("metadata.name", "t" * 55),  # -worker-3 behind it makes 64 characters
        ("spec.slots", 2),
        ("spec.slotsPerWorker", "2"),
        ("spec.mpiImplementation", "OpenMPI5"),
        ("spec.runPolicy.backoffLimit", -1),
        ("spec.runPolicy.restarts", 1),
        (f"{_PODS}.Launcher", _MISSING),
        (f"{_PODS}.Worker.replicas", 0),
        (f"{_PODS}.Worker.template.spec", _MISSING),
        (f"{_PODS}.Worker.template.spec.containers", []),
        (f"{_PODS}.Worker.template.spec.restartPolicy", "Never"),
        (f"{_PODS}.Worker.template.spec.containers.0.comand", ["a"]),
        (f"{_PODS}.Worker.template.spec.containers.0.command", "sshd -De"),
        (f"{_PODS}.Worker.template.spec.containers.0.resources.limits", {"cpu": True}),
    ],
)
def test_a_wrong_job_is_refused(path: str, value: object) -> None:
    job = yaml.safe_load(str(TARGETS["mpijob"].render(JOBS["mpijob"][1])))
    place: Any = job
    *keys, last = path.split(".")
    for key in keys:
        place = place[int(key) if key.isdigit() else key]
    if value is _MISSING:
        del place[last]
    else:
        place[last] = value
    found = problems(job)
    assert found and all(last in problem for problem in found)
