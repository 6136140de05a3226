"""Roll backs: return to the last commit after a batch has spoiled training, and skip that batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import on_rank_0
from hvdtrain.errors import NonFiniteError
from hvdtrain.state.buddies import Buddies
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.snapshot import Commits
from hvdtrain.state.train_state import Progress, TrainState

MAX_ROLL_BACKS = 3  # largest number of roll backs within `STRETCH` steps

STRETCH = 1000

Policy = Literal["never", "spikes", "non_finite", "both"]


@dataclass(frozen=True)
class SpoiledSteps:
    """Steps that have spoiled training, equal on all ranks."""

    kind: Literal["spikes", "non_finite"]  # the loss jumped; or the limit of non-finite steps in a row was reached
    first_step: int  # the first of the steps; the last is the newest step
    positions: list[int]  # range [begin, end) of their samples
    error: NonFiniteError | None = None  # ends the run if it is not rolled back; None if training may continue


@dataclass
class RollBack:
    """The roll back policy of a run, and its commits.

    After a roll back, the steps since the commit are done again. Other samples replace the spoiled ones.

    `needs_commits`: whether losing a rank loses state, so that commits are needed under every policy; equal on all
    ranks.
    """

    policy: Policy  # which spoiled steps are rolled back
    commits: Commits
    comm: Comm  # rank 0's clock decides when commits are due
    store: CheckpointStore | None  # on rank 0; None elsewhere
    event: Callable[[dict[str, Any]], None]
    warn: Callable[[str], None]
    needs_commits: Callable[[], bool] = lambda: False
    buddies: Buddies | None = None  # of the ranks, where losing one loses pieces of the state; else None

    def values(self) -> list[int]:
        """Return 1 if the next step ends with a commit, by rank 0's clock; the step sums it over ranks."""
        return [int(self.comm.rank == 0 and self._takes_commits() and self.commits.due())]

    def _takes_commits(self) -> bool:
        return self.policy != "never" or self.needs_commits()

    def begin(self, state: TrainState, *, synchronized: bool = False) -> None:
        """Commit at the start of a round, so that all ranks have the same commit. Collective: yes."""
        if self._takes_commits():
            self.commits.commit(state, self.buddies, synchronized=synchronized)

    def end_round(self, state: TrainState) -> None:
        """Commit before ranks leave, if they take pieces of the state with them. Collective: yes.

        The exchange's state is synchronized.
        """
        if self.buddies is not None:
            self.begin(state, synchronized=True)

    def commit(self, state: TrainState) -> None:
        """Commit, unless the last step was skipped: such a state leads nowhere. Collective: yes.

        Also called for every checkpoint, so that none is newer than the newest commit.
        """
        if not state.progress.skipped_in_row:
            self.begin(state)

    def roll_back(self, spoiled: SpoiledSteps, state: TrainState, wait_saved: Callable[[], None]) -> bool:
        """Restore `state` from the last commit and leave out the spoiled samples, if allowed. Collective: yes.

        `spoiled` is equal on all ranks. `wait_saved` waits for the checkpoint that is being written; its step may be
        one that is undone. Returns False if the policy does not allow a roll back.

        Errors: NonFiniteError: that of `spoiled`, if a roll back is not allowed.
        """
        if not self._is_allowed(spoiled, state.progress):
            if spoiled.error is not None:
                raise spoiled.error
            return False
        before, step = state.progress, state.progress.step
        self.commits.restore(state)
        # Before any collective: if a rank is lost in one, all others have rolled back.
        state.progress.left_out = merge_ranges([*before.left_out, spoiled.positions])
        state.progress.rolled_back = [*before.rolled_back, step]
        begin, end = spoiled.positions
        facts = {"from_step": step, "to_step": state.progress.step, "positions": [begin, end], "reason": spoiled.kind}
        self.event({"event": "rolled_back", "at_step": step, **facts})
        self.warn(
            f"training rolls back from step {step} to step {state.progress.step}, and leaves out the samples at"
            f" positions {begin} to {end - 1} ({'the loss jumped' if spoiled.kind == 'spikes' else 'not finite'})"
        )
        wait_saved()

        def set_aside() -> None:  # newer checkpoints: there are some only among skipped steps, which have no commits
            assert self.store is not None
            older = [saved for saved in self.store.list() if saved.step <= state.progress.step]
            self.store.set_aside_after(max(older, default=None))

        on_rank_0(self.comm, set_aside, name="set_aside")
        return True

    def _is_allowed(self, spoiled: SpoiledSteps, progress: Progress) -> bool:
        if self.policy not in ("both", spoiled.kind) or not 0 <= self.commits.step < spoiled.first_step:
            return False
        recent = [step for step in progress.rolled_back if step > progress.step - STRETCH]
        if len(recent) < MAX_ROLL_BACKS:
            return True
        self.warn(f"no roll back at step {progress.step}: there were {MAX_ROLL_BACKS} within {STRETCH} steps")
        return False


def merge_ranges(ranges: Sequence[list[int]]) -> list[list[int]]:
    """Sort ranges [begin, end), and join those that touch or overlap."""
    merged: list[list[int]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return merged


def first_position(progress: Progress, samples: int) -> int:
    """Return the position of the first of the last `samples` samples before `progress`, without those left out."""
    position, remaining = progress.position, samples
    for begin, end in reversed(progress.left_out):
        if end <= position:
            if position - end >= remaining:
                break
            remaining -= position - end
            position = begin
    return position - remaining
