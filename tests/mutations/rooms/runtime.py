"""Mutations of `hvdtrain/runtime/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "runtime/threads.py",
        "if now[t].busy_ns > first[t].busy_ns and now[t].sleeps == first[t].sleeps]",
        "if now[t].busy_ns > first[t].busy_ns]",
        "a young thread that sleeps is taken for the one that spins",
        "tests/runtime/test_threads.py",
    ),
    mutation(
        "runtime/tuning.py",
        'is_open = theirs in (DYNAMIC, "")',
        "is_open = theirs == DYNAMIC",
        "an empty HOROVOD_TIMELINE keeps a requested window from being recorded",
        "tests/runtime/test_timeline.py",
    ),
    mutation(
        "runtime/driver_client.py",
        "                if self._broken == self.round:\n",
        "                if self._broken > self.round:\n",
        "a rank that waits in a collective is not woken when another is lost",
        "tests/runtime/test_driver_client.py",
    ),
)
