"""``hvdtrain export``: write a run's model for other programs."""

from __future__ import annotations

from hvdtrain.cli.parser import Parser, local
from hvdtrain.errors import ConfigError

_FORMATS = ("hf", "safetensors", "dcp", "onnx")
_DESCRIPTION = """\
Write the model of a run's newest checkpoint, or of a checkpoint. Adapters of
--model.lora are merged. Every byte that is read is verified."""
_EPILOG = """\
formats:
  hf           folder for transformers: config, weights, tokenizer, model card
  safetensors  one file with the state dict, of any task
  dcp          folder of torch.distributed.checkpoint with the state dict, of
               any task
  onnx         folder with model.onnx for any batch and length, compared with
               torch by onnxruntime (pip install "hvdtrain[onnx]")

examples:
  hvdtrain export runs/NAME my-model
  hvdtrain export runs/NAME model.safetensors --format safetensors
"""


def parser() -> Parser:
    """Declare the options."""
    made = Parser(prog="hvdtrain export", description=_DESCRIPTION, epilog=_EPILOG)
    made.add_argument("run", type=local, metavar="RUN", help="run folder, RUN@best, RUN@STEP, or checkpoint")
    made.add_argument("out", type=local, metavar="OUT", help="new folder or file")
    made.add_argument("--format", choices=_FORMATS, default="hf", help="what to write (default: hf)")
    return made


def main(argv: list[str]) -> int:
    """Write the model and return 0. Errors: those of `hvdtrain.export.formats.export`."""
    options = parser().parse_args(argv)

    from hvdtrain.export.formats import export
    from hvdtrain.task.saved_model import find_model

    source = find_model(str(options.run), "RUN")
    if not source.is_checkpoint:
        what = f"{options.run} is not a run or checkpoint of hvdtrain"
        raise ConfigError(what, expected="a run folder, RUN@latest, RUN@best, RUN@100 for step 100, or a checkpoint")
    export(source, options.out, options.format)
    print(f"{options.out} has the model of {source.folder}")
    return 0
