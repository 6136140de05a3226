"""Mutations of `hvdtrain/compression/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("compression/sizes.py", "tests/compression/test_powersgd.py"): {
        "factors that save less than half are sent instead of the matrix": ("_WORTH = 2  #", "_WORTH = 1  #"),
        "the weights of experts are one matrix of few rows and very many columns": (
            "rows, columns = min(cuts, key=sum)",
            "rows, columns = cuts[0]",
        ),
    },
    ("compression/powersgd.py", "tests/compression/test_powersgd.py"): {
        "a start saved with another rank number is taken over": (
            "q.copy_(saved if saved is not None and fits else _first_guess(part, self._rank, group.n))",
            "q.copy_(saved[:1] if saved is not None else _first_guess(part, self._rank, group.n))",
        ),
    },
    ("compression/topk.py", "tests/compression/test_topk.py"): {
        "a GPU reads the places of a bitmap off by one": (
            "wanted = torch.arange(1, count + 1, dtype=torch.int32, device=flags.device)",
            "wanted = torch.arange(0, count, dtype=torch.int32, device=flags.device)",
        ),
    },
    ("compression/feedback.py", "tests/compression/test_contract.py"): {
        "residuals do not keep their sum on another number of ranks": (
            "residual.copy_(saved).mul_(ranks / self.comm.size)",
            "residual.copy_(saved).mul_(self.comm.size / ranks)",
        ),
    },
    ("compression/topk.py", "tests/compression/test_contract.py"): {
        "top-k sends one element and keeps it as residual too": (
            "            self.work.index_fill_(0, chosen, 0)\n",
            "            self.work.index_fill_(0, chosen[1:], 0)\n",
        ),
    },
    ("compression/int8.py", "tests/compression/test_contract.py"): {
        "the owner of a share forgets its own error of the first encoding": (
            "                x.add_(total)\n",
            "                x.copy_(total)\n",
        ),
    },
    ("compression/coding.py", "tests/compression/test_coding.py"): {
        "the last block of a shard holds values of another shard": ("self._last.zero_()[0, ", "self._last[0, "),
    },
    (
        "compression/powersgd.py",
        "tests/compression/test_powersgd.py",
        "tests/compression/test_contract.py",
        "tests/parallel/test_contract.py",
    ): {
        "a rank's own factor is copied after the sum over ranks has begun": (
            "            self._own.copy_(self._second)\n"
            '            handle = self.comm.allreduce(self._second, name=f"{self.shape.name}/q")\n',
            '            handle = self.comm.allreduce(self._second, name=f"{self.shape.name}/q")\n'
            "            self._own.copy_(self._second)\n",
        ),
    },
}
