"""Mutations of `hvdtrain/runtime/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
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
