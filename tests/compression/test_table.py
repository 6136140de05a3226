"""What can be written for a compression."""

from __future__ import annotations

import pytest

from hvdtrain.compression.table import TABLE, choices, parse
from hvdtrain.errors import ConfigError
from hvdtrain.plan.plan import Plan
from hvdtrain.training.start.opening import beyond_break_even


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
    ("name", "ranks", "pays_up_to"),
    [("topk:0.01", 128, None), ("topk:0.01", 1024, 133), ("topk:0.5", 64, 3), ("int8", 4096, None), ("fp16", 2, None)],
)
def test_what_every_rank_receives_of_every_other_pays_up_to_some_number(
    name: str, ranks: int, pays_up_to: int | None
) -> None:
    shapes = [[4096, 4096], [11008, 4096], [4096]]
    found = parse(name).break_even(shapes, ranks)
    assert found == pays_up_to
    assert found is None or parse(name).break_even(shapes, found) is None
    warning = beyond_break_even(Plan("horovod", name, "none"), shapes, ranks)
    assert (str(found) in warning) if found is not None else not warning
