"""Assign ranks to the workers of a round. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hvdtrain.launch.job import Host, Worker


def order(workers: Sequence[Worker], hosts: Mapping[str, Host]) -> list[Worker]:
    """Sort workers by future rank: survivors in their old order, those of this host first, then newcomers.

    So rank 0, which writes and prints, holds the state and stays the same process while that lives.
    """
    position = {name: index for index, name in enumerate(hosts)}

    def key(worker: Worker) -> tuple[bool, bool, int, int, int, int]:
        away = not hosts[worker.host].local
        newcomer = worker.round == 0
        return newcomer, away, -worker.round, worker.rank, position[worker.host], worker.slot

    return sorted(workers, key=key)


def places(workers: Sequence[Worker]) -> list[dict[str, int]]:
    """Return Horovod's six numbers of each place, for workers in the order of their ranks."""
    local: Counter[str] = Counter()
    numbers = []
    for worker in workers:
        numbers.append(local[worker.host])
        local[worker.host] += 1
    across = Counter(numbers)
    met: Counter[int] = Counter()
    result = []
    for rank, (worker, number) in enumerate(zip(workers, numbers, strict=True)):
        result.append(
            {
                "rank": rank,
                "size": len(workers),
                "local_rank": number,
                "local_size": local[worker.host],
                "cross_rank": met[number],
                "cross_size": across[number],
            }
        )
        met[number] += 1
    return result
