"""``hvdtrain fit``: predict the memory of a rank for ways to divide the state, before the job is queued."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hvdtrain.cli.parser import Parser
from hvdtrain.errors import ConfigError

if TYPE_CHECKING:
    from hvdtrain.fit.memory import Memory

_GIB = 1 << 30
_HEAD = f"{'ranks':>5} {'shard':<10} {'checkpointing':<13}{'model':>9}{'optimizer':>10}{'rest':>9}{'peak':>9}"
_DESCRIPTION = """\
Predict the largest memory of the tensors of one rank, by running two steps of
the job's own engine on tensors without memory. It takes seconds, and needs no
GPU and little memory."""
_EPILOG = """\
All options of hvdtrain train are accepted, too. With --parallel.device cuda,
attention takes the memory that it takes on GPUs, also if there is none here.
The rest is activations, gradients and the memory of their exchange.

examples:
  hvdtrain fit --ranks 1,8,64 --gib 80 --config run.yaml --parallel.device cuda
  hvdtrain fit --model.config big.json --train.micro_batch 1
  hvdtrain fit --shards parameters --ranks 8 --precision bf16-weights

exit code: 0 if a line fits in --gib, 1 if none does or on an error
"""


def parser() -> Parser:
    """Declare the options."""
    made = Parser(prog="hvdtrain fit", description=_DESCRIPTION, epilog=_EPILOG)
    add = made.add_argument
    add("--ranks", default="1,8", metavar="N,...", help="numbers of ranks (default: 1,8)")
    add("--gib", type=float, metavar="GIB", help="memory of a device: mark what fits")
    shards = (
        "values of --parallel.shard; parameters means --parallel.engine fsdp (default: all that the engine divides)"
    )
    add("--shards", metavar="SHARD,...", help=shards)
    add("--checkpointing", metavar="MODE,...", help="values of --memory.checkpointing (default: that of the options)")
    add("--json", action="store_true", help="print one JSON object")
    return made


@dataclass(frozen=True)
class _Line:
    ranks: int
    shard: str
    checkpointing: str
    memory: Memory | None
    refused: str = ""


def main(argv: list[str]) -> int:
    """Predict and print. Return 0; 1 if no line fits in the given memory.

    Errors:
        ConfigError: an invalid option. What only a line does not support is shown in that line.
    """
    options, training = parser().parse_known_args(argv)
    ranks = _numbers(options.ranks)
    shards, modes = (each.split(",") if each else None for each in (options.shards, options.checkpointing))
    found = []
    for line in _predict(training, ranks, shards, modes):
        found.append(line)
        if not options.json:
            if len(found) == 1:
                unit = "GiB" if line.memory is None or line.memory.peak >= _GIB else "MiB"
                print(f"{unit} of a rank's tensors\n{_HEAD}", flush=True)
            print(_text(line, options.gib, unit), flush=True)
    if options.json:
        print(json.dumps([asdict(line) for line in found], indent=1))
    elif options.gib is None:
        print("Add about 1 GiB for CUDA and NCCL, and 5 to 10% for gaps between blocks.")
    fitting = [line for line in found if line.memory and line.memory.peak <= (options.gib or float("inf")) * _GIB]
    return 0 if fitting else 1


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ConfigError(f"invalid --ranks {text!r}", expected="numbers of ranks, such as 1,8,64")
    return numbers


def _predict(argv: list[str], ranks: list[int], shards: list[str] | None, modes: list[str] | None) -> Iterator[_Line]:
    """Yield a line for each number of ranks, way to divide and mode of checkpointing."""
    from hvdtrain.comm.imagined import imagine_ranks
    from hvdtrain.config.parse import parse_argv, task_spec
    from hvdtrain.fit.memory import predict_memory
    from hvdtrain.task.base import load_task_function

    function: Callable[..., Any] = load_task_function(task_spec(argv))
    config = parse_argv(argv, function).config
    given, modes = config.parallel, modes or [config.memory.checkpointing]
    if shards is None:
        shards = ["none", "optimizer", "gradients", "parameters"] if given.engine == "horovod" else [given.shard]
    imagine_ranks(max(ranks))
    for count, shard, mode in itertools.product(ranks, shards, modes):
        if count == 1 and shard != "none":
            continue
        changed = [f"--parallel.shard={shard}", f"--memory.checkpointing={mode}"]
        changed += ["--parallel.engine=fsdp"] if shard == "parameters" else []
        run = parse_argv([*argv, *changed], function)
        try:
            yield _Line(count, shard, mode, predict_memory(run, partial(function, **run.task_args), count))
        except ConfigError as error:
            yield _Line(count, shard, mode, None, error.what)


def _text(line: _Line, gib: float | None, unit: str) -> str:
    start = f"{line.ranks:>5} {line.shard:<10} {line.checkpointing:<13}"
    if line.memory is None:
        return f"{start} {line.refused}"
    by = _GIB if unit == "GiB" else 1 << 20
    memory = line.memory
    rest = memory.peak - memory.model - memory.optimizer
    numbers = "".join(
        f"{value / by:>{width}.2f}"
        for value, width in ((memory.model, 9), (memory.optimizer, 10), (rest, 9), (memory.peak, 9))
    )
    fits = "" if gib is None else f"  {'fits' if memory.peak <= gib * _GIB else 'does not fit'}"
    return start + numbers + fits + (f"  host {memory.host / by:.2f}" if memory.host else "")
