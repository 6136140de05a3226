"""TensorBoard itself, started as the summary says, in a real browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorboard", reason="tensorboard is not installed: make setup")

from hvdtrain.observe import tensorboard_page as page
from hvdtrain.observe.past_journal import read_steps
from tests.support.browser import browser, deep_text, severe, until
from tests.support.launch import TIMEOUT_S
from tests.support.tensorboard_run import BATCH, Run

pytestmark = pytest.mark.slow

TITLES = [
    *page.LOSS_CHARTS,
    "words per second",
    "exposed communication (% of a step)",
    page.STRAGGLER_TITLE,
    page.STACK_TITLE,
    "learning rate",
    "gradient norm",
    "host CPU (%)",
    "host memory, process of rank 0 (GiB)",
    "host memory in use, all processes (GiB)",
]


@contextmanager
def _tensorboard(folder: Path) -> Iterator[str]:
    """The address of a TensorBoard that has read `folder`."""
    program = [str(Path(sys.executable).with_name("tensorboard")), "--logdir", str(folder), "--host", "127.0.0.1"]
    log = folder.parent / "tensorboard.log"
    with log.open("w") as out:
        server = subprocess.Popen([*program, "--port=0", "--reload_interval=1"], stdout=out, stderr=out)
        try:
            while (address := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())) is None:
                assert server.poll() is None, log.read_text()
                time.sleep(0.1)
            yield address[0]
        finally:
            server.terminate()
            server.wait()


def _get(address: str) -> Any:
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except (urllib.error.URLError, ConnectionError):  # not listening yet
        return None


def _points(address: str, run: str, tag: str) -> list[list[float]]:
    query = urllib.parse.urlencode({"run": run, "tag": tag})
    found = _get(f"{address}/data/plugin/scalars/scalars?{query}")
    assert isinstance(found, list), found
    return found


def test_the_page_of_charts_after_a_kill_and_a_resume(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    (tmp_path / "run").mkdir()
    run.stretch(None, [0.5] * 12, save_every=5, end=False)
    run.stretch(10, [0.5] * 6, save_every=5)
    steps = read_steps(run.journal)
    with _tensorboard(run.folder) as address, browser(tmp_path / "profile") as opened:

        def is_read() -> bool:
            tags = _get(f"{address}/data/plugin/scalars/tags")
            return bool(tags) and page.LOSS_BY_SAMPLES in tags.get("by_samples", {}) and len(tags) == 12

        until(opened, is_read)
        until(opened, lambda: len(_points(address, ".", "loss/train")) >= 16)
        for folder, tag, expected in (
            (".", "loss/train", sorted(steps)),
            ("by_samples", page.LOSS_BY_SAMPLES, [BATCH * step for step in sorted(steps)]),
            ("by_seconds", page.LOSS_BY_SECONDS, list(range(9))),
            ("heldout", page.LOSS_BY_STEP, [5, 10, 15]),
        ):
            assert [point[1] for point in _points(address, folder, tag)] == expected
        opened.get(f"{address}/#custom_scalars")
        until(opened, lambda: all(title in deep_text(opened) for title in TITLES))
        assert "Missing Tags" not in deep_text(opened)
        assert severe(opened) == []
