"""Mutations of `hvdtrain/observe/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "observe/past_journal.py",
        '            return bool(event == "finished")\n    return False',
        '            if event == "finished":\n                return True\n    return False',
        "a run counts as finished though steps were done since",
        "tests/observe/test_journal.py",
    ),
    mutation(
        "observe/span_trace.py",
        "over = step - 2 ",
        "over = step - 1 ",
        "spans that a device reports a step late are missing from the window",
        "tests/observe/test_traces.py",
    ),
    mutation(
        "observe/span_trace.py",
        "            self._failed = True\n",
        "",
        "a trace that cannot be written is reported again and again",
        "tests/observe/test_traces.py",
    ),
    mutation(
        "observe/horovod_timeline.py",
        'on_rank_0(self.comm, partial(self._start, step), name="timeline/open")',
        "self._start(step)",
        "ranks begin a window before Horovod's Timeline is open",
        "tests/observe/test_horovod_timeline.py",
    ),
    mutation(
        "observe/failure/verdict.py",
        'of = list(parameters.get(name) or parameters.get(name.rpartition("/")[0]) or [])',
        "of = list(parameters.get(name) or [])",
        "the failure card names no parameters for a later phase of a bucket",
        "tests/observe/failure",
    ),
    mutation(
        "observe/failure/statement.py",
        "groups.setdefault((s.step, inside, tuple(s.in_flight), s.is_waiting, error), []).append(s)",
        "groups.setdefault((s.step, inside, s.is_waiting, error), []).append(s)",
        "ranks that wait for different collectives are reported as one group",
        "tests/observe/failure",
    ),
    mutation(
        "observe/step_stamps.py",
        "self._gather(step - 1 - BLOCK, BLOCK, self._facts)",
        "self._gather(step - BLOCK, BLOCK, self._facts)",
        "a block of stamps begins one step too late",
        "tests/observe/test_step_stamps.py",
    ),
)
