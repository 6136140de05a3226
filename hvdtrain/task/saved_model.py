"""Models on disk: what `--model.from` names, and the weights of a folder of transformers, read one parameter at a time.

That may be a run, one of its checkpoints, a folder, or a checkpoint of another trainer. A rank that reads one parameter
at a time never holds the whole model; `from_pretrained` reads all of them, or with a `DistributedConfig` this rank's
part for an exchange of its own. The names and conversions are transformers' own, such as of the experts that a folder
has one by one.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hvdtrain.errors import CheckpointError, ConfigError, TaskError, listed
from hvdtrain.files import read_regular
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.checkpoint_store import BEST, MANIFEST, CheckpointStore, Measure, load
from hvdtrain.state.pieces import StateDict, named_like, plain_names
from hvdtrain.state.placeholder import Placeholder, parameters_without_memory
from hvdtrain.task.encode import TOKENIZER, TOKENIZER_FILES, is_byte_tokenizer
from hvdtrain.task.other_trainers import READERS, SOURCE, convert

CONFIG, BASE_CONFIG = "config.json", "base_config.json"
"""Files of a checkpoint that describe the model; the second one if the checkpoint has only adapters of it."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class SavedModel:
    """A folder with the files of a model."""

    folder: Path  # of a checkpoint, or in the form of transformers
    is_checkpoint: bool  # whether it is a checkpoint of hvdtrain

    @property
    def has_adapters(self) -> bool:
        """Whether it has the weights of LoRA only."""
        return self.is_checkpoint and (self.folder / BASE_CONFIG).exists()

    @property
    def note(self) -> str:
        """Of what it has the weights, in a few words."""
        if not (self.folder / SOURCE).is_file():
            return f"weights of {self.folder}"
        about = json.loads(read_regular(self.folder / SOURCE))
        left = about["left"]
        return f"weights of {about['of']}" + (f"; without a place in the model: {listed(left)}" if left else "")

    def config(self) -> Path:
        """Return the path of the config.json. Errors: CheckpointError: the checkpoint has none."""
        path = self.folder / (BASE_CONFIG if self.has_adapters else CONFIG)
        if self.is_checkpoint and not path.exists():
            raise CheckpointError(
                f"{self.folder} has no {CONFIG}, so it does not describe its model",
                expected="a checkpoint of --task language_model",
                found="a checkpoint of another task, or of an older version",
                next_step="name another run, or a folder of transformers",
            )
        return path

    def tokenizer(self) -> str | None:
        """Return the path of its tokenizer.json; None if it has none, or if each byte is a token."""
        path = self.folder / TOKENIZER
        return str(path) if path.is_file() and not is_byte_tokenizer(path) else None

    def load(self) -> StateDict:
        """Read and verify the model of a checkpoint, under `plain_names`. Errors: CheckpointError."""
        state = load(self.folder, groups={"model"})
        return named_like(state, plain_names([*state.tensors["model"], *state.values["aliases"]]).values())


def find_model(name: str, option: str = "--model.from", config: str | None = None) -> SavedModel:
    """Return the model in a run, a checkpoint or a folder; of a run, that of the newest checkpoint.

    ``RUN@best`` and ``RUN@100`` are the best checkpoint of a run, by its ``--checkpoint.best``, and that of a step.
    `option` is what has the name. `config`: the config.json of another trainer's checkpoint, if it has none itself.

    Errors: ConfigError: there is none; those of `convert`.
    """
    path = Path(name).expanduser()
    if is_of_other_trainer(name) and not path.exists():
        return _of_other_trainer(name, option, config)
    run, at, which = name.rpartition("@")
    if at and not path.exists():
        return SavedModel(_checkpoint_of(Path(run).expanduser(), which, option), True)
    if (path / MANIFEST).exists():
        return SavedModel(path.parent / path.readlink() if path.is_symlink() else path, True)
    if saves := CheckpointStore(RunLayout(path).checkpoints, lambda text: None).list():
        return SavedModel(saves[-1].path, True)
    if path.is_dir() and not RunLayout(path).is_run:
        return SavedModel(path, False)
    on_hub = not path.is_dir() and not path.parent.is_dir() and _HUB_ID.fullmatch(name)
    raise ConfigError(
        f"there is no model in {name!r}",
        expected="a run, RUN@best, RUN@100 for step 100, a checkpoint, a folder with config.json, or the checkpoint of"
        f" another trainer: {'|'.join(READERS)}:PATH",
        found="a run without checkpoints" if path.is_dir() else f"no folder; working directory {Path.cwd()}",
        next_step=f"for a model of the Hugging Face Hub: hf download {name} --local-dir DIR, then DIR as {option}"
        if on_hub
        else f"correct {option}",
    )


def is_of_other_trainer(name: str) -> bool:
    """Return whether a name has the prefix of another trainer's checkpoint."""
    return name.partition(":")[0] in READERS and ":" in name


def _of_other_trainer(name: str, option: str, config: str | None) -> SavedModel:
    form, _, rest = name.partition(":")
    path = Path(rest).expanduser()
    if not path.exists():
        raise ConfigError(
            f"there is no model in {name!r}", found=f"working directory {Path.cwd()}", next_step=f"correct {option}"
        )
    folder = (path if path.is_dir() else path.parent).absolute()
    names = (CONFIG, *TOKENIZER_FILES, "generation_config.json")
    extra = {each: place / each for place in (folder.parent, folder) for each in names if (place / each).is_file()}
    if config:
        extra[CONFIG] = Path(config).expanduser()
    if CONFIG not in extra or not extra[CONFIG].is_file():
        raise ConfigError(
            f"there is no {CONFIG} that describes the model in {name!r}",
            expected=f"a {CONFIG} of transformers in {folder} or {folder.parent}, or --model.config in training",
            found=config or "none",
        )
    return SavedModel(convert(form, path, extra), False)


def _checkpoint_of(run: Path, which: str, option: str) -> Path:
    """Return the folder of the best checkpoint of a run, or of that of a step. Errors: ConfigError: there is none."""
    layout = RunLayout(run)
    store = CheckpointStore(layout.checkpoints, lambda text: None)
    saves = store.list()
    if saves and which == BEST:
        options = layout.read_config().get("checkpoint") or {}
        store.best = Measure.parse(str(options.get("best", "loss")))
        if (best := store.find_best()) is not None:
            return best[0].path
    found = [saved.path for saved in saves if which in (str(saved.step), "latest")]
    if found:
        return found[-1]
    steps = ", ".join(str(saved.step) for saved in saves)
    raise ConfigError(
        f"there is no checkpoint {which!r} of {str(run)!r}",
        expected="RUN@latest, RUN@best in a run with held-out data, or RUN@100 for step 100",
        found=f"checkpoints of steps {steps}" if saves else "no checkpoints",
        next_step=f"correct {option}",
    )


class StoredWeights:
    """The tensors of a folder under the names of a model.

    `files`: that have the tensors, by their names there.

    Errors: ImportError: transformers is too old.
    """

    def __init__(self, model: Any, files: Mapping[str, Path]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

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

    def unknown(self) -> list[str]:
        """Return the names that the model does not have."""
        return [name for name in self._first if name not in self._own]

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
        paths = {key: self._files[key] for key, _ in found}
        with ExitStack() as stack:  # what was read of mapped files counts as memory of this process until then
            opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in {*paths.values()}}
            if found[0][1] is None:
                value: Tensor = opened[paths[found[-1][0]]].get_tensor(found[-1][0]).to(dtype, copy=True)
            else:
                converter = copy.deepcopy(self._converters[found[0][1]])
                for key, pattern in found:
                    converter.add_tensor(first, key, pattern, partial(opened[paths[key]].get_tensor, key))
                values = converter.convert(first, model=self._model, config=self._model.config)[name]
                value = (values[0] if isinstance(values, Sequence) else values).to(dtype)
        if value.shape != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)} in the folder, and {tuple(shape)} in the model")
        return value


def files_of(folder: Path) -> dict[str, Path]:
    """Return the files of a folder by the names of their tensors; {} if it has none. Errors: OSError, ValueError."""
    if (folder / _INDEX).is_file():
        return {key: folder / name for key, name in json.loads(read_regular(folder / _INDEX))["weight_map"].items()}
    if not (folder / WHOLE).is_file():
        return {}
    with safe_open(folder / WHOLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / WHOLE)


def model_to_read(auto: Any, folder: Path, config: Any, kernel: Mapping[str, str]) -> Any:
    """Return a model in float32 with placeholders that have `read`, and with the buffers of a folder.

    None if this is not possible: the model is quantized, transformers is too old, or the folder lacks a tensor, which
    `from_pretrained` names.

    `auto`: a class of transformers that makes models. `folder`: with config.json and safetensors files. `kernel`:
    further arguments of the model.
    """
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
