"""Mutations of `hvdtrain/observe/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("observe/past_journal.py", "tests/observe/test_journal.py"): {
        "a run counts as finished though steps were done since": (
            '            return bool(event == "finished")\n    return False',
            '            if event == "finished":\n                return True\n    return False',
        ),
    },
    ("observe/span_trace.py", "tests/observe/test_traces.py"): {
        "spans that a device reports a step late are missing from the window": ("over = step - 2 ", "over = step - 1 "),
        "a trace that cannot be written is reported again and again": ("            self._failed = True\n", ""),
    },
    ("observe/horovod_timeline.py", "tests/observe/test_horovod_timeline.py"): {
        "ranks begin a window before Horovod's Timeline is open": (
            'on_rank_0(self.comm, partial(self._start, step), name="timeline/open")',
            "self._start(step)",
        ),
    },
    ("observe/failure/verdict.py", "tests/observe/failure"): {
        "the failure card names no parameters for a later phase of a bucket": (
            'of = list(parameters.get(name) or parameters.get(name.rpartition("/")[0]) or [])',
            "of = list(parameters.get(name) or [])",
        ),
    },
    ("observe/failure/statement.py", "tests/observe/failure"): {
        "ranks that wait for different collectives are reported as one group": (
            "groups.setdefault((s.step, inside, tuple(s.in_flight), s.is_waiting, error), []).append(s)",
            "groups.setdefault((s.step, inside, s.is_waiting, error), []).append(s)",
        ),
    },
    ("observe/step_stamps.py", "tests/observe/test_step_stamps.py"): {
        "a block of stamps begins one step too late": (
            "self._gather(step - 1 - BLOCK, BLOCK, self._facts)",
            "self._gather(step - BLOCK, BLOCK, self._facts)",
        ),
    },
    ("observe/past_journal.py", "tests/timeline/analysis/test_goodput.py"): {
        "writing the report counts as training": (
            'if line.event not in AFTER_END or not any(each["event"] in ENDINGS',
            'if line.event not in AFTER_END or not any(each["event"] in ()',
        ),
    },
    ("observe/metrics.py", "tests/observe/test_metrics.py"): {
        "counters of ranks jump at each block": ("n + self._since * means.get(key, 0.0)", "n"),
    },
}
