"""What the Kubeflow MPI operator and Kubernetes take for an MPIJob (kubeflow.org/v2beta1).

No package ships the operator's CustomResourceDefinition. Those of its own fields that we may write are here as JSON
Schema from its types, defaults and validation (github.com/kubeflow/mpi-operator, Apache-2.0, in pkg/apis/kubeflow:
v2beta1/types.go and validation/validation.go). Pods are judged by Kubernetes' schemas, which kubernetes-validate ships.
Other fields are refused: a cluster would drop those that it does not know without a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator

_COUNT = {"type": "integer", "minimum": 0}


def problems(job: Mapping[str, Any]) -> list[str]:
    """Say what the operator or Kubernetes would refuse of an MPIJob, ``where: what`` a line; none when it is right."""
    return [
        f"Kubernetes {version}: {error.json_path}: {error.message}"
        for version in _versions()
        for error in _validator(version).iter_errors(job)
    ]


def _closed(required: list[str], **properties: object) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _one_of(*names: str) -> dict[str, Any]:
    return {"enum": list(names)}


def _replica(replicas: Mapping[str, object]) -> dict[str, Any]:
    # The replica's restartPolicy is taken; for the pod's a warning event is raised.
    pod = {"properties": {"containers": {"minItems": 1}, "restartPolicy": {"not": {}}}}
    needed = {"required": ["spec"], "properties": {"spec": pod}}
    return _closed(
        ["template"],
        replicas=replicas,
        restartPolicy=_one_of("Never", "OnFailure"),
        template={"allOf": [{"$ref": "#/$defs/io.k8s.api.core.v1.PodTemplateSpec"}, needed]},
    )


def _spec() -> dict[str, Any]:
    policy = {"cleanPodPolicy": _one_of("None", "Running", "All")}
    policy |= dict.fromkeys(("ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"), _COUNT)
    workers = {"type": "integer", "minimum": 1}
    return _closed(
        ["mpiReplicaSpecs"],
        slotsPerWorker=_COUNT,
        runPolicy=_closed([], **policy),
        mpiReplicaSpecs=_closed(["Launcher"], Launcher=_replica({"const": 1}), Worker=_replica(workers)),
        sshAuthMountPath={"type": "string", "minLength": 1},
        launcherCreationPolicy=_one_of("AtStartup", "WaitForWorkersReady"),
        mpiImplementation=_one_of("OpenMPI", "Intel", "MPICH"),
    )


def _schema(version: str) -> dict[str, Any]:
    """The schema of an MPIJob on a cluster of a Kubernetes version, such as ``v1.30.0``."""
    folder = _schemas() / f"{version}-local-strict"
    definitions = json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))["$defs"]
    named = [{"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}, {"required": ["name"]}]
    job = _closed(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": "kubeflow.org/v2beta1"},
        kind={"const": "MPIJob"},
        metadata={"allOf": named},
        spec=_spec(),
    )
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **job, "$defs": definitions}


def _schemas() -> Any:
    return resources.files("kubernetes_validate") / "kubernetes-json-schema"


@cache
def _versions() -> tuple[str, str]:
    """The oldest and the newest Kubernetes that there are schemas of."""
    names = (entry.name.removesuffix("-local-strict") for entry in _schemas().iterdir())
    known = sorted({name for name in names if re.fullmatch(r"v\d+\.\d+\.\d+", name)}, key=_numbers)
    return known[0], known[-1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.removeprefix("v").split(".")))


@cache
def _validator(version: str) -> Draft202012Validator:
    made = Draft202012Validator(_schema(version))
    made.check_schema(made.schema)
    return made
