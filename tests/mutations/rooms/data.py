"""Mutations of `hvdtrain/data/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "data/order.py",
        "start = rank * each + min(rank, more)",
        "start = rank * each",
        "the micro-batches of two ranks overlap where they cannot be shared evenly",
        "tests/data",
    ),
    mutation(
        "data/order.py",
        "before = min(count, begin - position)",
        "before = begin - position",
        "a step that ends before a hole takes all positions up to the hole",
        "tests/data",
    ),
    mutation(
        "data/loader.py",
        "return positions_without(position, self.global_batch, self.left_out)[-1][1]",
        "return position + self.global_batch",
        "after a hole the next step takes some positions again",
        "tests/data",
        "tests/training/test_roll_back.py",
    ),
    mutation(
        "data/sample_order.py",
        "length, mix_seed(self.seed, source))",
        "length, self.seed)",
        "all sources have the same order",
        "tests/data/test_sample_order.py",
    ),
)
