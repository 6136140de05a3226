from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import orjson
import pytest

from hvdtrain.__main__ import main
from hvdtrain.timeline.report.form import schema

TRACES = Path(__file__).parents[1] / "timeline" / "traces"
TRACE = str(TRACES / "training.json.gz")


def test_a_report_of_any_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", "report", TRACE]) == 0
    out = capsys.readouterr().out
    assert out.startswith("training.json.gz, 2 ranks") and "step time: " in out


def test_json_goes_to_stdout_alone_and_html_to_its_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert main(["timeline", "report", TRACE, "--json", "--html", str(page)]) == 0
    jsonschema.validate(orjson.loads(capsys.readouterr().out), schema())
    assert "training.json.gz" in page.read_text()


def test_a_page_that_cannot_be_written_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    absent = tmp_path / "missing" / "report.html"
    for page, found in ((absent, "No such file or directory"), (tmp_path, "a folder"), (Path(), "a folder")):
        assert main(["timeline", "report", TRACE, "--html", str(page)]) == 1
        said = capsys.readouterr().err
        assert str(page) in said and "--html FILE" in said and f"found: {found}" in said
    assert not list(tmp_path.iterdir()) and not list(tmp_path.parent.glob(f".{tmp_path.name}.*"))


def test_names_that_are_no_text_are_shown_all_the_same(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    strange = os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff.json.gz")
    shutil.copy(TRACE, strange)
    for command in (["report", strange, "--json"], ["report", strange, "--html", f"{strange}.html"]):
        assert main(["timeline", *command]) == 0
        assert "run-?.json.gz" in capfd.readouterr().out
    assert main(["compare", strange, TRACE, "--json"]) == 0
    assert "run-?.json.gz" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("condition", "code", "said"),
    [
        ("step_ms > 1e6", 0, ""),
        ("step_ms > 0 and transfer_ms > 0", 1, "step_ms is "),
        ("step_ms >", 2, "--fail_if"),
        ("stepms > 1", 2, "step_ms"),
        ("straggler_ms > 1", 2, "straggler_ms"),
    ],
)
def test_fail_if_gives_the_exit_code(condition: str, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", "report", TRACE, "--fail_if", condition]) == code
    assert said in capsys.readouterr().err


def test_a_login_node_needs_neither_torch_nor_horovod(tmp_path: Path) -> None:
    trace = shutil.copy(TRACE, tmp_path / "t.json.gz")
    program = (
        "import sys\nsys.modules['torch'] = sys.modules['horovod'] = None\n"
        "from hvdtrain.__main__ import main\n"
        f"sys.exit(main(['timeline', 'report', {str(trace)!r}, '--html', {str(tmp_path / 'r.html')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r.html").exists()


def test_a_closed_pipe_causes_no_traceback() -> None:
    """As with ``| head``: the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    call = [sys.executable, "-m", "hvdtrain", "timeline", "report", TRACE]
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(call, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")
