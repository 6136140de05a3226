"""Write the model of a checkpoint: for transformers with a model card, as safetensors, for torch's DCP, or as ONNX."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hvdtrain import __version__
from hvdtrain.doctor.facts.installation import package_version
from hvdtrain.errors import CheckpointError, ConfigError, TaskError
from hvdtrain.files import fsync_folder
from hvdtrain.observe.past_journal import read_events
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.frozen import FROZEN
from hvdtrain.state.manifest import read_manifest
from hvdtrain.state.tensor_file import write_tensors
from hvdtrain.task.base import import_library
from hvdtrain.task.causal_lm import load_model, read_weights
from hvdtrain.task.encode import TOKENIZER_FILES
from hvdtrain.task.saved_model import BASE_CONFIG, CONFIG, SavedModel
from hvdtrain.yaml_file import yaml_text

_TOLERANCE = 1e-4
"""Largest difference between logits of ONNX and of torch, relative to the largest logit if that is above 1."""

_TRIED = ((1, 5), (3, 12))
"""Batch and length of the inputs that are compared; those of the export are others."""


def to_transformers(source: SavedModel, out: Path) -> None:
    """Write config, weights in files of a moderate size, tokenizer and a model card into the new folder `out`.

    Errors:
        CheckpointError: the checkpoint is damaged, or is not of a language model.
        TaskError: transformers reads other weights from `out` than were written.
    """
    model: Any = load_model(source, mtp=True)
    model.save_pretrained(out)
    read = load_model(SavedModel(out, is_checkpoint=False), mtp=True).state_dict()
    for name, tensor in model.state_dict().items():
        if name not in read or not torch.equal(read[name], tensor):
            raise TaskError(f"transformers reads other values of {name} than were written", found=f"in {out}")
    _copy_tokenizer(source, out)
    (out / "README.md").write_text(model_card(source.folder), encoding="utf-8")
    for file in out.glob("*.safetensors"):  # which the library makes for this user alone
        file.chmod((out / "README.md").stat().st_mode)
    fsync_folder(out)


def to_safetensors(source: SavedModel, out: Path) -> None:
    """Write the state dict of the model of any task as one file. Errors: those of `_state_dict`."""
    write_tensors(out, _state_dict(source), lambda: None)


def to_dcp(source: SavedModel, out: Path) -> None:
    """Write the state dict of the model of any task as a distributed checkpoint of torch, by one process.

    A language model's config.json and tokenizer are written next to it. Errors: those of `_state_dict`.
    """
    from torch.distributed.checkpoint import FileSystemWriter, save

    tensors = _state_dict(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is only one process
        save(tensors, storage_writer=FileSystemWriter(out), no_dist=True)
    if (config := source.folder / (BASE_CONFIG if source.has_adapters else CONFIG)).is_file():
        shutil.copyfile(config, out / CONFIG)
    _copy_tokenizer(source, out)
    fsync_folder(out)


def _state_dict(source: SavedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of the model of any task by name; tied tensors are under each name.

    Errors: CheckpointError: the checkpoint is damaged, or lacks parameters that its task makes.
    """
    if source.has_adapters:
        return read_weights(source) or {}
    state = source.load()
    if FROZEN in state.values:
        raise CheckpointError(
            f"{source.folder} lacks the frozen parameters, because its task makes them again",
            next_step="save them in your own code: build the task's model, and load the checkpoint's into it",
        )
    stored = state.tensors["model"]
    return {**stored, **{name: stored[of] for name, of in state.values["aliases"].items()}}


def to_onnx(source: SavedModel, out: Path) -> None:
    """Write model.onnx with `input_ids` and `logits`, for any batch and length, and the tokenizer, into a new folder.

    Attention is computed without a cache of keys and values. onnxruntime's logits are compared with torch's.

    Errors:
        CheckpointError: the checkpoint is damaged, or is not of a language model.
        TaskError: torch cannot export the model, or the logits differ.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        import_library(name, "--format onnx", "onnx")
    model: Any = load_model(source).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the others have loops and kernels that ONNX lacks
    wrapped = _Logits(model)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    out.mkdir()
    try:
        made: Any = torch.onnx.export(
            wrapped,
            (torch.zeros(2, 7, dtype=torch.int64),),
            dynamo=True,
            dynamic_shapes=(sizes,),
            input_names=["input_ids"],
            output_names=["logits"],
            verbose=False,
        )
        made.save(str(out / "model.onnx"))
    except Exception as error:  # of many classes, by step of the export
        raise TaskError(
            f"torch cannot export the model of {source.folder} to ONNX",
            found=f"{type(error).__name__}: {error.__cause__ or error}".partition("\n")[0],
            next_step="export --format hf, and convert it with another program",
        ) from error
    _check_onnx(wrapped, model.config.get_text_config().vocab_size, out / "model.onnx")
    shutil.copyfile(source.config(), out / CONFIG)
    _copy_tokenizer(source, out)
    fsync_folder(out)


class _Logits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


def _check_onnx(model: torch.nn.Module, vocabulary: int, file: Path) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(0)
    for shape in _TRIED:
        ids = torch.randint(vocabulary, shape, generator=generator)
        with torch.no_grad():
            expected = model(ids)
        (found,) = session.run(None, {"input_ids": ids.numpy()})
        error = (torch.from_numpy(found) - expected).abs().max().item()
        if not error <= _TOLERANCE * max(1.0, expected.abs().max().item()):
            raise TaskError(
                "the ONNX model computes other logits than torch",
                expected=f"a difference of {_TOLERANCE:g} at most",
                found=f"{error:.2g} for {shape[0]} samples of {shape[1]} tokens",
            )


def _copy_tokenizer(source: SavedModel, out: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, out / name)


FORMATS: Mapping[str, Callable[[SavedModel, Path], None]] = {
    "hf": to_transformers,
    "safetensors": to_safetensors,
    "dcp": to_dcp,
    "onnx": to_onnx,
}


def export(source: SavedModel, out: Path, form: str) -> None:
    """Write the model completely or not at all.

    Errors:
        ConfigError: `out` exists, or cannot be written.
        Others: those of the format.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists already", next_step="name another place, or move this one away")
    temporary = out.with_name(f".{out.name}.writing")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        FORMATS[form](source, temporary)
        temporary.rename(out)
    except OSError as error:
        where = error.filename or out
        raise ConfigError(
            f"cannot write {out}: {error.strerror or error}", found=f"{where}", next_step="name another place"
        ) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def model_card(checkpoint: Path) -> str:
    """Return what a reader of the model wants to know: training, held-out losses, versions, options."""
    layout = RunLayout(checkpoint.resolve().parent.parent)
    step = read_manifest(checkpoint)["step"]
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "---", ""]
    lines += [f"# {layout.folder.name}, step {step:,}", "", "Trained with hvdtrain.", ""]
    options = layout.read_config() if layout.config.exists() else {}
    if options:
        samples = step * options["train"]["global_batch"]
        given = filter(None, (options["data"].get(name) for name in ("text", "tokens", "dataset")))
        lines += [
            f"- Data: {next(given, 'source code of the standard library of Python')}",
            f"- Steps: {step:,} of {options['train']['global_batch']} samples, {samples:,} samples in all,"
            f" of {options['data']['seq_len']} tokens",
        ]
    versions = ", ".join(f"{name} {package_version(name) or 'unknown'}" for name in ("torch", "transformers"))
    lines += [f"- Versions: hvdtrain {__version__}, {versions}", "", *_losses(layout, step)]
    if options:
        lines += ["## Options", "", "`hvdtrain train --config FILE` with:", ""]
        lines += ["```yaml", yaml_text(options).strip(), "```"]
    return "\n".join(lines) + "\n"


def _losses(layout: RunLayout, step: int) -> list[str]:
    events = read_events(layout.journal, "evaluation") if layout.is_run else []
    losses = {int(event["at_step"]): float(event["loss"]) for event in events if int(event["at_step"]) <= step}
    if not losses:
        return []
    best = min(losses, key=lambda at: losses[at])
    rows = (("first", min(losses)), ("best", best), ("last", max(losses)))
    table = [f"| {name} | {at:,} | {losses[at]:.4f} |" for name, at in rows]
    return ["| held-out loss | step | nats for a token |", "|---|---|---|", *table, ""]
