"""Mutations of `hvdtrain/runtime/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
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
