"""``hvdtrain evaluate``: the loss and the metrics of a model, on any number of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.cli.parser import Parser
from hvdtrain.observe.output import make_output_unfailing

if TYPE_CHECKING:
    from hvdtrain.runtime.environment import RankInfo
    from hvdtrain.training.evaluate_run import Evaluated

_DESCRIPTION = """\
Evaluate a model: each sample once, on all ranks of this job. A run folder means
its newest checkpoint. Data, model and all else are those of the run, unless
options of training say otherwise. Nothing is written to the run."""
_EPILOG = """\
examples:
  hvdtrain evaluate runs/NAME
  hvdtrain evaluate runs/NAME/checkpoints/step-000100 --split train
  hvdtrain evaluate runs/NAME --data.text 'other/**/*.txt' --data.heldout 0.5
  hvdtrain evaluate llama/ --data.text 'other/**/*.txt'
  mpirun -np 4 python -m hvdtrain evaluate runs/NAME --per_sample losses.jsonl

Any number of ranks finds the same values, bit for bit on equal devices. Another
--train.micro_batch rounds sums differently; --per_sample implies 1.

exit code: 0; 1 on an error; 2 on a wrong option
"""


def parser() -> Parser:
    """Declare the options. Those of training may follow."""
    made = Parser(prog="hvdtrain evaluate", description=_DESCRIPTION, epilog=_EPILOG)
    made.add_argument("path", metavar="RUN", help="run folder, checkpoint, or folder of transformers")
    made.add_argument(
        "--split", choices=("heldout", "train"), default="heldout", help="which samples (default: heldout)"
    )
    made.add_argument("--samples", type=int, default=0, help="number of samples, evenly spaced (default: all)")
    made.add_argument("--per_sample", type=Path, metavar="FILE", help="write the values of each sample, as JSON lines")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def main(argv: list[str]) -> int:
    """Evaluate, and print on rank 0."""
    from hvdtrain.cli.ending import end, show
    from hvdtrain.observe.output import FailureOutput
    from hvdtrain.runtime.tuning import prepare

    make_output_unfailing()
    options, training = parser().parse_known_args(argv)
    info: RankInfo | None = None
    try:
        info, _ = prepare()
        found, source = _evaluate(options, training, info)
        if info.rank == 0:
            if options.per_sample is not None:
                options.per_sample.write_text("".join(f"{line}\n" for line in _lines(found)))
            print(_json(found, source) if options.json else _text(found, source))
    except (Exception, KeyboardInterrupt) as error:
        return end(error, info, FailureOutput(show))
    return 0


def _evaluate(options: Any, training: Sequence[str], info: RankInfo) -> tuple[Evaluated, str]:
    from hvdtrain.comm.rounds import STARTED
    from hvdtrain.comm.start import start_rounds
    from hvdtrain.config.parse import parse_argv, task_spec
    from hvdtrain.run_layout import RunLayout
    from hvdtrain.task.base import load_task_function
    from hvdtrain.task.saved_model import find_model
    from hvdtrain.training.evaluate_run import evaluate_run, for_evaluation

    source = find_model(options.path, "RUN")
    if source.is_checkpoint:
        layout = RunLayout(source.folder.resolve().parent.parent)
        layout.read_config()  # its errors say more than those of the parser
        argv = ["--config", str(layout.config), *training]
    else:
        argv = ["--model.from", str(source.folder), *training]
    function = load_task_function(task_spec(argv))
    run = parse_argv(argv, function)
    config = for_evaluation(run.config, options.samples, one_by_one=options.per_sample is not None)
    comm = start_rounds(info, None, horovod=True).enter(STARTED)
    load = source.load if source.is_checkpoint else None
    found = evaluate_run(config, partial(function, **run.task_args), load, comm, options.split)
    return found, str(source.folder)


def _values(found: Evaluated) -> dict[str, float]:
    """Return the means; the perplexity, too, if the loss is one of tokens."""
    values = dict(found.means)
    return {**values, "perplexity": math.exp(min(values["loss"], 700.0))} if found.unit == "tokens" else values


def _json(found: Evaluated, source: str) -> str:
    return json.dumps({"model": source, "samples": found.samples, **_values(found)}, indent=1)


def _text(found: Evaluated, source: str) -> str:
    rows = [("model", source), ("samples", f"{found.samples:,}")]
    rows += [(name, f"{value:.6g}") for name, value in _values(found).items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _lines(found: Evaluated) -> list[str]:
    return [
        json.dumps({"sample": start, **{name.removeprefix("metric/"): pair for name, pair in sums.items()}})
        for start, sums in found.passes
    ]
