"""``hvdtrain tune``: search for better values of options."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from hvdtrain.cli.parser import Parser, local, positive
from hvdtrain.errors import ConfigError

_DESCRIPTION = """\
Train with several values of options, chosen by optuna, and keep the best.
Options of training follow; they are the same in all trials. If the command is
interrupted, the same command continues."""
_EPILOG = """\
examples:
  hvdtrain tune --over optimizer.lr --config run.yaml --train.steps 200
  hvdtrain tune --over 'optimizer.lr=1e-4:1e-2,optimizer.name=adamw|muon'
  hvdtrain tune -np 8 --over 'parallel.compression=none|fp16' --measure step_s

A trial that is worse than the median of the others at the same step is stopped.
"""


def parser() -> Parser:
    """Declare the options. Those of training may follow."""
    made = Parser(prog="hvdtrain tune", description=_DESCRIPTION, epilog=_EPILOG)
    over = "names of options, each alone, or with =LOW:HIGH or =A|B|C"
    made.add_argument("--over", required=True, metavar="OPTIONS", help=over)
    made.add_argument("--trials", type=positive, default=12, help="number of trials (default: 12)")
    made.add_argument("-np", type=positive, default=1, metavar="N", help="ranks of each trial (default: 1)")
    made.add_argument("--folder", type=local, default=Path("tune"), help="of the search and its runs (default: tune)")
    measure = "what is minimized: loss (held out, at the end) or step_s (median seconds of a step) (default: step_s if"
    made.add_argument("--measure", choices=("loss", "step_s"), help=f"{measure} no option changes the loss)")
    made.add_argument("--sampler_seed", type=int, default=0, help="of the choices (default: 0)")
    return made


def main(argv: list[str]) -> int:
    """Search; return 0, or 1 if no trial succeeded. Errors: ConfigError, RunDirectoryError."""
    chosen, training = parser().parse_known_args(argv)

    from hvdtrain.config.parse import parse_argv, task_spec
    from hvdtrain.task.base import load_task_function
    from hvdtrain.tune.space import is_about_speed, parse_space
    from hvdtrain.tune.study import best_yaml, options, search, table, write_hparams

    function = load_task_function(task_spec(training))
    run = parse_argv(training, function)
    space = parse_space(chosen.over, run.config, chosen.np)
    given = {word.partition("=")[0].removeprefix("--") for word in training if word.startswith("--")}
    if clash := sorted(given & {"run_dir", *(each.name for each in space)}):
        raise ConfigError(f"--{clash[0]} is chosen for each trial", next_step=f"omit --{clash[0]}")
    for each in space:  # an unknown name, or an invalid value
        for value in each.examples():
            parse_argv([*training, *options({each.name: value})], function)
    measure = chosen.measure or ("step_s" if is_about_speed(space) else "loss")
    command = [sys.executable, "-m", "hvdtrain"]
    command += ["launch", "--to", "auto", "-np", str(chosen.np), "--"] if chosen.np > 1 else ["train"]
    command += training
    if measure == "loss" and run.config.train.eval_every is None and run.config.train.steps:
        command.append(f"--train.eval_every={max(1, run.config.train.steps // 10)}")
    folder, say = chosen.folder, partial(print, flush=True)
    tried = search(folder, space, command, trials=chosen.trials, measure=measure, seed=chosen.sampler_seed, say=say)
    print("\n".join(table(tried, measure)))
    write_hparams(tried, folder / "tensorboard", measure)
    if (content := best_yaml(tried, measure)) is None:
        print(f"hvdtrain: no trial succeeded; the logs are in {folder}", file=sys.stderr)
        return 1
    best = folder / "best.yaml"
    best.write_text(content)
    print(f"written: {best}\nnext: hvdtrain train --config {best}")
    return 0
