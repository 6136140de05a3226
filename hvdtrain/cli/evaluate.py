"""``hvdtrain evaluate``: the loss and the metrics of a model, on any number of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.cli.parser import MODEL_HELP, Parser, end, local
from hvdtrain.config.schema import Config
from hvdtrain.errors import ConfigError
from hvdtrain.observe.output import make_output_unfailing
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.tuning import prepare

_DESCRIPTION = """\
Evaluate a model: each sample once, on all ranks of this job. A run folder means
its newest checkpoint. Data, model and all else are those of the run, unless
options of training say otherwise. Nothing is written to the run."""
_EPILOG = """\
examples:
  hvdtrain evaluate runs/NAME
  hvdtrain evaluate runs/NAME/checkpoints/step-000100 --split train
  hvdtrain evaluate copies/step-000100 --config copies/config.yaml
  hvdtrain evaluate llama/ --data.text 'other/**/*.txt'
  mpirun -np 4 python -m hvdtrain evaluate runs/NAME --per_sample losses.jsonl

Any number of ranks finds the same values, bit for bit on equal devices. Another
--train.micro_batch rounds sums differently; --per_sample implies 1.

exit code: 0; 1 on an error; 2 on one that would recur, such as a wrong option
"""


def parser() -> Parser:
    """Declare the options. Those of training may follow."""
    made = Parser(prog="hvdtrain evaluate", description=_DESCRIPTION, epilog=_EPILOG)
    add = made.add_argument
    add("path", metavar="RUN", help=MODEL_HELP)
    add("--split", choices=("heldout", "train"), default="heldout", help="which samples (default: heldout)")
    add("--samples", type=int, default=0, help="number of samples, evenly spaced (default: all)")
    add("--per_sample", type=local, metavar="FILE", help="write the values of each sample, as JSON lines")
    add("--json", action="store_true", help="print JSON")
    return made


def main(argv: list[str]) -> int:
    """Evaluate, and print on rank 0."""
    make_output_unfailing()
    made = parser()
    options, training = made.parse_known_args(argv)
    info: RankInfo | None = None
    try:
        info, _ = prepare()
        values, lines = _evaluate(options, training, info)
        if info.rank == 0:
            if options.per_sample is not None:
                options.per_sample.write_text("".join(f"{line}\n" for line in lines()))
            print(json.dumps(values, indent=1) if options.json else _text(values))
    except (Exception, KeyboardInterrupt) as error:
        return end(_misspelt(made, training, error) or error, info)
    return 0


def _misspelt(made: Parser, training: Sequence[str], error: BaseException) -> ConfigError | None:
    """Return the error for a misspelt option that was taken for one of training, if that explains an error."""
    if isinstance(error, ConfigError) and error.what.startswith("there is no "):
        for name in (word.partition("=")[0] for word in training):
            is_ours = name in {f"--{field.name}" for field in fields(Config)} or "." in name
            if name.startswith("--") and not is_ours and (near := made.nearest_option(name)):
                return ConfigError(f"there is no option {name}", next_step=f"did you mean {near}?")
    return None


def _evaluate(options: Any, training: Sequence[str], info: RankInfo) -> tuple[Any, Callable[[], list[str]]]:
    from hvdtrain.comm.rounds import STARTED, start_rounds
    from hvdtrain.config.parse import parse_argv, task_spec
    from hvdtrain.task.base import load_task_function
    from hvdtrain.task.saved_model import find_model
    from hvdtrain.training.evaluate_run import evaluate_run, for_evaluation

    source = find_model(options.path, "RUN")
    if source.is_checkpoint:
        argv = _with_config_of(source.folder, training)
    else:
        argv = ["--model.from", str(source.folder), *training]
    function = load_task_function(task_spec(argv))
    run = parse_argv(argv, function)
    config = for_evaluation(run.config, options.samples, one_by_one=options.per_sample is not None)
    comm = start_rounds(info, horovod=True).enter(STARTED)
    load = source.load if source.is_checkpoint else None
    found = evaluate_run(config, partial(function, **run.task_args), load, comm, options.split)
    values = {"model": str(source.folder), "samples": found.samples, **found.means}
    if found.unit == "tokens":
        values["perplexity"] = math.exp(min(found.means["loss"], 700.0))
    return values, lambda: [
        json.dumps({"sample": start, **{name.removeprefix("metric/"): pair for name, pair in sums.items()}})
        for start, sums in found.passes
    ]


def _with_config_of(checkpoint: Path, training: Sequence[str]) -> list[str]:
    """Return options of training after those of a checkpoint's run.

    Errors: ConfigError: the checkpoint is not in its run folder, and the options name no config; or it is damaged.
    """
    layout = RunLayout(checkpoint.resolve().parent.parent)
    if layout.config.exists():
        layout.read_config()  # its errors say more than those of the parser
        return ["--config", str(layout.config), *training]
    if any(option.partition("=")[0] == "--config" for option in training):
        return [*training]
    raise ConfigError(
        f"{checkpoint} is not in its run folder, which has the options of its data and model",
        expected=str(layout.config),
        found="no such file",
        next_step="name the checkpoint in its run folder, or add --config FILE, a copy of the run's config.yaml",
    )


def _text(values: Mapping[str, Any]) -> str:
    forms = {float: ".6g", int: ","}
    rows = [(name, format(value, forms.get(type(value), ""))) for name, value in values.items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
