"""Names of the tensors of a model that a task compiled or wrapped, with and without what that adds.

torch.compile adds `_orig_mod` anywhere in a name; DataParallel and the like add `module.` to the begin of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from hvdtrain.state.pieces import Assembly, StateDict


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return, for each name, the one without what compiling and wrapping adds; itself if two would be equal."""
    found = {name: ".".join(part for part in name.split(".") if part != "_orig_mod") for name in names}
    while found and all(name.startswith("module.") for name in found.values()):
        found = {name: plain.removeprefix("module.") for name, plain in found.items()}
    return found if len({*found.values()}) == len(found) else {name: name for name in found}


def named_like(state: StateDict, own: Iterable[str]) -> StateDict:
    """Return a state of whole tensors under the names of the own model, which may be compiled or wrapped otherwise."""
    plain, stored = plain_names(own), {*state.tensors["model"], *state.values["aliases"]}
    if stored <= plain.keys():
        return state
    by_plain = {short: name for name, short in plain.items()}
    names = {name: by_plain.get(short, name) for name, short in plain_names(stored).items()}

    def renamed(key: str, group: str = "") -> str:
        if group.startswith("optimizer"):  # the last part is a slot, which may have the name of a parameter
            name, _, slot = key.rpartition("/")
            return f"{names.get(name, name)}/{slot}"
        return "/".join(names.get(part, part) for part in key.split("/"))

    def renamed_value(value: Any, group: str) -> Any:
        if isinstance(value, Mapping):
            return {renamed(key, group): renamed_value(each, "") for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [renamed_value(each, "") for each in value]
        return renamed(value) if isinstance(value, str) else value

    tensors: dict[str, Any] = {}
    for group, entries in state.tensors.items():
        if isinstance(entries, Assembly):
            tensors[group] = entries.renamed(partial(renamed, group=group))
        else:
            tensors[group] = {renamed(key, group): tensor for key, tensor in entries.items()}
    with_names = {key: renamed_value(state.values[key], key) for key in _WITH_NAMES if key in state.values}
    return StateDict(tensors, {**state.values, **with_names})


_WITH_NAMES = ("aliases", "optimizer", "exchange", "callbacks")
"""The keys of values that have names of tensors."""
