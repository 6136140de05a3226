"""`hvdtrain plan`: what ranks hold and send, in words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.__main__ import main
from tests.support.whatif_run import run_folder

FILE = "model: {preset: tiny}\nparallel: {engine: fsdp, dp_shard: 8}\nprecision: bf16-weights\n"


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, str]:
    assert main(["plan", "--json", *argv]) == 0
    rows = json.loads(capsys.readouterr().out)
    return {row["name"]: " ".join(each["value"] for each in rows if each["name"] == row["name"]) for row in rows}


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ([], "parameters", ["each rank holds all"]),
        ([], "gradients", ["on all ranks", "once a step"]),
        (["--parallel.tp=2"], "mesh", ["each matrix: ranks 0-1, 2-3", "4 x each part"]),
        (["--parallel.tp=2"], "gradients", ["on the ranks with copies"]),
        (["--parallel.shard=gradients"], "gradients", ["at the owners of rows", "after each pass"]),
        (["--parallel.shard=optimizer", "--memory.offload=optimizer"], "optimizer", ["ZeRO", "memory of the host"]),
        (["--parallel.cp=2", "--parallel.pp=2"], "in passes", ["heads of attention", "to the next stage"]),
        (["--parallel.sync=diloco:16", "--parallel.workers=2"], "workers", ["2, which", "int8 every 16 steps"]),
        (["--precision=bf16-weights"], "parameters", ["a copy in bf16"]),
        (["--elastic"], "number of ranks", ["may change"]),
        (["--parallel.engine=fsdp", "--parallel.dp_shard=4"], "parameters", ["2 groups of 4 hold copies"]),
        (["--config=RUN"], "held", ["gradients: 8.39 MB, from backward to the update"]),
        (["--config=RUN"], "sent", ["gradients: 8.39 MB a step to 8 ranks, in 2 allreduce(s), the last"]),
        (["--config=RUN", "--parallel.shard=gradients"], "held", ["optimizer state: 2.10 MB"]),
        (["--config=RUN", "--parallel.shard=gradients"], "sent", ["parameters: 1.05 MB a step to 8 ranks, in 2 all"]),
        (["--config=RUN", "--parallel.sync=diloco:4", "--parallel.workers=2"], "sent", ["to 2 ranks", "every 4 steps"]),
        (["--config=RUN", "--parallel.engine=fsdp"], "parameters", ["rows of each block"]),
        (["--config=RUN", "--parallel.tp=2"], "parameters", ["its part of the mesh"]),
    ],
)
def test_who_holds_and_sends_what(
    options: list[str], name: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """RUN is of a run, which knows the sizes of a model without blocks."""
    path = run_folder(tmp_path / "run", size=2, passes=2, state_bytes=(8, 0)) / "config.yaml"
    found = said(capsys, *(option.replace("RUN", str(path)) for option in options))
    assert all(word in found[name] for word in words), found[name]


def test_of_a_file_with_options_of_its_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line wins; what is not of every run is named."""
    (tmp_path / "run.yaml").write_text(FILE)
    arguments = [f"--config={tmp_path / 'run.yaml'}", "--ranks=64", "--model.preset", "16b", "--parallel.dp_shard=16"]
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert "4 groups of 16" in " ".join(text.split()) and "not a part of the plan: --model.preset" in text
    assert max(map(len, text.splitlines())) < 80


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--parallel.shard=gradients", "--parallel.pp=2"], ["--parallel.pp 2", "or --parallel.shard none"]),
        (["--ranks=6", "--parallel.tp=4"], ["6 rank(s)", "--parallel.tp 3"]),
        (["--ranks=6", "--parallel.engine=fsdp", "--parallel.dp_shard=4"], ["6 ranks cannot form groups"]),
        (["--parallel.tb=2"], ["did you mean --parallel.tp"]),
    ],
)
def test_what_is_refused(options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *options]) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in words), told


def test_it_imports_no_torch() -> None:
    program = (
        "import sys\nfrom hvdtrain.__main__ import main\n"
        "assert main(['plan', '--parallel.tp=2']) == 0 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
