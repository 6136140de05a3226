"""Going back to the last commit when a batch has spoiled training, and on past that batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import on_rank_0
from hvdtrain.errors import NonFiniteError
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.commits import Commits
from hvdtrain.state.train_state import Progress, TrainState

MOST = 3
"""Roll backs within `STRETCH` steps."""

STRETCH = 1000

Policy = Literal["never", "spikes", "non_finite", "both"]


@dataclass(frozen=True)
class SpoiledSteps:
    """Steps that have spoiled training, equal on all ranks.

    Attributes:
        kind: the loss jumped in a step, or so many steps in a row were not finite that the run would end.
        first_step: the first of them; the last is the newest.
        positions: of their samples: begin, and one behind the last.
        error: that ends the run; None where it would go on.
    """

    kind: Literal["spikes", "non_finite"]
    first_step: int
    positions: list[int]
    error: NonFiniteError | None = None


@dataclass
class RollBack:
    """The policy of a run, and its commits.

    What was done after the commit is done again, from the same samples; of those of the offence others take the place.

    Attributes:
        policy: what it is for.
        commits: of this rank.
        comm: the ranks; rank 0's clock says when commits are due.
        store: on rank 0; None elsewhere.
        event: takes what the journal holds of an event.
        warn: takes a line for a person.
        loses: whether something of the state is lost with a rank, so that commits are needed in any case; equal on all
            ranks.
    """

    policy: Policy
    commits: Commits
    comm: Comm
    store: CheckpointStore | None
    event: Callable[[dict[str, Any]], None]
    warn: Callable[[str], None]
    loses: Callable[[], bool] = lambda: False

    def notices(self) -> list[int]:
        """A number that the step that comes sums over ranks: whether it is to end with a commit."""
        return [int(self.comm.rank == 0 and self._wanted() and self.commits.due())]

    def _wanted(self) -> bool:
        return self.policy != "never" or self.loses()

    def begin(self, state: TrainState, *, settled: bool = False) -> None:
        """Take the first commit of a round, amid whatever: all ranks have the same one then. Collective: yes."""
        if self._wanted():
            self.commits.commit(state, synchronized=settled)

    def commit(self, state: TrainState, *, settled: bool = False) -> None:
        """Take a commit, but not amid steps that are not finite, from which there is no way on. Collective: yes.

        Called for every checkpoint too, after the exchange's state was synchronized: so no checkpoint is newer than the
        newest commit.
        """
        if not state.progress.skipped_in_row:
            self.begin(state, settled=settled)

    def go_past(self, offence: SpoiledSteps, state: TrainState, saved: Callable[[], None]) -> bool:
        """Take `state` back, to pass over the samples of `offence`; False where that is not to be. Collective: yes.

        Args:
            offence: equal on all ranks.
            state: changed.
            saved: waits for the checkpoint that is being written, which may be of a step that is taken back.

        Errors:
            NonFiniteError: that of the offence, where it is not to be.
        """
        if not self._may(offence, state.progress):
            if offence.error is not None:
                raise offence.error
            return False
        before, step = state.progress, state.progress.step
        self.commits.restore(state)
        # Before anything that another rank takes part in: should one be lost, all others have gone back.
        state.progress.left_out = merged([*before.left_out, offence.positions])
        state.progress.rolled_back = [*before.rolled_back, step]
        self._tell(offence, step, state.progress.step)
        saved()
        on_rank_0(self.comm, partial(self._set_aside_after, state.progress.step), name="set_aside")
        return True

    def _may(self, offence: SpoiledSteps, progress: Progress) -> bool:
        if self.policy not in ("both", offence.kind) or not 0 <= self.commits.step < offence.first_step:
            return False
        recent = [step for step in progress.rolled_back if step > progress.step - STRETCH]
        if len(recent) < MOST:
            return True
        self.warn(f"no roll back at step {progress.step}: there were {MOST} within {STRETCH} steps")
        return False

    def _set_aside_after(self, step: int) -> None:
        """Checkpoints of steps that are taken back: only amid steps that are not finite is there no commit as new."""
        assert self.store is not None
        self.store.set_aside_after(max((saved for saved in self.store.list() if saved.step <= step), default=None))

    def _tell(self, offence: SpoiledSteps, step: int, to: int) -> None:
        facts = {"from_step": step, "to_step": to, "positions": offence.positions, "reason": offence.kind}
        self.event({"event": "rolled_back", "at_step": step, **facts})
        begin, end = offence.positions
        why = "the loss jumped" if offence.kind == "spikes" else "not finite"
        self.warn(
            f"training goes back from step {step} to step {to}, and leaves out the samples at positions {begin} to"
            f" {end - 1} ({why})"
        )


def merged(ranges: Sequence[list[int]]) -> list[list[int]]:
    """Ranges [begin, end) in order, those that touch or overlap as one."""
    found: list[list[int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found


def began_at(progress: Progress, global_batch: int) -> int:
    """The first position of the step that `progress` has just counted, which began behind what is left out."""
    position, taken = progress.position, global_batch
    for begin, end in reversed(progress.left_out):
        if end <= position:
            if position - end >= taken:
                break
            taken -= position - end
            position = begin
    return position - taken
