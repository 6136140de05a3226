"""Ranks with unequal shares of the global batch are reported at the start."""

from __future__ import annotations

import re

import pytest

from hvdtrain.config.schema import Config
from hvdtrain.training.start.opening import unequal_shares


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "words"),
    [
        (16, 4, 4, []),
        (16, 4, 1, []),
        (Config().train.global_batch, Config().train.micro_batch, 8, []),
        (16, 4, 8, ["4 of 8 ranks are idle", "50%", "--train.global_batch 32", "--train.micro_batch 2"]),
        (16, 4, 3, ["1 of 3 ranks have 2", "the others 1", "33%", "--train.global_batch 12", "--train.micro_batch 3"]),
        (4, 1, 3, ["1 of 3 ranks have 2", "33%", "--train.global_batch 3"]),
        (2, 1, 8, ["6 of 8 ranks are idle", "75%", "--train.global_batch 8"]),
    ],
)
def test_unequal_shares_are_said_with_what_divides(batch: int, micro: int, ranks: int, words: list[str]) -> None:
    found = unequal_shares(batch, micro, ranks)
    assert bool(found) == bool(words) and all(word in found for word in words)
    assert ("--train.micro_batch" in found) == any("micro_batch" in word for word in words)
    for option, value in re.findall(r"--train\.(\w+) (\d+)", found):
        sizes = {"global_batch": batch, "micro_batch": micro, option: int(value)}
        assert -(-sizes["global_batch"] // sizes["micro_batch"]) % ranks == 0
