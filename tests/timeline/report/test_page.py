"""The page in a real browser: nothing is asked of a network, every text is readable, hands can stay on the keyboard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hvdtrain.timeline.analysis.analysis import Analysis
from hvdtrain.timeline.report.page import headline, to_html
from tests.support.analyses import HOSTILE, analysis, empty, hostile
from tests.support.browser import browser, severe, until

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


@pytest.mark.parametrize(("theme", "width"), [("light", 1400), ("dark", 360)])
@pytest.mark.parametrize("size", [1, 2, 64])
def test_a_run_is_shown(size: int, theme: str, width: int, chromium: WebDriver, tmp_path: Path) -> None:
    found = analysis(size)
    show(chromium, found, tmp_path, theme, width)
    assert run(chromium, "return document.documentElement.scrollWidth") <= width
    assert run(chromium, "return document.querySelector('h1').innerText") == "; ".join(headline(found)) + "."
    ground = run(chromium, "return getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", ground)[0]) > 200) == (theme == "light")
    assert run(chromium, "return document.querySelectorAll('#rank-table tbody').length") == (size if size > 1 else 0)
    run(chromium, "for (const button of document.querySelectorAll('.why')) button.click()")
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
    while "why" not in reached and len(reached) < 200:
        _press(chromium, Keys.TAB)
        reached.append(run(chromium, at))
        if reached[-1] == "why" and reached.count("why") == 1:
            assert not run(chromium, why)
            _press(chromium, Keys.ENTER)
            assert run(chromium, why)
    assert {"copy", "sort", "why"} <= {*reached}


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
