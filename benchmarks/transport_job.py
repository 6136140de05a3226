"""Some exchanges under the settings of the environment: ``mpirun ... python transport_job.py FILE``.

Our settings are applied first; what the environment holds wins. Rank 0 writes FILE, as JSON: median milliseconds by
exchange, and how many milliseconds of processor time this rank took for 8 MiB.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.runtime import tuning

BUDGET_S, LEAST, MOST, WARM_UP = 0.6, 4, 100, 3
MANY, BYTES = 256, 32 << 10


def median_ms(work: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Of the wall and of the processor."""
    wall, processor = [], []
    for _ in range(repeats):
        start, used = time.perf_counter(), time.process_time()
        work()
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    return 1e3 * statistics.median(wall), 1e3 * statistics.median(processor)


def main() -> None:
    """Measure; all ranks repeat as often."""
    info, _ = tuning.prepare()
    import torch

    from hvdtrain.comm.rounds import start_comm

    torch.set_num_threads(1)
    comm = start_comm(info)
    import horovod.torch as hvd

    element, flat = torch.zeros(1), torch.zeros(MANY * BYTES // 4)
    many = [torch.zeros(BYTES // 4) for _ in range(MANY)]

    def one_by_one() -> None:
        for handle in [comm.allreduce(tensor, name=f"many/{n}") for n, tensor in enumerate(many)]:
            handle.wait()

    exchanges: dict[str, Callable[[], Any]] = {
        "1 element": lambda: comm.allreduce(element, name="element").wait(),
        "8 MiB": lambda: comm.allreduce(flat, name="flat").wait(),
        f"{MANY} x 32 KiB": one_by_one,
        f"{MANY} x 32 KiB grouped": lambda: hvd.grouped_allreduce_(many, name="group", op=hvd.Sum),
    }
    found = {}
    for name, work in exchanges.items():
        seconds = torch.tensor([median_ms(work, WARM_UP)[0] / 1e3])
        comm.allreduce(seconds, name="seconds").wait()
        repeats = max(LEAST, min(MOST, int(BUDGET_S * comm.size / float(seconds))))
        found[name], processor = median_ms(work, repeats)
        if name == "8 MiB":
            found["8 MiB, processor"] = processor
    if comm.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    main()
