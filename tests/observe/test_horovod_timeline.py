"""One window of Horovod's Timeline: opened, closed, never in the way. Real ones: tests/cli/test_timeline.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.windows import ALL, Window
from hvdtrain.errors import HorovodError
from hvdtrain.observe.horovod_timeline import HorovodTimeline
from tests.support.thread_comm import ThreadComm, on_ranks


class FakeHorovod:
    """Horovod's Timeline; notes what is asked of it."""

    def __init__(self, fails: str = "", content: str = "[{}]") -> None:
        self.calls: list[str] = []
        self._fails = fails
        self._content = content

    def start_timeline(self, path: Path) -> None:
        self._call("start")
        self._path = path

    def stop_timeline(self) -> None:
        self._call("stop")
        self._path.write_text(self._content)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self._fails:
            raise HorovodError(f"no {name}")


def run(window: Window, steps: range, folder: Path, horovod: FakeHorovod | None = None) -> tuple[list[str], list[str]]:
    """What was asked of Horovod, with the steps between, and the warnings."""
    horovod = horovod or FakeHorovod()
    warnings: list[str] = []
    timeline = HorovodTimeline(SoloComm(), horovod, window, folder, warnings.append)
    for step in steps:
        timeline.begin_step(step)
        horovod.calls.append(str(step))
    timeline.close()
    timeline.close()
    return horovod.calls, warnings


def test_a_window_is_open_in_its_steps(tmp_path: Path) -> None:
    calls, warnings = run(Window(2, 3), range(1, 6), tmp_path)
    assert (calls, warnings) == (["1", "start", "2", "3", "stop", "4", "5"], [])
    assert [file.name for file in tmp_path.iterdir()] == ["horovod-steps-2-3.json"]


@pytest.mark.parametrize(("window", "name"), [(Window(2, 9), "2-9"), (ALL, "1-on")])
def test_a_run_that_ends_in_its_window_closes_it_once(window: Window, name: str, tmp_path: Path) -> None:
    calls, warnings = run(window, range(1, 4), tmp_path)
    assert calls[-1] == "stop" and calls.count("stop") == 1
    assert warnings == []
    assert (tmp_path / f"horovod-steps-{name}.json").read_text() == "[{}]"


def test_a_start_within_the_window_takes_what_is_left_and_one_after_it_nothing(tmp_path: Path) -> None:
    for number in range(3):
        run(Window(2, 5), range(4, 8), tmp_path, FakeHorovod(content=f"[{number}]"))
    assert (tmp_path / "horovod-steps-4-5.json").read_text() == "[0]"
    assert sorted(file.read_text() for file in tmp_path.iterdir()) == ["[0]", "[1]", "[2]"], "no file is written twice"
    calls, _ = run(Window(2, 3), range(4, 6), tmp_path / "other")
    assert calls == ["4", "5"]
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("fails", "content", "reason", "started", "stopped", "files"),
    [
        ("start", "[{}]", "no start", True, False, 0),
        ("stop", "[{}]", "no stop", True, True, 1),
        ("folder", "[{}]", "File exists", False, False, 0),
        ("", "", "disk", True, True, 0),  # an empty one is no file
        ("", '[{"ph": "B"},', "disk", True, True, 1),
    ],
)
def test_what_horovod_or_the_disk_refuses_is_a_warning(
    fails: str, content: str, reason: str, started: bool, stopped: bool, files: int, tmp_path: Path
) -> None:
    folder = tmp_path / "timeline"
    if fails == "folder":
        folder.write_text("")
    calls, warnings = run(Window(1, 2), range(1, 5), folder, FakeHorovod(fails, content))
    assert len(warnings) == 1 and reason in warnings[0] and "training continues" in warnings[0]
    assert ("start" in calls, "stop" in calls) == (started, stopped)
    assert len(list(folder.glob("*"))) == files


def test_ranks_wait_for_the_window_to_open_and_to_close(tmp_path: Path) -> None:
    horovod = FakeHorovod()
    comms: dict[int, ThreadComm] = {}

    def others_have_come(where: str, step: int) -> bool:
        done = [call for call in horovod.calls if call == f"step {step}"]
        return len(done) + sum(f"timeline/{where}/length" in comm.in_flight for comm in list(comms.values())) == 2

    def rank(comm: ThreadComm) -> None:
        recording = horovod if comm.rank == 0 else None
        timeline = HorovodTimeline(comm, recording, Window(2, 3), tmp_path, pytest.fail)
        comms[comm.rank] = comm
        for step in range(1, 5):
            where = {2: "open", 4: "close"}.get(step)
            while comm.rank == 0 and where is not None and not others_have_come(where, step):
                pass
            timeline.begin_step(step)
            horovod.calls.append(f"step {step}")
        timeline.close()

    on_ranks(3, rank, at_once=True)
    calls = horovod.calls
    assert calls.index("start") < calls.index("step 2")
    assert calls.index("stop") < calls.index("step 4")
    assert [file.name for file in tmp_path.iterdir()] == ["horovod-steps-2-3.json"]
