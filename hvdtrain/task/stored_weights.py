"""The weights of a folder of transformers, read one parameter at a time: a rank then never holds the whole model.

`from_pretrained` reads all of them, or with a `DistributedConfig` this rank's part for an exchange of its own. The
names and conversions are transformers' own, such as of the experts that a folder has one by one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import TaskError
from hvdtrain.files import read_regular
from hvdtrain.state.placeholder import Placeholder, parameters_without_memory

if TYPE_CHECKING:
    from torch import Tensor

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class StoredWeights:
    """The tensors of a folder under the names of a model.

    Args:
        model: of transformers; its state has shapes and dtypes.
        files: that have the tensors, by their names there.

    Errors:
        ImportError: transformers is too old.
    """

    def __init__(self, model: Any, files: Mapping[str, Path]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        self._model, self._files = model, files
        self._own = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
        transforms = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._converters = {pattern: each for each in converters for pattern in each.source_patterns}
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        self._first: dict[str, str] = {}  # of the names that one conversion yields
        for key in sorted(files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, self._own)
            if name not in self._own and key in self._own:
                name, pattern = rename_source_key(key, [], [], model.base_model_prefix, self._own)
            self._sources.setdefault(name, []).append((key, pattern))
            targets = self._converters[pattern].target_patterns if pattern else [""]
            self._first |= {name.replace(targets[0], target): name for target in targets} if pattern else {name: name}

    def __contains__(self, name: str) -> bool:
        """Return whether the folder has a tensor."""
        return name in self._first

    def read(self, name: str) -> Tensor:
        """Read a tensor, into memory of its own. Errors: TaskError: it is damaged, or of another model."""
        try:
            return self._read(name)
        except Exception as error:  # of files, of safetensors, and of transformers' conversions
            path = self._files[self._sources[self._first[name]][0][0]]
            raise TaskError(
                f"{name} cannot be read from {path}",
                found=f"{type(error).__name__}: {error}",
                next_step="copy the folder of the model again, or name another one: --model.from",
            ) from error

    def _read(self, name: str) -> Tensor:
        first, (shape, dtype) = self._first[name], self._own[name]
        found = self._sources[first]
        with _opened({key: self._files[key] for key, _ in found}) as tensors:
            if found[0][1] is None:
                value: Tensor = tensors[found[-1][0]].to(dtype, copy=True)
            else:
                converter = copy.deepcopy(self._converters[found[0][1]])
                for key, pattern in found:
                    converter.add_tensor(first, key, pattern, partial(tensors.__getitem__, key))
                values = converter.convert(first, model=self._model, config=self._model.config)[name]
                value = (values[0] if isinstance(values, Sequence) else values).to(dtype)
        if value.shape != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)} in the folder, and {tuple(shape)} in the model")
        return value


class _Tensors(dict[str, Any]):
    """Opened files by the names of their tensors; an item is a tensor in the mapped file."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key).get_tensor(key)


@contextmanager
def _opened(files: Mapping[str, Path]) -> Iterator[_Tensors]:
    """Map files; what was read of them counts as memory of this process until they are closed."""
    from safetensors import safe_open

    with ExitStack() as stack:
        opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in {*files.values()}}
        yield _Tensors({key: opened[path] for key, path in files.items()})


def files_of(folder: Path) -> dict[str, Path]:
    """Return the files of a folder by the names of their tensors; {} if it has none. Errors: OSError, ValueError."""
    if (folder / _INDEX).is_file():
        return {key: folder / name for key, name in json.loads(read_regular(folder / _INDEX))["weight_map"].items()}
    if not (folder / _WHOLE).is_file():
        return {}
    from safetensors import safe_open

    with safe_open(folder / _WHOLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / _WHOLE)


def model_to_read(auto: Any, folder: Path, config: Any, kernel: Mapping[str, str]) -> Any:
    """Return a model in float32 with placeholders that have `read`, and with the buffers of a folder.

    None if this is not possible: the model is quantized, transformers is too old, or the folder lacks a tensor, which
    `from_pretrained` names.

    Args:
        auto: a class of transformers that makes models.
        folder: with config.json and safetensors files.
        config: of the model.
        kernel: further arguments of the model.
    """
    import torch

    if getattr(config, "quantization_config", None) is not None or not (files := files_of(folder)):
        return None
    with parameters_without_memory(draw=False):
        model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False, **kernel)
    try:
        weights = StoredWeights(model, files)
    except ImportError:
        return None
    names: dict[Any, list[str]] = {}  # of tied parameters, all
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    stored = {parameter: next((n for n in known if n in weights), None) for parameter, known in names.items()}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    if None in stored.values() or not all(name in weights for name in buffers):
        return None
    for parameter, name in stored.items():
        assert isinstance(parameter, Placeholder) and name is not None
        parameter.read = partial(weights.read, name)
    for name, buffer in buffers.items():
        buffer.copy_(weights.read(name))
    return model
