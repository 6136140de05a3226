"""Mutations of `hvdtrain/state/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "state/checkpoint_store.py",
        "        if obsolete:\n            self._verify(just_saved, progress or self.progress)\n",
        "",
        "old checkpoints are removed before the new one is verified",
        "tests/state/test_checkpoint_store.py",
    ),
    mutation(
        "state/manifest.py",
        "if hashlib.sha256(data).hexdigest() != sha256:",
        "if not sha256:",
        "a damaged checkpoint of format 1 is accepted",
        "tests/state/test_checkpoint_store.py",
    ),
    mutation(
        "state/ledger.py",
        "if self._ranges and self._ranges[-1][1] == begin:",
        "if self._ranges and self._ranges[-1][1] <= begin:",
        "the ledger includes positions that were left out",
        "tests/state/test_ledger.py",
    ),
    mutation(
        "state/train_state.py",
        '            self.scaler.load_state_dict(state.values["scaler"])\n',
        "            pass\n",
        "a resume forgets the loss scale of fp16",
        "tests/state/test_checkpoint_store.py",
    ),
    mutation(
        "state/train_state.py",
        "for key, value in chain(slots.items(), plain.items()):",
        "for key, value in slots.items():",
        "a resume loses the optimizer's counters that are plain numbers",
        "tests/state/test_checkpoint_store.py",
    ),
    mutation(
        "state/manifest.py",
        "if (CHECKSUM in manifest or form == FORMAT) and manifest.get(CHECKSUM) != _own_checksum(content):",
        "if CHECKSUM in manifest and manifest.get(CHECKSUM) != _own_checksum(content):",
        "a manifest that lost its own checksum is accepted",
        "tests/state/test_damage.py",
        "tests/state/test_checkpoint_store.py",
    ),
    mutation(
        "state/tensor_file.py",
        "    if hasher.hexdigest() != digest.checksum:\n",
        "    if len(hasher.hexdigest()) != len(digest.checksum):\n",
        "a file with other bytes of the same size is accepted",
        "tests/state/test_damage.py",
        "tests/state/test_checkpoint_store.py",
    ),
    mutation(
        "state/shard_files.py",
        "        if found != self.others:\n",
        "        if found > self.others:\n",
        "a checkpoint that lacks tensors of another rank is kept",
        "tests/state/test_background_writer.py",
    ),
    mutation(
        "state/snapshot.py",
        "if not synchronized and state.exchange is not None and (exchange := state.exchange.synchronized_state()):",
        "if synchronized and state.exchange is not None and (exchange := state.exchange.synchronized_state()):",
        "a commit holds one rank's residuals instead of the mean",
        "tests/state/test_commits.py",
    ),
    mutation(
        "state/snapshot.py",
        "                self._unsure = Snapshot(), copies\n"
        "                self._unsure[0].capture(copied, state.progress.step)\n",
        "",
        "a rank forgets a commit that others may have ended when they notice the loss of a rank",
        "tests/state/test_buddies.py",
    ),
    mutation(
        "state/placeholder.py",
        "            _fill_another(func, *args, **named)\n",
        "            pass\n",
        "a rank that builds a model without memory draws other data than rank 0",
        "tests/state/test_placeholder.py",
    ),
    mutation(
        "state/placeholder.py",
        'if func.namespace != "aten" or _writes_values(func, args, named):',
        'if func.namespace != "aten":',
        "data that is computed from parameters without values is wrong, without an error",
        "tests/state/test_placeholder.py",
    ),
)
