"""Copies of pieces on other ranks, and a divided state put together from them after a loss of ranks."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.errors import LostStateError
from hvdtrain.state.pieces import DTYPES, Piece, PieceKey, Place, StateDict
from hvdtrain.state.sync import assemble_pieces, broadcast_state
from hvdtrain.state.train_state import TrainState

_CHUNK_BYTES = 16 << 20  # bytes that a rank sends at a time

_ALIGNMENT = 64

Offer = tuple[int, str, int, list[int]]
"""What a rank has of a commit: its step and identity, the number of all pieces, and the indices of those it has."""


def choose_buddies(hosts: Sequence[str], leaving: Sequence[bool]) -> list[int | None]:
    """Return for each rank the one that gets a copy of its pieces; None if there is no other. Pure.

    It is a rank that stays, on another host if there is one. The ranks of a host have different buddies, as far as
    possible; on a single host, each has the next rank.

    `leaving`: whether the rank is about to leave the job.
    """
    ranks = range(len(hosts))
    staying = [rank for rank in ranks if not leaving[rank]] or list(ranks)
    by_host: dict[str, list[int]] = {host: [] for host in hosts}
    for rank in staying:
        by_host[hosts[rank]].append(rank)
    names, met = list(by_host), dict.fromkeys(by_host, 0)
    found: list[int | None] = []
    for rank, host in enumerate(hosts):
        place, number = names.index(host), met[host]
        met[host] += 1
        away = [other for name in [*names[place + 1 :], *names[:place]] for other in by_host[name]]
        near = [other for other in staying if other > rank] + [other for other in staying if other < rank]
        found.append(away[number % len(away)] if away else near[0] if near else None)
    return found


@dataclass(frozen=True)
class Copies:
    """What a rank has of the pieces of a commit, besides its own."""

    identity: str  # of the commit, equal on all ranks
    every: list[PieceKey]  # keys of the pieces of all ranks, equal on all ranks
    pieces: list[Piece]  # of the ranks that this rank is the buddy of


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
        own = state.pieces(state.pieces_of(self._comm.rank))
        facts = [secrets.token_hex(8), self._host, self._is_leaving(), [piece.spec() for piece in own]]
        everyone = allgather_json(self._comm, facts, name="commit/pieces")
        identities, hosts, leaving, specs = zip(*everyone, strict=True)
        every = [(group, name, tuple(offset)) for rank in specs for group, name, _, _, _, offset in rank]
        return Copies(identities[0], every, self._send(own, choose_buddies(hosts, leaving), specs))

    def agree(self) -> None:
        """Return once all ranks have their copies. Collective: yes."""
        self._comm.allreduce(torch.zeros(1), name="commit/agreed").wait()

    def _send(self, own: list[Piece], buddies: list[int | None], specs: Sequence[list[Any]]) -> list[Piece]:
        comm = self._comm
        totals = [
            sum(padded(_nbytes(spec)) for spec in rank) if buddy is not None else 0
            for rank, buddy in zip(specs, buddies, strict=True)
        ]
        senders = [rank for rank, buddy in enumerate(buddies) if buddy == comm.rank]
        received = {rank: torch.empty(totals[rank], dtype=torch.uint8) for rank in senders}
        chunks = _chunks([piece.tensor for piece in own] if buddies[comm.rank] is not None else [])
        for begin in range(0, max(totals), _CHUNK_BYTES):
            chunk = next(chunks, torch.empty(0, dtype=torch.uint8))
            rows = [len(chunk) if rank == buddies[comm.rank] else 0 for rank in range(comm.size)]
            found = comm.alltoall(chunk, name="commit/copies", rows=rows).wait()
            for rank in senders:
                length = min(_CHUNK_BYTES, max(0, totals[rank] - begin))
                received[rank][begin : begin + length] = found[:length]
                found = found[length:]
            self._progress()
        return [piece for rank in senders for piece in _unpack(received[rank], specs[rank], rank)]


def _nbytes(spec: list[Any]) -> int:
    shape: list[int] = spec[2]
    return math.prod(shape) * DTYPES[spec[3]].itemsize


def padded(nbytes: int) -> int:
    """Return the bytes that a tensor takes in a buffer of several."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _chunks(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield the padded bytes of the tensors, in chunks on the CPU."""
    parts: list[Tensor] = []
    length = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        for part in (flat, torch.zeros(padded(len(flat)) - len(flat), dtype=torch.uint8)):
            while len(part):
                parts.append(part[: _CHUNK_BYTES - length])
                length, part = length + len(parts[-1]), part[len(parts[-1]) :]
                if length == _CHUNK_BYTES:
                    yield torch.cat(parts)
                    parts, length = [], 0
    if parts:
        yield torch.cat(parts)


def _unpack(buffer: Tensor, specs: list[Any], rank: int) -> Iterator[Piece]:
    for spec in specs:
        group, name, shape, dtype, whole, offset = spec
        tensor = buffer[: _nbytes(spec)].view(DTYPES[dtype]).reshape(shape)
        yield Piece(group, name, tensor, Place(tuple(whole), tuple(offset), (rank,)))
        buffer = buffer[padded(_nbytes(spec)) :]


@dataclass(frozen=True)
class HeldCommit:
    """What a rank has of a commit."""

    step: int  # optimizer steps done
    state: StateDict  # of this rank
    copies: Copies  # of other ranks

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
    """The commit to continue from."""

    step: int  # optimizer steps done
    identity: str  # of the commit
    root: int  # the lowest rank that has it
    holders: list[int]  # the lowest rank that has the piece, for each piece


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

    Errors: LostStateError: there is none.
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
