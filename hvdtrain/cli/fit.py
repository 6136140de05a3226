"""``hvdtrain fit``: predict the memory of ways to divide the state, before the job is queued."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from hvdtrain.cli.parser import Parser, positives
from hvdtrain.errors import ConfigError
from hvdtrain.fit.ways import GIB, Line, Way, fits_in, meshes_to_try, propose, shard_options, sizes_to_try

_HEAD = f"{'ranks':>5} {'divided':<10} {'checkpoint':<10}{'model':>8}{'optimizer':>10}{'rest':>8}{'peak':>8}{'sent':>9}"
_DESCRIPTION = """\
Predict the largest memory of the tensors of one rank, by running two steps of
the job's own engine on tensors without memory. It takes seconds, and needs no
GPU and little memory."""
_EPILOG = """\
All options of hvdtrain train are accepted, too. With --parallel.device cuda,
attention takes the memory that it takes on GPUs, also if there is none here.
The rest is activations, gradients and the memory of their exchange. Sent is
what a rank sends in a step; experts count as having equally many tokens.

examples:
  hvdtrain fit --ranks 1,8,64 --gib 80 --config run.yaml --parallel.device cuda
  hvdtrain fit --shards parameters --ranks 8 --precision bf16-weights
  hvdtrain fit --ranks 64 --gib 80 --config run.yaml --meshes ep8,tp2xep2,cp4

exit code: 0 if a line fits in --gib, 1 if none does or on an error
"""


def parser() -> Parser:
    """Declare the options."""
    made = Parser(prog="hvdtrain fit", description=_DESCRIPTION, epilog=_EPILOG)
    add = made.add_argument
    add("--ranks", type=positives, default=[1, 8], metavar="N,...", help="numbers of ranks (default: 1,8)")
    add("--gib", type=float, metavar="GIB", help="memory of a device: mark what fits")
    largest = "find the largest --train.micro_batch, a power of two, that fits in --gib"
    add("--largest", action="store_true", help=largest)
    shards = "values of --parallel.shard; parameters means --parallel.engine fsdp (default: all that the engine"
    add("--shards", metavar="SHARD,...", help=f"{shards} divides)")
    meshes = (
        "meshes of --parallel.ep, tp, cp and pp, such as ep8,tp2xpp4, or with --parallel.engine fsdp tp2xfsdp; auto:"
        " powers of two of each, until one fits; none (default: auto if nothing else fits in --gib)"
    )
    add("--meshes", metavar="MESH,...", help=meshes)
    add("--checkpointing", metavar="MODE,...", help="values of --memory.checkpointing (default: that of the options)")
    add("--json", action="store_true", help="print one JSON object")
    return made


def main(argv: list[str]) -> int:
    """Predict and print. Return 0; 1 if no line fits in the given memory.

    Errors: ConfigError: an invalid option. What only a line does not support is shown in that line.
    """
    options, training = parser().parse_known_args(argv)
    found: list[Line] = []
    for line in _predict(training, options, options.ranks):
        found.append(line)
        if not options.json:
            if len(found) == 1:
                unit = "GiB" if line.memory is None or line.memory.peak >= GIB else "MiB"
                found_sizes = f"{'samples':>8}" if line.micro_batch else ""
                print(f"{unit} of a rank's tensors\n{_HEAD}{found_sizes}", flush=True)
            print(_text(line, options.gib, unit), flush=True)
    found, reasons = propose(found, options.gib)
    if options.json:
        print(json.dumps([asdict(line) for line in found], indent=1))
    else:
        for reason in reasons:
            print(reason)
        if options.gib is None:
            print("Add about 1 GiB for CUDA and NCCL, and 5 to 10% for gaps between blocks.")
    return 0 if any(line.memory and fits_in(line.memory, options.gib) for line in found) else 1


def _predict(argv: list[str], options: argparse.Namespace, ranks: list[int]) -> Iterator[Line]:
    """Yield a line for each number of ranks, way to divide and mode of checkpointing."""
    from hvdtrain.comm.solo import imagined_ranks
    from hvdtrain.config.parse import parse_argv, task_spec
    from hvdtrain.fit.memory import predict_memory
    from hvdtrain.plan.plan import plan_of
    from hvdtrain.task.base import load_task_function

    function: Callable[..., Any] = load_task_function(task_spec(argv))
    config = parse_argv(argv, function).config
    given, gib, meshes = config.parallel, options.gib, options.meshes
    modes = options.checkpointing.split(",") if options.checkpointing else [config.memory.checkpointing]
    dimensions = plan_of(config).dimensions
    has_mesh = bool(dimensions)
    shards = ["none", "optimizer", "gradients", "parameters"] if given.engine == "horovod" else [given.shard]
    shards = options.shards.split(",") if options.shards else shards
    if options.largest and gib is None:
        raise ConfigError("--largest without the memory of a device", next_step="add --gib, such as --gib 80")
    if has_mesh and meshes not in (None, "none"):
        raise ConfigError("--meshes, but the options have a mesh", next_step=f"leave out {dimensions.options}")

    def predict(count: int, way: Way, mode: str) -> Line:
        train, line = config.train, None
        places = max(1, count // plan_of(parse_argv([*argv, *way.options], function).config).dimensions.same_samples)
        for size in sizes_to_try(train.global_batch, places) if options.largest else [train.micro_batch]:
            changed = [*way.options, f"--memory.checkpointing={mode}", f"--train.micro_batch={size}"]
            run = parse_argv([*argv, *changed], function)
            found = size if options.largest else None
            try:
                memory = predict_memory(run, partial(function, **run.task_args), count)
            except ConfigError as error:
                return Line(count, way.shard, mode, None, error.what, found, mesh=way.mesh)
            if line is not None and not fits_in(memory, gib):
                break
            line = Line(count, way.shard, mode, memory, micro_batch=found, mesh=way.mesh)
        assert line is not None
        return line

    with imagined_ranks(max(ranks)):
        for count in ranks:
            fits = False
            done: set[str] = set()
            ways = [Way(shard, shard_options(shard)) for shard in shards if count > 1 or shard == "none"]
            for way, mode in itertools.product([*ways, *meshes_to_try(meshes, count, given.engine)], modes):
                if way.family and ((meshes is None and (fits or gib is None or has_mesh)) or way.family in done):
                    continue
                line = predict(count, way, mode)
                if way.family and line.memory is None:  # the model has no such part, or none that is so large
                    done.add(way.family)
                    continue
                if line.memory is not None and fits_in(line.memory, gib):
                    fits = fits or not way.family
                    done.add(way.family)
                yield line


def _text(line: Line, gib: float | None, unit: str) -> str:
    start = f"{line.ranks:>5} {line.mesh or line.shard:<10} {line.checkpointing:<10}"
    if line.memory is None:
        return f"{start} {line.refused}"
    by = GIB if unit == "GiB" else 1 << 20
    memory = line.memory
    rest = memory.peak - memory.model - memory.optimizer
    numbers = "".join(
        f"{value / by:>{width}.2f}"
        for value, width in ((memory.model, 8), (memory.optimizer, 10), (rest, 8), (memory.peak, 8), (memory.sent, 9))
    )
    if line.micro_batch:
        numbers += f"{line.micro_batch:>8}"
    fits = "" if gib is None else f"  {'fits' if fits_in(memory, gib) else 'too big'}"
    return start + numbers + fits + (f"  host {memory.host / by:.2f}" if memory.host else "")
