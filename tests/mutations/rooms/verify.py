"""Mutations of `hvdtrain/verify/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("verify/coverage.py", "tests/verify/test_data.py"): {
        "a position that two ranks took counts as taken once": (
            "    bad |= begins != np.concatenate([np.array([origin], np.int64), ends[:-1]])\n",
            "",
        ),
        "each part of a start's steps begins at the position of the first": (
            " + (window.first - header.from_step) * header.global_batch\n",
            "\n",
        ),
    },
    ("verify/plan.py", "tests/verify/test_plan.py"): {
        "of two ranks with elements of a tensor, one counts": (
            "(*own.place.offset, own.place.first)",
            "own.place.offset",
        ),
    },
    ("verify/replay.py", "tests/verify/test_replay.py"): {
        "a step with another loss counts as equal": ("if repr(pair[0]) != repr(pair[1])", "if pair[0] is None"),
    },
}
