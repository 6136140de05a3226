"""How long does an exchange take on one host, from 4 B to 256 MiB, and of many tensors?

2 ranks of 1 thread. Each contender is a job of its own, started anew in every round, one at a time; a figure is the
median over rounds of what the ratio was in one round, of medians over repeats.

- ours: our communicator as shipped, with all settings; of many tensors: from the last gradient that backward makes
  until the sums of all are there;
- stock: Horovod as it comes; of many tensors: from the first one handed over until the sums of all are there;
- mpi, mpi_ring: mpi4py's Allreduce on the same MPI, by its own choice and around a ring;
- gloo: torch.distributed;
- limit: what one rank needs to copy as much memory, and to add as much to it, nothing else running.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from common import HERE, Figure, figure, in_turn, main, ratios
from exchange_job import FLAT, MODEL, SIZES, SMALL
from jobs import mpirun

RING = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}
CONTENDERS = {"ours": {}, "stock": {}, "mpi": {}, "mpi_ring": RING, "gloo": {}}
QUICK = ("4B", "256KiB", FLAT, SMALL)
Milliseconds = dict[str, list[float]]


def run(name: str, cases: tuple[str, ...]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        kind = "mpi" if name == "mpi_ring" else name
        mpirun(name, [str(HERE / "exchange_job.py"), kind, str(file), *cases], CONTENDERS[name], timeout_s=300)
        return dict(json.loads(file.read_text()))


def rounds(number: int, cases: tuple[str, ...]) -> dict[str, Milliseconds]:
    """By contender, by case, the milliseconds of each round."""
    found: dict[str, Milliseconds] = {}
    for turn in range(number):
        for name in in_turn(list(CONTENDERS), turn):
            for case, milliseconds in run(name, cases).items():
                owner, _, own_case = case.rpartition("/")
                if owner and name != "mpi":
                    continue  # the limit is measured by each job of mpi4py; one is enough
                found.setdefault(owner or name, {}).setdefault(own_case, []).append(milliseconds)
    return found


def measure(quick: bool) -> list[Figure]:
    cases = QUICK if quick else (*SIZES, SMALL, MODEL)
    found = rounds(2 if quick else 3, cases)
    ours = found["ours"]
    worst = max((ratios(ours[case], found["stock"][case]) for case in cases), key=lambda r: figure("", r, "").value)
    return [
        figure("exchange/33MB_vs_mpi_ring", ratios(ours[FLAT], found["mpi_ring"][FLAT]), "ratio"),
        figure("exchange/1024x32KiB_vs_flat", ratios(ours[SMALL], ours[FLAT]), "ratio"),
        figure("exchange/vs_stock_worst", worst, "ratio"),
        *(
            figure(f"exchange/{case}/{name}", by_case[case], "ms")
            for case in cases
            for name, by_case in found.items()
            if case in by_case
        ),
    ]


if __name__ == "__main__":
    main(__doc__, measure)
