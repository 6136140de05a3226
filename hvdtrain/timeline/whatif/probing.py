"""Measure the cost of coding on this machine with `hvdtrain.compression.coding_probe`, and keep it with the run."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import orjson

from hvdtrain.compression.coding_cost import CodingCost
from hvdtrain.compression.table import Compression
from hvdtrain.errors import LaunchError
from hvdtrain.files import read_regular, write_text
from hvdtrain.plan.collectives import PlannedBucket
from hvdtrain.run_layout import RunLayout
from hvdtrain.timeline.whatif.evidence import Evidence, Job

VERSION = 1
_TIMEOUT_S = 300


class CodingProbe:
    """The measured costs of coding, stored in `timeline/probe.json` of a run. Can be used as `Costs`."""

    def __init__(self, path: Path) -> None:
        self._file = RunLayout(path).timeline.link_probe
        self._costs = _read(self._file)

    def __call__(self, compression: Compression, bucket: PlannedBucket, ranks: int) -> CodingCost | None:
        """Return the cost of a bucket; None if it was not measured."""
        return self._costs.get(_key(compression, bucket, ranks))

    def measure(self, evidence: Evidence, jobs: Sequence[Job]) -> None:
        """Measure the missing costs of these jobs, with one process for each rank on a host.

        Errors: LaunchError: a process failed, for example because there is no torch.
        """
        for job in jobs:
            compression, size = evidence.compression_of(job.plan.compression), job.ranks.size
            buckets = [b for b in evidence.buckets_of(job) if not b.rows and self(compression, b, size) is None]
            if not buckets or (size == 1 and compression.exact):
                continue
            costs = _measure(compression, size, buckets, evidence.threads, min(job.ranks.per_host, evidence.cores))
            self._costs |= {_key(compression, b, size): cost for b, cost in zip(buckets, costs, strict=True)}
        content = {"version": VERSION, "buckets": {key: asdict(cost) for key, cost in self._costs.items()}}
        write_text(self._file, json.dumps(content) + "\n")


def _read(file: Path) -> dict[str, CodingCost]:
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = orjson.loads(read_regular(file))
        if found["version"] == VERSION:
            return {key: CodingCost(**cost) for key, cost in found["buckets"].items()}
    return {}


def _key(compression: Compression, bucket: PlannedBucket, ranks: int) -> str:
    facts = [str(compression), ranks, [list(shape) for shape in bucket.shape.shapes], bucket.shape.dtype]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _measure(
    compression: Compression, ranks: int, buckets: Sequence[PlannedBucket], threads: int, processes: int
) -> list[CodingCost]:
    """Return the mean over processes that measure at the same time."""
    parts = [[*zip(bucket.names, bucket.shape.shapes, bucket.starts, strict=True)] for bucket in buckets]
    shapes = [
        {"parts": own, "length": bucket.shape.length, "dtype": bucket.shape.dtype}
        for own, bucket in zip(parts, buckets, strict=True)
    ]
    question = {"compression": str(compression), "ranks": ranks, "threads": threads, "buckets": shapes}
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder) / "question.json"
        asked.write_text(json.dumps(question))
        answers = [Path(folder) / f"answer-{number}.json" for number in range(processes)]
        command = [sys.executable, "-m", "hvdtrain.compression.coding_probe", str(asked)]
        started = [
            subprocess.Popen([*command, str(answer)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for answer in answers
        ]
        outputs = [process.communicate(timeout=_TIMEOUT_S)[0] for process in started]
        for process, output in zip(started, outputs, strict=True):
            if process.returncode:
                raise LaunchError(
                    "the cost of coding cannot be measured on this machine",
                    found=output.strip().splitlines()[-1] if output.strip() else f"exit code {process.returncode}",
                    next_step="run the command where the run was trained (it needs torch), or leave out --probe",
                )
        found = [[CodingCost(**cost) for cost in json.loads(answer.read_text())] for answer in answers]
    return [CodingCost.combine(costs, fmean) for costs in zip(*found, strict=True)]
