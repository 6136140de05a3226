"""Mutations of the files directly in `hvdtrain/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("files.py", "tests/test_files.py"): {
        "a file is renamed into place before it is on the disk": ("        fsync(temporary)\n", ""),
    },
    ("lease.py", "tests/test_lease.py"): {
        "a process that was taken for dead takes its lease back": (
            "                return  # it must not take the lease back\n",
            "                pass\n",
        ),
    },
    ("spans.py", "tests/test_spans.py", "tests/observe/test_traces.py"): {
        "spans recorded behind those of an older step are lost": (
            "        if event[4] < first_step - 1:  # a device's durations of a step arrive with the next step\n",
            "        if event[4] < first_step:\n",
        ),
    },
}
