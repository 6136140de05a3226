"""--over: options and their values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.config.schema import Config
from hvdtrain.errors import ConfigError
from hvdtrain.tune.space import Choice, Range, is_about_speed, parse_space


def test_values() -> None:
    found = parse_space("optimizer.lr=1e-4:1e-2, --train.steps=10:20,parallel.compression=none|fp16", Config(), 1)
    assert found == [
        Range("optimizer.lr", 1e-4, 1e-2, is_whole=False),
        Range("train.steps", 10, 20, is_whole=True),
        Choice("parallel.compression", ("none", "fp16")),
    ]
    assert not is_about_speed(found)


def test_default_values() -> None:
    lr, size = parse_space("optimizer.lr,train.micro_batch", Config(), 2)
    assert lr == Range("optimizer.lr", 2e-4, 2e-2, is_whole=False)
    assert size == Choice("train.micro_batch", ("1", "2", "4", "8")), "16 samples on 2 ranks"
    assert is_about_speed([size]) and not is_about_speed([lr, size])


@pytest.mark.parametrize(("low", "high", "by_ratio"), [(1, 8, True), (1, 7, False), (0, 100, False), (-8, 8, False)])
def test_wide_ranges_are_tried_by_ratio(low: int, high: int, by_ratio: bool) -> None:
    asked: list[Any] = []
    trial = SimpleNamespace(suggest_int=lambda *given, log: asked.append((*given, log)) or 3)
    assert Range("x", low, high, is_whole=True).suggest(trial) == 3
    assert asked == [("x", low, high, by_ratio)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((f"optimizer.lr={values}", "--over is invalid") for values in ("", "1e-3", "2:1", "1:nan", "1:2:3")),
        ("", "--over is invalid"),
        ("precision=bf16|bf16", "--over is invalid"),
        ("seed", "--over seed needs its values"),
        ("optimizer.lr,optimizer.lr=1:2", "optimizer.lr twice"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_space(text, Config(), 1)
