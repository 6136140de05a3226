"""``hvdtrain evaluate``: the loss and the metrics of a checkpoint, on any number of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.cli.parser import Parser
from hvdtrain.observe.output import make_output_unfailing

if TYPE_CHECKING:
    from hvdtrain.runtime.environment import RankInfo
    from hvdtrain.state.pieces import StateDict
    from hvdtrain.training.evaluate_run import Evaluated

_DESCRIPTION = """\
Evaluate a checkpoint: each sample once, on all ranks of this job. RUN means its
newest checkpoint. The data, the model and all else are those of the run, unless
options of training say otherwise. Nothing is written to the run."""
_EPILOG = """\
examples:
  hvdtrain evaluate runs/NAME
  hvdtrain evaluate runs/NAME/checkpoints/step-000100 --split train
  hvdtrain evaluate runs/NAME --data.text 'other/**/*.txt' --data.heldout 0.5
  mpirun -np 4 python -m hvdtrain evaluate runs/NAME --per_sample losses.jsonl

Any number of ranks gives the same numbers, up to the last bits of sums within a
pass. With --per_sample, each sample has a pass of its own, and they are equal.

exit code: 0; 1 on an error; 2 on a wrong option
"""


def parser() -> Parser:
    """Declare the options. Those of training may follow."""
    made = Parser(prog="hvdtrain evaluate", description=_DESCRIPTION, epilog=_EPILOG)
    made.add_argument("path", type=Path, metavar="RUN", help="run folder, or one of its checkpoints")
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
    from hvdtrain.errors import RunDirectoryError
    from hvdtrain.run_layout import RunLayout
    from hvdtrain.state.checkpoint_store import MANIFEST
    from hvdtrain.task.base import load_task_function
    from hvdtrain.training.evaluate_run import evaluate_run, for_evaluation

    path: Path = options.path
    is_checkpoint = (path / MANIFEST).is_file()
    layout = RunLayout(path.resolve().parent.parent if is_checkpoint else path)
    if not layout.config.is_file():
        raise RunDirectoryError(
            f"{path} is no run, and no checkpoint in one",
            expected="a folder with config.yaml, or RUN/checkpoints/step-000100",
            next_step="name the run folder that training has shown",
        )
    argv = ["--config", str(layout.config), *training]
    function = load_task_function(task_spec(argv))
    run = parse_argv(argv, function)
    config = for_evaluation(run.config, options.samples, one_by_one=options.per_sample is not None)
    sources: list[str] = []
    load = partial(_load, path if is_checkpoint else None, layout.checkpoints, sources.append)
    comm = start_rounds(info, None, horovod=True).enter(STARTED)
    found = evaluate_run(config, partial(function, **run.task_args), load, comm, options.split)
    return found, next(iter(sources), "")


def _load(checkpoint: Path | None, folder: Path, note: Callable[[str], None]) -> StateDict:
    """Load a checkpoint, or the newest one of a run. `note` gets its path."""
    from hvdtrain.errors import CheckpointError
    from hvdtrain.state.checkpoint_store import CheckpointStore, load

    if checkpoint is not None:
        note(str(checkpoint))
        return load(checkpoint)
    newest = CheckpointStore(folder, print).load_newest()
    if newest is None:
        raise CheckpointError(f"{folder} has no complete checkpoint", next_step="name a checkpoint, or train first")
    note(str(newest[0].path))
    return newest[1]


def _values(found: Evaluated) -> dict[str, float]:
    """Return the means; the perplexity, too, if the loss is one of tokens."""
    values = dict(found.means)
    return {**values, "perplexity": math.exp(min(values["loss"], 700.0))} if found.unit == "tokens" else values


def _json(found: Evaluated, source: str) -> str:
    return json.dumps({"checkpoint": source, "samples": found.samples, **_values(found)}, indent=1)


def _text(found: Evaluated, source: str) -> str:
    rows = [("checkpoint", source), ("samples", f"{found.samples:,}")]
    rows += [(name, f"{value:.6g}") for name, value in _values(found).items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _lines(found: Evaluated) -> list[str]:
    return [
        json.dumps({"sample": start, **{name.removeprefix("metric/"): pair for name, pair in sums.items()}})
        for start, sums in found.passes
    ]
