"""``hvdtrain timeline whatif``: how long a step would take with other ranks, links, buckets or compression."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, get_args

from hvdtrain.cli.parser import Parser, local
from hvdtrain.errors import ConfigError
from hvdtrain.timeline.whatif.links import Algorithm


def main(command: str, argv: list[str]) -> int:
    """Predict and print; 0, 2 on a wrong option.

    Errors: ConfigError, DataError, LaunchError: see `predict`, `read_evidence` and `CodingProbe`.
    """
    options = parser(command).parse_args(argv)
    from hvdtrain.timeline.whatif.evidence import Change
    from hvdtrain.timeline.whatif.predict import predict
    from hvdtrain.timeline.whatif.prediction_text import as_data, lines, rare_data, rare_lines
    from hvdtrain.timeline.whatif.probing import CodingProbe
    from hvdtrain.timeline.whatif.read_run import read_evidence

    change = Change(**{field.name: getattr(options, field.name) for field in fields(Change)})
    evidence = read_evidence(options.run)
    probed = CodingProbe(options.run)
    given = [name for name in ("workers", "outer_compression") if getattr(change, name) is not None]
    if change.sync is None and given:
        raise ConfigError(f"--{given[0]} has no effect without --sync", next_step="add for example --sync diloco:32")
    if change.sync is not None:
        from hvdtrain.timeline.whatif.outer_exchange import predict_rarely

        rare = predict_rarely(evidence, change, probed)
        data, text = rare_data(evidence, change, rare), rare_lines(evidence, change, rare)
    else:
        prediction = predict(evidence, change, probed)
        if options.probe:
            probed.measure(evidence, (evidence.job, prediction.job))
            prediction = predict(evidence, change, probed)
        data, text = as_data(evidence, change, prediction), lines(evidence, change, prediction)
    print(json.dumps(data, indent=1) if options.json else "\n".join(text))
    return 0


def parser(command: str) -> Parser:
    """Declare the options."""
    made = Parser(
        prog=f"hvdtrain timeline {command}",
        description="Predict the time of a step of RUN under a change, by replaying its measured step. Options"
        " that are not given stay as in the run.",
    )
    add = made.add_argument
    count: dict[str, Any] = {"type": int, "metavar": "N"}
    number: dict[str, Any] = {"type": float, "metavar": "X"}
    add("run", type=local, metavar="RUN", help="folder of a run of hvdtrain")
    add("--size", help="number of ranks", **count)
    per_host = "ranks on each host (default: as in the run; if it had one host, as many as its cores hold)"
    add("--ranks_per_host", help=per_host, **count)
    add("--bandwidth_gbit", help="bandwidth of each host's link, in Gbit/s", **number)
    add("--latency_us", help="latency of a small message between two ranks, in microseconds", **number)
    algorithms, what = get_args(Algorithm), "algorithm of all-reduces; auto is the fastest that MPI or NCCL use"
    add("--algorithm", choices=algorithms, help=what)
    add("--compression", metavar="NAME", help="a value of --parallel.compression, such as powersgd:4")
    engines = ("horovod", "ddp", "fsdp")
    add("--engine", choices=engines, help="a value of --parallel.engine; --shard is then none unless it is given")
    shards = ("none", "optimizer", "gradients", "parameters")
    add("--shard", choices=shards, help="what is divided among ranks: a value of --parallel.shard")
    add("--bucket_mib", help="a value of --parallel.bucket_mib, in MiB", **number)
    add("--global_batch", help="samples per step over all ranks", **count)
    add("--sync", metavar="NAME", help="a value of --parallel.sync, such as diloco:32, with --workers")
    add("--workers", help="a value of --parallel.workers", **count)
    add("--outer_compression", metavar="NAME", help="a value of --outer.compression, such as int4; with --sync")
    add("--data_ms", help="time per step to wait for data, in ms; 0 means that data is always ready", **number)
    add("--slow_rank_percent", help="how much slower one rank computes, in percent", **number)
    add("--json", action="store_true", help="print JSON")
    probe = "first measure the cost of compression on this machine (takes seconds, needs torch)"
    add("--probe", action="store_true", help=probe)
    return made
