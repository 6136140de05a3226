"""Mutations of `hvdtrain/state/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("state/checkpoint_store.py", "tests/state/test_checkpoint_store.py"): {
        "old checkpoints are removed before the new one is verified": (
            "        if obsolete:\n            self._verify(just_saved, progress or self.progress)\n",
            "",
        ),
        "the worst checkpoint by a metric of which more is better is kept as the best": (
            "        return -value if self.more else value\n",
            "        return value\n",
        ),
    },
    ("state/ledger.py", "tests/state/test_ledger.py"): {
        "the ledger includes positions that were left out": (
            "if self._ranges and self._ranges[-1][1] == begin:",
            "if self._ranges and self._ranges[-1][1] <= begin:",
        ),
        "the next start has the number of the last one": ("    return max(numbers) + 1\n", "    return max(numbers)\n"),
        "lines that found no room are lost": (
            'del self._unwritten[: self._unwritten.rfind(b"\\n", 0, written + 1)]',
            "self._unwritten.clear()",
        ),
        "the number of a start is in its header alone": (r"\n(?:\[|\{", r"\n(?:\{"),
    },
    ("state/checkpoint_store.py", "tests/training/test_store.py"): {
        "a damaged checkpoint is not replaced by its copy": ("if self.fetch(saved.path.name):", "if False:"),
    },
    ("state/train_state.py", "tests/state/test_checkpoint_store.py"): {
        "a resume forgets the loss scale of fp16": (
            '            self.scaler.load_state_dict(state.values["scaler"])\n',
            "            pass\n",
        ),
        "a resume loses the optimizer's counters that are plain numbers": (
            "for key, value in chain(((key, lazily(slots, key)) for key in slots), plain.items()):",
            "for key, value in slots.items():",
        ),
    },
    ("state/manifest.py", "tests/state/test_damage.py", "tests/state/test_checkpoint_store.py"): {
        "a manifest that lost its own checksum is accepted": (
            "if (CHECKSUM in manifest or form == FORMAT) and manifest.get(CHECKSUM) != _own_checksum(content):",
            "if CHECKSUM in manifest and manifest.get(CHECKSUM) != _own_checksum(content):",
        ),
    },
    ("state/stored_file.py", "tests/state/test_damage.py", "tests/state/test_checkpoint_store.py"): {
        "a file with other bytes of the same size is accepted": (
            "    if hasher.hexdigest() != digest.checksum:\n",
            "    if len(hasher.hexdigest()) != len(digest.checksum):\n",
        ),
    },
    ("state/stored_file.py", "tests/state/test_tensor_file.py"): {
        "a part of a file with other bytes is accepted": (
            "if found != self.digest.blocks[number * _DIGITS : (number + 1) * _DIGITS]:",
            "if len(found) != _DIGITS:",
        ),
    },
    ("state/tensor_file.py", "tests/state/test_tensor_file.py"): {
        "a block's checksum has the bytes of the next one, too": (
            "of_block, block, room = xxhash.xxh3_64(), block[room:], CHECKED_BYTES",
            "block, room = block[room:], CHECKED_BYTES",
        ),
    },
    ("state/tensor_file.py", "tests/state/test_pieces.py"): {
        "each box of a file's elements is read from the first of them": (
            "        begin += found.numel() * tensor.dtype.itemsize\n",
            "",
        ),
    },
    ("state/read_together.py", "tests/state/test_read_together.py"): {
        "rank 0 does not learn of damage that another rank finds": (
            "        if each is not None:\n",
            "        if each is not None and not rank:\n",
        ),
    },
    ("state/shard_files.py", "tests/state/test_background_writer.py"): {
        "a checkpoint that lacks tensors of another rank is kept": (
            "        if found != self.others:\n",
            "        if found > self.others:\n",
        ),
        "a checkpoint that another host has been writing for long is removed": (
            "max(path.stat().st_mtime for path in (folder, *folder.iterdir()))",
            "min(path.stat().st_mtime for path in (folder, *folder.iterdir()))",
        ),
    },
    ("state/snapshot.py", "tests/state/test_commits.py"): {
        "a commit holds one rank's residuals instead of the mean": (
            "if not synchronized and state.exchange is not None and (exchange := state.exchange.synchronized_state()):",
            "if synchronized and state.exchange is not None and (exchange := state.exchange.synchronized_state()):",
        ),
    },
    ("state/snapshot.py", "tests/state/test_buddies.py"): {
        "a rank forgets a commit that others may have ended when they notice the loss of a rank": (
            "                self._unsure = Snapshot(), copies\n"
            "                self._unsure[0].capture(copied, state.progress.step)\n",
            "",
        ),
    },
    ("state/placeholder.py", "tests/state/test_placeholder.py"): {
        "a rank that builds a model without memory draws other data than rank 0": (
            "            _fill_another(func, *args, **named)\n",
            "            pass\n",
        ),
        "data that is computed from parameters without values is wrong, without an error": (
            'if func.namespace != "aten" or _writes_values(func, args, named):',
            'if func.namespace != "aten":',
        ),
    },
    ("state/background_writer.py", "tests/state/test_background_writer.py"): {
        "a save that failed is tried again though a later one has succeeded": (
            '        self._retry_s, self._retry_at, self._last_error = _FIRST_RETRY_S, float("inf"), ""\n',
            '        self._retry_s, self._last_error = _FIRST_RETRY_S, ""\n',
        ),
    },
    ("state/divided.py", "tests/state/test_divided.py"): {
        "rows that two parallelisms divide are saved as other rows": (
            "        offset[cut.dim] += begin\n",
            "        offset[cut.dim] = begin\n",
        ),
    },
    ("state/extras.py", "tests/state/test_commits.py"): {
        "a callback shares the memory of what it was loaded from, and changes a commit": (
            "        return tensor[...].clone()\n",
            "        return tensor[...]\n",
        ),
    },
    ("state/frozen.py", "tests/state/test_frozen.py"): {
        "ranks with frozen weights of rank 0 refuse its checkpoints, because their own task made others": (
            '        own.digest = stored["digest"]\n',
            "",
        ),
    },
    ("state/pieces.py", "tests/state/test_pieces.py"): {
        "pieces of other dtypes are converted in silence": (
            "if not inside or (first_place.shape, first.dtype) != (place.shape, piece.dtype):",
            "if not inside or first_place.shape != place.shape:",
        ),
        "elements that a rank owns are the first ones of their box": (
            "_boxes(self.box, self.first, self.first + size[0])",
            "_boxes(self.box, 0, size[0])",
        ),
    },
    ("state/buddies.py", "tests/state/test_buddies.py"): {
        "a commit that lacks a piece is chosen": (
            "        if len(holders) == count:\n",
            "        if len(holders) >= count - 1:\n",
        ),
        "a rank that is about to leave gets the only copy": (
            "    staying = [rank for rank in ranks if not leaving[rank]] or list(ranks)\n",
            "    staying = list(ranks)\n",
        ),
        "equal copies on other ranks do not count": (
            "if rank in self.copies.pieces or held[rank] == n]",
            "if rank in self.copies.pieces]",
        ),
    },
    ("state/transfer.py", "tests/state/test_transfer.py"): {
        "a piece that begins before a part is not sent": ("max(piece.shape[0] for piece in pieces) + 1", "0"),
        "only the first box of a part arrives": ("enumerate(boxes)", "enumerate(boxes[:1])"),
        "a lost piece is what was in memory before": ('if extra else ""', 'if extra > 0 else ""'),
        "pieces of another dtype are reinterpreted": ("{(each.dtype, *each.whole) for", "{(*each.whole,) for"),
        "small pieces for many ranks make chunks small": (
            "sum(min(chunk, n) for n in all_)",
            "sum(chunk for n in all_ if n)",
        ),
        "chunks of several ranks are mixed up": ("min(chunk, max(0, count - begin))", "min(chunk, count)"),
    },
    ("state/shard_files.py", "tests/state/test_shard_files.py"): {
        "transformers takes some rows of a tensor for the whole": ("        if pieces:\n", "        if not entries:\n"),
    },
    ("state/sync.py", "tests/parallel/test_state.py"): {
        "a rank with parameters of an engine cannot load the state of rank 0": (
            'received["model"] = {**here, **received["model"]}',
            'received["model"] = {**received["model"]}',
        ),
    },
    ("state/frozen.py", "tests/training/test_step_checks.py"): {
        "a tensor that an optimizer changes in place outside of its state is lost without a warning": (
            "            return id(value), value._version\n",
            "            return id(value)\n",
        ),
    },
    ("state/exchange_state.py", "tests/state/test_buddies.py"): {
        "a count in the state of a divided optimizer cannot be loaded": (
            "        if self.place is None or self.parameter is None or tuple(value.shape) != self.place.shape:\n",
            "        if self.place is None or self.parameter is None:\n",
        ),
    },
}
