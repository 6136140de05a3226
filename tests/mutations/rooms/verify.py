"""Mutations of `hvdtrain/verify/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "verify/coverage.py",
        "    bad |= begins != np.concatenate([np.array([origin], np.int64), ends[:-1]])\n",
        "",
        "a position that two ranks took counts as taken once",
        "tests/verify/test_data.py",
    ),
)
