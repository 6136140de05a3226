"""docs/elastic.md tells of every option of `hvdtrain launch`, with its default."""

from __future__ import annotations

import re
from pathlib import Path

from hvdtrain.cli.launch_parser import parser

TEXT = (Path(__file__).parents[2] / "docs" / "elastic.md").read_text()
TABLE = TEXT.partition("## Options")[2].partition("###")[0]


def test_every_option_and_its_default() -> None:
    rows = dict(re.findall(r"^\| `(--?[a-zA-Z-]+)[^|]*\| (.*) \|$", TABLE, re.MULTILINE))
    known = {action.option_strings[0]: action for action in parser()._actions if action.option_strings}
    assert set(rows) | {"--ssh-option", "-h"} == set(known)
    for option, text in rows.items():
        default = known[option].default
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert text.endswith(f"({default:g})"), option
            assert str(known[option].help).endswith(f"({default:g})"), option


def test_the_examples_are_taken() -> None:
    for line in re.findall(r"^    hvdtrain launch (.*?) -- .*$", TEXT, re.MULTILINE):
        parser().parse_args(line.split())
