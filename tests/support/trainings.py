"""Several trainings in one job, one after the other: ``python trainings.py FILE BYTES``.

FILE has a JSON list of command lines; their groups of ranks are made at the start. A rank writes a part of a checkpoint
if that has BYTES or more.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from hvdtrain.comm.rounds import OneRound, start_comm
from hvdtrain.config.parse import parse_argv, task_spec
from hvdtrain.errors import ConfigError, DriftError
from hvdtrain.plan.plan import plan_of
from hvdtrain.runtime.tuning import TimelinePlan, prepare
from hvdtrain.state.background_writer import CheckpointWriter
from hvdtrain.task.base import load_task_function
from hvdtrain.training.session import run_training


def main() -> None:
    """Train each; a user's error, which all ranks raise, ends its training only."""
    CheckpointWriter.__init__.__kwdefaults__["min_bytes"] = int(sys.argv[2])
    info, _ = prepare()
    listed = [
        (options, load_task_function(task_spec(options))) for options in json.loads(Path(sys.argv[1]).read_text())
    ]
    runs = [(parse_argv(options, function), function) for options, function in listed]

    def groups(size: int) -> list[list[int]]:
        found = [tuple(ranks) for run, _ in runs for ranks in plan_of(run.config).groups(size)]
        return [list(ranks) for ranks in dict.fromkeys(found)]

    comm = start_comm(info, groups)
    for run, function in runs:
        try:
            run_training(run, partial(function, **run.task_args), OneRound(comm), TimelinePlan("off"), info)
        except (ConfigError, DriftError) as error:
            print(f"rank {comm.rank}: {run.config.run_dir}: {error}", flush=True)
    comm.barrier()


if __name__ == "__main__":
    main()
