"""The page in a real browser: nothing is asked of a network, every text is readable, hands can stay on the keyboard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hvdtrain.__main__ import main
from hvdtrain.timeline.analysis.analysis import Analysis
from hvdtrain.timeline.report.page import headline, to_html
from tests.support.analyses import HOSTILE, analysis, empty, hostile
from tests.support.browser import browser, severe, until
from tests.support.journals import FakeRun

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from selenium.webdriver.remote.webdriver import WebDriver

CONTRAST = """
const rgb = text => text.match(/[\\d.]+/g).map(Number);
const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
const ratio = (a, b) => {
  const [light, dark] = [luminance(a), luminance(b)].sort((x, y) => y - x);
  return (light + 0.05) / (dark + 0.05);
};
const ground = node => {
  for (let at = node; at; at = at.parentElement) {
    const colour = rgb(getComputedStyle(at).backgroundColor);
    if (colour.length === 3 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
};
const bad = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const parent = node.parentElement;
  if (!node.textContent.trim() || parent.closest("svg, script, .unseen") || !parent.checkVisibility()) continue;
  const found = ratio(rgb(getComputedStyle(parent).color), ground(parent));
  if (found < 4.5) bad.push([node.textContent.trim().slice(0, 40), found]);
}
const segments = [...document.querySelectorAll(".bar rect:not(.bracket)")].map(r => [r.getBoundingClientRect(), r]);
for (const text of document.querySelectorAll(".bar text:not(.label)")) {
  const box = text.getBoundingClientRect(), middle = (box.left + box.right) / 2;
  const own = segments.filter(([, rect]) => rect.parentElement === text.parentElement);
  const [, under] = own.find(([r]) => r.left <= middle && middle <= r.right);
  for (const ground of under.matches(".f-late") ? document.querySelectorAll("#late-hatch rect") : [under]) {
    const found = ratio(rgb(getComputedStyle(text).fill), rgb(getComputedStyle(ground).fill));
    if (found < 4.5) bad.push([text.textContent, found]);
  }
}
return bad;
"""

COLOURS = """
const canvas = document.querySelector("#lanes canvas");
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
const found = new Map();
for (let i = 0; i < pixels.length; i += 4) {
  const key = pixels.slice(i, i + 4).join(" ");
  found.set(key, (found.get(key) || 0) + 1);
}
return [...found].filter(([, count]) => count > 40).map(([key]) => key);
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def show(opened: WebDriver, of: Analysis | str, folder: Path, theme: str = "light", width: int = 1200) -> None:
    """Open a page, or that of an analysis."""
    features = [{"name": "prefers-color-scheme", "value": theme}]
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    path = folder / "report.html"
    path.write_text(of if isinstance(of, str) else to_html(of), encoding="utf-8")
    severe(opened)
    opened.get(path.as_uri())
    opened.execute_script("try { localStorage.clear(); } catch {}")


def run(opened: WebDriver, script: str) -> Any:
    return opened.execute_script(script)


def settled(opened: WebDriver) -> None:
    """Wait until what was asked for is drawn."""
    opened.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done));")


def view(opened: WebDriver) -> tuple[int, int]:
    """The part of the steps that the lanes show, in microseconds."""
    settled(opened)
    begin, end = map(int, run(opened, "return document.getElementById('lanes').dataset.view").split())
    return begin, end


@pytest.mark.parametrize(("theme", "width"), [("light", 1200), ("dark", 360)])
@pytest.mark.parametrize("size", [1, 2, 64])
def test_a_run_is_shown(size: int, theme: str, width: int, chromium: WebDriver, tmp_path: Path) -> None:
    found = analysis(size)
    show(chromium, found, tmp_path, theme, width)
    assert run(chromium, "return document.documentElement.scrollWidth") <= width
    assert run(chromium, "return document.querySelector('h1').innerText") == "; ".join(headline(found)) + "."
    ground = run(chromium, "return getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", ground)[0]) > 200) == (theme == "light")
    assert len(run(chromium, COLOURS)) >= 6
    assert run(chromium, "return document.querySelectorAll('#rank-table tbody').length") == (size if size > 1 else 0)
    run(chromium, "for (const button of document.querySelectorAll('.why')) button.click()")
    run(chromium, "for (const more of document.querySelectorAll('details')) more.open = true")
    assert run(chromium, CONTRAST) == []
    assert run(chromium, "return performance.getEntriesByType('resource').map(entry => entry.name)") == []
    assert severe(chromium) == []


def test_an_empty_run_still_has_a_page(chromium: WebDriver, tmp_path: Path) -> None:
    show(chromium, empty(), tmp_path)
    assert "No step was measured." in run(chromium, "return document.body.innerText")
    assert severe(chromium) == []


def test_hostile_names_are_text(chromium: WebDriver, tmp_path: Path) -> None:
    show(chromium, hostile(), tmp_path, width=360)
    assert run(chromium, "return document.documentElement.scrollWidth") <= 360 and severe(chromium) == []
    assert run(chromium, "return document.title").startswith("</script><script>")
    assert run(chromium, "return document.querySelectorAll('img').length") == 0
    seen = run(chromium, "return document.body.innerText")
    assert seen.count(HOSTILE) > 20
    assert HOSTILE in run(chromium, "return JSON.parse(document.getElementById('lanes-data').textContent).lanes[0][0]")
    assert len(run(chromium, COLOURS)) >= 6


def test_its_policy_lets_nothing_else_run(chromium: WebDriver, tmp_path: Path) -> None:
    show(chromium, analysis(2), tmp_path)
    run(
        chromium,
        "const script = document.createElement('script'); script.textContent = 'document.title = \"taken\"';"
        "document.body.append(script); document.body.setAttribute('onclick', 'document.title = \"taken\"');"
        "const image = new Image(); image.src = 'http://127.0.0.1:9/'; document.body.append(image);"
        "document.body.click()",
    )
    assert run(chromium, "return document.title") != "taken"
    refused = until(chromium, lambda: severe(chromium))
    assert len(refused) == 3 and all("Content Security Policy" in message for message in refused)


def _press(opened: WebDriver, key: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(opened).send_keys(key).perform()


def test_hands_stay_on_the_keyboard(chromium: WebDriver, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    show(chromium, analysis(8), tmp_path)
    why = "return document.getElementById('why-3').checkVisibility()"
    at = "const at = document.activeElement; return at.id || at.className || at.localName"
    reached: list[str] = []
    while "lanes" not in reached and len(reached) < 200:
        _press(chromium, Keys.TAB)
        reached.append(run(chromium, at))
        if reached[-1] == "why" and reached.count("why") == 1:
            assert not run(chromium, why)
            _press(chromium, Keys.ENTER)
            assert run(chromium, why)
    assert {"to-step", "copy", "sort", "why", "to-lane", "lanes"} <= {*reached}
    whole = view(chromium)
    _press(chromium, "+")
    begin, end = view(chromium)
    assert whole[0] < begin < end < whole[1]
    _press(chromium, Keys.ARROW_RIGHT)
    assert view(chromium)[0] > begin and view(chromium)[1] - view(chromium)[0] == pytest.approx(end - begin, abs=2)
    _press(chromium, Keys.ARROW_LEFT)
    assert view(chromium) == pytest.approx((begin, end), abs=2)
    _press(chromium, "-")
    assert view(chromium) == pytest.approx(whole, abs=2)
    for key in ("0", Keys.HOME):
        _press(chromium, "+")
        _press(chromium, key)
        assert view(chromium) == whole
    for key in (Keys.ARROW_DOWN, ".", "."):
        _press(chromium, key)
    said = run(chromium, "return document.getElementById('said').textContent").splitlines()
    assert said[0] == "data" and said[1].endswith(" ms, step 1") and said[2] == "rank 0 on node-0"
    assert run(chromium, "return document.getElementById('tip').innerText").splitlines() == said


def _lanes_in_view(opened: WebDriver) -> dict[str, float]:
    """Where the middle of a lane is once the page no longer scrolls."""
    places: list[Any] = []
    while len(places) < 3 or places[-1] != places[-3]:
        places.append(
            run(
                opened,
                "const lanes = document.getElementById('lanes');"
                "lanes.scrollIntoView({block: 'center', behavior: 'instant'});"
                "const box = lanes.getBoundingClientRect(); return {x: box.left + box.width / 2, y: box.top + 60}",
            )
        )
        settled(opened)
    return dict(places[-1])


def test_a_mouse_zooms_moves_and_asks(chromium: WebDriver, tmp_path: Path) -> None:
    show(chromium, analysis(8), tmp_path)
    at, whole = _lanes_in_view(chromium), view(chromium)

    def mouse(kind: str, **more: Any) -> None:
        chromium.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, **at, **more})

    wheel = {"deltaX": 0, "deltaY": -200}
    before = run(chromium, "return scrollY")
    mouse("mouseWheel", **wheel)
    assert until(chromium, lambda: run(chromium, "return scrollY") != before), "without the focus the page scrolls"
    assert view(chromium) == whole
    at = _lanes_in_view(chromium)
    mouse("mouseMoved")
    assert "ms, step" in run(chromium, "return document.getElementById('tip').innerText")
    mouse("mousePressed", button="left", clickCount=1)
    mouse("mouseReleased", button="left", clickCount=1)
    mouse("mouseWheel", **wheel)
    begin, end = until(chromium, lambda: (now := view(chromium)) != whole and now)
    mouse("mousePressed", button="left", buttons=1, clickCount=1)
    at["x"] += 100
    mouse("mouseMoved", button="left", buttons=1)
    mouse("mouseReleased", button="left")
    assert view(chromium)[0] < begin and view(chromium)[1] - view(chromium)[0] == pytest.approx(end - begin, abs=2)


def test_a_click_on_the_plot_shows_the_steps_of_that_time(chromium: WebDriver, tmp_path: Path) -> None:
    show(chromium, analysis(2), tmp_path)
    whole = view(chromium)
    assert run(chromium, "return document.querySelectorAll('.over-time .place').length") == 190
    assert not run(chromium, "return document.querySelector('.marks .at').checkVisibility()"), "a button says it"
    run(chromium, "document.querySelectorAll('.to-step')[1].click()")
    begin, end = until(chromium, lambda: (now := view(chromium)) != whole and now)
    last_step_us = 2 * 352_400
    assert begin <= last_step_us <= end and end - begin < whole[1]
    assert run(chromium, "return document.getElementById('said').textContent") == "step 3"
    run(chromium, "document.querySelector('.over-time .place').dispatchEvent(new Event('click'))")
    assert view(chromium)[0] == 0 and run(chromium, "return document.getElementById('said').textContent") == "step 1"


def test_headings_sort(chromium: WebDriver, tmp_path: Path) -> None:
    show(chromium, analysis(64), tmp_path)
    order = "return [...document.querySelectorAll('#rank-table tbody')].map(b => b.rows[0].cells[0].innerText.trim())"
    assert run(chromium, order)[0] == "3"
    heading = "document.querySelectorAll('#rank-table .sort')[{}].click()"
    run(chromium, heading.format(0))
    assert run(chromium, order) == [str(rank) for rank in range(64)]
    run(chromium, heading.format(0))
    assert run(chromium, order) == [str(rank) for rank in reversed(range(64))]


def test_a_flag_is_copied(chromium: WebDriver, tmp_path: Path) -> None:
    show(chromium, analysis(2), tmp_path)
    run(chromium, "document.querySelector('.copy').scrollIntoView({block: 'center', behavior: 'instant'})")
    chromium.find_element("css selector", ".copy").click()
    said = "return document.getElementById('said').textContent"
    assert until(chromium, lambda: run(chromium, said)) == "copied --parallel.compression powersgd:4"


def test_runs_are_compared(chromium: WebDriver, tmp_path: Path) -> None:
    runs = [
        FakeRun(tmp_path / name, data={"text": name + HOSTILE}).start([loss] * 200)
        for name, loss in (("a", 1.0), ("b", 2.0))
    ]
    written = tmp_path / "compared.html"
    assert main(["compare", *(str(each.folder) for each in runs), "--html", str(written)]) == 0
    show(chromium, written.read_text(), tmp_path, width=390)
    assert HOSTILE in run(chromium, "return document.body.innerText")
    heights = "return [...document.querySelectorAll('polyline')].map(line => line.getBoundingClientRect().top)"
    assert len(set(run(chromium, heights))) == 4  # two plots of two curves
    assert run(chromium, CONTRAST) == []
    assert run(chromium, "return document.documentElement.scrollWidth") <= 390
    assert severe(chromium) == []


def test_a_lane_is_reached_from_its_rank(chromium: WebDriver, tmp_path: Path) -> None:
    show(chromium, analysis(64), tmp_path)
    run(chromium, "[...document.querySelectorAll('.to-lane')].find(b => b.dataset.rank === '60').click()")
    assert run(chromium, "return document.activeElement.id") == "lanes"
    assert run(chromium, "return document.getElementById('said').textContent") == "rank 60 on node-7"
    assert run(chromium, "return document.getElementById('lanes').scrollTop") > 0
