"""Mutations of `hvdtrain/timeline/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("timeline/steps.py", "tests/timeline/test_steps.py"): {
        "stamps of unknown steps stay in while their step numbers are left out": (
            "start_us=start[:, known],",
            "start_us=start,",
        ),
    },
    ("timeline/whatif/evidence.py", "tests/timeline/whatif/test_predict.py"): {
        "the slowest of many ranks is never later than what was measured": (
            "return max(measured, self._tail_s(ranks))",
            "return measured",
        ),
        "the delays of few ranks are underestimated": ("* math.sqrt(ranks / (ranks - 1))", ""),
        "a host whose cores all compute has one left for the exchange": (
            "ranks.per_host * self.threads >= self.cores",
            "ranks.per_host * self.threads > self.cores",
        ),
        "threads that share cores take no longer": ("math.pow(then / now, _SHARED_CORES)", "1.0"),
    },
    ("timeline/whatif/predict.py", "tests/timeline/whatif/test_predict.py"): {
        "one rank alone still waits for the others of the measured run": (
            "        if self.job.ranks.size == 1 < self.evidence.job.ranks.size:\n            return 0.0\n",
            "",
        ),
    },
    ("timeline/whatif/read_run.py", "tests/timeline/whatif/test_read_run.py"): {
        "data that are late in some steps only cost nothing": ("step_s=usual_s + rare_of_ranks_s,", "step_s=usual_s,"),
        "instant data keep what is late in some steps only": (
            '| {"data": parts_s["data"] + rare_s}',
            '| {"data": parts_s["data"]}',
        ),
        "steps before shares by speed count for a prediction": (
            '("started", "compression_chosen", "shares")',
            '("started", "compression_chosen")',
        ),
        "a prediction includes the slow first steps of the last start": (
            "                found.clear()\n                warm = 0\n",
            "                found.clear()\n",
        ),
    },
    ("timeline/analysis/budget.py", "tests/timeline/analysis/test_budget.py"): {
        "a Timeline of another clock divides the exposed exchange": (
            "if phases.length(cut[OTHER_EXCHANGE]) > 0.95 * waiting.sum():",
            "if phases.length(cut[OTHER_EXCHANGE]) > waiting.sum():",
        ),
    },
    ("timeline/merge.py", "tests/timeline/test_merge.py"): {
        "merged Timelines of two jobs are not on one clock": (
            "return (trace.epoch_us or 0.0) - (wall_clock_us(self.spans) or 0.0)",
            "return -(wall_clock_us(self.spans) or 0.0)",
        ),
    },
    (
        "timeline/analysis/rank_steps.py",
        "tests/timeline/analysis/test_rank_steps.py",
        "tests/timeline/analysis/test_stragglers.py",
    ): {
        "the work of a step is counted from the sums of the step after it": (
            "begin = np.where(follows(table.step), np.roll(released, 1, axis=1), start)",
            "begin = np.where(follows(table.step), np.roll(released, -1, axis=1), start)",
        ),
    },
    ("timeline/analysis/rank_steps.py", "tests/timeline/analysis/test_planted.py"): {
        "all of the time between exchanges gave cause to wait": (
            "    share = np.where(total > 0, ahead / np.where(total > 0, total, 1.0), even)\n",
            "    share = even\n",
        ),
    },
    ("timeline/analysis/stragglers.py", "tests/timeline/analysis/test_stragglers.py"): {
        "a rank with fewer passes, for which nobody waits, makes jitter": (
            "mean_of((usual - rounds.fewer_ms).max(axis=0)",
            "mean_of(usual.max(axis=0)",
        ),
        "a rank is named whose cost may be noise": (
            "kept = [rank for rank in found if cost[rank].low > matters[rank]]",
            "kept = [rank for rank in found if cost[rank].value > matters[rank]]",
        ),
    },
    ("timeline/reading/events.py", "tests/timeline/test_read.py"): {
        "the bytes of bfloat16 tensors are counted twice": ('{"bfloat16": 2}', '{"bfloat16": 4}'),
    },
    ("compare/step_times.py", "tests/compare/test_step_times.py"): {
        "the interval of a difference ignores how uncertain the first run is": (
            "low = math.hypot(b.value - b.low, a.high - a.value)",
            "low = b.value - b.low",
        ),
    },
    ("timeline/analysis/ending.py", "tests/timeline/analysis/test_ending.py"): {
        "a failure repeats no steps in the promised end": ("pace.start_s + every / 2 * mean", "pace.start_s"),
        "the promised end has no noise of the steps to come": (
            "math.sqrt(steps * pace.steps) * of_mean",
            "0.0 * of_mean",
        ),
        "the slow steps of a start-up count for the pace": ("seconds = seconds[start_up_steps(seconds) :]", ""),
    },
    ("timeline/whatif/outlook.py", "tests/timeline/whatif/test_outlook.py"): {
        "another job is promised the step of the measured one": ("found.then.step_s / found.now.step_s", "1.0"),
    },
    ("timeline/analysis/shares.py", "tests/timeline/analysis/test_stragglers.py"): {
        "a slow rank with most passes is an effect of their number": (
            "or rate[most] > _SLOWER * min(rate.values()):",
            "or False:",
        ),
        "one with fewest is, too": ("    if fewer_as_long or rate", "    if rate"),
        "a rank with fewer micro-batches costs what nobody waits for": (
            "work_ms=rounds.work_ms + fewer, fewer_ms=fewer",
            "work_ms=rounds.work_ms + fewer",
        ),
    },
    ("timeline/whatif/links.py", "tests/timeline/whatif/test_links.py"): {
        "a ring sends all bytes twice": ("    ring = 2 * (n - 1) / n * nbytes\n", "    ring = 2 * nbytes\n"),
        "ranks of a host do not share its link": ("local * nbytes * (n - local) / n", "nbytes * (n - local) / n"),
        "small messages give the bandwidth of a link": (
            "        if size < _LARGE * points[-1][0]:  # mostly latency and burst\n            continue\n",
            "",
        ),
        "messages inside a host take as long as between hosts": (
            "inside * (min(self.hop_s, ONE_HOST.hop_s) if ranks.hosts > 1 else self.hop_s)",
            "inside * self.hop_s",
        ),
    },
    ("timeline/whatif/engine_passes.py", "tests/timeline/whatif/test_engines.py"): {
        "each rank clips all of the gradient": ("clip_s = clip_s / job.sharers + ", "clip_s = clip_s + "),
        "an update that ranks shared already is shared again": (
            'parts["optimizer"] * was.sharers / job.sharers',
            'parts["optimizer"] / job.sharers',
        ),
        "forward needs the last block first": ("forward_s * (1 - at_s / end_s)", "forward_s * at_s / end_s"),
    },
    ("timeline/whatif/replay.py", "tests/timeline/whatif/test_replay.py"): {
        "passes before the last one take no time": ("self._work(one.repeats * one.computing_s)", "pass"),
        "an exchange takes no time from the core that computes": ("rate = 1.0 - first.cpu_share", "rate = 1.0"),
        "a pass begins before the sums of the one before have arrived": (
            "            if number:\n                self._finish()\n",
            "",
        ),
    },
    ("timeline/whatif/predict.py", "tests/timeline/whatif/test_choice.py"): {
        "auto compresses for next to nothing": ("if best_s > WORTH * evidence.step_s:", "if best_s > evidence.step_s:"),
    },
    ("timeline/whatif/outer_exchange.py", "tests/timeline/whatif/test_outer_exchange.py"): {
        "a delayed exchange hides behind no step": ("max(0.0, wire_s - plan.delay * inner.then.step_s)", "wire_s"),
    },
    ("timeline/whatif/assemble.py", "tests/timeline/whatif/test_meshes.py"): {
        "other stages wait as long as those that were measured": (
            "computed_s * job.pass_times / evidence.job.pass_times / now",
            "computed_s / now",
        ),
    },
    ("timeline/whatif/fitting.py", "tests/timeline/whatif/test_read_run.py"): {
        "a late rank is taken for a slow link": (
            'waited_s = max(0.0, evidence.parts_s["wait"] - evidence.late_s)',
            'waited_s = evidence.parts_s["wait"]',
        ),
        "time for coding is taken for a slow link": ("shows_links = exact and exchanges", "shows_links = exchanges"),
    },
    ("timeline/analysis/findings_ranks.py", "tests/timeline/analysis/test_findings.py"): {
        "a stall in the exchange is one of all ranks": ("if 2 * exposed_ms * len(stalls) > stalled_ms:", "if False:"),
        "jitter by data has the advice of jitter by cores": ("if 2 * more.sum() > beyond.sum() and cure:", "if False:"),
        "every step is named as a period": (
            "if period > 1 and np.all(np.abs(gaps",
            "if np.all(np.abs(gaps",
        ),
    },
    ("timeline/analysis/findings.py", "tests/timeline/analysis/test_findings.py"): {
        "the network is blamed for a late rank": (
            "is not None and grown[0] > grown[1]:",
            "is not None and False:",
        ),
        "the network is blamed on a single host": (
            "elif table is not None and len(set(table.hosts)) == 1:",
            "elif False:",
        ),
        "what is never cached shows that the cache is too small": ("cached & (turns >", "(turns > 0) & (turns >"),
    },
    ("timeline/analysis/analyse.py", "tests/timeline/analysis/test_findings.py"): {
        "a few steps show that there is no straggler": ("len(rounds.step) >= LEAST_ROUNDS and", "True and"),
        "clocks that were never compared do": ("and np.isfinite(rounds.clock_error_ms).all())", "and True)"),
    },
    ("timeline/analysis/rank_steps.py", "tests/timeline/analysis/test_rank_steps.py"): {
        "a checkpoint's broadcasts are steps": ('if not trace.tensors[t].startswith("broadcast.")]', "]"),
        "each pass is a step": ("& (counts <= (count_steps(trace) or counts.max(initial=0)) + 1)]", "]"),
    },
}
