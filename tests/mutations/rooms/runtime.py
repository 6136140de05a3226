"""Mutations of `hvdtrain/runtime/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("runtime/threads.py", "tests/runtime/test_threads.py"): {
        "a young thread that sleeps is taken for the one that spins": (
            "if now[t].busy_ns > first[t].busy_ns and now[t].sleeps == first[t].sleeps]",
            "if now[t].busy_ns > first[t].busy_ns]",
        ),
    },
    ("runtime/tuning.py", "tests/runtime/test_timeline.py"): {
        "an empty HOROVOD_TIMELINE keeps a requested window from being recorded": (
            'is_open = theirs in (DYNAMIC, "")',
            "is_open = theirs == DYNAMIC",
        ),
    },
    ("runtime/driver_client.py", "tests/runtime/test_driver_client.py"): {
        "a rank that waits in a collective is not woken when another is lost": (
            "                if self._broken == self.round:\n",
            "                if self._broken > self.round:\n",
        ),
    },
}
