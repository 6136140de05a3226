"""Mutations of `hvdtrain/launch/`."""

from tests.mutations.mutation import Mutation, mutation

MEMBERSHIP = "tests/launch/test_membership.py"

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "launch/round_changes.py",
        "return newcomer, away, -worker.round, worker.rank, position[worker.host], worker.slot",
        "return newcomer, away, -worker.round, position[worker.host], worker.slot, worker.rank",
        "survivors are ordered by slot instead of by the rank they had",
        MEMBERSHIP,
    ),
    mutation(
        "launch/worker_starts.py",
        "job.limits.cooldown_s * 2.0 ** min(place.failures - 1, 30)",
        "job.limits.cooldown_s * 4.0 ** min(place.failures - 1, 30)",
        "the cooldown of a slot that fails again grows by 4 instead of 2",
        MEMBERSHIP,
    ),
    mutation(
        "launch/worker_starts.py",
        "if len(present) >= limits.least or not limits.elastic:  # else the first loss ends it\n"
        "        job.short_s = None\n",
        "if len(present) >= limits.least or not limits.elastic:  # else the first loss ends it\n        return\n",
        "the time below the least ranks goes on though enough are there again",
        MEMBERSHIP,
    ),
    mutation(
        "launch/job_end.py",
        "        host.failed = False\n",
        "",
        "a restart gives up where all hosts have failed before",
        MEMBERSHIP,
    ),
    mutation(
        "launch/job_end.py",
        "  # a stopping job has its own deadline\n        job.deadline_s = job.now_s + job.limits.grace_s\n",
        "  # a stopping job has its own deadline\n        pass\n",
        "ranks that stay are killed at once while the first still writes",
        MEMBERSHIP,
    ),
    mutation(
        "launch/job_end.py",
        "        job.code = _code_of(why)\n",
        "        job.code = 0\n",
        "a job whose ranks ended by a signal of their own exits with 0",
        MEMBERSHIP,
    ),
    mutation(
        "launch/membership.py",
        "            if job.phase is Phase.RUNNING and worker.leave_reason and not worker.round:\n"
        "                job_end.dismiss(job, worker, worker.leave_reason)\n",
        "            if job.phase is Phase.RUNNING and worker.leave_reason and worker.joined and not worker.round:\n"
        "                job_end.dismiss(job, worker, worker.leave_reason)\n",
        "a worker that is still starting where it may not be is not ended",
        MEMBERSHIP,
    ),
    mutation(
        "launch/membership.py",
        "elif inside and not job.changed:",
        'elif inside and why == "changed" and job.changed:',
        "the others do not follow a rank that leaves the round by itself",
        MEMBERSHIP,
    ),
    mutation(
        "launch/faults.py",
        "if job.phase is Phase.FINISHING and (worker.rank == 0 or not job.limits.elastic):",
        "if job.phase is Phase.STOPPING and (worker.rank == 0 or not job.limits.elastic):",
        "the job counts as done though rank 0 died before it had finished",
        MEMBERSHIP,
    ),
    mutation(
        "launch/faults.py",
        "if not worker.joined and not worker.round and job.now_s - worker.started_s",
        "if not worker.joined and worker.round and job.now_s - worker.started_s",
        "a worker that never asks for a place is waited for without end",
        MEMBERSHIP,
    ),
    mutation(
        "launch/faults.py",
        "if not timeout or not (waiting or overdue) or len(waiting) + len(blocking) < len(members):",
        "if not timeout or not (waiting or overdue):",
        "a rank counts as hanging while another still computes",
        MEMBERSHIP,
    ),
    mutation(
        "launch/spec.py",
        'return " ".join([*given, join(self.argv)])',
        "return join(self.argv)",
        "the command that --dry-run shows lacks the variables that the real one sets",
        "tests/cli/test_launch_targets.py",
        "tests/launch/test_targets.py",
    ),
    mutation(
        "launch/hosts.py",
        "return parse_discovered(out, slots)",
        "return parse_discovered(out)",
        "--slots is ignored for hosts that the script names without a number",
        "tests/launch/test_hosts.py",
    ),
    mutation(
        "launch/variables.py",
        'and re.fullmatch("[A-Za-z0-9_]+", name)',
        "",
        "variables that no shell can set are passed to other hosts",
        "tests/launch/test_worker_plan.py",
    ),
    mutation(
        "launch/rendezvous_store.py",
        '        if not number or number != self._round:\n            reply(GONE, b"")\n        elif key',
        "        if key",
        "a rank that is late asks the store of a closed round without end",
        "tests/launch/test_rendezvous_store.py",
    ),
)
