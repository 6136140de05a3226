"""What can be written for a compression."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hvdtrain.compression.table import TABLE, choices, parse
from hvdtrain.errors import ConfigError


@pytest.mark.parametrize("kind", TABLE.values(), ids=lambda k: k.name)
def test_each_is_understood_as_it_is_written(kind) -> None:  # type: ignore[no-untyped-def]
    written = str(parse(kind.name))
    assert parse(written) == parse(kind.name)
    assert parse(written).kind is kind
    assert any(choice.startswith(kind.name) for choice in choices())


@pytest.mark.parametrize(
    "text",
    ["", "fp17", "fp16:", "fp16:2", "none:0", ":4", "FP16", "topk:0", "topk:1.1", "topk:nan", "powersgd:1.5", "topk:x"],
)
def test_what_is_none_names_those_there_are(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert repr(text) in error.value.what
    assert all(name in str(error.value.expected) for name in TABLE)


def test_a_number_is_taken_and_otherwise_the_default() -> None:
    assert parse("topk").number == parse("topk:0.01").number
    assert str(parse("topk:0.002")) == "topk:0.002"
    assert str(parse("powersgd:8")) == "powersgd:8"


def test_the_table_needs_no_torch() -> None:
    program = "import sys, hvdtrain.compression.table; assert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)
