"""Measure the cost of coding on this machine, by `hvdtrain.exchange.coding_probe`; results stay with the run."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from hvdtrain.compression.table import Compression, parse
from hvdtrain.durable import write_text
from hvdtrain.errors import LaunchError
from hvdtrain.regular import read_regular
from hvdtrain.run_layout import RunLayout
from hvdtrain.timeline.whatif.assemble import buckets_of
from hvdtrain.timeline.whatif.bucket_plan import Planned
from hvdtrain.timeline.whatif.coding import Cost, of_probe
from hvdtrain.timeline.whatif.evidence import Evidence, Job

VERSION = 1
_TIMEOUT_S = 300


class Probed:
    """What was measured of coding, as `timeline/probe.json` of a run keeps it.

    Args:
        path: of the run.
    """

    def __init__(self, path: Path) -> None:
        self._file = RunLayout(path).timeline.link_probe
        self._found = _read(self._file)

    def __call__(self, compression: Compression, bucket: Planned, ranks: int) -> Cost | None:
        """Of a bucket; None where it was not measured."""
        found = self._found.get(_key(compression, bucket, ranks))
        return None if found is None else of_probe(found)

    def measure(self, evidence: Evidence, jobs: Sequence[Job]) -> None:
        """Measure what is missing for these, with as many processes at once as there are ranks on a host.

        Errors:
            LaunchError: it does not work here, as without torch.
        """
        for job in jobs:
            compression, size = parse(job.compression), job.ranks.size
            buckets = [b for b in buckets_of(evidence, job) if not b.rows and self(compression, b, size) is None]
            if not buckets or (size == 1 and job.compression == "none"):
                continue
            answers = _ask(compression, size, buckets, evidence.threads, beside=min(job.ranks.per_host, evidence.cores))
            self._found |= {_key(compression, b, size): a for b, a in zip(buckets, answers, strict=True)}
        write_text(self._file, json.dumps({"version": VERSION, "buckets": self._found}) + "\n")


def _read(file: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(read_regular(file))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or found.get("version") != VERSION:
        return {}
    try:
        for cost in found["buckets"].values():
            of_probe(cost)
    except (KeyError, TypeError, AttributeError):
        return {}
    return dict(found["buckets"])


def _key(compression: Compression, bucket: Planned, ranks: int) -> str:
    what = [str(compression), ranks, [list(shape) for shape in bucket.shape.shapes], bucket.shape.dtype]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _ask(
    compression: Compression, ranks: int, buckets: Sequence[Planned], threads: int, beside: int
) -> list[Mapping[str, Any]]:
    """The mean over processes that measure at the same time."""
    question = {
        "compression": str(compression),
        "ranks": ranks,
        "threads": threads,
        "buckets": [
            {
                "parts": [
                    [name, list(shape), start]
                    for name, shape, start in zip(bucket.names, bucket.shape.shapes, bucket.starts, strict=True)
                ],
                "length": bucket.shape.length,
                "dtype": bucket.shape.dtype,
            }
            for bucket in buckets
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder) / "asked.json"
        asked.write_text(json.dumps(question))
        answers = [Path(folder) / f"answer-{number}.json" for number in range(beside)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "hvdtrain.exchange.coding_probe", str(asked), str(answer)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for answer in answers
        ]
        said = [process.communicate(timeout=_TIMEOUT_S)[0] for process in processes]
        for process, text in zip(processes, said, strict=True):
            if process.returncode:
                raise LaunchError(
                    "what coding costs cannot be measured here",
                    found=text.strip().splitlines()[-1] if text.strip() else f"exit code {process.returncode}",
                    next_step="measure where the run was: torch is needed; or leave --probe and --check out",
                )
        found = [json.loads(answer.read_text()) for answer in answers]
    return [_mean(costs) for costs in zip(*found, strict=True)]


def _mean(costs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    def of(key: str) -> Any:
        values = [cost[key] for cost in costs]
        if isinstance(values[0], list):
            return [sum(column) / len(column) for column in zip(*values, strict=True)]
        return sum(values) / len(values)

    return {key: of(key) for key in costs[0]}
