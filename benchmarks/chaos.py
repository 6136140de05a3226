"""The kill matrix: what becomes of an elastic run that a fault befalls, for each fault, phase, number of ranks, hosts.

Each cell is a job of its own under `hvdtrain launch` (see tests/support/chaos.py), a toy task of some 45 ms a step, so
that most of a cell is spent waiting. It holds where the job ends with 0, every step is in the journal with the loss of
an undisturbed run of one rank (to 1e-5), `verify data` finds each sample once, and parameters were found equal on all
ranks, which is looked at in every fifth step. Needs root, for two hosts and for a disk that is full.

    python benchmarks/chaos.py --json results.json              # what results.json does not hold yet
    python benchmarks/chaos.py --json results.json --only SIGKILL --only 2-hosts --again
    python benchmarks/chaos.py --json results.json --table      # only say what is there, as Markdown
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import Figure, content, figure, options, print_table

from hvdtrain.files import write_text
from tests.support.chaos import DIVIDED, STEP, Cell, Outcome, cells, run_cell, undisturbed
from tests.support.chaos_rank import COPIES, FAULTS, PHASES

QUICK = ("SIGKILL 1-host 2-ranks", "SIGTERM 1-host 2-ranks")
Row = Mapping[str, Any]


def name(cell: Cell) -> str:
    """Of a cell, in words that `--only` looks for."""
    late = "" if cell.step == STEP else " late"
    divided = " divided" if cell.options == DIVIDED else ""
    return f"{cell.fault} {cell.phase}{late} {cell.hosts}-host{'s' * (cell.hosts > 1)} {cell.size}-ranks{divided}"


def row(cell: Cell, outcome: Outcome) -> dict[str, Any]:
    """As the results hold it; what the driver said only where something is wrong."""
    found = {**asdict(cell), **asdict(outcome), "name": name(cell), "wrong": outcome.faults}
    if not outcome.faults:
        del found["said"]
    return found


def figures(rows: Iterable[Row]) -> list[Figure]:
    """How many hold, and times by fault and number of hosts."""
    rows = list(rows)
    found = [figure("chaos/held", [1.0 - bool(r["wrong"]) for r in rows], "")] if rows else []
    found = [
        Figure(f.name, statistics.mean(1.0 - bool(r["wrong"]) for r in rows), f.low, f.high, "share") for f in found
    ]
    for fault in FAULTS:
        for hosts in (1, 2):
            own = [r for r in rows if (r["fault"], r["hosts"]) == (fault, hosts) and r["phase"] != "start-up"]
            for what in ("to_next_step_s", "pause_s"):
                times = [r[what] for r in own if r[what] is not None and not r["wrong"]]
                if times:
                    found.append(figure(f"chaos/{fault.replace(' ', '_')}/{hosts}_hosts/{what}", times, "s"))
    return found


def table(rows: Iterable[Row]) -> str:
    """Seconds from the fault to the next step / the longest pause from then on; what does not hold is named below."""
    rows = {r["name"]: r for r in rows}
    lines = [f"| fault | hosts | ranks | {' | '.join(PHASES)} |", "|---" * (3 + len(PHASES)) + "|"]
    for fault in FAULTS:
        for hosts in (1, 2):
            for size, own_options, kind in ((2, (), ""), (3, (), ""), (4, (), ""), (3, DIVIDED, ", divided")):
                own = [rows.get(name(Cell(fault, phase, size, hosts, options=own_options))) for phase in PHASES]
                if any(own):
                    lines.append(f"| {fault} | {hosts} | {size}{kind} | {' | '.join(map(_entry, own))} |")
    copies = [f"{r['hosts']} host(s): {_entry(r)}" for r in rows.values() if r["phase"] == COPIES]
    if copies:
        lines += ["", f"SIGKILL of a rank that has the copies of a commit, divided: {'; '.join(copies)}."]
    late = [r for r in rows.values() if r["step"] != STEP]
    if late:
        entries = [f"{r['hosts']} host(s), {r['size']} ranks: {'no' if r['wrong'] else 'yes'}" for r in late]
        lines += ["", f"Disk full to the end of the run: {'; '.join(entries)}."]
    wrong = [
        f"- {r['name']} (rank {r['rank']}): {'; '.join(w.splitlines()[0] for w in r['wrong'])}"
        for r in rows.values()
        if r["wrong"]
    ]
    return "\n".join([*lines, "", *wrong]).rstrip() + "\n"


def _entry(found: Row | None) -> str:
    if found is None:
        return ""
    if found["wrong"]:
        return "**no**"
    times = (found["to_next_step_s"], found["pause_s"] if found["phase"] != "start-up" else None)
    return " / ".join(f"{time_s:.2f}" for time_s in times if time_s is not None) or "yes"


def run(wanted: list[Cell], jobs: int, results: dict[str, Row], file: Path | None) -> None:
    """Run cells, several at once, and keep what comes as soon as it does."""
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        base = Path(folder)
        (base / "alone").mkdir()
        expected = undisturbed(base / "alone")

        def one(cell: Cell) -> tuple[Cell, Outcome, float]:
            began = time.perf_counter()
            own = Path(tempfile.mkdtemp(dir=base))
            return cell, run_cell(cell, own, expected), time.perf_counter() - began

        with ThreadPoolExecutor(jobs) as pool:
            in_turn = sorted(wanted, key=lambda cell: cell.size)
            futures = {pool.submit(one, cell): cell for cell in in_turn}
            for future in as_completed(futures):
                if (error := future.exception()) is not None:
                    print(f"     {name(futures[future])}: could not be run: {error!r}", flush=True)
                    continue
                cell, outcome, seconds = future.result()
                results[name(cell)] = {**row(cell, outcome), "at_once": jobs}
                write(results, file)
                said = "; ".join(outcome.faults) or "holds"
                times = f"{outcome.to_next_step_s} s to the next step, rounds of {outcome.sizes}, {seconds:.0f} s"
                print(f"{len(results):>4} {name(cell)}: {said} ({times})", flush=True)


def write(results: Mapping[str, Row], file: Path | None) -> None:
    """Keep the results, in the order of the matrix."""
    if file is None:
        return
    rows = [results[name(cell)] for cell in cells() if name(cell) in results]
    write_text(file, json.dumps(content(figures(rows), cells=rows), indent=1) + "\n")


def main() -> int:
    """Parse options, run what is wanted, say what came of it; 1 where something does not hold."""
    parser = options(__doc__)
    parser.add_argument("--only", action="append", default=[], help="cells with this in their name; all that are given")
    parser.add_argument("--again", action="store_true", help="also those that the file holds")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="cells at once")
    parser.add_argument("--table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    results: dict[str, Row] = {}
    if arguments.json and arguments.json.exists():
        results = {r["name"]: r for r in json.loads(arguments.json.read_text())["cells"]}
    asked = [c for c in cells() if all(part in name(c) for part in arguments.only)]
    if arguments.quick:
        asked = [c for c in asked if any(set(q.split()) <= set(name(c).split()) for q in QUICK)]
    wanted = [] if arguments.table else [c for c in asked if arguments.again or name(c) not in results]
    if wanted:
        run(wanted, arguments.jobs, results, arguments.json)
    rows = [results[name(c)] for c in asked if name(c) in results]
    print(table(rows))
    print_table(figures(rows))
    return int(any(r["wrong"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
