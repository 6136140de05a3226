"""``hvdtrain timeline whatif``: how long a step would take with other ranks, links, buckets or compression."""

from __future__ import annotations

import json
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from hvdtrain.cli.parser import Parser, local
from hvdtrain.config.sync import AUTO_SYNC
from hvdtrain.errors import ConfigError
from hvdtrain.timeline.whatif.links import Algorithm

if TYPE_CHECKING:
    from hvdtrain.timeline.whatif.evidence import Change, Evidence
    from hvdtrain.timeline.whatif.probing import CodingProbe


def main(command: str, argv: list[str]) -> int:
    """Predict, print, and try where asked to; 0, 2 on a wrong option.

    Errors: ConfigError, DataError, LaunchError: see `predict`, `read_evidence` and `try_change`.
    """
    options = parser(command).parse_args(argv)
    from hvdtrain.timeline.whatif.evidence import Change
    from hvdtrain.timeline.whatif.predict import predict
    from hvdtrain.timeline.whatif.prediction_text import as_data, lines
    from hvdtrain.timeline.whatif.probing import CodingProbe
    from hvdtrain.timeline.whatif.read_run import read_evidence

    change = Change(**{field.name: getattr(options, field.name) for field in fields(Change)})
    evidence = read_evidence(options.run)
    probed = CodingProbe(options.run)
    _check_sync(change, check=options.check)
    if change.sync == AUTO_SYNC:
        from hvdtrain.timeline.whatif.prediction_text import ways_data, ways_lines
        from hvdtrain.timeline.whatif.time_to_loss import compare_ways

        found = compare_ways(evidence, change, probed)
        shown = json.dumps(ways_data(evidence, change, found), indent=1)
        print(shown if options.json else "\n".join(ways_lines(evidence, change, found)))
        return 0
    if change.sync is not None:
        from hvdtrain.timeline.whatif.outer_exchange import predict_rarely
        from hvdtrain.timeline.whatif.prediction_text import rare_data, rare_lines

        rare = predict_rarely(evidence, change, probed)
        shown = json.dumps(rare_data(evidence, change, rare), indent=1)
        print(shown if options.json else "\n".join(rare_lines(evidence, change, rare)))
        return 0
    prediction = predict(evidence, change, probed)
    if options.probe or options.check:
        probed.measure(evidence, (evidence.job, prediction.job))
        prediction = predict(evidence, change, probed)
    data = as_data(evidence, change, prediction)
    if not options.json:
        print("\n".join(lines(evidence, change, prediction)))
    if options.check:
        data["check"] = _check(evidence, change, probed, quiet=options.json)
    if options.json:
        print(json.dumps(data, indent=1))
    return 0


def _check_sync(change: Change, *, check: bool) -> None:
    given = [name for name in ("workers", "outer_compression") if getattr(change, name) is not None]
    if change.sync is None and given:
        raise ConfigError(f"--{given[0]} has no effect without --sync", next_step="add for example --sync diloco:32")
    if change.sync == AUTO_SYNC and change.outer_compression is not None:
        raise ConfigError(
            f"--outer_compression has no effect with --sync {AUTO_SYNC}, which compares several", next_step="omit it"
        )
    if change.sync is not None and check:
        raise ConfigError(
            "--check does not try --sync", found="rounds of more steps than a trial has", next_step="omit --check"
        )


def _check(evidence: Evidence, change: Change, probed: CodingProbe, *, quiet: bool) -> dict[str, object]:
    """Try the change, predicted again from what the unchanged job does now: other work slows both alike."""
    from hvdtrain.timeline.whatif.predict import predict
    from hvdtrain.timeline.whatif.prediction_text import comparison_lines
    from hvdtrain.timeline.whatif.read_run import read_evidence
    from hvdtrain.timeline.whatif.trying import reasons_against, try_change

    def show(line: str) -> None:
        if not quiet:
            print(line, flush=True)

    reasons = reasons_against(evidence, change)
    if reasons:
        raise ConfigError(
            "this change cannot be tried here",
            found="; ".join(reasons),
            next_step="omit --check, or run the command on a machine where the change can be tried",
        )
    show("\ntrying it here, rounds interleaved:")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-whatif-") as folder:
        tried = try_change(evidence, change, Path(folder), show)
        found = [predict(read_evidence(run), change, probed) for run in tried.unchanged]
    for line in comparison_lines(found, tried.unchanged_s, tried.changed_s):
        show(line)
    return {
        "unchanged_s": tried.unchanged_s,
        "changed_s": tried.changed_s,
        "predicted_s": [prediction.then.step_s for prediction in found],
    }


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
    add("--sync", metavar="NAME", help="a value of --parallel.sync, such as diloco:32, with --workers; auto compares")
    add("--workers", help="a value of --parallel.workers", **count)
    add("--outer_compression", metavar="NAME", help="a value of --outer.compression, such as int4; with --sync")
    add("--data_ms", help="time per step to wait for data, in ms; 0 means that data is always ready", **number)
    add("--slow_rank_percent", help="how much slower one rank computes, in percent", **number)
    add("--json", action="store_true", help="print JSON")
    probe = "first measure the cost of compression on this machine (takes seconds, needs torch)"
    add("--probe", action="store_true", help=probe)
    add("--check", action="store_true", help="try the change on this machine too, and show the error of the prediction")
    return made
