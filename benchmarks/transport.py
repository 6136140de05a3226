"""What does each choice of the settings cost, on one host and between two joined by 1 Gbit/s?

2 ranks of 1 thread, exchanges by Horovod through our communicator: one element, 8 MiB as one tensor and as 256 tensors
of 32 KiB, one by one or handed over as a group; and the processor time that one rank takes for 8 MiB. `shipped` is what
our settings choose; in every other line one choice differs. A figure is the ratio to `shipped` of the same round: above
1 the choice costs. Two hosts need root (tests/support/two_hosts.py); without, they are left out. Horovod's own Gloo
under mpirun (HOROVOD_CPU_OPERATIONS=gloo) is no choice: Horovod 0.28.1 crashes in the first allreduce.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from common import HERE, Figure, figure, main, ratios
from jobs import mpirun

from hvdtrain.runtime.rules import BLOCK, PROMPT, RING, TCP_FLAGS, YIELD
from tests.support.two_hosts import TwoHosts, UnavailableError, two_hosts

RATE = "1gbit"
SHIPPED = "shipped"
Variables = dict[str, str]
Run = Callable[[Path, Variables], object]
Found = dict[str, float]


def algorithm(number: int) -> Variables:
    """Of Open MPI's for allreduce."""
    return dict(zip(RING, ("1", str(number)), strict=True))


BOTH: dict[str, Variables] = {
    "not woken, cycle 1 ms": {PROMPT: "0"},
    "not woken, cycle 0.1 ms": {PROMPT: "0", "HOROVOD_CYCLE_TIME": "0.1"},
    "cycle 5 ms": {"HOROVOD_CYCLE_TIME": "5"},
    "fusion 128 MiB": {"HOROVOD_FUSION_THRESHOLD": str(128 << 20)},
    "no response cache": {"HOROVOD_CACHE_CAPACITY": "0"},
    "recursive doubling": algorithm(3),
    "Rabenseifner": algorithm(6),
    "small pages": {"THP_MEM_ALLOC_ENABLE": "0"},
}
ONE_HOST = {
    **BOTH,
    "Open MPI's own choice": {RING[0]: "0"},
    "segmented ring": algorithm(5),
    "spinning": {YIELD: "0"},
}
TWO_HOSTS = {
    **BOTH,
    "ring": algorithm(4),
    "one direction at a time": {TCP_FLAGS: "send,put,inplace"},
    "asking, not blocking": {BLOCK: "0"},
}
QUICK = ("not woken, cycle 1 ms", "fusion 128 MiB", "Open MPI's own choice", "one direction at a time")
JOB = str(HERE / "transport_job.py")


def on_one_host(file: Path, variables: Variables) -> None:
    """Run a job of two ranks here."""
    mpirun(str(variables), [JOB, str(file)], variables, timeout_s=120)


def on(hosts: TwoHosts) -> Run:
    """A job of one rank on each of two hosts."""
    # Under the checkout's own path: the package may be installed from elsewhere.
    ours = {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    return lambda file, variables: hosts.mpirun([sys.executable, JOB, str(file)], environment={**ours, **variables})


def compare(place: str, run: Run, choices: dict[str, Variables], rounds: int) -> list[Figure]:
    """One round after the other, each choice once in each."""
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name, variables in {SHIPPED: {}, **choices}.items():
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "found.json"
                run(file, variables)
                for exchange, milliseconds in json.loads(file.read_text()).items():
                    found.setdefault(name, {}).setdefault(exchange, []).append(milliseconds)
    shipped = found[SHIPPED]
    figures = [figure(f"transport/{place}/{SHIPPED}/{exchange}", ms, "ms") for exchange, ms in shipped.items()]
    for name in choices:
        for exchange, ms in found[name].items():
            figures.append(figure(f"transport/{place}/{name}/{exchange}", ratios(ms, shipped[exchange]), "ratio"))
    return figures


def measure(quick: bool) -> list[Figure]:
    rounds = 1 if quick else 2
    one, two = ({n: v for n, v in all_.items() if not quick or n in QUICK} for all_ in (ONE_HOST, TWO_HOSTS))
    figures = compare("one_host", on_one_host, one, rounds)
    try:
        with two_hosts(RATE) as hosts:
            figures += compare(RATE, on(hosts), two, rounds)
    except UnavailableError as error:
        print(f"two hosts are left out: {error}")
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
