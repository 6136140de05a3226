"""What every compressor must do: one body a clause, run by each rank with each line of the table."""

from __future__ import annotations

import math
from inspect import isfunction

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.compression.base import commit_all
from hvdtrain.compression.sizes import Bucket
from hvdtrain.compression.table import TABLE, Compression, parse
from tests.support.compression import (
    DTYPES,
    SHAPES,
    Counting,
    bucket,
    check_law,
    drive,
    exchange,
    gradients,
    parts,
    residual_sum,
    step,
)

AS_USED = [*map(parse, TABLE), parse("fp16").where_halves_are_slow()]


def named(one: Compression) -> str:
    return f"{one}{'' if one.halves else ' by owners'}"


def law(comm: Comm, compression: Compression) -> None:
    for dtype, turned in [*((dtype, False) for dtype in DTYPES), (torch.float32, True)]:
        compressor = compression.load()(bucket(SHAPES, dtype, turned=turned), comm)
        for number in range(3):
            values: list[Tensor | None] = [*gradients(compressor.shape, 10 * comm.rank + number)]
            values[1 + comm.rank] = None
            out = check_law(compressor, compression.kind, values, weight=0.37)
            assert out.dtype == dtype
            assert out.count_nonzero() > 0


def buckets_without_elements_and_of_one(comm: Comm, compression: Compression) -> None:
    for shapes in ((), ((0,),), ((),), ((1, 1), (0, 4))):
        compressor = compression.load()(bucket(shapes), comm)
        for number in range(2):
            check_law(compressor, compression.kind, gradients(compressor.shape, comm.rank + number))
        compressor.synchronize_state()


def equal_bits_on_all_ranks(comm: Comm, compression: Compression) -> None:
    compressor = compression.load()(bucket(SHAPES), comm)
    for number in range(3):
        out = step(compressor, gradients(compressor.shape, 10 * comm.rank + number))
        everyone = comm.allgather(out.view(torch.int32), name="test/bits").wait().view(comm.size, -1)
        assert all(torch.equal(everyone[0], other) for other in everyone)


def sums_may_take_the_place_of_what_was_packed(comm: Comm, compression: Compression) -> None:
    """Where nothing is to be kept there; also after a step that was not finite."""
    for shapes in (((64, 64), (64, 64)), SHAPES):
        one, other = (compression.load()(bucket(shapes), comm) for _ in range(2))
        if one.keeps_error or one.work.dtype != one.shape.dtype:
            return
        for number in range(4):
            values = gradients(one.shape, comm.rank + number)
            if number == 1:
                values[0][-1] = math.nan
            apart = step(one, values)
            for index, value in enumerate(values):
                other.pack(index, value)
            inside = drive(other, other.work[: other.shape.length])
            assert torch.equal(parts(one, apart).nan_to_num(), parts(other, inside).nan_to_num())
            commit_all([other], applied=True)


def bytes_are_those_of_the_table(comm: Comm, compression: Compression) -> None:
    for dtype in DTYPES:
        for shapes in (SHAPES, ((),), ((3000, 7),)):
            counting = Counting(comm)
            compressor = compression.load()(bucket(shapes, dtype), counting)  # type: ignore[arg-type]
            length = compressor.shape.length
            expected = compression.payload(Bucket(shapes, str(dtype).removeprefix("torch."), length), comm.size)
            for number in range(3):
                counting.bytes.clear()
                exchange(compressor, [v * number for v in gradients(compressor.shape, comm.rank + number)])
                commit_all([compressor], applied=True)
                assert dict(counting.bytes) == expected


def inf_and_nan_reach_all_ranks_and_no_state(comm: Comm, compression: Compression) -> None:
    for place, poison in ((0, math.inf), (2, math.nan), (8, -math.inf), (5, math.nan)):
        compressor = compression.load()(bucket(SHAPES), comm)
        step(compressor, gradients(compressor.shape, comm.rank))
        values = gradients(compressor.shape, comm.rank + 1)
        if comm.rank == comm.size - 1:
            values[place] = values[place].clone()
            values[place].view(-1)[-1] = poison
        before = {name: tensor.clone() for name, tensor in compressor.state_dict().items()}
        out = exchange(compressor, values)
        assert not bool(torch.isfinite(parts(compressor, out)).all())
        commit_all([compressor], applied=True)  # a loop that does not look
        for name, tensor in compressor.state_dict().items():
            assert torch.equal(tensor, before[name]) or name.endswith("fp16_scale")  # which follows it
        check_law(compressor, compression.kind, gradients(compressor.shape, comm.rank + 2))


def a_skipped_step_commits_nothing(comm: Comm, compression: Compression) -> None:
    outs = []
    for skipped in (False, True):
        compressor = compression.load()(bucket(SHAPES), comm)
        step(compressor, gradients(compressor.shape, comm.rank))
        if skipped:
            step(compressor, gradients(compressor.shape, comm.rank + 50), applied=False)
        outs.append([step(compressor, gradients(compressor.shape, comm.rank + n)) for n in (1, 2)])
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def the_same_steps_give_the_same_bits(comm: Comm, compression: Compression) -> None:
    """Also after state was saved and loaded in between."""
    make = compression.load()
    one, other = make(bucket(SHAPES), comm), make(bucket(SHAPES), comm)
    for number in range(4):
        values = gradients(one.shape, comm.rank + number)
        assert torch.equal(step(one, values), step(other, values))
        state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        other = make(bucket(SHAPES), comm)
        other.load_state_dict(state, comm.size)


def state_goes_with_the_parameter_into_other_buckets(comm: Comm, compression: Compression) -> None:
    make = compression.load()
    whole = make(bucket(SHAPES), comm)
    step(whole, gradients(whole.shape, comm.rank))
    state = whole.state_dict()
    for first, last in ((4, len(SHAPES)), (0, 4)):
        part = make(bucket(SHAPES[first:last], first=first), comm)
        part.load_state_dict(state, comm.size)
        for name, tensor in part.state_dict().items():
            assert torch.equal(tensor, state[name]), name


def what_a_state_lacks_starts_anew(comm: Comm, compression: Compression) -> None:
    make = compression.load()
    used, new = make(bucket(SHAPES), comm), make(bucket(SHAPES), comm)
    for number in range(2):
        step(used, gradients(used.shape, comm.rank + number))
    used.load_state_dict({}, comm.size)
    values = gradients(used.shape, comm.rank + 5)
    assert torch.equal(exchange(used, values), exchange(new, values))


def ranks_agree_on_state_once_settled(comm: Comm, compression: Compression) -> None:
    compressor = compression.load()(bucket(SHAPES), comm)
    step(compressor, gradients(compressor.shape, comm.rank))
    before = residual_sum(compressor)
    compressor.synchronize_state()
    torch.testing.assert_close(residual_sum(compressor), before, rtol=1e-5, atol=1e-6)
    for name, tensor in sorted(compressor.state_dict().items()):
        everyone = comm.allgather(tensor.reshape(1, -1).clone(), name=f"test/{name}").wait()
        assert all(torch.equal(everyone[0], other) for other in everyone)


def what_settling_would_leave_is_told_and_nothing_changes(comm: Comm, compression: Compression) -> None:
    told, settled, left = (compression.load()(bucket(SHAPES), comm) for _ in range(3))
    for number in range(2):
        for compressor in (told, settled, left):
            step(compressor, gradients(compressor.shape, comm.rank + number))
    found = {name: tensor.clone() for name, tensor in told.synchronized_state().items()}
    settled.synchronize_state()
    assert found.keys() == settled.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in settled.state_dict().items())
    values = [*gradients(left.shape, comm.rank + 5)]
    assert torch.equal(step(told, values), step(left, values))
    assert all(torch.equal(told.state_dict()[name], tensor) for name, tensor in left.state_dict().items())


_OWN = [each for each in list(globals().values()) if isfunction(each) and each.__module__ == __name__]
CLAUSES = [each for each in _OWN if each.__code__.co_varnames[:1] == ("comm",)]
