"""Mutations of `hvdtrain/training/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("training/diagnostics/step_replay.py", "tests/training/test_step_replay.py"): {
        "looking into a bad step does not restore the modes of modules": (
            "        for module, training in modes.items():\n            module.training = training\n",
            "",
        ),
    },
    ("training/result.py", "tests/training/test_result.py"): {
        "the budget includes earlier starts of the run": (
            'if line.get("event") == "started" and not line.get("goes_on"):',
            'if line.get("event") == "started" and line.get("goes_on"):',
        ),
    },
    ("training/loop/evaluate.py", "tests/training/test_evaluate.py"): {
        "only the first held-out samples are used, not some all over": (
            "*(i * self._length // self.count for i in range(b.start, b.stop))]",
            "*range(b.start, b.stop)]",
        ),
        "held-out losses are summed in fp32": (
            "[sum(n for own in ranks if name in own for n in own[name][part]) for part in (0, 1)]",
            "[sum(torch.tensor(own[name][part]).sum().item() for own in ranks if name in own) for part in (0, 1)]",
        ),
        "held-out samples that draw random numbers are others each time": (
            "[sample_seed(0, b),",
            "[torch.initial_seed(),",
        ),
    },
    ("training/diagnostics/step_checks.py", "tests/training/test_loss_spikes.py"): {
        "on a loss curve without noise small jumps are spikes": ("_SMALLEST = 0.01  #", "_SMALLEST = 0.001  #"),
    },
    ("training/loop/step.py", "tests/training/test_step.py", "tests/laws/test_laws.py"): {
        "dropout follows the rank's own random state": ("            seed()\n", ""),
        "each micro-batch is normalised by its own weight": (
            "scaler.scale(whole / self.nominal)",
            "scaler.scale(whole / weight)",
        ),
    },
    ("training/loop/update.py", "tests/training/test_step.py", "tests/laws/test_laws.py"): {
        "clipping compares the norm before it is corrected for the actual weight": (
            "self.clip / (grad_norm + 1e-6)",
            "self.clip / (raw_norm + 1e-6)",
        ),
    },
    ("training/elastic/worker_state.py", "tests/training/test_worker_state.py"): {
        "survivors continue without what a lost rank's compression still owed": (
            "                self.commits.restore(self.state)\n",
            "                pass\n",
        ),
    },
    ("training/loop/trainer.py", "tests/laws/test_divided_rounds.py"): {
        "a planned change of the ranks loses the steps since the last commit of a divided optimizer": (
            "                self.roll_back.end_round(self._state)\n",
            "",
        ),
    },
    ("training/diagnostics/drift.py", "tests/training/test_drift.py"): {
        "the hash of parameters misses the highest bit of some elements": (
            "* _ODD  # each step is one to one",
            "* (2 * places)  # each step is one to one",
        ),
        "parameters that differ between ranks are never noticed": (
            "if any(n * squares != total * total for",
            "if any(n * squares < total * total for",
        ),
    },
    ("training/loop/step.py", "tests/training/test_unused_parameters.py"): {
        "a parameter that only another rank uses is left out of the update": (
            "count_users(unused, self.comm.size)",
            "count_users((True,) * len(unused), self.comm.size)",
        ),
    },
    ("training/loop/step.py", "tests/training/test_step.py"): {
        "a step is applied although a rank was lost": (
            "                    part.wait()\n",
            "                    pass\n",
        ),
    },
    ("training/loop/buffers.py", "tests/training/test_step.py"): {
        "passes that fill up a rank's step leave their statistics in its buffers": (
            "        return _restored(copy_to_host(place for place in own if _is_saved(place)))\n",
            "        return _restored([])\n",
        ),
    },
    ("training/records/gradient_times.py", "tests/training/test_recorded_times.py"): {
        "a gradient counts as packed before it is": ("on_cuda=self.ready.on_cuda, last=True", "on_cuda=False"),
    },
    ("training/records/promise.py", "tests/training/test_promise.py"): {
        "a run that gets slower and slower breaks each promise": (
            "max(left.high, left.value + missed_s)",
            "left.high",
        ),
        "a promise breaks by chance": ("seconds.low > self._end_s.high", "seconds.high > self._end_s.high"),
        "other ranks are held to the promise of those before": (
            '        if name == "started":\n            self._begin()\n        elif name == "evaluation":',
            '        if name == "evaluation":',
        ),
    },
    ("training/loop/step.py", "tests/training/test_routers.py"): {
        "the balance loss of experts is computed and never trained on": (
            "            whole = sum(extras, loss)\n",
            "            whole = loss\n",
        ),
    },
    ("training/records/run_report.py", "tests/training/test_run_report.py"): {
        "a trace of an earlier start stands for the one on another host": (
            "_fingerprint(folder / file[0]) != file[1]",
            "not (folder / file[0]).exists()",
        ),
    },
    ("training/diagnostics/second_rank.py", "tests/training/test_second_rank.py"): {
        "the rank that checks is called wrong, not the one it checks": (
            "for rank, found in ((owner, before[owner, _OWN]), (owner - 1, before[owner - 1, _OTHER])):",
            "for found, rank in ((before[owner, _OWN], owner - 1), (before[owner - 1, _OTHER], owner)):",
        ),
        "gradients of two ranks are not compared": ("if self._contradictions():", "if False:"),
        "a copy of the parameters stays wrong": ("self._compare_parameters(wrong)", "self._compare_parameters"),
    },
    ("training/start/store_target.py", "tests/training/test_store.py"): {
        "the copies of another run are continued": (
            "if identity == run.identity() or (own and own == theirs):",
            "if True:",
        ),
    },
}
