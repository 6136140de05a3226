"""docs/launching.md and docs/elastic.md name every target and show valid commands; --help shows each default."""

from __future__ import annotations

import re
from pathlib import Path

from hvdtrain.cli.launch_options import parse, parser
from hvdtrain.launch.choose import AUTO, OWN
from hvdtrain.launch.targets import TARGETS

LAUNCHING = (Path(__file__).parents[2] / "docs" / "launching.md").read_text()
TEXT = (Path(__file__).parents[2] / "docs" / "elastic.md").read_text()


def test_the_help_of_a_number_ends_with_its_default() -> None:
    for action in parser()._actions:
        if isinstance(action.default, int | float) and not isinstance(action.default, bool):
            shown = f"{action.default // 60}m" if action.dest == "notice" else f"{action.default:g}"
            assert str(action.help).endswith(f"(default: {shown})"), action.option_strings


def test_every_target_is_in_the_table() -> None:
    table = LAUNCHING.partition("| `--to`")[2].partition("##")[0]
    listed = {
        name for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert listed == {AUTO, OWN, *TARGETS}


def test_the_examples_are_valid_commands() -> None:
    lines = re.findall(r"^    (?:salloc .*)?hvdtrain launch (.*?)-- .*$", TEXT + LAUNCHING, re.MULTILINE)
    assert len(lines) > 10
    for line in lines:
        parse(line.split())
