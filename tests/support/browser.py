"""A real browser for tests: Debian's Chromium without a window, and pages that the test itself serves."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.launch import TIMEOUT_S

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
)


def _found(name: str, package: str) -> str:
    path = shutil.which(name)
    if path is None:
        if "CI" in os.environ:
            pytest.fail(f"{name} is missing, which .ci/run installs")
        pytest.skip(f"there is no {name}: sudo apt-get install {package}")
    return path


@contextmanager
def browser(profile: Path, width: int = 1400, height: int = 1000) -> Iterator[Chrome]:
    """A browser with a fresh profile in the folder `profile`; its window of that many pixels."""
    chromium, driver = _found("chromium", "chromium"), _found("chromedriver", "chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: make setup")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
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


def deep_text(opened: Chrome) -> str:
    """The text of the page that can be seen, shadow roots included."""
    return str(
        opened.execute_script(
            """
            const text = node => {
              if (node.nodeType === Node.TEXT_NODE) return node.textContent;
              if (["SCRIPT", "STYLE", "TEMPLATE"].includes(node.nodeName)) return "";
              const inside = [...(node.shadowRoot ? node.shadowRoot.childNodes : []), ...node.childNodes];
              return inside.map(text).join(" ");
            };
            return text(document.body);
            """
        )
    )


def severe(opened: Chrome) -> list[str]:
    """Errors of the browser's console since the last call."""
    return [entry["message"] for entry in opened.get_log("browser") if entry["level"] == "SEVERE"]
