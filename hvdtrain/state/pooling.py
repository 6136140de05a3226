"""Put a divided state together after a loss of ranks, from what the others have in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.errors import LostStateError
from hvdtrain.state.buddies import Copies
from hvdtrain.state.pieces import Piece, PieceKey, StateDict
from hvdtrain.state.sync import assemble_pieces, broadcast_state
from hvdtrain.state.train_state import TrainState

Offer = tuple[int, str, int, list[int]]
"""What a rank has of a commit: its step and identity, the number of all pieces, and the indices of those it has."""


@dataclass(frozen=True)
class HeldCommit:
    """What a rank has of a commit.

    Attributes:
        step: optimizer steps done.
        state: of this rank.
        copies: of other ranks.
    """

    step: int
    state: StateDict
    copies: Copies

    def pieces(self) -> dict[PieceKey, Piece]:
        """Return all pieces in this rank's memory."""
        return {piece.key: piece for piece in (*self.copies.pieces, *self.state.pieces()) if not piece.is_nothing}

    def offer(self) -> Offer:
        """Return what this rank can contribute."""
        held = self.pieces()
        indices = [index for index, key in enumerate(self.copies.every) if key in held]
        return self.step, self.copies.identity, len(self.copies.every), indices


@dataclass(frozen=True)
class Choice:
    """The commit to continue from.

    Attributes:
        step: optimizer steps done.
        identity: of the commit.
        root: the lowest rank that has it.
        holders: the lowest rank that has the piece, for each piece.
    """

    step: int
    identity: str
    root: int
    holders: list[int]


def choose_commit(offers: Sequence[Sequence[Offer]]) -> Choice | None:
    """Return the newest commit that the ranks together have all pieces of; None if there is none. Pure.

    `offers` of each rank; of commits that were cut off, not all ranks have offers.
    """
    found: dict[tuple[int, str], tuple[int, int, dict[int, int]]] = {}
    for rank, own in enumerate(offers):
        for step, identity, count, indices in own:
            _, _, holders = found.setdefault((step, identity), (rank, count, {}))
            for index in indices:
                holders.setdefault(index, rank)
    for step, identity in sorted(found, reverse=True):
        root, count, holders = found[step, identity]
        if len(holders) == count:
            return Choice(step, identity, root, [holders[index] for index in range(count)])
    return None


def pool_state(
    state: TrainState, commits: Sequence[HeldCommit], comm: Comm, progress: Callable[[], None] = lambda: None
) -> Choice:
    """Load the newest whole commit into the state of every rank; return which one it is. Collective: yes.

    `commits`: what this rank has. All pieces pass through the memory of one rank, as in a resume from a checkpoint.

    Errors:
        LostStateError: there is none.
    """
    offers = allgather_json(comm, [commit.offer() for commit in commits], name="state/commits")
    choice = choose_commit(offers)
    if choice is None:
        newest = max(offer[0] for own in offers for offer in own)
        raise LostStateError(
            "ranks were lost together with the ranks that had the copies of their part of the optimizer's state",
            expected="each part in the memory of a remaining rank",
            found=f"no complete state; the newest incomplete one is of step {newest}",
            next_step="start the same command again: it resumes from the newest checkpoint;"
            " hvdtrain launch --restarts N does so by itself",
        )
    mine = next((commit for commit in commits if commit.copies.identity == choice.identity), None)
    own: list[Piece] = []
    if mine is not None:
        held = mine.pieces()
        keys = [key for key, rank in zip(mine.copies.every, choice.holders, strict=True) if rank == comm.rank]
        own = [held[key] for key in keys]
    whole = assemble_pieces(mine.state if mine is not None else StateDict({}, {}), own, comm, choice.root)
    source = whole if comm.rank == choice.root else None
    if source is not None:
        state.load_state_dict(source)
    broadcast_state(state, comm, progress, root=choice.root, source=source)
    return choice
