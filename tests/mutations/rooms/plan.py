"""Mutations of `hvdtrain/plan/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("plan/buckets.py", "tests/exchange/test_buckets.py"): {
        "a large model has as many buckets as experts": (
            "max(limit_bytes, sum(nbytes for nbytes, _ in sizes.values()) // _MANY)",
            "limit_bytes",
        ),
        "what backward skips shares a bucket with what it finishes, which then waits for the end": (
            "most) for names in (first, rest)]",
            "most) for names in ([*first, *rest],)]",
        ),
    },
    ("plan/shards.py", "tests/exchange/test_shards.py"): {
        "rows are divided evenly, also among ranks that own whole matrices": (
            "rank = min(ranks - 1, bisect_right(ends, middle * ends[-1] // rest))",
            "rank = min(ranks - 1, middle * ranks // rest)",
        ),
        "the first rank owns the largest matrix of each bucket": (
            "order = [(first + number) % ranks for number in range(ranks)]",
            "order = list(range(ranks))",
        ),
        "an expert is the smallest part of a tensor of experts": (
            "    if row > elements and not by_rows:\n",
            "    if row > elements and not shape:\n",
        ),
        "with many ranks, rows are divided where their squares are summed": (
            "            if row > finer and not by_rows:\n",
            "            if row > finer:\n",
        ),
    },
    ("plan/collectives.py", "tests/plan/test_collectives.py"): {
        "each rank hands over the numbers of all ranks' rows": (
            '[("allgather", 4.0 * self.rows / ranks), ',
            '[("allgather", 4.0 * self.rows), ',
        ),
        "a plan compresses inside groups of ranks, too": (
            'inside = replace(plan, dp_shard=None, compression="none")',
            "inside = replace(plan, dp_shard=None)",
        ),
        "FSDP's blocks are counted as gathered for forward only": (
            "often = passes * (1 + is_block) if by_fsdp else 1",
            "often = passes if by_fsdp else 1",
        ),
    },
    ("plan/collectives.py", "tests/timeline/whatif/test_meshes.py"): {
        "the only rank with an expert sends its gradient": (
            "if not divided or plan.summing(ranks, g.summed_by).size > 1}",
            "}",
        ),
    },
    ("plan/collectives.py", "tests/timeline/whatif/test_engines.py"): {
        "a full bucket of DDP is not closed": (
            "if math.fsum(one.nbytes for one in bucket) >= limit_bytes:",
            "if math.fsum(one.nbytes for one in bucket) > limit_bytes:",
        ),
    },
    ("plan/collectives.py", "tests/timeline/whatif/test_outer_exchange.py"): {
        "each outer step sends all fragments": ("length // outer.fragments", "length"),
    },
    ("plan/gradients.py", "tests/plan/test_collectives.py"): {
        "what backward skips is sent first": (
            "(gradient.ready_s is None, gradient.ready_s or 0.0)",
            "(gradient.ready_s or 0.0,)",
        ),
    },
    ("plan/gradients.py", "tests/timeline/whatif/test_engines.py"): {
        "each expert counts as a block": ("numbers[0] + 1] if numbers", "numbers[-1] + 1] if numbers"),
        "rows that cannot be divided evenly are not held": ("-(-self.shape[0] // ranks)", "self.shape[0] // ranks"),
    },
    ("plan/description.py", "tests/timeline/whatif/test_engines.py"): {
        "ZeRO-1 is said to hold only its part of the gradients": (
            "if plan.sums_each_pass or passes == 1 else summed",
            "",
        ),
        "sums of bfloat16 gradients count as bfloat16": (
            'segment * (4 if bucket.shape.dtype == "bfloat16" else item)',
            "segment * item",
        ),
    },
    ("plan/description.py", "tests/timeline/whatif/test_outer_exchange.py"): {
        "a rank that serves two workers is said to hold one model": (
            'Held("parameters", served * parameters)',
            'Held("parameters", parameters)',
        ),
    },
    ("plan/plan.py", "tests/timeline/whatif/test_meshes.py"): {
        "all copies of a part are thought to be on one host": (
            "min(stage, ranks.per_host) * min(size, stage) // stage",
            "ranks.per_host",
        ),
    },
    ("plan/refusals.py", "tests/plan/test_refusals.py"): {
        "ranks of ZeRO-2 measure the waits for each other as their speed": (
            'if plan.shard not in ("none", "optimizer"):',
            'if plan.shard == "parameters":',
        ),
        "an error proposes options that are refused, too": (
            "if not refusals(plan_of(changed, elastic=joins)):",
            "if len(refusals(plan_of(changed, elastic=joins))) < len(found):",
        ),
    },
}
