"""What the page is made of, without a browser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.timeline.analysis.analysis import Analysis, Blame, Budget, Estimate, Part, RankRow
from hvdtrain.timeline.report.page import headline, to_html
from hvdtrain.timeline.report.page_view import MOST_RANKS, blame_view, finding_pieces
from tests.support.analyses import analysis, empty, hostile, rank_rows


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def _text(page: str) -> str:
    """What is seen and heard of it, each run of spaces as one."""
    seen: list[str] = []
    parser = HTMLParser()
    parser.handle_data = seen.append  # type: ignore[method-assign]
    parser.feed(page.partition("<body>")[2].partition("<script")[0])
    return " ".join("".join(seen).split())


@pytest.mark.parametrize("of", [analysis(2), analysis(64), hostile(), empty()])
def test_the_page_names_no_other_file(of: Analysis) -> None:
    for tag, attributes in _Page(to_html(of)).elements:
        assert tag not in ("img", "link", "iframe", "object", "base", "form"), tag
        assert not {"src", "srcset", "action", "style"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes), attributes
        assert str(attributes.get("href", "#")).startswith("#")


@given(st.text())
@settings(max_examples=40, deadline=None)
def test_any_text_is_shown_and_nothing_else(text: str) -> None:
    def tags(text: str) -> list[str]:
        blame = Blame("none", 0, [], [], {}, text)
        page = to_html(Analysis("run", 2, None, None, [], blame, [], [text], [text]))
        page.encode()
        return [tag for tag, _ in _Page(page).elements]

    assert tags(text) == tags("x")


def test_of_many_ranks_late_ones_stay_and_the_page_is_no_larger_than_a_megabyte() -> None:
    rows = rank_rows(500, {})
    found = blame_view(Blame("stamps", 9, rows, [rows[450].rank], {}), 350.0)
    assert [row["rank"] for row in found["rows"]] == [row.rank for row in [*rows[:MOST_RANKS], rows[450]]]
    assert found["left"] == 500 - MOST_RANKS - 1
    page = to_html(analysis(4096))
    assert len(page.encode()) < 1_000_000
    assert f"{4096 - MOST_RANKS:,} ranks that cost less" in _text(page) and "hvdtrain timeline merge RUN" in _text(page)


@pytest.mark.parametrize(
    ("advice", "code"),
    [
        ("--loader.workers 4, or --train.micro_batch or wait", ["--loader.workers 4", "--train.micro_batch"]),
        ("use `hvdtrain timeline merge RUN`, or hvdtrain doctor", ["hvdtrain timeline merge RUN", "hvdtrain doctor"]),
        ("set HOROVOD_CYCLE_TIME=0.5.", ["HOROVOD_CYCLE_TIME=0.5"]),
        ("bind ranks (mpirun --bind-to core), nothing else", ["mpirun --bind-to core"]),
        ("nvidia-smi -q -d PERFORMANCE: heat, or its power limit", ["nvidia-smi -q -d PERFORMANCE"]),
        ("--train.eval_every 200 --checkpoint.every 9, or", ["--train.eval_every 200", "--checkpoint.every 9"]),
        ("under mpirun, or nvidia-smi; nothing to do -- really", []),
    ],
)
def test_flags_are_found_in_advice(advice: str, code: list[str]) -> None:
    pieces = finding_pieces(advice)
    assert [text for text, is_code in pieces if is_code] == code
    assert "".join(text for text, _ in pieces) == advice.replace("`", "")


def _of_ranks(*rows: RankRow, late: Sequence[int] = (), source: Literal["stamps", "ticks"] = "stamps") -> Analysis:
    return Analysis("run", len(rows), None, None, [], Blame(source, 9, rows, late, {}, ""), [])


def _row(rank: int, cost: Estimate, host: str = "here", error_ms: float = 0.0) -> RankRow:
    return RankRow(rank, host, 0.5, cost, {"data": 1.0 + 9 * rank}, error_ms)


ABOUT_2 = Estimate(2.0, 1.0, 3.0)
UNSURE = Estimate(2.0, float("-inf"), float("inf"))


def test_a_rank_of_an_unknown_host_is_a_rank() -> None:
    found = _of_ranks(_row(0, ABOUT_2, ""), _row(1, Estimate(0.0, 0.0, 0.0), ""), late=[0], source="ticks")
    assert headline(found) == ["rank 0 is a straggler and costs 2.00 ms per step [1.00 .. 3.00]"]
    assert "Rank 0 costs" in to_html(found) and "Rank 0 on here costs" in to_html(_of_ranks(_row(0, ABOUT_2), late=[0]))


@pytest.mark.parametrize(
    ("error_ms", "said"), [(0.0, "share a clock"), (0.25, "to within 0.250 ms"), (float("inf"), "never compared")]
)
def test_clocks_are_reported_with_their_error(error_ms: float, said: str) -> None:
    found = _of_ranks(_row(0, ABOUT_2), _row(1, ABOUT_2, "b", error_ms))
    text = _text(to_html(found))
    assert said in text and " inf " not in text


def test_unknown_costs_are_no_numbers() -> None:
    unknown = Estimate(5.0, float("nan"), float("nan"))
    of_one_step = Budget("rank 0", unknown, 1, [Part("data", unknown, 1.0)], [])
    page = to_html(replace(_of_ranks(_row(0, UNSURE), late=[0]), budget=of_one_step))
    assert "nan" not in page and "inf " not in page
