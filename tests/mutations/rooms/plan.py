"""Mutations of `hvdtrain/plan/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "plan/buckets.py",
        "limit_bytes) for names in (first, rest)]",
        "limit_bytes) for names in ([*first, *rest],)]",
        "what backward skips shares a bucket with what it finishes, which then waits for the end",
        "tests/exchange/test_buckets.py",
    ),
    mutation(
        "plan/shards.py",
        "rank = min(ranks - 1, bisect_right(ends, middle * ends[-1] // rest))",
        "rank = min(ranks - 1, middle * ranks // rest)",
        "rows are divided evenly, also among ranks that own whole matrices",
        "tests/exchange/test_shards.py",
    ),
    mutation(
        "plan/shards.py",
        "order = [(first + number) % ranks for number in range(ranks)]",
        "order = list(range(ranks))",
        "the first rank owns the largest matrix of each bucket",
        "tests/exchange/test_shards.py",
    ),
)
