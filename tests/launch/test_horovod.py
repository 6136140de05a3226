"""Real Horovod under the driver: one process lives through rounds of other sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.install.record import installed
from tests.support.fake_launch import FakeJob

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "support" / "hvd_rank.py"


@pytest.fixture(autouse=True)
def horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("horovod")
    monkeypatch.setenv("HVD_RANK_MARK", str(tmp_path / "mark"))


def test_horovod_continues_with_the_remaining_ranks(tmp_path: Path) -> None:
    options = ("-np", "2", "--elastic", "1:2", "-H", "localhost:1,127.0.0.1:1", "--events", "events")
    with FakeJob(tmp_path, *options, "--", "3", "kill:1:200", program=PROGRAM) as job:
        code, out = job.end()
    assert code == 0, job.said
    events = map(json.loads, (tmp_path / "events").read_text().splitlines())
    assert [event["size"] for event in events if event["event"] == "round"] == [2, 1, 2]
    assert "round 2: rank 0 of 1 at 200" in out and "[1] round 3: rank 1 of 2 at 0" in out


def test_pending_messages_of_a_dead_rank_fail_at_once(tmp_path: Path) -> None:
    found = installed()
    if found is None or not found.fixed:
        pytest.skip("this Horovod's Gloo does not tell")
    with FakeJob(tmp_path, "-np", "2", "--elastic", "1:2", "--", "2", "kill:1:5", "512", program=PROGRAM) as job:
        code, out = job.end()
    assert code == 0 and "round 2: rank 0 of 1 at 5" in out, job.said
    assert any("Connection closed by peer" in line or "reset by peer" in line for line in job.said)
    assert not any("Timed out" in line for line in job.said)
