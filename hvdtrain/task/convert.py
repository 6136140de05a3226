"""Write the weights of another trainer's checkpoint for transformers: a program, so that it has a process of its own.

Its arguments: the format, the checkpoint, and a folder with config.json, to which it adds the weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hvdtrain.errors import HvdtrainError, TaskError, listed
from hvdtrain.state.tensor_file import write_tensors
from hvdtrain.task.causal_lm import read_config
from hvdtrain.task.multi_token import is_mtp_weight, is_supported
from hvdtrain.task.other_trainers import READERS, SOURCE, map_names
from hvdtrain.task.saved_model import CONFIG, WHOLE, StoredWeights


def write(form: str, path: Path, folder: Path) -> None:
    """Add the weights of a checkpoint to a folder. Errors: TaskError: it is of another model; those of the reader."""
    import torch
    from transformers import AutoModelForCausalLM

    contents = READERS[form](path)
    config = read_config(folder / CONFIG, "--model.config")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    names = map_names(contents.shapes, own)
    weights = StoredWeights(model, dict.fromkeys(names.values(), folder / WHOLE))
    tied: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tied.setdefault(id(tensor), []).append(name)

    unknown = [n for n in weights.unknown() if not (is_supported(config) and is_mtp_weight(n, config))]
    shapes = {name: contents.shapes[key] for key, name in names.items()}
    for found, what in (
        ([each[0] for each in tied.values() if not any(name in weights for name in each)], "no weights of"),
        (unknown, "weights of unknown parameters"),
        ([f"{n} {shapes[n]}, not {own[n]}" for n in shapes.keys() & own if shapes[n] != own[n]], "other shapes:"),
    ):
        if found:
            raise TaskError(
                f"the weights in {form}:{path} are not those of the model",
                expected=f"weights of all parameters of a {config.model_type} model",
                found=f"{what} {listed(sorted(found))}",
                next_step="correct the config.json next to the checkpoint, or name another one: --model.config",
            )
    write_tensors(folder / WHOLE, {names[key]: each for key, each in contents.read([*names]).items()}, lambda: None)
    left = sorted({*contents.others, *contents.shapes} - names.keys())
    (folder / SOURCE).write_text(json.dumps({"of": f"{form}:{path}", "left": left}), encoding="utf-8")


def main(form: str, path: str, folder: str) -> None:
    """Write the weights; print the parts of an error, if there is one, as JSON."""
    failure: dict[str, Any] = {}
    try:
        write(form, Path(path), Path(folder))
    except HvdtrainError as error:
        failure = {name: getattr(error, name) for name in ("what", "expected", "found", "next_step")}
    except Exception as error:  # of damaged files: of torch, pickle and many others
        found = f"{type(error).__name__}: {error}".partition("\n")[0]
        failure = {"what": f"{path} cannot be read as a checkpoint of the format {form}", "found": found}
    sys.stdout.write(f"\n{json.dumps(failure)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
