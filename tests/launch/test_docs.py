"""docs/launching.md and docs/elastic.md tell of every option of `hvdtrain launch`, with its default."""

from __future__ import annotations

import re
from pathlib import Path

from hvdtrain.cli.launch_options import parse, parser
from hvdtrain.launch.choose import AUTO, OWN
from hvdtrain.launch.targets import TARGETS

LAUNCHING = (Path(__file__).parents[2] / "docs" / "launching.md").read_text()
TEXT = (Path(__file__).parents[2] / "docs" / "elastic.md").read_text()
TABLE = TEXT.partition("## Options")[2].partition("###")[0]


def _rows(table: str) -> dict[str, str]:
    """What is said of each option; a row may name several."""
    rows = re.findall(r"^\| (`-[^|]*) \| (.*) \|$", table, re.MULTILINE)
    return {option: text for names, text in rows for option in re.findall(r"`(--?[a-zA-Z-]+)", names)}


def test_every_option_and_its_default() -> None:
    """Those of our own driver in the one page, the others in the other."""
    own, others = _rows(TABLE), _rows(LAUNCHING.partition("## Options")[2].partition("##")[0])
    known = {action.option_strings[0]: action for action in parser()._actions if action.option_strings}
    assert own.keys() | others.keys() | {"-h"} == set(known)
    for option, text in [*own.items(), *others.items()]:
        default = known[option].default
        if isinstance(default, int | float) and not isinstance(default, bool):
            shown = f"{default // 60}m" if option == "--notice" else f"{default:g}"
            assert text.endswith(f"({shown})"), option
            assert str(known[option].help).endswith(f"(default: {shown})"), option


def test_every_target_is_told_of() -> None:
    table = LAUNCHING.partition("| `--to`")[2].partition("##")[0]
    told = {name for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert told == {AUTO, OWN, *TARGETS}


def test_the_examples_are_taken() -> None:
    lines = re.findall(r"^    (?:salloc .*)?hvdtrain launch (.*?)-- .*$", TEXT + LAUNCHING, re.MULTILINE)
    assert len(lines) > 10
    for line in lines:
        parse(line.split())
