"""Mutations of `hvdtrain/data/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("data/tree.py", "tests/data/test_tree.py"): {
        "the last position waits for a sibling that does not exist": (
            "elif begin + width < self._count:",
            "else:",
        ),
    },
    ("data/order.py", "tests/data/test_order.py"): {
        "the micro-batches of two ranks overlap where they cannot be shared evenly": (
            "start = rank * each + min(rank, more)",
            "start = rank * each",
        ),
    },
    ("data/order.py", "tests/data/test_loader.py"): {
        "a step that ends before a hole takes all positions up to the hole": (
            "before = min(count, begin - position)",
            "before = begin - position",
        ),
    },
    ("data/loader.py", "tests/data/test_loader.py", "tests/training/test_roll_back.py"): {
        "after a hole the next step takes some positions again": (
            "return positions_without(position, self.global_batch, self.left_out)[-1][1]",
            "return position + self.global_batch",
        ),
    },
    ("data/order.py", "tests/data/test_sample_order.py"): {
        "all sources have the same order": ("length, mix_seed(self.seed, source))", "length, self.seed)"),
    },
    ("data/iterable.py", "tests/data/test_iterable.py"): {
        "a resume reads its pass from where the first pass began": (
            "self._epoch, self._begin = self._epoch + 1, self._next",
            "self._epoch += 1",
        ),
        "a position before that of the resume is looked for after it": (
            'self._open(self._start if self._start.get("position", 0) <= position else {})',
            "self._open(self._start)",
        ),
        "the order of a pass depends on what the sample before it drew": (
            "        self._next = position\n        seed_generators(mix_seed(self._seed, position))\n",
            "        self._next = position\n",
        ),
        "what Python draws for a sample depends on the samples before it": ("    random.seed(value)\n", ""),
        "two readers of a data set with a state move each other": (
            "return copy.deepcopy(self._dataset)",
            "return self._dataset",
        ),
    },
    ("data/loader_processes.py", "tests/data/test_loader_processes.py"): {
        "a loader process that ends a moment after its connection is not named": (
            "is not None]) and time.monotonic() < deadline:",
            "is not None]) and time.monotonic() > deadline:",
        ),
        "a rank that had blocked SIGTERM hears it after its loader has started": (
            "        signal.pthread_sigmask(signal.SIG_SETMASK, before)\n",
            "        signal.pthread_sigmask(signal.SIG_UNBLOCK, notices)\n",
        ),
    },
    ("data/mixture.py", "tests/data/test_sample_order.py"): {
        "weights such as 0.25 and 0.2 lose their ratio": (
            "lcm(*(weight.denominator for weight in exact))",
            "max(weight.denominator for weight in exact)",
        ),
        "the weights of a mixture have no effect": (
            "return SampleOrder(samples, dataset.sources if isinstance(dataset, Mixture) else [], seed)",
            "return SampleOrder(samples, [], seed)",
        ),
    },
    ("data/order.py", "tests/config/test_sync.py"): {
        "as many ranks as workers make a second communicator of all ranks": (
            "        if self.ranks <= self.count:\n            return []\n",
            "        if self.ranks < self.count:\n            return []\n",
        ),
        "the last rank of a worker exchanges, not its leader": (
            "return sorted({self.ranks_of(worker)[0] for worker in range(self.count)})",
            "return sorted({self.ranks_of(worker)[-1] for worker in range(self.count)})",
        ),
        "the shares of workers have no effect": (
            "apportion(micro_batches, self.parts or (1,) * self.count)",
            "apportion(micro_batches, (1,) * self.count)",
        ),
    },
}
