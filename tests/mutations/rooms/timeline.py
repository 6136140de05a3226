"""Mutations of `hvdtrain/timeline/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "timeline/steps.py",
        "start_us=start[:, known],",
        "start_us=start,",
        "stamps of unknown steps stay in while their step numbers are left out",
        "tests/timeline/test_steps.py",
    ),
    mutation(
        "timeline/whatif/jitter.py",
        "return max(measured, self._tail_s(ranks))",
        "return measured",
        "the slowest of many ranks is never later than what was measured",
        "tests/timeline/whatif/test_predict.py",
    ),
    mutation(
        "timeline/whatif/predict.py",
        "        if self.job.ranks.size == 1 < self.evidence.job.ranks.size:\n            return 0.0\n",
        "",
        "one rank alone still waits for the others of the measured run",
        "tests/timeline/whatif/test_predict.py",
    ),
    mutation(
        "timeline/whatif/read_run.py",
        "                found.clear()\n                warm = 0\n",
        "                found.clear()\n",
        "a prediction includes the slow first steps of the last start",
        "tests/timeline/whatif/test_read_run.py",
    ),
    mutation(
        "timeline/whatif/traced_allreduces.py",
        'elif name.endswith(_OPERATION) and not name.startswith("NEGOTIATE"):',
        "elif name.endswith(_OPERATION):",
        "the wait for late ranks counts as time on the link",
        "tests/timeline/whatif/test_read_run.py",
    ),
    mutation(
        "timeline/analysis/budget.py",
        "if phases.length(cut[OTHER_EXCHANGE]) > 0.95 * waiting.sum():",
        "if phases.length(cut[OTHER_EXCHANGE]) > waiting.sum():",
        "a Timeline of another clock divides the exposed exchange",
        "tests/timeline/analysis/test_budget.py",
    ),
    mutation(
        "timeline/merge.py",
        "return (trace.epoch_us or 0.0) - self.epoch_of(0)",
        "return -self.epoch_of(0)",
        "merged Timelines of two jobs are not on one clock",
        "tests/timeline/test_merge.py",
    ),
    mutation(
        "timeline/analysis/rank_steps.py",
        "begin = np.where(follows(table.step), np.roll(released, 1, axis=1), start)",
        "begin = np.where(follows(table.step), np.roll(released, -1, axis=1), start)",
        "the work of a step is counted from the sums of the step after it",
        "tests/timeline/analysis/test_rank_steps.py",
        "tests/timeline/analysis/test_stragglers.py",
    ),
    mutation(
        "timeline/analysis/stragglers.py",
        "kept = [rank for rank in found if cost[rank].low > matters[rank]]",
        "kept = [rank for rank in found if cost[rank].value > matters[rank]]",
        "a rank is named whose cost may be noise",
        "tests/timeline/analysis/test_stragglers.py",
    ),
    mutation(
        "timeline/reading/events.py",
        '{"bfloat16": 2}',
        '{"bfloat16": 4}',
        "the bytes of bfloat16 tensors are counted twice",
        "tests/timeline/test_read.py",
    ),
    mutation(
        "compare/step_times.py",
        "low = math.hypot(b.value - b.low, a.high - a.value)",
        "low = b.value - b.low",
        "the interval of a difference ignores how uncertain the first run is",
        "tests/compare/test_step_times.py",
    ),
)
