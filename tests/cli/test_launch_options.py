"""What ``hvdtrain launch`` answers to options that are not its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.cli.launch import main
from hvdtrain.cli.launch_options import parse, parser
from hvdtrain.errors import LaunchError
from hvdtrain.launch.hosts import run_script


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--elastc", "1:2"], "did you mean --elastic?"),
        (["--restart=2"], "did you mean --restarts?"),  # which --re may be is another thing tomorrow
        (["--min-np", "1"], "--elastic MIN:MAX"),
        (["--host-discovery-script", "x"], "--discover SCRIPT"),
        (["--task", "toy"], "an option of training"),
        (["--train.steps=100"], "an option of training"),
        (["--config", "run.yaml"], "an option of training"),
        (["--quite-another"], "follow --"),
    ],
)
def test_an_option_that_does_not_exist_is_answered(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["-np", "2", "--dry-run", *wrong, "--", "--train.steps", "3"])
    error = capsys.readouterr().err
    assert code == 2 and said in error and wrong[0][:8] in error


def test_np_has_the_short_form_of_mpiexec_and_srun() -> None:
    assert parse(["-n", "3"]).np == parse(["-np", "3"]).np == 3
    assert "-np N, -n N" in parser().format_help()


@pytest.mark.parametrize(
    ("name", "said", "unsaid"),
    [
        ("cat hosts", "without arguments", "chmod"),
        ("missing", "give the path", "chmod"),
        (".", "is a folder", "chmod"),
        ("plain file", "chmod +x", "interpreter"),
        ("headless", "interpreter", "chmod"),
    ],
)
def test_the_advice_about_a_script_fits_its_fault(
    name: str, said: str, unsaid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain file").write_text("#!/bin/sh\n")
    Path("headless").write_text("echo a\n")
    Path("headless").chmod(0o755)
    with pytest.raises(LaunchError) as wrong:
        run_script(Path(name))
    assert said in str(wrong.value.next_step) and unsaid not in str(wrong.value.next_step)
