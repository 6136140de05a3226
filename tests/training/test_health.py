"""Checks on models."""

from __future__ import annotations

import torch
from torch import nn

from hvdtrain.training.health import batch_statistics, digests


def test_batch_statistics_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.GroupNorm(1, 2))
    assert batch_statistics(model) == ["1"]


def test_a_digest_sees_a_bit_and_a_swap() -> None:
    model = nn.Linear(50, 50)
    before = digests(model)
    weight = model.weight.data
    weight[3, 4], weight[4, 3] = weight[4, 3].clone(), weight[3, 4].clone()
    assert (digests(model) != before).tolist() == [True, False]
    before = digests(model)
    model.bias.data.view(torch.int32)[49] ^= 1
    assert (digests(model) != before).tolist() == [False, True]


def test_digests_take_any_dtype_and_shape() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model = nn.ParameterList([nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((), (0,), (3, 1))])
        assert digests(model).shape == (3,)
