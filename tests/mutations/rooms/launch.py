"""Mutations of `hvdtrain/launch/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("launch/round_changes.py", "tests/launch/test_membership.py"): {
        "survivors are ordered by slot instead of by the rank they had": (
            "return newcomer, away, -worker.round, worker.rank, position[worker.host], worker.slot",
            "return newcomer, away, -worker.round, position[worker.host], worker.slot, worker.rank",
        ),
    },
    ("launch/worker_starts.py", "tests/launch/test_membership.py"): {
        "the cooldown of a slot that fails again grows by 4 instead of 2": (
            "job.limits.cooldown_s * 2.0 ** min(place.failures - 1, 30)",
            "job.limits.cooldown_s * 4.0 ** min(place.failures - 1, 30)",
        ),
        "the time below the least ranks goes on though enough are there again": (
            "if len(present) >= limits.least or not limits.elastic:  # else the first loss ends it\n"
            "        job.short_s = None\n",
            "if len(present) >= limits.least or not limits.elastic:  # else the first loss ends it\n        return\n",
        ),
    },
    ("launch/job_end.py", "tests/launch/test_membership.py"): {
        "a restart gives up where all hosts have failed before": ("        host.failed = False\n", ""),
        "ranks that stay are killed at once while the first still writes": (
            "  # a stopping job has its own deadline\n        job.deadline_s = job.now_s + job.limits.grace_s\n",
            "  # a stopping job has its own deadline\n        pass\n",
        ),
        "a job whose ranks ended by a signal of their own exits with 0": (
            "        job.code = _code_of(why)\n",
            "        job.code = 0\n",
        ),
    },
    ("launch/membership.py", "tests/launch/test_membership.py"): {
        "a worker that is still starting where it may not be is not ended": (
            "worker.leave_reason and not worker.round:\n                job_end.dismiss(",
            "worker.leave_reason and worker.joined and not worker.round:\n                job_end.dismiss(",
        ),
        "the others do not follow a rank that leaves the round by itself": (
            "elif inside and not job.changed:",
            'elif inside and why == "changed" and job.changed:',
        ),
    },
    ("launch/faults.py", "tests/launch/test_membership.py"): {
        "the job counts as done though rank 0 died before it had finished": (
            "if job.phase is Phase.FINISHING and (worker.rank == 0 or not job.limits.elastic):",
            "if job.phase is Phase.STOPPING and (worker.rank == 0 or not job.limits.elastic):",
        ),
        "a worker that never asks for a place is waited for without end": (
            "if not worker.joined and not worker.round and job.now_s - worker.started_s",
            "if not worker.joined and worker.round and job.now_s - worker.started_s",
        ),
        "a rank counts as hanging while another still computes": (
            "if not timeout or not (waiting or overdue) or len(waiting) + len(blocking) < len(members):",
            "if not timeout or not (waiting or overdue):",
        ),
    },
    ("launch/spec.py", "tests/cli/test_launch_targets.py", "tests/launch/test_targets.py"): {
        "the command that --dry-run shows lacks the variables that the real one sets": (
            'return " ".join([*given, join(self.argv)])',
            "return join(self.argv)",
        ),
    },
    ("launch/hosts.py", "tests/launch/test_hosts.py"): {
        "--slots is ignored for hosts that the script names without a number": (
            "return parse_discovered(out, slots)",
            "return parse_discovered(out)",
        ),
    },
    ("launch/variables.py", "tests/launch/test_worker_plan.py"): {
        "variables that no shell can set are passed to other hosts": ('and re.fullmatch("[A-Za-z0-9_]+", name)', ""),
    },
    ("launch/agent_link.py", "tests/launch/test_rendezvous_store.py"): {
        "a rank gets the address that is for its neighbour": ("[rank - (rank > int(own)) for rank", "[rank for rank"),
        "what is queued for a host is sent to all": ("if host else self._send", "if not host else self._send"),
    },
    ("launch/rendezvous.py", "tests/launch/test_rendezvous_store.py"): {
        "a rank that is late asks the store of a closed round without end": (
            '        if not number or number != self._round:\n            return GONE, b""\n',
            "",
        ),
    },
    ("launch/worker_process.py", "tests/launch/test_cpu_use.py"): {
        "a worker that computed once counts as one that computes": (
            "self._found[pid][0] - before[pid][0] >= _BUSY * passed_s]",
            "self._found[pid][0] >= _BUSY * passed_s]",
        ),
        "a worker that waits for a slow file system counts as one that hangs": (
            " or any(map(waits_for_files, self._found[pid][1]))",
            "",
        ),
    },
    ("launch/choose.py", "tests/launch/test_choose.py"): {
        "--elastic MIN:MAX is accepted though -np lies outside of it": (
            "if not 1 <= least <= spec.ranks <= most:",
            "if not 1 <= least <= most:",
        ),
    },
    ("launch/drain.py", "tests/launch/test_pods.py"): {
        "processes that a rank has started are ended before it has saved": (
            "found.values() if parent not in found]",
            "found.values()]",
        ),
    },
    ("launch/job_output.py", "tests/launch/test_screen.py"): {
        "lines that were dropped are reported again with each line that follows": (
            "            self._left_out = 0\n",
            "",
        ),
    },
    ("launch/own_task.py", "tests/cli/test_launch_program.py"): {
        "a program that a forwarded signal ended counts as failed": (
            "elif received and code == 128 + received[-1]:",
            "elif received and code == -received[-1]:",
        ),
    },
    ("launch/rendezvous.py", "tests/launch/test_rendezvous.py"): {
        "idle connections of strangers keep ranks out of the store": (
            "            if len(self._strangers) > MOST_STRANGERS:\n                self._close_oldest()",
            "            if len(self._strangers) > MOST_STRANGERS:\n                task.cancel()",
        ),
    },
    ("launch/restarts.py", "tests/launch/test_pods.py"): {
        "a pod that keeps failing is started again every 10 seconds": (
            "wait_s = min(2 * wait_s, _LONGEST_S)",
            "wait_s = min(wait_s, _LONGEST_S)",
        ),
    },
    ("launch/site.py", "tests/launch/test_site.py"): {
        "a profile with a host name in capitals fits no host": (
            "fnmatchcase(name, pattern.lower())",
            "fnmatchcase(name, pattern)",
        ),
    },
    ("launch/worker_process.py", "tests/launch/test_job.py"): {
        "a rank that a signal ended is reported with an exit code": (
            "code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status",
            "code = ended.si_status",
        ),
    },
    ("launch/driver.py", "tests/launch/test_membership_laws.py"): {
        "a driver that lags behind takes ranks for silent whose signs of life it has not handled": (
            "now_s = arrived_s",
            "now_s = time.monotonic()",
        ),
    },
}
