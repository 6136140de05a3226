"""Mutations of `hvdtrain/torch/`."""

from tests.mutations.mutation import Mutation, mutation

DROP_IN = "tests/parallel/test_drop_in.py"
MISUSE = "tests/parallel/test_drop_in_misuse.py"

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "torch/optimizer.py",
        "else (comm, 1.0 / predivide, predivide / comm.size)",
        "else (comm, 1.0 / predivide, 1.0)",
        "predivision averages only where the factor is the number of ranks",
        DROP_IN,
    ),
    mutation(
        "torch/optimizer.py",
        'hvd.Compression.fp16: "fp16"}',
        'hvd.Compression.fp16: "none"}',
        "Horovod's fp16 compression compresses nothing",
        DROP_IN,
    ),
    mutation(
        "torch/optimizer.py",
        "return [[names[id(p)] for p in group if id(p) in names] for group in groups]",
        "return [[names[id(p)] for p in group if id(p) in names] for group in groups[:1]]",
        "only the first of the listed groups shares a bucket",
        MISUSE,
    ),
    mutation(
        "torch/optimizer.py",
        "return (comm, 1.0 / comm.size, 1.0) if predivide == 1.0",
        "return (comm, 1.0, 1.0) if predivide == 1.0",
        "Average is a sum",
        DROP_IN,
    ),
)
