"""Mutations of `hvdtrain/compression/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "compression/sizes.py",
        "_WORTH = 2  #",
        "_WORTH = 1  #",
        "factors that save less than half are sent instead of the matrix",
        "tests/compression/test_powersgd.py",
    ),
    mutation(
        "compression/sizes.py",
        "rows, columns = min(cuts, key=sum)",
        "rows, columns = cuts[0]",
        "the weights of experts are one matrix of few rows and very many columns",
        "tests/compression/test_powersgd.py",
    ),
    mutation(
        "compression/powersgd.py",
        "q.copy_(saved if saved is not None and fits else _first_guess(part, self._rank, group.n))",
        "q.copy_(saved[:1] if saved is not None else _first_guess(part, self._rank, group.n))",
        "a start saved with another rank number is taken over",
        "tests/compression/test_powersgd.py",
    ),
    mutation(
        "compression/topk.py",
        "wanted = torch.arange(1, count + 1, dtype=torch.int32, device=flags.device)",
        "wanted = torch.arange(0, count, dtype=torch.int32, device=flags.device)",
        "a GPU reads the places of a bitmap off by one",
        "tests/compression/test_topk.py",
    ),
    mutation(
        "compression/feedback.py",
        "residual.copy_(saved).mul_(ranks / self.comm.size)",
        "residual.copy_(saved).mul_(self.comm.size / ranks)",
        "residuals do not keep their sum on another number of ranks",
        "tests/compression/test_contract.py",
    ),
    mutation(
        "compression/topk.py",
        "            self.work.index_fill_(0, chosen, 0)\n",
        "            self.work.index_fill_(0, chosen[1:], 0)\n",
        "top-k sends one element and keeps it as residual too",
        "tests/compression/test_contract.py",
    ),
    mutation(
        "compression/int8.py",
        "                x.add_(total)\n",
        "                x.copy_(total)\n",
        "the owner of a share forgets its own error of the first encoding",
        "tests/compression/test_contract.py",
    ),
    mutation(
        "compression/coding.py",
        "self._last.zero_()[0, ",
        "self._last[0, ",
        "the last block of a shard holds values of another shard",
        "tests/compression/test_coding.py",
    ),
    mutation(
        "compression/powersgd.py",
        "            self._own.copy_(self._second)\n"
        '            handle = self.comm.allreduce(self._second, name=f"{self.shape.name}/q")\n',
        '            handle = self.comm.allreduce(self._second, name=f"{self.shape.name}/q")\n'
        "            self._own.copy_(self._second)\n",
        "a rank's own factor is copied after the sum over ranks has begun",
        "tests/compression/test_powersgd.py",
        "tests/compression/test_contract.py",
        "tests/parallel/test_contract.py",
    ),
)
