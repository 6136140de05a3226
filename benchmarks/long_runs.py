"""What do days of training and a thousand ranks cost: the report, TensorBoard and the journal?

Nothing trains: the files of runs are written here, in the program's formats.

- long_runs/report_s and report_mib: `hvdtrain timeline report` of 1,000 ranks, three days of steps of half a second,
  512 of them stamped; one rank is slow from the middle on.
- long_runs/look_cpu_s: CPU time of a look at this run while it trains, after the first one.
- long_runs/timeline_report_s and timeline_report_mib: the same of a Horovod Timeline of 1 GiB alone.
- long_runs/tensorboard_mb: TensorBoard's files after these three days.
- long_runs/journal_bytes: of a step in the journal.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
from common import Figure, figure, options, report
from timeline_traces import USUAL, write

from hvdtrain.observe.step_format import VERSION, BlockLine, ClockLine, StartLine
from hvdtrain.observe.tensorboard import TensorBoard
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.run import load
from hvdtrain.timeline.run_files import RunFiles
from tests.support.step_tables import table_of

RANKS, STAMPED, BLOCK = 1000, 512, 16
STEP_S, DAYS = 0.5, 3
STEPS = int(DAYS * 86400 / STEP_S)
_PARTS_S = {
    "data_s": 0.004, "copy_s": 0.001, "gather_s": 0.0, "activations_s": 0.0, "forward_s": 0.15, "backward_s": 0.3,
    "exposed_comm_s": 0.02, "clip_s": 0.005, "optimizer_s": 0.015,
}  # fmt: skip


def record(step: int) -> dict[str, object]:
    """The journal's line of a step."""
    noise = (step * 7919 % 1000) / 1000
    parts = {name: round(seconds * (1 + 0.1 * noise), 6) for name, seconds in _PARTS_S.items()}
    whole = {"loss": 2 + noise, "grad_norm": 1 + noise, "lr": 1e-3, "position": 1024 * step, "tokens": 131072.0}
    return {"step": step, "time": 1.8e9 + STEP_S * step, **whole, "step_s": STEP_S, **parts}


def write_journal(path: Path) -> None:
    """Write the journal of one start."""
    with path.open("w") as file:
        file.write(json.dumps({"event": "started", "time": 1.8e9, "size": RANKS, "format": 1}) + "\n")
        file.writelines(json.dumps(record(step)) + "\n" for step in range(1, STEPS + 1))


def write_stamps(path: Path) -> None:
    """Write evenly spaced blocks of stamps of all ranks."""
    work_ms = 400 + np.random.default_rng(0).normal(0, 2, (RANKS, STAMPED))
    work_ms[617, STAMPED // 2 :] += 40
    table = table_of(work_ms, exchange_ms=20.0)
    zeros = [0.0] * RANKS
    clock = ClockLine(list(zeros), list(zeros))
    start = StartLine(VERSION, 0, RANKS, 0, table.hosts, ["x"] * RANKS, 0.0, clock=clock)
    with path.open("wb") as file:
        file.write(msgspec.json.encode(start) + b"\n")
        for number in range(STAMPED // BLOCK):
            here = slice(number * BLOCK, (number + 1) * BLOCK)
            first = 1 + number * (STEPS // (STAMPED // BLOCK))
            gap_us = 1e6 * STEP_S * (first - 1 - number * BLOCK)  # of the steps without stamps
            moments = [table.start_us, table.ready_us, table.released_us, table.end_us]
            parts = {name: values[:, here].round(1).tolist() for name, values in table.parts_us.items() if values.any()}
            rows = [(each[:, here] + gap_us).round(1).tolist() for each in moments]
            file.write(msgspec.json.encode(BlockLine(first, *rows, parts, {}, clock)) + b"\n")


def run_report(run: Path) -> tuple[float, float]:
    """Seconds and MiB of `hvdtrain timeline report`."""
    began = time.perf_counter()
    process = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "hvdtrain", "timeline", "report", str(run)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(process, 0)
    if os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"the report of {run} failed")
    return time.perf_counter() - began, usage.ru_maxrss / 1024


def look_cpu_s(run: Path, looks: int) -> list[float]:
    """CPU seconds of each look of `hvdtrain timeline watch` after the first one."""
    files, times = RunFiles(run, grows=True), []
    for _ in range(1 + looks):
        began = time.process_time()
        analyse(load(run, files=files))
        times.append(time.process_time() - began)
    return times[1:]


def tensorboard_bytes(folder: Path) -> int:
    """The size of TensorBoard's files after all steps."""
    sink = TensorBoard(folder, folder / "journal.jsonl")
    sink.write({"event": "started", "time": 1.8e9, "size": RANKS})
    for step in range(1, STEPS + 1):
        sink.write(record(step))
        if step % 1000 == 0:
            sink.write({"event": "evaluation", "at_step": step, "time": 1.8e9 + STEP_S * step, "loss": 2.0})
    sink.close()
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure(quick: bool) -> list[Figure]:
    rounds = 1 if quick else 3
    with tempfile.TemporaryDirectory() as temporary:
        folder, traced = Path(temporary) / "run", Path(temporary) / "timeline.json"
        (folder / "timeline").mkdir(parents=True)
        write_journal(folder / "journal.jsonl")
        write_stamps(folder / "timeline" / "steps.jsonl")
        write(traced, 1 << 30, USUAL)
        found = []
        for name, which in (("report", folder), ("timeline_report", traced)):
            runs = [run_report(which) for _ in range(rounds)]
            found.append(figure(f"long_runs/{name}_s", [seconds for seconds, _ in runs], "s"))
            found.append(figure(f"long_runs/{name}_mib", [mib for _, mib in runs], "MiB"))
        found.append(figure("long_runs/look_cpu_s", look_cpu_s(folder, rounds), "s"))
        size = (folder / "journal.jsonl").stat().st_size
        found.append(figure("long_runs/journal_bytes", [size / STEPS], "bytes"))
        board = Path(temporary) / "tensorboard"
        board.mkdir()
        found.append(figure("long_runs/tensorboard_mb", [tensorboard_bytes(board) / 1e6], "MB"))
    return found


def main() -> None:
    arguments = options(__doc__).parse_args()
    report(measure(arguments.quick), arguments.json)


if __name__ == "__main__":
    main()
