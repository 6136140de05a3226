"""Mutations of `hvdtrain/verify/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("verify/coverage.py", "tests/verify/test_data.py"): {
        "a position that two ranks took counts as taken once": (
            "    bad |= begins != np.concatenate([np.array([origin], np.int64), ends[:-1]])\n",
            "",
        ),
    },
}
