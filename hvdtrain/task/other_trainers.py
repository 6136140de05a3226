"""Checkpoints of other trainers: the readers of their formats, and which of their tensors are a model's parameters.

They are pickles, so whoever makes one may put a call of any function into it. Each is read in a process of its own, by
an unpickler with a list of the names that may occur. The metadata of torch's distributed checkpoints needs ours:
torch's own reader allows all names. torch reads the tensors, with `weights_only`.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import re
import shutil
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain.errors import TaskError, listed
from hvdtrain.files import read_regular
from hvdtrain.programs import answer
from hvdtrain.state.pieces import plain_names
from hvdtrain.task.once_per_host import once_per_host

SOURCE = "source.json"
"""File in a folder of converted weights: of what they are, and which tensors have no place in the model."""

_VERSION = 1  # of what `hvdtrain.task.convert` writes
_LONGEST_S = 86_400.0


class Contents(NamedTuple):
    """What a checkpoint has. A tensor takes memory when it is read."""

    shapes: Mapping[str, tuple[int, ...]]  # of its tensors, by name
    others: Sequence[str]  # names of what is not a tensor
    read: Callable[[Sequence[str]], Mapping[str, Tensor]]  # returns tensors of these names


_DCP = "torch.distributed.checkpoint."
_DCP_CLASSES = "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties"
_DCP_CLASSES += " TensorStorageMetadata _MEM_FORMAT_ENCODING"
_ALLOWED = {
    *((f"{_DCP}metadata", name) for name in _DCP_CLASSES.split()),
    (f"{_DCP}filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath")),
}
"""Names in the metadata of a distributed checkpoint, besides dtypes: all that torch's own writer uses."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) not in _ALLOWED:
            raise _refused(f"{module}.{name}")
        return super().find_class(module, name)


def _refused(names: str) -> TaskError:
    return TaskError(
        "the file holds more than tensors and plain values, and is not read: such a file can run any code",
        expected="tensors, numbers, texts, lists and dictionaries",
        found=names,
        next_step="if you trust it, save the state dict alone with the program that wrote the file, and name that file",
    )


def read_dcp(path: Path) -> Contents:
    """Read torch's distributed checkpoint, of any number of ranks. Errors: TaskError, and those of damaged files."""
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, load
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    if not (path / ".metadata").is_file():
        raise TaskError(
            f"{path} is no checkpoint of torch.distributed.checkpoint",
            expected="a folder with .metadata and files *.distcp",
            found=_names_in(path),
            next_step="name the folder that has them",
        )
    with (path / ".metadata").open("rb") as file:
        metadata: Any = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise TypeError(f".metadata has a {type(metadata).__name__}")
    entries = metadata.state_dict_metadata
    stored = {name: each for name, each in entries.items() if isinstance(each, TensorStorageMetadata)}
    for name, each in stored.items():
        if sum(math.prod(chunk.sizes) for chunk in each.chunks) != math.prod(each.size):
            raise ValueError(f"{name} is not complete")

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        found = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names}
        # torch unpickles what is no tensor without a list of names, but only if it is asked for.
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        load(found, storage_reader=Reader(path), planner=planner, no_dist=True)
        return found

    return Contents({n: tuple(e.size) for n, e in stored.items()}, sorted(entries.keys() - stored.keys()), read)


def read_file(path: Path) -> Contents:
    """Read a file of `torch.save`: of Lightning, with a `state_dict`, or with a state dict alone, as of accelerate."""
    found = _load(path)
    within = found.get("state_dict", found)
    outside = [name for name in found if name != "state_dict"] if within is not found else []
    return _of_state(within, outside)


def read_parts(path: Path) -> Contents:
    """Read a file as `read_file`, or in a folder pytorch_model.bin or its parts, as of transformers and accelerate."""
    if not path.is_dir():
        return read_file(path)
    whole = path / "pytorch_model.bin"
    if not (files := [whole] if whole.is_file() else sorted(path.glob("pytorch_model*.bin"))):
        raise TaskError(
            f"there is no checkpoint in {path}",
            expected="pytorch_model.bin, or parts pytorch_model-*.bin",
            found=_names_in(path),
            next_step="name a file, or without torch: a folder of safetensors files",
        )
    return _of_state({name: value for file in files for name, value in _load(file).items()}, [])


def _names_in(path: Path) -> str:
    return listed(sorted(each.name for each in path.iterdir())) if path.is_dir() else "a file"


def read_deepspeed(path: Path) -> Contents:
    """Read a checkpoint of DeepSpeed: of ZeRO 0 to 2 in the precision of training, or a universal one in fp32."""
    if (path / "latest").is_file():
        path /= read_regular(path / "latest").decode().strip()
    if (path / "zero").is_dir():
        loaded = {file.parent.name: _load(file) for file in sorted(path.glob("zero/*/fp32.pt"))}
        return _of_state({name: each["param"] for name, each in loaded.items()}, [])
    files = sorted(path.glob("*model_states.pt"))
    if len(files) != 1 or not files[0].name.startswith("mp_rank_"):
        raise TaskError(
            f"{path} has no file with a whole model",
            expected="mp_rank_00_model_states.pt of ZeRO 0, 1 or 2, or a universal checkpoint",
            found=listed(file.name for file in files) or "no file *model_states.pt",
            next_step="convert ZeRO 3 by DeepSpeed's own script in the folder: python zero_to_fp32.py . OUT"
            " --safe_serialization, then --model.from OUT",
        )
    found = _load(files[0])
    return _of_state(found["module"], [name for name in found if name != "module"])


READERS: Mapping[str, Callable[[Path], Contents]] = {
    "dcp": read_dcp,
    "deepspeed": read_deepspeed,
    "lightning": read_file,
    "torch": read_parts,
}
"""By the prefix of `--model.from`."""


def _load(path: Path) -> dict[str, Any]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, EOFError) as error:
        if names := re.findall(r"GLOBAL ([\w.]+)|(?:class|function) ([\w.]+)", str(error)):
            raise _refused(next(filter(None, names[0]))) from error
        raise TaskError(
            f"{path} is no file of torch.save",
            expected="a state dict that torch.save has written",
            found=f"{path.stat().st_size:,} bytes of another format, or damaged ones",
            next_step="name another file; for safetensors name the folder, without a prefix",
        ) from error
    if not isinstance(loaded, dict):
        raise TypeError(f"{path.name} has a {type(loaded).__name__}, and not a state dict")
    return loaded


def _of_state(state: Mapping[str, Any], outside: Sequence[str]) -> Contents:
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    others = [*outside, *(name for name in state if name not in tensors)]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Contents(shapes, others, lambda names: {name: tensors[name] for name in names})


def map_names(shapes: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the tensors that belong to a model, as a dictionary from their name in a checkpoint to that in the model.

    They follow the prefix under which most parameters have the model's names and shapes. Tensors with other names there
    belong to it, too. Averaged weights and the state of an optimizer come last. Without such a prefix, all belong.

    `own`: shapes of the model's tensors.
    """
    plain, votes = plain_names(shapes), Counter[str]()
    for key, name in plain.items():
        parts = name.split(".")
        for start in range(len(parts)):
            if own.get(".".join(parts[start:])) == shapes[key]:
                votes[".".join([*parts[:start], ""])] += 1
    if not votes:
        return plain
    best = max(votes, key=lambda prefix: (votes[prefix], not re.search("ema|avg|average|optim", prefix), -len(prefix)))
    within = {key: name.removeprefix(best) for key, name in plain.items() if name.startswith(best)}
    first = {name.partition(".")[0] for name in own}
    return {key: name for key, name in within.items() if name.partition(".")[0] in first}


def convert(form: str, path: Path, extra: Mapping[str, Path]) -> Path:
    """Return a folder of transformers with the weights of a checkpoint, in the cache of this host.

    `form`: in `READERS`. `extra`: config.json and other files to copy into the folder, by name.

    Errors: TaskError: the checkpoint cannot be read, or is of another model; TransientDataError: no space.
    """
    files = sorted({*extra.values(), *(filter(Path.is_file, path.rglob("*")) if path.is_dir() else [path])})
    facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(json.dumps([_VERSION, form, str(path.resolve()), facts]).encode()).hexdigest()[:32]
    build = partial(_build, form=form, path=path, extra=extra)
    return once_per_host("models", key, build, lambda folder: (folder / SOURCE).is_file())


def _build(folder: Path, form: str, path: Path, extra: Mapping[str, Path]) -> None:
    for name, file in extra.items():
        shutil.copyfile(file, folder / name)
    found = answer([sys.executable, "-m", "hvdtrain.task.convert", form, str(path), str(folder)], _LONGEST_S)
    if found.error:
        raise TaskError(f"the weights of {form}:{path} cannot be read", found=found.error)
    if found.values:
        raise TaskError(**found.values)
