"""100 wrong versions of the source: what the tests have to catch, whatever is moved between their tiers.

Each entry replaces one text, found exactly once in its file, by a plausible programming mistake. `python -m
tests.mutations` applies them one at a time and names the test that fails.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    Attributes:
        file: path below ``hvdtrain/``.
        old: text that occurs exactly once in the file.
        new: what replaces it.
        breaks: what is wrong then.
        tests: files or folders of tests that should catch it.
        seen: whether an earlier version of the tests passed with it.
    """

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    seen: bool


def _missed(file: str, old: str, new: str, breaks: str, *tests: str) -> Mutation:
    """A mistake that an earlier version of the tests did not catch."""
    return Mutation(file, old, new, breaks, tests, seen=True)


def _new(file: str, old: str, new: str, breaks: str, *tests: str) -> Mutation:
    """A mistake of a kind that no earlier list had."""
    return Mutation(file, old, new, breaks, tests, seen=False)


MEMBERSHIP = "tests/launch/test_membership.py"
DROP_IN = "tests/parallel/test_drop_in.py"
MISUSE = "tests/parallel/test_drop_in_misuse.py"

MUTATIONS: tuple[Mutation, ...] = (
    # launch: who is in a job, and what becomes of it
    _missed(
        "launch/round_changes.py",
        "return newcomer, away, -worker.round, worker.rank, position[worker.host], worker.slot",
        "return newcomer, away, -worker.round, position[worker.host], worker.slot, worker.rank",
        "survivors are ordered by slot instead of by the rank they had",
        MEMBERSHIP,
    ),
    _missed(
        "launch/worker_starts.py",
        "job.limits.cooldown_s * 2.0 ** min(place.failures - 1, 30)",
        "job.limits.cooldown_s * 4.0 ** min(place.failures - 1, 30)",
        "the cooldown of a slot that fails again grows by 4 instead of 2",
        MEMBERSHIP,
    ),
    _missed(
        "launch/worker_starts.py",
        "if len(present) >= limits.least or not limits.elastic:  # else the first loss ends it\n"
        "        job.short_s = None\n",
        "if len(present) >= limits.least or not limits.elastic:  # else the first loss ends it\n        return\n",
        "the time below the least ranks goes on though enough are there again",
        MEMBERSHIP,
    ),
    _missed(
        "launch/job_end.py",
        "        host.failed = False\n",
        "",
        "a restart gives up where all hosts have failed before",
        MEMBERSHIP,
    ),
    _missed(
        "launch/job_end.py",
        "  # a stopping job has its own deadline\n        job.deadline_s = job.now_s + job.limits.grace_s\n",
        "  # a stopping job has its own deadline\n        pass\n",
        "ranks that stay are killed at once while the first still writes",
        MEMBERSHIP,
    ),
    _missed(
        "launch/job_end.py",
        "        job.code = _code_of(why)\n",
        "        job.code = 0\n",
        "a job whose ranks ended by a signal of their own exits with 0",
        MEMBERSHIP,
    ),
    _missed(
        "launch/membership.py",
        "            if job.phase is Phase.RUNNING and worker.leave_reason and not worker.round:\n"
        "                job_end.dismiss(job, worker, worker.leave_reason)\n",
        "            if job.phase is Phase.RUNNING and worker.leave_reason and worker.joined and not worker.round:\n"
        "                job_end.dismiss(job, worker, worker.leave_reason)\n",
        "a worker that is still starting where it may not be is not ended",
        MEMBERSHIP,
    ),
    _missed(
        "launch/membership.py",
        "elif inside and not job.changed:",
        'elif inside and why == "changed" and job.changed:',
        "the others do not follow a rank that leaves the round by itself",
        MEMBERSHIP,
    ),
    _missed(
        "launch/faults.py",
        "if job.phase is Phase.FINISHING and (worker.rank == 0 or not job.limits.elastic):",
        "if job.phase is Phase.STOPPING and (worker.rank == 0 or not job.limits.elastic):",
        "the job counts as done though rank 0 died before it had finished",
        MEMBERSHIP,
    ),
    _missed(
        "launch/faults.py",
        "if not worker.joined and not worker.round and job.now_s - worker.started_s",
        "if not worker.joined and worker.round and job.now_s - worker.started_s",
        "a worker that never asks for a place is waited for without end",
        MEMBERSHIP,
    ),
    _missed(
        "launch/faults.py",
        "if not timeout or not (waiting or overdue) or len(waiting) + len(blocking) < len(members):",
        "if not timeout or not (waiting or overdue):",
        "a rank counts as hanging while another still computes",
        MEMBERSHIP,
    ),
    # launch: command lines, choices and what goes to other hosts
    _missed(
        "launch/spec.py",
        'return " ".join([*given, join(self.argv)])',
        "return join(self.argv)",
        "the command that --dry-run shows lacks the variables that the real one sets",
        "tests/cli/test_launch_targets.py",
        "tests/launch/test_targets.py",
    ),
    _missed(
        "cli/launch_spec.py",
        "return tuple(name for name in names if name in environ and name not in hidden)",
        "return tuple(names)",
        "a batch script exports variables that do not exist",
        "tests/cli/test_launch_targets.py",
    ),
    _missed(
        "launch/hosts.py",
        "return parse_discovered(out, slots)",
        "return parse_discovered(out)",
        "--slots is ignored for hosts that the script names without a number",
        "tests/launch/test_hosts.py",
    ),
    _missed(
        "launch/variables.py",
        'and re.fullmatch("[A-Za-z0-9_]+", name)',
        "",
        "variables that no shell can set are passed to other hosts",
        "tests/launch/test_worker_plan.py",
    ),
    # install
    _missed(
        "install/build.py",
        "                fcntl.flock(file, fcntl.LOCK_EX)\n",
        "",
        "a second build announces that it waits, and does not",
        "tests/install/test_build_cache.py",
    ),
    _missed(
        "install/versions.py",
        'return cls(flavour, _normal(found[1].rstrip(".")))',
        'return cls(flavour, found[1].rstrip("."))',
        "a leading zero in an MPI's version makes the label unlike the installed one",
        "tests/install/test_record.py",
    ),
    _missed(
        "install/versions.py",
        "return cls(_normal(public), flavour,",
        "return cls(public, flavour,",
        "a leading zero in torch's version makes the label unlike the installed one",
        "tests/install/test_record.py",
    ),
    _missed(
        "install/venv.py",
        "    (venv / _STAMP).unlink(missing_ok=True)\n",
        "",
        "an environment whose update was interrupted counts as current",
        "tests/install/test_venv.py",
    ),
    # compression
    _missed(
        "compression/sizes.py",
        "_WORTH = 2\n",
        "_WORTH = 1\n",
        "factors that save less than half are sent instead of the matrix",
        "tests/compression/test_powersgd.py",
    ),
    _missed(
        "compression/sizes.py",
        "rows, columns = min(cuts, key=sum)",
        "rows, columns = cuts[0]",
        "the weights of experts are one matrix of few rows and very many columns",
        "tests/compression/test_powersgd.py",
    ),
    _missed(
        "compression/powersgd.py",
        "q.copy_(saved if saved is not None and fits else _first_guess(part, self._rank, group.n))",
        "q.copy_(saved[:1] if saved is not None else _first_guess(part, self._rank, group.n))",
        "a start saved with another rank number is taken over",
        "tests/compression/test_powersgd.py",
    ),
    _missed(
        "compression/topk.py",
        "wanted = torch.arange(1, count + 1, dtype=torch.int32, device=flags.device)",
        "wanted = torch.arange(0, count, dtype=torch.int32, device=flags.device)",
        "a GPU reads the places of a bitmap off by one",
        "tests/compression/test_topk.py",
    ),
    # exchange
    _missed(
        "exchange/rows.py",
        "return torch.maximum(gradient.amax(across), -gradient.amin(across))",
        "return gradient.amax(across)",
        "rows of zeros and negative numbers count as zero and are not sent",
        "tests/exchange/test_rows.py",
    ),
    _missed(
        "exchange/agreement.py",
        "rows = {n: sys.maxsize if has_residual(n) else count for n, count in count_rows(counted).items()}",
        "rows = count_rows(counted)",
        "what compression owes to a parameter is lost when its rows travel",
        "tests/exchange/test_rows.py",
    ),
    _missed(
        "exchange/reducer.py",
        "self.adopt(loaded.without_rows(with_residual))",
        "self.adopt(loaded)",
        "a saved plan of rows loses what is owed to the parameter",
        "tests/exchange/test_rows.py",
    ),
    _missed(
        "exchange/active_buckets.py",
        "self.detached = self.detached.without_parameters(dict(self._known), self.ranks, keep=self._delivered)",
        "self.detached = DetachedState({}, self.ranks)",
        "what is owed to a frozen parameter is forgotten",
        "tests/exchange/test_residual_transfer.py",
    ),
    _missed(
        "exchange/bucket.py",
        "        parameter.grad = None\n        self.missing.remove(index)\n",
        "        self.missing.remove(index)\n",
        "a gradient that is on its way can still be clipped or scaled",
        "tests/exchange/test_reducer.py",
    ),
    # torch: equal to Horovod's optimizer
    _missed(
        "torch/optimizer.py",
        "else (comm, 1.0 / predivide, predivide / comm.size)",
        "else (comm, 1.0 / predivide, 1.0)",
        "predivision averages only where the factor is the number of ranks",
        DROP_IN,
    ),
    _missed(
        "torch/optimizer.py",
        'hvd.Compression.fp16: "fp16"}',
        'hvd.Compression.fp16: "none"}',
        "Horovod's fp16 compression compresses nothing",
        DROP_IN,
    ),
    _missed(
        "torch/optimizer.py",
        "return [[names[id(p)] for p in group if id(p) in names] for group in groups]",
        "return [[names[id(p)] for p in group if id(p) in names] for group in groups[:1]]",
        "only the first of the listed groups shares a bucket",
        MISUSE,
    ),
    _missed(
        "exchange/optimizer.py",
        "partial(kind.zero_grad, self), *arguments, **keywords)",
        "partial(kind.zero_grad, self))",
        "zero_grad ignores set_to_none",
        DROP_IN,
    ),
    _missed(
        "exchange/optimizer.py",
        '    optimizer.__dict__.pop("step", None)\n',
        "",
        "with a schedule made before, steps go past the exchange",
        DROP_IN,
    ),
    _missed(
        "exchange/optimizer.py",
        "        self._hvdtrain_exchange.reducer.synchronize_state()\n",
        "",
        "the saved state of compression differs between ranks",
        DROP_IN,
    ),
    # training
    _missed(
        "training/diagnostics/step_replay.py",
        "        for module, training in modes.items():\n            module.training = training\n",
        "",
        "looking into a bad step does not restore the modes of modules",
        "tests/training/test_step_replay.py",
    ),
    _missed(
        "training/records/run_report.py",
        "_fingerprint(folder / file[0]) != file[1]",
        "not (folder / file[0]).exists()",
        "a trace of an earlier start stands for the one on another host",
        "tests/training/test_remote_spans.py",
    ),
    _missed(
        "training/result.py",
        'if line.get("event") == "started" and not line.get("goes_on"):',
        'if line.get("event") == "started" and line.get("goes_on"):',
        "the budget includes earlier starts of the run",
        "tests/training/test_time_budget.py",
    ),
    _missed(
        "training/loop/evaluate.py",
        "*(i * self._length // self.count for i in range(b.start, b.stop))]",
        "*range(b.start, b.stop)]",
        "only the first held-out samples are used, not some all over",
        "tests/training/test_evaluate.py",
    ),
    _missed(
        "training/loop/evaluate.py",
        "total[0] = total[0] + _exact(value)",
        "total[0] = float(torch.tensor(total[0]) + value)",
        "held-out losses are summed in fp32",
        "tests/training/test_evaluate.py",
    ),
    _missed(
        "training/loop/evaluate.py",
        "[sample_seed(0, b),",
        "[torch.initial_seed(),",
        "held-out samples that draw random numbers are others each time",
        "tests/training/test_evaluate.py",
    ),
    _missed(
        "training/diagnostics/curves.py",
        "_SMALLEST = 0.01\n",
        "_SMALLEST = 0.001\n",
        "on a loss curve without noise small jumps are spikes",
        "tests/training/test_loss_spikes.py",
    ),
    # state
    _missed(
        "state/checkpoint_store.py",
        "        if obsolete:\n            self._verify(just_saved, progress or self.progress)\n",
        "",
        "old checkpoints are removed before the new one is verified",
        "tests/state/test_checkpoint_store.py",
    ),
    _missed(
        "state/manifest.py",
        "if hashlib.sha256(data).hexdigest() != sha256:",
        "if not sha256:",
        "a damaged checkpoint of format 1 is accepted",
        "tests/state/test_checkpoint_store.py",
    ),
    # observe
    _missed(
        "observe/past_journal.py",
        '            return bool(event == "finished")\n    return False',
        '            if event == "finished":\n                return True\n    return False',
        "a run counts as finished though steps were done since",
        "tests/observe/test_journal.py",
    ),
    _missed(
        "observe/span_trace.py",
        "over = step - 2 ",
        "over = step - 1 ",
        "spans that a device reports a step late are missing from the window",
        "tests/observe/test_traces.py",
    ),
    _missed(
        "observe/span_trace.py",
        "            self._failed = True\n",
        "",
        "a trace that cannot be written is reported again and again",
        "tests/observe/test_traces.py",
    ),
    _missed(
        "observe/horovod_timeline.py",
        'on_rank_0(self.comm, partial(self._start, step), name="timeline/open")',
        "self._start(step)",
        "ranks begin a window before Horovod's Timeline is open",
        "tests/observe/test_horovod_timeline.py",
    ),
    _missed(
        "observe/failure/verdict.py",
        'return list(parameters.get(name) or parameters.get(name.rpartition("/")[0]) or [])',
        "return list(parameters.get(name) or [])",
        "the failure card names no parameters for a later phase of a bucket",
        "tests/observe/failure",
    ),
    _missed(
        "observe/failure/statement.py",
        "groups.setdefault((s.step, inside, tuple(s.in_flight), s.is_waiting, error), []).append(s)",
        "groups.setdefault((s.step, inside, s.is_waiting, error), []).append(s)",
        "ranks that wait for different collectives are reported as one group",
        "tests/observe/failure",
    ),
    # runtime
    _missed(
        "runtime/threads.py",
        "if now[t].busy_ns > first[t].busy_ns and now[t].sleeps == first[t].sleeps]",
        "if now[t].busy_ns > first[t].busy_ns]",
        "a young thread that sleeps is taken for the one that spins",
        "tests/runtime/test_threads.py",
    ),
    _missed(
        "runtime/timeline.py",
        'is_open = theirs in (_DYNAMIC, "")',
        "is_open = theirs == _DYNAMIC",
        "an empty HOROVOD_TIMELINE keeps a requested window from being recorded",
        "tests/runtime/test_timeline.py",
    ),
    # timeline
    _missed(
        "timeline/steps.py",
        "start_us=start[:, known],",
        "start_us=start,",
        "stamps of unknown steps stay in while their step numbers are left out",
        "tests/timeline/test_steps.py",
    ),
    _missed(
        "timeline/whatif/jitter.py",
        "return max(measured, self._tail_s(ranks))",
        "return measured",
        "the slowest of many ranks is never later than what was measured",
        "tests/timeline/whatif/test_jitter.py",
    ),
    _missed(
        "timeline/whatif/predict.py",
        "        if self.job.ranks.size == 1 < self.evidence.job.ranks.size:\n            return 0.0\n",
        "",
        "one rank alone still waits for the others of the measured run",
        "tests/timeline/whatif/test_predict.py",
    ),
    _missed(
        "timeline/whatif/read_run.py",
        "                found.clear()\n                warm = 0\n",
        "                found.clear()\n",
        "a prediction includes the slow first steps of the last start",
        "tests/timeline/whatif/test_read_run.py",
    ),
    _missed(
        "timeline/whatif/traced_allreduces.py",
        'elif name.endswith(_OPERATION) and not name.startswith("NEGOTIATE"):',
        "elif name.endswith(_OPERATION):",
        "the wait for late ranks counts as time on the link",
        "tests/timeline/whatif/test_traced_allreduces.py",
    ),
    _missed(
        "timeline/analysis/budget.py",
        "if length(cut[OTHER_EXCHANGE]) > 0.95 * waiting.sum():",
        "if length(cut[OTHER_EXCHANGE]) > waiting.sum():",
        "a Timeline of another clock divides the exposed exchange",
        "tests/timeline/analysis/test_budget.py",
    ),
    _missed(
        "timeline/merge.py",
        "return (trace.epoch_us or 0.0) - self.epoch_of(0)",
        "return -self.epoch_of(0)",
        "merged Timelines of two jobs are not on one clock",
        "tests/timeline/test_merge.py",
    ),
    # doctor
    _missed(
        "doctor/hosts/checks.py",
        "if facts.fabric and facts.locked_bytes >= 0}",
        "if facts.locked_bytes >= 0}",
        "doctor warns of locked memory where only TCP is used",
        "tests/doctor/hosts/test_checks.py",
    ),
    _missed(
        "doctor/links/expected.py",
        "work = evidence.job.micro_batch * evidence.job.passes",
        "work = evidence.job.micro_batch",
        "the outlook gives each rank one micro-batch instead of the run's work",
        "tests/doctor/links/test_expected.py",
    ),
    # data: which samples, exactly once
    _new(
        "data/order.py",
        "start = rank * each + min(rank, more)",
        "start = rank * each",
        "the micro-batches of two ranks overlap where they cannot be shared evenly",
        "tests/data",
    ),
    _new(
        "data/order.py",
        "before = min(count, begin - position)",
        "before = begin - position",
        "a step that ends before a hole takes all positions up to the hole",
        "tests/data",
    ),
    _new(
        "data/loader.py",
        "return positions_without(position, self.global_batch, self.left_out)[-1][1]",
        "return position + self.global_batch",
        "after a hole the next step takes some positions again",
        "tests/data",
        "tests/training/test_roll_back.py",
    ),
    _new(
        "state/ledger.py",
        "if self._ranges and self._ranges[-1][1] == begin:",
        "if self._ranges and self._ranges[-1][1] <= begin:",
        "the ledger includes positions that were left out",
        "tests/state/test_ledger.py",
    ),
    _new(
        "verify/coverage.py",
        "    bad |= begins != np.concatenate([np.array([origin], np.int64), ends[:-1]])\n",
        "",
        "a position that two ranks took counts as taken once",
        "tests/verify/test_data.py",
    ),
    # training: the loss curve does not depend on ranks
    _new(
        "training/loop/step.py",
        "            seed()\n",
        "",
        "dropout follows the rank's own random state",
        "tests/training/test_step.py",
        "tests/laws/test_laws.py",
    ),
    _new(
        "training/loop/step.py",
        "scaler.scale(whole / nominal)",
        "scaler.scale(whole / weight)",
        "each micro-batch is normalised by its own weight",
        "tests/training/test_step.py",
        "tests/laws/test_laws.py",
    ),
    _new(
        "training/loop/step.py",
        "self.clip / (grad_norm + 1e-6)",
        "self.clip / (raw_norm + 1e-6)",
        "clipping compares the norm before it is corrected for the actual weight",
        "tests/training/test_step.py",
        "tests/laws/test_laws.py",
    ),
    _new(
        "engine/exchange.py",
        "        if self._remaining == 0:\n",
        "        if self._remaining <= 1:\n",
        "the exchange starts one micro-batch too early",
        "tests/training/test_step.py",
        "tests/laws/test_laws.py",
    ),
    # state: resume is bit for bit
    _new(
        "state/train_state.py",
        '            self.scaler.load_state_dict(state.values["scaler"])\n',
        "            pass\n",
        "a resume forgets the loss scale of fp16",
        "tests/state/test_checkpoint_store.py",
    ),
    _new(
        "state/train_state.py",
        "for key, value in chain(slots.items(), plain.items()):",
        "for key, value in slots.items():",
        "a resume loses the optimizer's counters that are plain numbers",
        "tests/state/test_checkpoint_store.py",
    ),
    _new(
        "compression/feedback.py",
        "residual.copy_(saved).mul_(ranks / self.comm.size)",
        "residual.copy_(saved).mul_(self.comm.size / ranks)",
        "residuals do not keep their sum on another number of ranks",
        "tests/compression/test_contract.py",
    ),
    # state: a damaged checkpoint is refused
    _new(
        "state/manifest.py",
        "if (CHECKSUM in manifest or form == FORMAT) and manifest.get(CHECKSUM) != _own_checksum(content):",
        "if CHECKSUM in manifest and manifest.get(CHECKSUM) != _own_checksum(content):",
        "a manifest that lost its own checksum is accepted",
        "tests/state/test_damage.py",
        "tests/state/test_checkpoint_store.py",
    ),
    _new(
        "state/tensor_file.py",
        "    if hasher.hexdigest() != digest.checksum:\n",
        "    if len(hasher.hexdigest()) != len(digest.checksum):\n",
        "a file with other bytes of the same size is accepted",
        "tests/state/test_damage.py",
        "tests/state/test_checkpoint_store.py",
    ),
    _new(
        "state/shard_files.py",
        "        if found != self.others:\n",
        "        if found > self.others:\n",
        "a checkpoint that lacks tensors of another rank is kept",
        "tests/state/test_background_writer.py",
    ),
    # elastic: a killed rank costs no more than itself
    _new(
        "launch/rendezvous_store.py",
        '        if not number or number != self._round:\n            reply(GONE, b"")\n        elif key',
        "        if key",
        "a rank that is late asks the store of a closed round without end",
        "tests/launch/test_rendezvous_store.py",
    ),
    _new(
        "runtime/driver_client.py",
        "                if self._broken == self.round:\n",
        "                if self._broken > self.round:\n",
        "a rank that waits in a collective is not woken when another is lost",
        "tests/runtime/test_driver_client.py",
    ),
    _new(
        "training/elastic/worker_state.py",
        "                self.commits.restore(self.state)\n",
        "                pass\n",
        "survivors continue without what a lost rank's compression still owed",
        "tests/training/test_worker_state.py",
    ),
    _new(
        "state/snapshot.py",
        "if not synchronized and state.exchange is not None and (exchange := state.exchange.synchronized_state()):",
        "if synchronized and state.exchange is not None and (exchange := state.exchange.synchronized_state()):",
        "a commit holds one rank's residuals instead of the mean",
        "tests/state/test_commits.py",
    ),
    _new(
        "state/snapshot.py",
        "                self._unsure = Snapshot(), copies\n"
        "                self._unsure[0].capture(copied, state.progress.step)\n",
        "",
        "a rank forgets a commit that others may have ended when they notice the loss of a rank",
        "tests/state/test_buddies.py",
    ),
    _new(
        "training/loop/trainer.py",
        "                self.roll_back.end_round(self._state)\n",
        "",
        "a planned change of the ranks loses the steps since the last commit of a divided optimizer",
        "tests/laws/test_divided_rounds.py",
    ),
    _new(
        "comm/rounds.py",
        "            if self._client.is_broken():\n"
        '                raise HorovodInternalError("the round has lost a rank")\n'
        "            yield part\n",
        "            yield part\n"
        "            if self._client.is_broken():\n"
        '                raise HorovodInternalError("the round has lost a rank")\n',
        "a survivor computes another micro-batch before it gives the step up",
        "tests/comm/test_rounds.py",
    ),
    # equal to Horovod's optimizer
    _new(
        "torch/optimizer.py",
        "return (comm, 1.0 / comm.size, 1.0) if predivide == 1.0",
        "return (comm, 1.0, 1.0) if predivide == 1.0",
        "Average is a sum",
        DROP_IN,
    ),
    _new(
        "exchange/backward_passes.py",
        "self.last = number >= self.count",
        "self.last = number > self.count",
        "with several passes a step gradients travel after the last backward, not during it",
        "tests/exchange",
        DROP_IN,
    ),
    # compressors: each one's law
    _new(
        "compression/topk.py",
        "            self.work.index_fill_(0, chosen, 0)\n",
        "            self.work.index_fill_(0, chosen[1:], 0)\n",
        "top-k sends one element and keeps it as residual too",
        "tests/compression/test_contract.py",
    ),
    _new(
        "compression/int8.py",
        "                x.add_(total)\n",
        "                x.copy_(total)\n",
        "the owner of a share forgets its own error of the first encoding",
        "tests/compression/test_contract.py",
    ),
    _new(
        "compression/coding.py",
        "self._last.zero_()[0, ",
        "self._last[0, ",
        "the last block of a shard holds values of another shard",
        "tests/compression/test_coding.py",
    ),
    _new(
        "state/placeholder.py",
        "            _fill_another(func, *args, **named)\n",
        "            pass\n",
        "a rank that builds a model without memory draws other data than rank 0",
        "tests/state/test_placeholder.py",
    ),
    _new(
        "state/placeholder.py",
        'if func.namespace != "aten" or _writes_values(func, args, named):',
        'if func.namespace != "aten":',
        "data that is computed from parameters without values is wrong, without an error",
        "tests/state/test_placeholder.py",
    ),
    _new(
        "engine/fsdp_collectives.py",
        "                coding.decode(received, out.view(comm.size, -1))\n",
        "                kept = own.clone()\n"
        "                coding.decode(received, out.view(comm.size, -1))\n"
        "                own.copy_(kept)\n",
        "an owner computes with parameters that are not rounded, unlike the other ranks",
        "tests/engine/test_fsdp_collectives.py",
    ),
    _new(
        "exchange/coded_shard_bucket.py",
        "return self._residual if self._left is None else self._left",
        "return self._residual",
        "a pass of a step forgets what the one before it has not delivered",
        "tests/laws/test_sharded_compression.py",
    ),
    _new(
        "exchange/coded_shard_bucket.py",
        "            self._model(shard).copy_(self._exact(shard))\n",
        "            pass\n",
        "after a save, an owner's model has rounded parameters",
        "tests/laws/test_sharded_compression.py",
    ),
    _new(
        "compression/powersgd.py",
        "            self._own.copy_(self._second)\n"
        '            handle = self.comm.allreduce(self._second, name=f"{self.shape.name}/q")\n',
        '            handle = self.comm.allreduce(self._second, name=f"{self.shape.name}/q")\n'
        "            self._own.copy_(self._second)\n",
        "a rank's own factor is copied after the sum over ranks has begun",
        "tests/compression/test_powersgd.py",
        "tests/compression/test_contract.py",
        "tests/parallel/test_compression.py",
    ),
    # a straggler is named
    _new(
        "timeline/analysis/rank_steps.py",
        "released = np.roll(np.median(table.released_us, axis=0), 1)",
        "released = np.roll(np.median(table.released_us, axis=0), -1)",
        "the work of a step is counted from the sums of the step after it",
        "tests/timeline/analysis/test_rank_steps.py",
        "tests/timeline/analysis/test_stragglers.py",
    ),
    _new(
        "timeline/analysis/stragglers.py",
        "kept = [rank for rank in found if cost[rank].low > matters[rank]]",
        "kept = [rank for rank in found if cost[rank].value > matters[rank]]",
        "a rank is named whose cost may be noise",
        "tests/timeline/analysis/test_stragglers.py",
    ),
    _new(
        "observe/step_stamps.py",
        "self._gather(step - 1 - BLOCK, BLOCK, self._facts)",
        "self._gather(step - BLOCK, BLOCK, self._facts)",
        "a block of stamps begins one step too late",
        "tests/observe/test_step_stamps.py",
    ),
    # other rooms
    _new(
        "config/windows.py",
        "return self.last is not None and step > self.last",
        "return self.last is not None and step >= self.last",
        "the last step of a window is left out",
        "tests/config/test_windows.py",
    ),
    _new(
        "data/sample_order.py",
        "length, mix_seed(self.seed, source))",
        "length, self.seed)",
        "all sources have the same order",
        "tests/data/test_sample_order.py",
    ),
    _new(
        "task/token_loss.py",
        "tokens_BT[:, 1:].masked_fill(ends_BT, IGNORED)",
        "tokens_BT[:, 1:]",
        "the end of a document predicts the next document",
        "tests/task/test_documents.py",
    ),
    _new(
        "task/token_loss.py",
        "masked_fill(~counted_BT[:, 1:], IGNORED)",
        "masked_fill(~counted_BT[:, :-1], IGNORED)",
        "the tokens after those of the assistant have the loss",
        "tests/task/test_chat.py",
    ),
    _new(
        "task/token_file.py",
        "return index * self.seq_len\n",
        "return index * (self.seq_len + 1)\n",
        "one token between two windows is never predicted",
        "tests/task/test_windows.py",
    ),
    _new(
        "training/diagnostics/drift.py",
        "if any(n * squares != total * total for",
        "if any(n * squares < total * total for",
        "parameters that differ between ranks are never noticed",
        "tests/training/test_drift.py",
    ),
    _new(
        "timeline/reading/events.py",
        '{"bfloat16": 2}',
        '{"bfloat16": 4}',
        "the bytes of bfloat16 tensors are counted twice",
        "tests/timeline/test_read.py",
    ),
    _new(
        "timeline/report/compare.py",
        "low = math.hypot(b.value - b.low, a.high - a.value)",
        "low = b.value - b.low",
        "the interval of a difference ignores how uncertain the first run is",
        "tests/timeline/report/test_compare.py",
    ),
    _new(
        "cli/train.py",
        "return EXIT_OF_SIGNAL.get(result.reason, 0)",
        "return 0",
        "a run that a signal stopped exits with 0",
        "tests/cli/test_report_at_end.py",
        "tests/cli/test_train.py",
        "tests/cli/test_launchers.py",
    ),
    _new(
        "engine/hybrid.py",
        "if self._remaining or self._runs[module] != 1:",
        "if self._runs[module] != 1:",
        "groups of ranks exchange the gradients of each pass instead of their sum",
        "tests/engine/test_fsdp_engine.py",
    ),
    _new(
        "doctor/hosts/survey.py",
        "Offset((there - (sent + came) / 2) * 1e-9,",
        "Offset((there - sent) * 1e-9,",
        "the time of the question counts as an offset of the clocks",
        "tests/doctor/hosts/test_clock_offset.py",
    ),
    _new(
        "files.py",
        "        fsync(temporary)\n",
        "",
        "a file is renamed into place before it is on the disk",
        "tests/test_files.py",
    ),
    _new(
        "lease.py",
        "                return  # it must not take the lease back\n",
        "                pass\n",
        "a process that was taken for dead takes its lease back",
        "tests/test_lease.py",
    ),
    _new(
        "spans.py",
        "        if event[4] < first_step - 1:  # a device's durations of a step arrive with the next step\n",
        "        if event[4] < first_step:\n",
        "spans recorded behind those of an older step are lost",
        "tests/test_spans.py",
        "tests/observe/test_traces.py",
    ),
)
