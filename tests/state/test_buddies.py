"""A commit of a divided state survives the loss of a rank, at whatever moment it is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hvdtrain.errors import LostStateError
from hvdtrain.state import transfer
from hvdtrain.state.buddies import Buddies, HeldCommit, choose_buddies, choose_commit, pool_state
from hvdtrain.state.pieces import Place, StateDict
from hvdtrain.state.snapshot import Commits
from hvdtrain.state.train_state import Owned, Progress, TrainState
from tests.support.thread_comm import Lost, ThreadComm, ThreadHandle, on_ranks

ROWS = 12


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=12))
def test_a_buddy_is_another_rank_that_stays_on_another_host_if_there_is_one(ranks: list[tuple[str, bool]]) -> None:
    hosts, leaving = zip(*ranks, strict=True)
    staying = [rank for rank in range(len(ranks)) if not leaving[rank] or all(leaving)]
    for rank, buddy in enumerate(choose_buddies(hosts, leaving)):
        away = [other for other in staying if hosts[other] != hosts[rank]]
        assert buddy in (away or [other for other in staying if other != rank] or [None])


@given(st.integers(1, 4), st.integers(1, 4))
def test_each_rank_of_equal_hosts_has_one_copy(hosts: int, ranks: int) -> None:
    names = [str(rank // ranks) for rank in range(hosts * ranks)]
    found = choose_buddies(names, [False] * len(names))
    assert sorted(found, key=str) == sorted(range(len(names)), key=str) if len(names) > 1 else found == [None]


class Divided:
    """An exchange with an owner for some rows, or elements, of a weight, and another one for its bias."""

    flat = False

    def __init__(self, comm: ThreadComm, model: nn.Linear) -> None:
        size, rank = comm.size, comm.rank
        count = 5 * ROWS if self.flat else ROWS
        bounds = [count * number // size for number in range(size + 1)]
        begin, end = bounds[rank], bounds[rank + 1]
        owners = tuple(number for number in range(size) if bounds[number] < bounds[number + 1])
        weight = model.weight.detach().reshape(-1) if self.flat else model.weight.detach()
        rows = nn.Parameter(weight[begin:end]) if begin < end else None
        bias = nn.Parameter(model.bias.detach()) if rank == size - 1 else None
        shape = ROWS, 5
        place = Place(shape, (0, 0), (rank,), shape, begin) if self.flat else Place(shape, (begin, 0), (rank,))
        self._owned = {
            "weight": Owned(rows, place if rows is not None else None, owners),
            "bias": Owned(bias, Place((ROWS,), (0,), (rank,)) if bias is not None else None, (size - 1,)),
        }
        self.parameters = [own.parameter for own in self._owned.values() if own.parameter is not None]

    def complete(self) -> None:
        pass

    def owned(self) -> dict[str, Owned]:
        return self._owned

    def synchronized_state(self) -> dict[str, Tensor]:
        return {}

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {}

    def load_state_dict(self, tensors: Any, values: Any) -> None:
        pass


def _state(comm: ThreadComm) -> TrainState:
    model = nn.Linear(5, ROWS)
    exchange: Any = Divided(comm, model)
    optimizer = torch.optim.Adam([{"params": exchange.parameters}])
    return TrainState(model, optimizer, torch.amp.GradScaler(enabled=False), Progress(), exchange)


def _reach(state: TrainState, step: int) -> None:
    """Let all be what follows from the step."""
    exchange: Any = state.exchange
    for own in exchange.owned().values():
        if own.parameter is not None:
            count, rows = own.parameter.numel(), len(own.parameter)
            begin = own.place.first or own.place.offset[0] * count // rows
            numbers = (torch.arange(float(count)) + begin).view_as(own.parameter)
            state.optimizer.state[own.parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": numbers + step,
                "exp_avg_sq": (numbers - step).double(),
                "count": step,
            }
    for parameter in state.model.parameters():
        parameter.data.fill_(step)
    state.progress.step = step


def _check(state: TrainState, step: int) -> None:
    wanted = {parameter: dict(slots) for parameter, slots in state.optimizer.state.items()}
    assert state.progress.step == step
    assert all(bool((p == step).all()) for p in state.model.parameters())
    _reach(state, step)
    assert wanted.keys() == state.optimizer.state.keys()
    for parameter, slots in state.optimizer.state.items():
        for slot, value in slots.items():
            found = wanted[parameter][slot]
            assert torch.equal(torch.as_tensor(found).double(), torch.as_tensor(value).double()), slot


class Unreliable(ThreadComm):
    """Loses its connections in some collective, before or after the other ranks have this rank's part."""

    def __init__(self, comm: ThreadComm, at: int, after: bool) -> None:
        super().__init__(comm._hub, comm.rank)
        self._left, self._after = at, after

    def _start(self, *arguments: Any) -> ThreadHandle:
        self._left -= 1
        if self._left < 0 and not self._after:
            raise Lost("cut")
        handle = super()._start(*arguments)
        if self._left < 0:
            raise Lost("cut")
        return handle


def _commit_twice(size: int, lost: set[int], at: int, after: bool) -> list[tuple[Commits, bool]]:
    """Commit step 1, then step 2, in whose collective `at` the ranks `lost` lose their connections."""

    def body(comm: ThreadComm) -> tuple[Commits, bool]:
        state, commits = _state(comm), Commits(60.0)
        _reach(state, 1)
        commits.commit(state, Buddies(comm, "host", lambda: False))
        comm.barrier()
        _reach(state, 2)
        failing = Unreliable(comm, at, after) if comm.rank in lost else comm
        try:
            commits.commit(state, Buddies(failing, "host", lambda: False))
        except Lost:
            comm._hub.break_off()
            _reach(state, 3)  # what is kept must not follow the state
            return commits, False
        return commits, True

    return on_ranks(size, body)


def _pool(all_commits: list[Commits]) -> set[int]:
    """Put the state together by these ranks, and one that has nothing; return the steps."""

    def body(comm: ThreadComm) -> int:
        state = _state(comm)
        _reach(state, 9)
        state.optimizer.state.clear()
        held = all_commits[comm.rank].held() if comm.rank < len(all_commits) else []
        choice = pool_state(state, held, comm)
        _check(state, choice.step)
        return choice.step

    return set(on_ranks(len(all_commits) + 1, body))


@pytest.mark.parametrize("flat", [False, True], ids=["rows", "elements"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_rank_may_be_lost(size: int, flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_WINDOW_BYTES", 100)
    monkeypatch.setattr(Divided, "flat", flat)
    done = _commit_twice(size, set(), 0, after=False)
    assert all(is_done for _, is_done in done)
    for lost in range(size):
        left = [commits for rank, (commits, _) in enumerate(done) if rank != lost] or [done[0][0]]
        assert _pool(left) == {2}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(10))
def test_a_commit_that_is_cut_off_leaves_a_whole_one(at: int, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is lost; ranks 0 and 2 may have ended the commit, or not, each by itself."""
    monkeypatch.setattr(transfer, "_WINDOW_BYTES", 300)
    for failing in ({1}, {0, 1}, {1, 2}):
        done = _commit_twice(3, failing, at, after)
        steps = _pool([commits for rank, (commits, _) in enumerate(done) if rank != 1])
        assert steps <= {1, 2}
        if any(is_done for rank, (_, is_done) in enumerate(done) if rank != 1):
            assert steps == {2}, "one that has ended it has no other"


def test_neighbours_that_are_lost_together_are_reported() -> None:
    done = _commit_twice(4, set(), 0, after=False)
    assert _pool([done[0][0], done[2][0]]) == {2}
    with pytest.raises(LostStateError, match="start the same command again") as caught:
        _pool([done[0][0], done[3][0]])
    assert caught.value.everywhere


def test_the_newest_whole_commit_counts() -> None:
    older, newer = (4, "older", 2, [0]), (5, "newer", 2, [1])
    assert choose_commit([[older], [newer]]) is None
    choice = choose_commit([[newer], [older, newer], [(4, "older", 2, [1])], [(4, "older", 2, [0, 1])]])
    assert choice is not None and (choice.step, choice.root, choice.holders) == (4, 1, [1, 2])
    both = choose_commit([[(0, "nothing", 0, [])], [(5, "newer", 2, [0, 1]), (4, "older", 1, [0])]])
    assert both is not None and (both.step, both.root) == (5, 1)


def test_a_rank_without_pieces_may_be_lost_with_its_buddy() -> None:
    """Of 14 ranks, two have no rows."""
    done = _commit_twice(ROWS + 2, set(), 0, after=False)
    empty = [rank for rank, (commits, _) in enumerate(done) if not commits.held()[0].pieces_of(rank)]
    assert empty
    assert _pool([commits for rank, (commits, _) in enumerate(done) if rank not in (empty[0], empty[0] + 1)]) == {2}


def test_equal_copies_on_other_ranks_count() -> None:
    """Ranks 0 and 2 have the same pieces, and so have 1 and 3. Each writes some. Two neighbours may be lost."""
    wholes = {f"t{number}": torch.full((2,), float(number)) for number in range(8)}

    def body(comm: ThreadComm) -> HeldCommit:
        names = [name for number, name in enumerate(wholes) if number % 2 == comm.rank % 2]
        ranks = (comm.rank % 2, comm.rank % 2 + 2)
        places = {("optimizer", name): Place((2,), (0,), ranks) for name in names}
        state = StateDict({"model": {}, "optimizer": {name: wholes[name] for name in names}}, {}, places)
        return HeldCommit(1, state, Buddies(comm, "host", lambda: False).copy(state))

    commits = on_ranks(4, body)
    for left in ((0, 1), (1, 2), (2, 3), (3, 0)):
        choice = choose_commit([[commits[rank].offer()] for rank in left])
        assert choice is not None
        found = [p.name for rank, holder in enumerate(choice.holders) for p in commits[left[holder]].pieces_of(rank)]
        assert sorted(found) == sorted(wholes)
