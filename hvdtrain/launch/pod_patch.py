"""``--pod-patch FILE``: changes of the pods of a Kubernetes job.

The file has the keys ``launcher`` and ``worker``, each a part of a pod template (``metadata``, ``spec``). It is merged
as in RFC 7386: mappings are merged, null removes a field. Lists replace lists, except those of `_KEYS`, as in the
strategic merge of https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/. kubectl
does that merge only for types that it knows, and an MPIJob is none; jsonmerge, a library, needs a schema of each list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.errors import LaunchError
from hvdtrain.files import read_regular
from hvdtrain.yaml_file import parse_yaml

PODS = ("launcher", "worker")
_PARTS = ("metadata", "spec")
_KEYS = {"containers": "name", "initContainers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath"}
"""Lists with elements that are merged, and the key that identifies an element."""


def read_pod_patch(path: Path) -> dict[str, Any]:
    """Return the changes in a YAML or JSON file, by pod.

    Errors:
        LaunchError: it cannot be read, or has keys other than those of a pod template. ConfigError: as of `parse_yaml`.
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

    Errors:
        LaunchError: the job could not run with the changes.
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
