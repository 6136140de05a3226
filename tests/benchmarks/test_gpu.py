"""benchmarks/gpu.py runs its parts in order, within their limits, and keeps each result as it comes."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import ROOT, TIMEOUT_S
from tests.support.processes import is_alive

sys.path.insert(0, str(ROOT / "benchmarks"))
gpu: Any = importlib.import_module("gpu")
gpu_checks: Any = importlib.import_module("gpu_checks")

ONE = "import json; print('RESULT ' + json.dumps(dict(name='a', value=1.5, unit='x', bar='>= 1', ok={ok})), flush=True)"


def _options(folder: Path, **more: object) -> argparse.Namespace:
    return argparse.Namespace(out=folder, only=None, minutes=10.0, device="cpu", **more)


def _part(name: str, program: str, limit_s: float = 60.0) -> Any:
    return gpu.Part(name, "Why?", (sys.executable, "-c", program), limit_s)


def test_each_part_runs_whatever_the_others_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    earlier = f"import json; print(json.load(open({str(tmp_path / 'gpu.json')!r}))['parts'][0]['state'])"
    parts = [
        _part("first", ONE.format(ok=True)),
        _part("second", f"{earlier}; raise SystemExit(3)"),
        _part("third", ONE.format(ok=False)),
        gpu.Part("fourth", "Why?", ("/no/such/program",), 60.0),
    ]
    assert gpu.run_all(parts, _options(tmp_path)) == 1
    content = json.loads((tmp_path / "gpu.json").read_text())
    states = [part["state"] for part in content["parts"]]
    assert states[:3] == ["ok", "failed with exit code 3", "missed: a"] and "No such file" in states[3]
    assert content["parts"][1]["tail"] == ["ok"], "the first part's result was on the disk"
    assert content["parts"][0]["results"] == [{"name": "a", "value": 1.5, "unit": "x", "bar": ">= 1", "ok": True}]
    page = (tmp_path / "gpu.html").read_text()
    assert "failed with exit code 3" in page and page.count("1.5 x") == 2
    assert "1 of 4 parts ok; not second; not third; not fourth" in capsys.readouterr().out


@pytest.mark.slow
def test_a_part_past_its_limit_is_killed_and_its_results_stay(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    child = f"p = subprocess.Popen(['sleep', '600']); open({str(started)!r}, 'w').write(str(p.pid))"
    slow = _part("slow", f"import subprocess, time; {child}; {ONE.format(ok=True)}; time.sleep(600)", limit_s=6.0)
    assert gpu.run_all([slow, _part("next", "pass")], _options(tmp_path)) == 1
    first, second = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert first["state"] == "stopped at its limit of 6 s" and len(first["results"]) == 1 and second["state"] == "ok"
    assert not is_alive(int(started.read_text()))


def test_every_check_is_a_part_and_every_part_has_a_check() -> None:
    options = _options(Path(), kit=None, python=sys.executable, venv=Path(), quick=True)
    named = {part.argv[part.argv.index("cpu") + 1] for part in gpu.parts("python", options) if "cpu" in part.argv}
    assert named == set(gpu_checks.CHECKS)


@pytest.mark.slow
def test_checks_run_without_a_gpu(tmp_path: Path) -> None:
    """The script's control flow on small sizes; bars of speed are the GPU's, so they may be missed."""
    argv = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--quick", "--out", str(tmp_path)]
    checks = ["machine", "train", "kernels", "checkpoint", "kill", "memory"]  # the others take longer
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*argv, "--minutes", "60", "--only", *checks], env=environment, cwd=tmp_path, capture_output=True, text=True,
        timeout=2 * TIMEOUT_S,
    )  # fmt: skip
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [part["name"] for part in parts if not part["results"]] == [], done.stdout + done.stderr
    ended = {part["name"]: part["state"] for part in parts}
    assert all(state == "ok" or state.startswith("missed") for state in ended.values()), done.stdout
    exact = [r for p in parts if p["name"] in ("train", "kill") for r in p["results"]]
    assert all(result["ok"] is not False for result in exact), exact
