"""Check the work of each rank by another one: now and then it repeats a micro-batch, and both gradients must be equal.

Sums in one order make this possible: a micro-batch has the same gradient on every rank, in each bit. What a flipped bit
or a broken core changes in a forward or backward pass, or in a copy of the parameters, is found before the update. What
it changes in an exchange or in the optimizer is not; `drift` sees that where copies of parameters then differ.

Library rejected: torchtitan repeats a step on the same ranks, which does not tell which of them is wrong.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from hvdtrain.comm.objects import allgather_json
from hvdtrain.data.iterable import is_iterable
from hvdtrain.data.loader import Stream, fetch_step, seed_forward
from hvdtrain.errors import ConfigError, DriftError, listed
from hvdtrain.exchange.in_order import as_leaf
from hvdtrain.observe.monitor import gpu_identity
from hvdtrain.training.diagnostics.drift import digest, replicated
from hvdtrain.training.diagnostics.step_replay import preserved_state
from hvdtrain.training.loop.forward import checked_loss, to_device
from hvdtrain.training.loop.step import Stepper
from hvdtrain.training.loop.step_part import StepPart
from hvdtrain.training.loop.update import StepResult
from hvdtrain.training.round import Round

Batches = Iterable[tuple[Callable[[], None], Any]]
_Hashes = dict[str, Tensor]
_OWN, _OTHER = range(2)


class ContradictionError(Exception):
    """Two ranks have different gradients of a micro-batch; raised on every rank, before the update."""


class SecondRank(StepPart):
    """In one step of `every`, each rank repeats a micro-batch of the next rank, and all compare.

    So it is in the first step of a round. If two differ, a third rank repeats it, too. Of two ranks, the one is wrong
    that contradicts itself. Then all repeat the step. Before such a step, a rank gets the parameters of the others
    where all others differ from its own.

    Args:
        host: of this rank.
        tell: called with the facts of an event, and what to show, on every rank.
        report: called with the number of a wrong rank, on one of the others.
    """

    def __init__(
        self, every: int, host: str, tell: Callable[[dict[str, Any], str], None], report: Callable[[int], None]
    ) -> None:
        self._every, self._host, self._tell, self._report = every, host, tell, report
        self._is_first = True
        self._stepper: Stepper
        self._stream: Stream
        self._due = False
        self._number = 0  # of the pass that is compared, on each rank that has as many

    def checked(
        self, run: Callable[[Batches], StepResult], batches: Batches, stepper: Stepper, stream: Stream, position: int
    ) -> StepResult:
        """Run the step that starts at `position`, checked if that is its turn; return its result. Collective: yes.

        Errors: DriftError: a rank is wrong, and nobody can tell which one; or a rank is wrong again. On every rank.
        """
        step = stepper.spans.step
        is_due, self._is_first = self._is_first or step % self._every == 0, False
        if not is_due or stepper.comm.size == 1:
            return run(batches)
        self._stepper, self._stream, self._due = stepper, stream, True
        try:
            stepper.engine.complete()
            self._compare_parameters()
            most = max(map(len, stream.positions(position).shares))
            self._number = step // self._every % most
            self._other = self._repeat(+1, position)
            try:
                return run(batches)
            except ContradictionError:
                wrong = self._find_wrong(position)
            self._compare_parameters(wrong)
            batches = [*self._drawn(stream, position)]
            self._other = self._repeat(+1, position)
            try:
                return run(batches)
            except ContradictionError:
                raise DriftError(
                    f"rank {wrong} computed a wrong gradient in step {step}, and a rank did so again",
                    expected="equal gradients of a micro-batch on two ranks",
                    next_step="take its host out of the job, and resume from the last checkpoint",
                ) from None
        finally:
            self._due = False

    def begin(self, count: int) -> None:
        """Note the gradients of one of this rank's passes."""
        if self._due:
            self._own = self._none()
            leaves = self._stepper.engine.sums.leaves
            assert leaves is not None
            leaves.watch(self._number, partial(self._note, self._own))

    def wait(self) -> None:
        """Compare. Collective: yes. Errors: ContradictionError: two ranks differ; on every rank."""
        if self._due:
            self._hashes = self._gathered(self._own, self._other)
            if self._contradictions():
                raise ContradictionError

    def _contradictions(self) -> list[int]:
        """Return the ranks with a gradient that the rank before has otherwise."""
        own, other = self._hashes[:, _OWN], self._hashes[:, _OTHER].roll(1, dims=0)
        return (own != other).any(dim=1).nonzero().view(-1).tolist()

    def _find_wrong(self, position: int) -> int:
        """Return the rank with a wrong gradient. Collective: yes. Errors: DriftError: it is not known."""
        comm, before, owners = self._stepper.comm, self._hashes, self._contradictions()
        # As its own second rank, and as the third one for the rank before.
        again = self._gathered(self._repeat(0, position), self._repeat(-1, position))
        if comm.size == 2:
            wrong = [rank for rank in range(2) if not torch.equal(again[rank], before[rank])]
        else:
            wrong = []
            for owner in owners:
                third = again[(owner + 1) % comm.size, _OTHER]
                for rank, found in ((owner, before[owner, _OWN]), (owner - 1, before[owner - 1, _OTHER])):
                    if not torch.equal(third, found):
                        wrong.append(rank % comm.size)
        first = (before[owners[0], _OWN] != before[owners[0] - 1, _OTHER]).nonzero()[0, 0]
        suspects = {rank % comm.size for owner in owners for rank in (owner - 1, owner)}
        return self._name(set(wrong), suspects, "gradient", [*self._trained()][first])

    def _compare_parameters(self, known: int | None = None) -> None:
        """Replace the parameters of a rank that differ from those of all others. Collective: yes. Errors: DriftError.

        `known`: the rank that has been found wrong.
        """
        size, tensors = self._stepper.comm.size, replicated(self._stepper.model)
        hashes = self._gathered({name: digest(tensor) for name, tensor in tensors.items()}).squeeze(1)
        ((usual, count),) = Counter(map(tuple, hashes.tolist())).most_common(1)
        others = (hashes != hashes.new_tensor(usual)).any(dim=1).nonzero().view(-1).tolist()
        if not others:
            return
        by_most = set(others) if 2 * count > size else set()
        wrong = by_most if known is None or size > 2 else {known}
        different = (hashes != hashes[0]).any(dim=0).nonzero().view(-1).tolist()
        names = [[*tensors][number] for number in different]
        self._name(wrong, by_most or set(range(size)), "parameters", names[0], names)

    def _name(self, wrong: set[int], suspects: set[int], what: str, tensor: str, unequal: Sequence[str] = ()) -> int:
        """Report a wrong rank and return it. Collective: yes. Errors: DriftError: there is not exactly one."""
        step, comm, model = self._stepper.spans.step, self._stepper.comm, self._stepper.model
        places = allgather_json(comm, self._place(), name="second_rank/places")
        facts = {"event": "wrong_rank", "at_step": step, "what": what, "tensor": tensor}
        if len(wrong) != 1:
            self._tell({**facts, "rank": None, "suspects": sorted(suspects)}, "")
            raise DriftError(
                f"ranks {listed(sorted(suspects), 8)} have different {what} in step {step}, first of {tensor}, and "
                "which of them is wrong is not known",
                expected="equal bits, or a third rank that agrees with one of them",
                next_step="the update of this step was not made: resume from the last checkpoint, on other hosts if"
                " this comes again; three ranks or more can tell which one is wrong",
            )
        (rank,) = wrong
        every, root = replicated(model), int(rank == 0)
        for name in unequal:
            comm.broadcast(every[name].data, name=f"second_rank/{name}", root=root).wait()
        done = f"its copy is that of rank {root} now" if unequal else "it was not used: the step is repeated"
        if comm.rank == root:
            self._report(rank)
        place = ", ".join(f"{kind} {value}" for kind, value in places[rank].items())
        self._tell(
            {**facts, "rank": rank, **places[rank]},
            f"step {step}: the {what} of {tensor} was wrong on rank {rank} ({place}); {done}",
        )
        return rank

    def _place(self) -> dict[str, Any]:
        gpu = gpu_identity(self._stepper.device)
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        return {"host": self._host, "gpu": gpu.uuid} if gpu is not None else {"host": self._host, "cores": cores}

    def _repeat(self, distance: int, position: int) -> _Hashes:
        """Return the hashes of the gradients that this rank has of the pass of the rank at a distance."""
        stepper, found = self._stepper, self._none()
        stream = replace(self._stream, rank=(self._stream.rank + distance) % stepper.comm.size)
        if self._number >= len(stream.step(position)):
            return found
        with stepper.spans("replay"), preserved_state(stepper.model, stepper.engine, stepper.device):
            seed, batch = next(self._drawn(stream, position, self._number))
            batch = to_device(batch, stepper.device)
            with stepper.precision.weights(), ExitStack() as around:
                for part in stepper.parts:
                    around.enter_context(part.around_repeated())
                seed()
                with stepper.precision.autocast():
                    loss, _ = checked_loss(stepper.task, stepper.model, batch)
                torch.autograd.backward(stepper.precision.scaler.scale(loss / stepper.nominal))
            for name, parameter in self._trained().items():
                if parameter.grad is not None:
                    self._note(found, name, as_leaf(parameter.grad))
        return found

    def _drawn(self, stream: Stream, position: int, first: int = 0) -> Iterator[tuple[Callable[[], None], Any]]:
        """Yield the micro-batches of a step from the `first` on, each with the function that seeds its forward pass."""
        collate = self._stepper.task.collate or default_collate
        for where, _, samples in fetch_step(stream, position, first):
            yield partial(seed_forward, stream.seed, where.start), collate(samples)

    def _trained(self) -> dict[str, Tensor]:
        return {name: p for name, p in self._stepper.model.named_parameters() if p.requires_grad}

    def _none(self) -> _Hashes:
        return dict.fromkeys(self._trained(), torch.zeros((), dtype=torch.int64, device=self._stepper.device))

    def _note(self, hashes: _Hashes, name: str, gradient: Tensor) -> None:
        hashes[name] = digest(gradient)

    def _gathered(self, *hashes: _Hashes) -> Tensor:
        """Return hashes of all ranks, by rank, kind and parameter. Collective: yes."""
        mine = torch.stack([torch.stack([*each.values()]) for each in hashes]).cpu()
        return self._stepper.comm.allgather(mine.unsqueeze(0), name="second_rank/hashes").wait()


def make_second_rank(current: Round) -> SecondRank | None:
    """Return what checks the ranks of a round; None if they are not to be checked. Errors: ConfigError."""
    train, recorder = current.run.config.train, current.recorder
    if not train.verify_every:
        return None
    data = current.worker.task.train_data
    is_read_once = is_iterable(data) and not hasattr(data, "by_position")
    if is_read_once or train.balance_loss:
        what = "an iterable data set: a rank cannot draw a micro-batch of another one"
        raise ConfigError(
            f"--train.verify_every does not support {what if is_read_once else '--train.balance_loss'}",
            expected="a data set with an index" if is_read_once else "--train.balance_loss 0",
            next_step="--train.verify_every 0",
        )

    def tell(facts: dict[str, Any], text: str) -> None:
        recorder.event(facts)
        if text:
            recorder.warn(text)

    return SecondRank(train.verify_every, current.worker.info.host, tell, current.rounds.report_wrong)
