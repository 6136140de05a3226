"""Mutations of the files directly in `hvdtrain/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "files.py",
        "        fsync(temporary)\n",
        "",
        "a file is renamed into place before it is on the disk",
        "tests/test_files.py",
    ),
    mutation(
        "lease.py",
        "                return  # it must not take the lease back\n",
        "                pass\n",
        "a process that was taken for dead takes its lease back",
        "tests/test_lease.py",
    ),
    mutation(
        "spans.py",
        "        if event[4] < first_step - 1:  # a device's durations of a step arrive with the next step\n",
        "        if event[4] < first_step:\n",
        "spans recorded behind those of an older step are lost",
        "tests/test_spans.py",
        "tests/observe/test_traces.py",
    ),
)
