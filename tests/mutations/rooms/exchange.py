"""Mutations of `hvdtrain/exchange/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("exchange/in_order.py", "tests/laws/test_same_bits.py"): {
        "the passes of a rank are added one after the other, not in the order of the tree": (
            "taken[name], parameter.grad = as_leaf(parameter.grad), None",
            "taken[name], parameter.grad = as_leaf(parameter.grad) * 0.0, parameter.grad",
        ),
    },
    ("exchange/rows.py", "tests/exchange/test_rows.py"): {
        "rows of zeros and negative numbers count as zero and are not sent": (
            "return torch.maximum(gradient.amax(across), -gradient.amin(across))",
            "return gradient.amax(across)",
        ),
    },
    ("exchange/agreement.py", "tests/exchange/test_rows.py"): {
        "what compression owes to a parameter is lost when its rows travel": (
            "rows = {n: sys.maxsize if has_residual(n) else count for n, count in count_rows(counted).items()}",
            "rows = count_rows(counted)",
        ),
    },
    ("exchange/reducer.py", "tests/exchange/test_rows.py"): {
        "a saved plan of rows loses what is owed to the parameter": (
            "self.adopt(loaded.without_rows(with_residual))",
            "self.adopt(loaded)",
        ),
    },
    ("exchange/active_buckets.py", "tests/exchange/test_residual_transfer.py"): {
        "what is owed to a frozen parameter is forgotten": (
            "self.detached = self.detached.without_parameters(named, self.ranks, keep=self._delivered)",
            "self.detached = DetachedState({}, self.ranks)",
        ),
        "residuals of another number of copies change their sum": (
            'self.exchange, self.detached = None, DetachedState(tensors, int(values["ranks"]))',
            "self.exchange, self.detached = None, DetachedState(tensors, self.ranks)",
        ),
    },
    ("exchange/bucket.py", "tests/exchange/test_reducer.py"): {
        "a gradient that is on its way can still be clipped or scaled": (
            "        parameter.grad = None\n        self.missing.remove(index)\n",
            "        self.missing.remove(index)\n",
        ),
    },
    ("exchange/optimizer.py", "tests/parallel/test_drop_in.py"): {
        "zero_grad ignores set_to_none": (
            "partial(kind.zero_grad, self), *arguments, **keywords)",
            "partial(kind.zero_grad, self))",
        ),
        "with a schedule made before, steps go past the exchange": ('    optimizer.__dict__.pop("step", None)\n', ""),
        "the saved state of compression differs between ranks": (
            "tensors = reducer.synchronized_state()",
            "tensors = reducer.state_dict()[0]",
        ),
    },
    ("exchange/backward_passes.py", "tests/exchange", "tests/parallel/test_drop_in.py"): {
        "with several passes a step gradients travel after the last backward, not during it": (
            "self.last = number >= self.count",
            "self.last = number > self.count",
        ),
    },
    ("exchange/coded_shard_bucket.py", "tests/laws/test_sharded_compression.py"): {
        "a pass of a step forgets what the one before it has not delivered": (
            "return self._residual if self._left is None else self._left",
            "return self._residual",
        ),
        "after a save, an owner's model has rounded parameters": (
            "            self._model(shard).copy_(shard.exact)\n",
            "            pass\n",
        ),
    },
    ("exchange/buckets.py", "tests/exchange/test_buckets.py", "tests/exchange/test_reducer.py"): {
        "the gradient of a parameter in channels_last lies as if it were contiguous": (
            "None if parameter.is_contiguous() else each.stride())",
            "None)",
        ),
    },
    ("exchange/norms.py", "tests/exchange/test_shards.py"): {
        "the norm of rows has other chunks than that of the whole gradient": (
            "shapes = shapes or [gradient.shape for gradient in gradients]",
            "shapes = [gradient.shape for gradient in gradients]",
        ),
        "the norm of elements has other chunks than that of rows": (
            "    if rows and gradient.dim() == len(shape):\n",
            "    if rows:\n",
        ),
    },
    ("exchange/optimizer.py", "tests/exchange/test_residual_transfer.py"): {
        "residuals shrink when the loss scale grows": (
            "exchange.reducer.rescale(after / before)",
            "exchange.reducer.rescale(before / after)",
        ),
    },
    ("exchange/at_owners.py", "tests/exchange/test_at_owners.py"): {
        "one copy owns the whole matrices of all buckets": (
            "self._comm, whole, number, self._on_host",
            "self._comm, whole, 0, self._on_host",
        ),
    },
    ("exchange/bucket_exchange.py", "tests/exchange/test_shard_bucket.py"): {
        "sums that have arrived take memory beyond the limit": (
            "if exchanged + sum(bucket.kept_bytes for bucket in self._buckets) <= self._limit_bytes:",
            "if exchanged <= self._limit_bytes:",
        ),
    },
    ("exchange/shard_bucket.py", "tests/engine/test_own_loop.py"): {
        "the sums of a pass replace those of the passes before it": (
            "sums.view(-1) if self._summed is None else self._summed.add_(sums.view(-1))",
            "sums.view(-1)",
        ),
    },
    ("exchange/shard_bucket.py", "tests/laws/test_sharded.py"): {
        "the state of elements is saved as that of the first ones": (
            "box=shape, first=begin)",
            "box=shape)",
        ),
    },
    ("exchange/own_loop.py", "tests/exchange/test_residual_transfer.py"): {
        "after a change of ranks, each step restarts the exchange and drops what compression has learned": (
            "        self._last_session = self._session()\n        self.reducer.restart",
            "        self.reducer.restart",
        ),
    },
    ("exchange/in_order.py", "tests/training/test_second_rank.py"): {
        "the last pass is not compared": ("len(self._mine) == self._watched + 1", "len(self._mine) == self._watched"),
    },
}
