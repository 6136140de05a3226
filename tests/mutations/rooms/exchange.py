"""Mutations of `hvdtrain/exchange/`."""

from tests.mutations.mutation import Mutation, mutation

DROP_IN = "tests/parallel/test_drop_in.py"

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "exchange/rows.py",
        "return torch.maximum(gradient.amax(across), -gradient.amin(across))",
        "return gradient.amax(across)",
        "rows of zeros and negative numbers count as zero and are not sent",
        "tests/exchange/test_rows.py",
    ),
    mutation(
        "exchange/agreement.py",
        "rows = {n: sys.maxsize if has_residual(n) else count for n, count in count_rows(counted).items()}",
        "rows = count_rows(counted)",
        "what compression owes to a parameter is lost when its rows travel",
        "tests/exchange/test_rows.py",
    ),
    mutation(
        "exchange/reducer.py",
        "self.adopt(loaded.without_rows(with_residual))",
        "self.adopt(loaded)",
        "a saved plan of rows loses what is owed to the parameter",
        "tests/exchange/test_rows.py",
    ),
    mutation(
        "exchange/active_buckets.py",
        "self.detached = self.detached.without_parameters(dict(self._known), self.ranks, keep=self._delivered)",
        "self.detached = DetachedState({}, self.ranks)",
        "what is owed to a frozen parameter is forgotten",
        "tests/exchange/test_residual_transfer.py",
    ),
    mutation(
        "exchange/bucket.py",
        "        parameter.grad = None\n        self.missing.remove(index)\n",
        "        self.missing.remove(index)\n",
        "a gradient that is on its way can still be clipped or scaled",
        "tests/exchange/test_reducer.py",
    ),
    mutation(
        "exchange/optimizer.py",
        "partial(kind.zero_grad, self), *arguments, **keywords)",
        "partial(kind.zero_grad, self))",
        "zero_grad ignores set_to_none",
        DROP_IN,
    ),
    mutation(
        "exchange/optimizer.py",
        '    optimizer.__dict__.pop("step", None)\n',
        "",
        "with a schedule made before, steps go past the exchange",
        DROP_IN,
    ),
    mutation(
        "exchange/optimizer.py",
        "        self._hvdtrain_exchange.reducer.synchronize_state()\n",
        "",
        "the saved state of compression differs between ranks",
        DROP_IN,
    ),
    mutation(
        "exchange/backward_passes.py",
        "self.last = number >= self.count",
        "self.last = number > self.count",
        "with several passes a step gradients travel after the last backward, not during it",
        "tests/exchange",
        DROP_IN,
    ),
    mutation(
        "exchange/coded_shard_bucket.py",
        "return self._residual if self._left is None else self._left",
        "return self._residual",
        "a pass of a step forgets what the one before it has not delivered",
        "tests/laws/test_sharded_compression.py",
    ),
    mutation(
        "exchange/coded_shard_bucket.py",
        "            self._model(shard).copy_(self._exact(shard))\n",
        "            pass\n",
        "after a save, an owner's model has rounded parameters",
        "tests/laws/test_sharded_compression.py",
    ),
)
