"""Copies of pieces on other ranks, and a divided state put together from them after a loss of ranks."""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, alltoall_json
from hvdtrain.errors import LostStateError
from hvdtrain.state.pieces import DTYPES, Piece, Place, StateDict
from hvdtrain.state.sync import broadcast_state
from hvdtrain.state.train_state import TrainState
from hvdtrain.state.transfer import fetch, send_packed

Offer = tuple[int, str, int, list[int]]
"""What a rank has of a commit: its step, identity and number of ranks, and the ranks that it has all pieces of."""


def choose_buddies(hosts: Sequence[str], leaving: Sequence[bool]) -> list[int | None]:
    """Return for each rank the one that gets a copy of its pieces; None if there is no other. Pure.

    It is a rank that stays (not `leaving` the job), on another host if there is one. The ranks of a host have different
    buddies, as far as possible; on a single host, each has the next rank.
    """
    ranks = range(len(hosts))
    staying = [rank for rank in ranks if not leaving[rank]] or list(ranks)
    by_host: dict[str, list[int]] = {host: [] for host in hosts}
    for rank in staying:
        by_host[hosts[rank]].append(rank)
    order, met = [rank for of_host in by_host.values() for rank in of_host], Counter[str]()
    ends = dict(zip(by_host, accumulate(map(len, by_host.values())), strict=True))
    found: list[int | None] = []
    for rank, host in enumerate(hosts):
        if away := len(order) - len(by_host[host]):  # in a circle, those of the hosts after this one
            found.append(order[(ends[host] + met[host] % away) % len(order)])
        else:
            near = staying[bisect_right(staying, rank) % len(staying)]
            found.append(near if near != rank else None)
        met[host] += 1
    return found


@dataclass(frozen=True)
class Copies:
    """What a rank has of the pieces of a commit, besides its own."""

    identity: str  # of the commit, equal on all ranks
    counts: Sequence[int]  # of the pieces that each rank writes
    pieces: dict[int, list[Piece]]  # of the ranks that this rank is the buddy of


class Buddies:
    """The ranks of a round, which keep copies of each other's pieces in the memory of their hosts.

    `host`: name of this rank's host. `is_leaving`: says whether this rank is about to leave the job. `progress`: called
    for each chunk.
    """

    def __init__(
        self, comm: Comm, host: str, is_leaving: Callable[[], bool], progress: Callable[[], None] = lambda: None
    ) -> None:
        self._comm, self._host, self._is_leaving, self._progress = comm, host, is_leaving, progress

    def copy(self, state: StateDict) -> Copies:
        """Send this rank's pieces to its buddy, and return what others have sent. Collective: yes."""
        own = state.pieces_of(self._comm.rank)
        facts = [secrets.token_hex(8), self._host, self._is_leaving(), len(own)]
        identities, hosts, leaving, counts = zip(*allgather_json(self._comm, facts, name="commit/facts"), strict=True)
        return Copies(identities[0], counts, self._send(own, choose_buddies(hosts, leaving)))

    def agree(self) -> None:
        """Return once all ranks have their copies. Collective: yes."""
        self._comm.allreduce(torch.zeros(1), name="commit/agreed").wait()

    def _send(self, own: list[Piece], buddies: list[int | None]) -> dict[int, list[Piece]]:
        comm, own = self._comm, [box for piece in own for box in piece.boxes()]
        given = [own if rank == buddies[comm.rank] else [] for rank in range(comm.size)]
        specs = alltoall_json(comm, [[piece.spec() for piece in pieces] for pieces in given], name="commit/pieces")
        kinds = [[(shape, DTYPES[dtype]) for _, _, shape, dtype, _, _ in of_rank] for of_rank in specs]
        outgoing = [[piece.tensor for piece in pieces] for pieces in given]
        found: dict[int, list[Piece]] = {rank: [] for rank, buddy in enumerate(buddies) if buddy == comm.rank}
        for rank, tensors in enumerate(send_packed(outgoing, kinds, comm, self._progress, name="commit/copies")):
            for (group, name, _, _, whole, offset), tensor in zip(specs[rank], tensors, strict=True):
                found[rank].append(Piece(group, name, tensor, Place(tuple(whole), tuple(offset), (rank,))))
        return found


@dataclass(frozen=True)
class HeldCommit:
    """What a rank has of a commit."""

    step: int  # optimizer steps done
    state: StateDict  # of this rank
    copies: Copies  # of other ranks

    def offer(self) -> Offer:
        """Return what this rank can contribute."""
        counts = self.copies.counts
        held = Counter(piece.writer for piece in self.state.pieces() if not piece.is_nothing)  # copies of others, too
        ranks = [rank for rank, n in enumerate(counts) if rank in self.copies.pieces or held[rank] == n]
        return self.step, self.copies.identity, len(counts), ranks

    def pieces_of(self, rank: int) -> list[Piece]:
        """Return the pieces that a rank of the commit's round writes, which are in this rank's memory."""
        return self.copies.pieces.get(rank) or self.state.pieces_of(rank)


@dataclass(frozen=True)
class Choice:
    """The commit to continue from."""

    step: int  # optimizer steps done
    identity: str  # of the commit
    root: int  # the lowest rank that has it
    holders: list[int]  # the lowest rank that has its pieces, for each rank of the commit's round


def choose_commit(offers: Sequence[Sequence[Offer]]) -> Choice | None:
    """Return the newest commit that the ranks together have all pieces of; None if there is none. Pure.

    `offers` of each rank; of commits that were cut off, not all ranks have offers.
    """
    found: dict[tuple[int, str], tuple[int, int, dict[int, int]]] = {}
    for rank, own in enumerate(offers):
        for step, identity, count, ranks in own:
            _, _, holders = found.setdefault((step, identity), (rank, count, {}))
            for each in ranks:
                holders.setdefault(each, rank)
    for step, identity in sorted(found, reverse=True):
        root, count, holders = found[step, identity]
        if len(holders) == count:
            return Choice(step, identity, root, [holders[each] for each in range(count)])
    return None


def pool_state(
    state: TrainState, commits: Sequence[HeldCommit], comm: Comm, progress: Callable[[], None] = lambda: None
) -> Choice:
    """Load the newest whole commit into the state of every rank; return which one it is. Collective: yes.

    `commits`: what this rank has. Each rank gets only the pieces that it needs, from the ranks that have them.

    Errors: LostStateError: there is none.
    """
    offers = allgather_json(comm, [commit.offer() for commit in commits], name="state/commits")
    choice = choose_commit(offers)
    if choice is None:
        newest = max((offer[0] for own in offers for offer in own), default=0)
        raise LostStateError(
            "ranks were lost together with the ranks that had the copies of their part of the optimizer's state",
            expected="each part in the memory of a remaining rank",
            found=f"no complete state; the newest incomplete one is of step {newest}",
            next_step="start the same command again: it resumes from the newest checkpoint;"
            " hvdtrain launch --restarts N does so by itself",
        )
    mine = next((commit for commit in commits if commit.copies.identity == choice.identity), None)
    sent = [rank for rank, holder in enumerate(choice.holders) if holder == comm.rank]
    own = [piece for rank in sent for piece in mine.pieces_of(rank)] if mine is not None else []
    parts = fetch(own, state.held_part, comm, progress)
    source = None
    if mine is not None and comm.rank == choice.root:
        source = mine.state.with_parts(parts)
        state.load_state_dict(source)
    broadcast_state(state, comm, progress, root=choice.root, source=source, parts=parts)
    return choice
