"""Requesting a window: the errors if no job answers, or if nothing can be recorded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from hvdtrain.cli.timeline.window import ask_window
from hvdtrain.config.windows import Window
from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.live_window import (
    Answer,
    LiveWindow,
    Request,
    Requests,
    read_message,
    write_message,
)


def run_folder(folder: Path) -> Path:
    (folder / "timeline").mkdir()
    (folder / "journal.jsonl").write_text('{"event":"started"}\n')
    return folder


def job(folder: Path, states: list[Answer]) -> Callable[[float], None]:
    """A clock that, at each look, lets a job answer the request with the next state."""

    def sleep(seconds: float) -> None:
        request = read_message(folder / "timeline", Request)
        assert request is not None
        if states:
            write_message(folder / "timeline", replace(states.pop(0), id=request.id))

    return sleep


@pytest.mark.parametrize(
    ("asked", "states", "said"),
    [
        (Request("a", "start"), [], "no job answers"),
        (Request("a", "start"), [Answer("", "seen")], "no step within 1 s"),
        (Request("a", "stop"), [Answer("", "none")], "not recording"),
    ],
)
def test_no_window_is_an_error(asked: Request, states: list[Answer], said: str, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=said):
        ask_window(run_folder(tmp_path), asked, patience_s=1.0, sleep=job(tmp_path, [*states]))


def test_an_answer_to_another_request_is_none_to_this_one(tmp_path: Path) -> None:
    write_message(run_folder(tmp_path) / "timeline", Answer("other", "open", 7))
    answers = job(tmp_path, [Answer("", "seen"), Answer("", "open", 9)])
    assert ask_window(tmp_path, Request("a", "start"), patience_s=1.0, sleep=answers).first == 9


@pytest.mark.parametrize(
    "content",
    [b"", b"[", b"[]", b"\xff\xfe", b'{"version":2}', b'{"version":1,"id":"a","action":"rm","steps":0}']
    + [b'{"version":1,"id":"a","action":"start","steps":%s}' % steps for steps in (b"-1", b"true", b'"5"', b"1e99")]
    + [b'{"id":"a","action":"start","steps":0,"more":' + b"[" * 100_000],
)
def test_what_is_no_request_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".window-request.json").write_bytes(content)
    assert read_message(tmp_path, Request) is None


def test_a_fifo_as_request_or_answer_blocks_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".window-request.json")
    os.mkfifo(tmp_path / ".window-answer.json")
    assert read_message(tmp_path, Request) is None and read_message(tmp_path, Answer) is None


class Told:
    """Notes what it is to record."""

    def __init__(self) -> None:
        self.windows: list[Window] = []
        self.record = self.windows.append


def test_what_was_asked_of_an_earlier_start_is_not_done_again(tmp_path: Path) -> None:
    write_message(tmp_path, Request("old", "start"))
    requests = Requests(tmp_path, every_s=1000.0)
    requests.poll()
    assert requests.next_request() is None
    write_message(tmp_path, new := Request("new", "start", 5))
    requests.poll()
    assert requests.next_request() == new
    requests.poll()
    assert requests.next_request() is None
    requests.close()


OPEN, STEPS_5_MORE, OVER = [1 << 40, 1, 0], [5, 0, 0], [0, 0, 1]


@pytest.mark.parametrize(
    ("sums", "windows", "profiled"),
    [
        ({10: STEPS_5_MORE, 12: [7, 0, 0], 30: OVER}, [Window(11, 15), Window(11, 19)], 0),  # over by then
        ({40: OPEN, 44: OVER}, [Window(41, None), Window(41, 44)], 2),
        (
            {10: OPEN, 12: [7, 0, 0], 14: OVER, 20: STEPS_5_MORE},
            [Window(11, None), Window(11, 19), Window(11, 14), Window(21, 25)],
            3,
        ),
    ],
)
def test_steps_are_added_to_a_window_that_is_open_and_a_profile_ends_with_it(
    sums: dict[int, list[int]], windows: list[Window], profiled: int, tmp_path: Path
) -> None:
    told, profile = Told(), Told()
    window = LiveWindow(tmp_path, None, [told.record], profile.record, "", lambda text: None)
    for step, asked in sums.items():
        window.on_sums(step, asked)
    assert (told.windows, profile.windows) == (windows, windows[:profiled])


def job_of(folder: Path, lacks: str = "") -> LiveWindow:
    return LiveWindow(folder, Requests(folder, every_s=0.001), [Told().record], Told().record, lacks, lambda text: None)


def taken(window: LiveWindow, folder: Path, request: Request) -> list[int]:
    """What the step that comes sums when this is asked."""
    write_message(folder, request)
    while not any(asked := window.values()):
        pass
    return asked


def test_what_is_over_is_answered_to_whoever_asked_for_it(tmp_path: Path) -> None:
    window = job_of(tmp_path)
    window.on_sums(3, taken(window, tmp_path, Request("first", "start", 2)))
    asked = taken(window, tmp_path, Request("second", "start", 2))
    window.begin_step(8)
    assert read_message(tmp_path, Answer) == Answer("first", "over", 4, 5, [])
    window.on_sums(8, asked)
    assert read_message(tmp_path, Answer) == Answer("second", "open", 9, 10, [])
    window.close()


def test_a_run_that_ends_answers_a_late_request(tmp_path: Path) -> None:
    window = job_of(tmp_path)
    window.begin_step(3)
    window.on_sums(3, taken(window, tmp_path, Request("last step", "start", 2)))
    window.close()
    assert read_message(tmp_path, Answer) == Answer("last step", "none", files=[], lacks="the run has ended")
    window = job_of(tmp_path)
    window.begin_step(3)
    write_message(tmp_path, Request("later", "stop"))
    while (seen := read_message(tmp_path, Answer)) is None or seen.id != "later":
        pass
    window.close()
    assert read_message(tmp_path, Answer) == Answer("later", "none", files=[], lacks="the run has ended")


def test_the_answer_says_what_was_written(tmp_path: Path) -> None:
    """A trace that disappears meanwhile is no failure, and another request is not answered."""
    (tmp_path / "old.json").write_text("[]")
    (tmp_path / "spans.json").write_text("[]")
    (tmp_path / "gone.json").symlink_to(tmp_path / "renamed")
    write_message(tmp_path, Request("before", "stop"))
    window = job_of(tmp_path, "nothing")
    window.on_sums(3, taken(window, tmp_path, Request("now", "start", 2)))
    (tmp_path / "spans.json").write_text("[{}]")
    (tmp_path / "horovod.json").write_text("[{}]")
    for step in (5, 6, 7):
        window.begin_step(step)
        assert read_message(tmp_path, Answer) == Answer("now", "open", 4, 5, [], "nothing")
    window.begin_step(8)
    files = [str(tmp_path / name) for name in ("horovod.json", "spans.json")]
    assert read_message(tmp_path, Answer) == Answer("now", "over", 4, 5, files, "nothing")
    window.close()
