"""What the page is made of, without a browser."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Analysis, Blame, Budget, Estimate, Lane, Part, RankRow, Slice
from hvdtrain.timeline.report.page import MOST_SLICES, headline, packed, shown_lanes, summary, to_html
from hvdtrain.timeline.report.page_view import MOST_RANKS, blame_view, budget_view, finding_pieces
from tests.support.analyses import analysis, budget, empty, hostile, lanes, rank_rows


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


def test_headings_and_ids_are_in_order() -> None:
    elements = _Page(to_html(analysis(64))).elements
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in elements if tag in ("h1", "h2", "h3")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


@given(st.text())
@settings(max_examples=40, deadline=None)
def test_any_text_is_shown_and_nothing_else(text: str) -> None:
    def tags(text: str) -> list[str]:
        blame = Blame("none", 0, [], [], {}, text)
        page = to_html(Analysis("run", 2, None, None, [], blame, [], [Lane(text, [Slice(text, 0.0, 1.0, 1)])], [text]))
        page.encode()
        return [tag for tag, _ in _Page(page).elements]

    assert tags(text) == tags("x")


def test_the_bar_is_full_and_its_parts_lie_on_end() -> None:
    found = budget_view(budget(8))
    at = 0.0
    for row in found["rows"]:
        assert row["x"] == pytest.approx(at)
        at += row["width"]
    assert at == pytest.approx(100.0)
    exposed = [row for row in found["rows"] if row["exposed"]]
    assert found["bracket"] == {"x": exposed[0]["x"], "end": pytest.approx(exposed[-1]["x"] + exposed[-1]["width"])}
    assert float(found["sum"]) == pytest.approx(sum(float(row["ms"]) for row in found["rows"]))


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


def test_heat_is_against_the_median() -> None:
    found = blame_view(Blame("stamps", 9, rank_rows(8, {3: 20.0}), [3], {}), 352.0)
    heats = {row["rank"]: [cell["heat"] for cell in row["cells"]] for row in found["rows"]}
    data, wait = found["names"].index("data"), found["names"].index("wait")
    assert heats[3][data] == "more-3" and heats[3][wait] == "less-3"
    assert all(not heats[rank][data] for rank in range(8) if rank != 3)


@pytest.mark.parametrize(
    ("advice", "code"),
    [
        ("try --parallel.compression powersgd:4.", ["--parallel.compression powersgd:4"]),
        ("--loader.workers 4, or --train.micro_batch or wait", ["--loader.workers 4", "--train.micro_batch"]),
        ("`hvdtrain timeline merge RUN` and --train.compile true",
         ["hvdtrain timeline merge RUN", "--train.compile true"]),
        ("see hvdtrain doctor there; or hvdtrain timeline diff.", ["hvdtrain doctor", "hvdtrain timeline diff"]),
        ("set HOROVOD_CYCLE_TIME=0.5.", ["HOROVOD_CYCLE_TIME=0.5"]),
        ("--parallel.bucket_mib=25 does", ["--parallel.bucket_mib=25"]),
        ("bind ranks (mpirun --bind-to core), nothing else", ["mpirun --bind-to core"]),
        ("see nvidia-smi -q -d CLOCK,PERFORMANCE", ["nvidia-smi -q -d CLOCK,PERFORMANCE"]),
        ("nvidia-smi -q -d PERFORMANCE: heat, or its power limit", ["nvidia-smi -q -d PERFORMANCE"]),
        ("under mpirun, or nvidia-smi", []),
        ("--train.eval_every 200 --checkpoint.every 9, or", ["--train.eval_every 200", "--checkpoint.every 9"]),
        ("nothing to do -- really", []),
        ("", []),
    ],
)  # fmt: skip
def test_flags_are_found_in_advice(advice: str, code: list[str]) -> None:
    pieces = finding_pieces(advice)
    assert [text for text, is_code in pieces if is_code] == code
    assert "".join(text for text, _ in pieces) == advice.replace("`", "")


def test_numbers_as_a_person_reads_them() -> None:
    ms = {1234.5: "1,234", 352.41: "352", 41.26: "41.3", 1.234: "1.23", 0.0123: "0.012", 0.0: "0"}
    assert {value: wording.ms(value) for value in ms} == ms
    assert wording.interval(Estimate(12.34, 11.21, 13.4)) == "[11.2 .. 13.4]"
    assert wording.interval(Estimate(12.34, float("nan"), float("nan"))) == ""
    assert [wording.percent(share) for share in (0.0, 0.004, 0.12, 1.0)] == ["0%", "< 1%", "12%", "100%"]
    assert [wording.nbytes(count) for count in (12, 26_214_400, 3.1e9)] == ["12 B", "26.2 MB", "3.10 GB"]


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
    ("error_ms", "said", "not_said"),
    [
        (0.0, ["share a clock", "There is no straggler"], ["its clock"]),
        (
            0.25,
            ["agree to within 0.250 ms", "rank 0's to within 0.250 ms"],
            ["never compared"],
        ),
        (float("inf"), ["never compared", "No straggler can be identified"], ["share a clock", " inf "]),
    ],
)
def test_clocks_are_reported_with_their_error(error_ms: float, said: list[str], not_said: list[str]) -> None:
    found = _of_ranks(_row(0, ABOUT_2), _row(1, ABOUT_2, "b", error_ms))
    text = _text(to_html(found))
    assert all(each in text for each in said) and not any(each in text for each in not_said)
    assert ("unknown" in headline(found)[0]) == (error_ms == float("inf"))


def test_small_costs_are_not_called_noise_and_unknown_ones_are_no_numbers() -> None:
    found = _of_ranks(_row(0, ABOUT_2), _row(1, Estimate(0.0, 0.0, 0.0)))
    assert "2.00 ms [1.00 .. 3.00] per step, which is small" in _text(to_html(found))
    unknown = Estimate(5.0, float("nan"), float("nan"))
    of_one_step = Budget("rank 0", unknown, 1, [Part("data", unknown, 1.0)], [])
    page = to_html(replace(_of_ranks(_row(0, UNSURE), late=[0]), budget=of_one_step))
    assert "nan" not in page and "inf " not in page


def test_pictures_and_buttons_have_names_and_heat_has_a_sign() -> None:
    page = to_html(_of_ranks(_row(0, ABOUT_2), _row(1, UNSURE), _row(2, Estimate(0.0, 0.0, 0.0))))
    elements = _Page(page).elements
    for tag, attributes in elements:
        assert attributes.get("role") != "img" or attributes["aria-label"], (tag, attributes)
    whiskers = [attributes for tag, attributes in elements if attributes.get("class") == "whisker"]
    assert [each.get("aria-label") for each in whiskers] == ["[1.00 .. 3.00] ms", None, None]
    assert ["aria-hidden" in each for each in whiskers] == [False, True, True]
    buttons = [attributes["aria-label"] for _, attributes in elements if attributes.get("class") == "why"]
    assert buttons == ["why rank 0", "why rank 1", "why rank 2"]
    text = _text(page)
    assert "\u25be1.00, -9.00 ms from the median" in text and "\u25b419.0, +9.00 ms from the median" in text


def test_a_trace_without_steps_has_no_step_time() -> None:
    found = analysis(2)
    assert "ms per step" in _text(to_html(found))
    alone = Blame("none", 0, [], [], {}, "nothing says")
    whole = replace(found, budget=replace(found.budget, steps=0), findings=[], lanes=[], blame=alone)
    assert "it spans 352 ms" in headline(whole)[0]
    text = _text(to_html(whole))
    assert "Time by part" in text and "ms per step" not in text and "rank and step" not in text
