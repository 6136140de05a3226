"""What can be written for a compression."""

from __future__ import annotations

import pytest

from hvdtrain.compression.table import TABLE, choices, parse
from hvdtrain.errors import ConfigError


@pytest.mark.parametrize("kind", TABLE.values(), ids=lambda k: k.name)
def test_each_is_understood_as_it_is_written(kind) -> None:  # type: ignore[no-untyped-def]
    written = str(parse(kind.name))
    assert parse(written) == parse(kind.name)
    assert parse(written).kind is kind
    assert any(choice.startswith(kind.name) for choice in choices())
    assert [str(parse(text)) for text in ("topk:0.002", "powersgd:8")] == ["topk:0.002", "powersgd:8"]


@pytest.mark.parametrize(
    "text",
    ["", "fp17", "fp16:", "fp16:2", "none:0", ":4", "FP16", "topk:0", "topk:1.1", "topk:nan", "powersgd:1.5", "topk:x"],
)
def test_what_is_none_names_those_there_are(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert repr(text) in error.value.what
    assert all(name in str(error.value.expected) for name in TABLE)


@pytest.mark.parametrize(
    ("name", "most"), [("topk:0.01", 133), ("topk:0.5", 3), ("topk:1", 1), ("int8", 4096), ("fp16", 4096)]
)
def test_what_every_rank_receives_of_every_other_pays_up_to_some_number(name: str, most: int) -> None:
    shapes = [[4096, 4096], [11008, 4096], [4096]]
    for ranks in (1, 3, 200, 4096):
        assert parse(name).most_ranks(shapes, ranks) == min(ranks, most)
