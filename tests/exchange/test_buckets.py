"""Which gradient lies where: plans and layouts hold each parameter once, whatever the model."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hvdtrain.exchange.buckets import assign_buckets, lay_out, sizes_of
from hvdtrain.plan.buckets import BucketPlan, assign

KINDS = ["float32", "float64", "bfloat16"]
PARAMETERS = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(KINDS)), max_size=12)


def _named(shapes: list[tuple[list[int], str]]) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"p{i}", nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype))))
        for i, (shape, dtype) in enumerate(shapes)
    ]


@given(PARAMETERS, st.integers(1, 4000), st.randoms())
def test_each_parameter_has_one_place(shapes: list[tuple[list[int], str]], limit_bytes: int, random) -> None:  # type: ignore[no-untyped-def]
    named = _named(shapes)
    names = [name for name, _ in named]
    finished = random.sample(names, random.randint(0, len(names)))
    sparse = random.sample(names, random.randint(0, len(names)))
    few = {name: 1 for name in names if name not in sparse and random.random() < 0.2}
    made = assign_buckets(named, limit_bytes, finished, sparse=sparse, rows=few)
    assert made.fits(sizes_of(named))
    assert sorted(made.sparse) == sorted(sparse)
    layouts = lay_out(made, dict(named), "g")
    seen = [part.name for layout in layouts for part in layout.shape.parts]
    assert sorted(seen) == sorted(names)
    assert {(name,) for name in few} <= set(made.buckets), "each alone"
    for number, layout in enumerate(layouts):
        first = layout.shape.parts[0].name
        assert layout.shape.name == (f"g/{first}" if first in sparse else f"g/{number}")
        flat = layout.shape.zeros()
        for part, parameter in zip(layout.shape.parts, layout.parameters, strict=True):
            assert parameter is dict(named)[part.name]
            assert (parameter.dtype, parameter.shape) == (layout.shape.dtype, part.shape)
            view = part.view(flat)
            assert view.numel() == 0 or (view.data_ptr() - flat.data_ptr()) % 64 == 0
            view += 1
        assert flat.max() <= 1 if flat.numel() else True
        if len(layout.parameters) > 1:
            least = sum(p.numel() * p.dtype.itemsize for _, p in named) // 256
            assert sum(p.numel() * p.dtype.itemsize for p in layout.parameters) <= max(limit_bytes, least)
        kinds = {part.name in finished for part in layout.shape.parts}
        assert len(kinds) == 1, "what backward left out must not hold up what it finished"


@given(PARAMETERS, st.randoms())
def test_gradients_lie_in_the_order_in_which_they_come(shapes: list[tuple[list[int], str]], random) -> None:  # type: ignore[no-untyped-def]
    named = [(name, p) for name, p in _named(shapes) if p.dtype == torch.float32]
    names = [name for name, _ in named]
    finished = random.sample(names, len(names))
    assert [n for bucket in assign_buckets(named, 100, finished).buckets for n in bucket] == finished
    assert [n for bucket in assign_buckets(named, 100).buckets for n in bucket] == names[::-1]


def test_a_plan_fits_its_own_parameters_only() -> None:
    named = _named([([2], "float32"), ([3], "float64")])
    made = assign_buckets(named, 100)
    assert made.buckets == (("p1",), ("p0",))
    assert not made.fits(sizes_of(named[:1]))
    assert not made.fits(sizes_of([*named, ("p2", named[0][1])]))
    assert not BucketPlan((("p0", "p1"),)).fits(sizes_of(named)), "of two dtypes"
    assert BucketPlan((("p0",),), ("p1",)).fits(sizes_of(named))


def test_a_large_model_has_no_more_buckets_than_horovods_cache_holds() -> None:
    """A mixture has 58 layers of 256 experts, and each expert has its own parameters."""
    sizes = {f"p{number}": (7 << 20, 0) for number in range(58 * 256 * 3)}
    made = assign(sizes, limit_bytes=8 << 20)
    assert 250 <= len(made.buckets) <= 260
    assert len(assign(dict(list(sizes.items())[:200]), limit_bytes=8 << 20).buckets) == 200, "a small one overlaps more"


def test_a_gradient_has_the_strides_of_its_parameter() -> None:
    """torch's fused optimizers ignore strides."""
    parameter = nn.Parameter(torch.zeros(8, 3, 2, 2).to(memory_format=torch.channels_last))
    (layout,) = lay_out(assign_buckets([("w", parameter)], 1 << 20), {"w": parameter}, "g")
    found = layout.shape.parts[0].view(layout.shape.zeros())
    assert found.stride() == parameter.stride() and not found.is_contiguous()
