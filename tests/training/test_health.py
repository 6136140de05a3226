"""Checks on models."""

from __future__ import annotations

import torch
from torch import nn

from hvdtrain.training.diagnostics.drift import digests, replicated
from hvdtrain.training.start.opening import batch_statistics


def test_batch_statistics_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.GroupNorm(1, 2))
    assert batch_statistics(model) == ["1"]


def test_a_digest_sees_a_bit_and_a_swap() -> None:
    model = nn.Linear(50, 50)
    before = digests(model.parameters())
    weight = model.weight.data
    weight[3, 4], weight[4, 3] = weight[4, 3].clone(), weight[3, 4].clone()
    assert (digests(model.parameters()) != before).tolist() == [True, False]
    before = digests(model.parameters())
    model.bias.data.view(torch.int32)[49] ^= 1
    assert (digests(model.parameters()) != before).tolist() == [False, True]


def test_digests_take_any_dtype_and_shape() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model = nn.ParameterList([nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((), (0,), (3, 1))])
        assert digests(model.parameters()).shape == (3,)


def test_replicated_tensors_are_parameters_and_persistent_buffers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    model.register_buffer("empty", None)
    expected = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert list(replicated(model)) == expected
