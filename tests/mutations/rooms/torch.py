"""Mutations of `hvdtrain/torch/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("torch/optimizer.py", "tests/parallel/test_drop_in.py"): {
        "predivision averages only where the factor is the number of ranks": (
            "else (comm, 1.0 / predivide, predivide / comm.size)",
            "else (comm, 1.0 / predivide, 1.0)",
        ),
        "Horovod's fp16 compression compresses nothing": (
            'hvd.Compression.fp16: "fp16"}',
            'hvd.Compression.fp16: "none"}',
        ),
        "Average is a sum": (
            "return (comm, 1.0 / comm.size, 1.0) if predivide == 1.0",
            "return (comm, 1.0, 1.0) if predivide == 1.0",
        ),
    },
    ("torch/optimizer.py", "tests/parallel/test_drop_in_misuse.py"): {
        "only the first of the listed groups shares a bucket": (
            "return [[names[id(p)] for p in group if id(p) in names] for group in groups]",
            "return [[names[id(p)] for p in group if id(p) in names] for group in groups[:1]]",
        ),
    },
}
