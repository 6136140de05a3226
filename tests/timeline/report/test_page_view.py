"""What the page is made of, without a browser."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.timeline.analysis.analysis import Analysis, Blame, Budget, Estimate, Lane, Part, RankRow, Slice
from hvdtrain.timeline.report.page import MOST_SLICES, headline, packed, shown_lanes, summary, to_html
from hvdtrain.timeline.report.page_view import MOST_RANKS, blame_view, finding_pieces
from tests.support.analyses import analysis, empty, hostile, lanes, rank_rows


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1] == ("script", {"type": "application/json", "id": "lanes-data"}):
            self.scripts.append(data)


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
        page = to_html(Analysis("run", 2, None, None, [], blame, [], [Lane(text, [Slice(text, 0.0, 1.0, 1)])], [text]))
        page.encode()
        return [tag for tag, _ in _Page(page).elements]

    assert tags(text) == tags("x")


_SLICES = st.lists(
    st.builds(
        lambda name, start, ms, step: Slice(name, start / 1e3, (start + ms) / 1e3, step),
        st.text(max_size=3),
        st.integers(0, 10**7),
        st.integers(0, 10**6),
        st.integers(0, 5),
    ),
    max_size=20,
)


@given(st.lists(st.builds(Lane, st.text(max_size=3), _SLICES), max_size=4))
def test_packed_lanes_are_the_lanes(given: list[Lane]) -> None:
    found = json.loads(json.dumps(packed(given)))
    for lane, (label, row, steps) in zip(given, found["lanes"], strict=True):
        assert label == lane.label
        at, back = 0, []
        of_step = [step for step, count in zip(steps[::2], steps[1::2], strict=True) for _ in range(count)]
        for number, gap, us, step in zip(row[::3], row[1::3], row[2::3], of_step, strict=True):
            at += gap
            back.append((found["names"][number][0], at, at + us, step))
        assert sorted(back) == sorted(
            (s.name, round(s.start_ms * 1e3), round(s.end_ms * 1e3), s.step) for s in lane.slices
        )
        assert found["end"] >= max((end for _, _, end, _ in back), default=0)


def test_a_late_rank_keeps_its_lane_where_there_are_too_many() -> None:
    many = lanes(3000)
    found = Analysis("run", 3000, None, None, [], Blame("stamps", 1, [], [2900], {}), [], many)
    shown = shown_lanes(found)
    assert many[2901].label.startswith("rank 2900 ")
    assert many[2901] in shown and many[0] in shown
    assert len(shown) < 300 and shown == sorted(shown, key=many.index)
    assert sum(len(lane.slices) for lane in shown) <= MOST_SLICES


def test_the_table_next_to_the_lanes_has_ms_per_step() -> None:
    lane = Lane("rank 0", [Slice("a", 0.0, 1.0, 1), Slice("a", 2.0, 5.0, 2), Slice("b", 5.0, 6.0, 2)])
    assert summary([lane, Lane("none", [])]) == (["a", "b"], [("rank 0", [2.0, 0.5]), ("none", [None, None])])


def test_of_many_ranks_late_ones_stay_and_the_page_is_no_larger_than_a_megabyte() -> None:
    rows = rank_rows(500, {})
    found = blame_view(Blame("stamps", 9, rows, [rows[450].rank], {}), 350.0)
    assert [row["rank"] for row in found["rows"]] == [row.rank for row in [*rows[:MOST_RANKS], rows[450]]]
    assert found["left"] == 500 - MOST_RANKS - 1
    page = to_html(analysis(4096, lane_ranks=1000, slices=200))
    assert len(page.encode()) < 1_000_000
    assert f"{4096 - MOST_RANKS:,} ranks that cost less" in _text(page) and "more lanes are not shown" in _text(page)


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
    assert ("unknown" in headline(found)[0]) == (error_ms == float("inf"))


def test_unknown_costs_are_no_numbers() -> None:
    unknown = Estimate(5.0, float("nan"), float("nan"))
    of_one_step = Budget("rank 0", unknown, 1, [Part("data", unknown, 1.0)], [])
    page = to_html(replace(_of_ranks(_row(0, UNSURE), late=[0]), budget=of_one_step))
    assert "nan" not in page and "inf " not in page
