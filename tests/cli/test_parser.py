from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.__main__ import main
from hvdtrain.cli import build_horovod, doctor, launch_options
from hvdtrain.config.parse import parse_argv
from hvdtrain.errors import ConfigError


@pytest.mark.parametrize(
    ("argv", "wrong", "next_step"),
    [
        ("doctor --hosst a", "there is no option --hosst", "did you mean --hosts?"),
        ("doctor --host a", "there is no option --host", "did you mean --hosts?"),  # no part of a name
        ("doctor --run.dir=x", "there is no option --run.dir", "did you mean --run_dir?"),
        ("doctor --q", "there is no option --q", "hvdtrain doctor --help"),
        ("bundle", "required: FOLDER", "hvdtrain bundle --help"),
        ("bundle a b", "unexpected argument 'b'", "hvdtrain bundle --help"),
        ("launch --time 90", "is not a time; expected 2h", "hvdtrain launch --help"),
        ("launch --to sge", "invalid choice: 'sge'", "hvdtrain launch --help"),
        ("timeline merge x -o y --y", "there is no option --y", "hvdtrain timeline merge --help"),
        ("verify data", "required: RUN", "hvdtrain verify data --help"),
        ("export runs/x s3://bucket/x", "is no local path", "hvdtrain export --help"),
    ],
)
def test_errors_are_short(argv: str, wrong: str, next_step: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv.split())
    assert ended.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"hvdtrain {argv.split()[0]}") and wrong in first
    assert second == f"  next: {next_step}"


@pytest.mark.parametrize(
    ("argv", "wrong", "next_step"),
    [
        ("lunch -np 2", "'lunch'", "did you mean launch?"),
        ("train.steps=5", "'train.steps=5'", "options begin with --, as in hvdtrain --train.steps 100"),
        ("timeline raport x", "'raport' of timeline", "did you mean report?"),
        ("verify runs/NAME", "'runs/NAME' of verify", ""),
    ],
)
def test_a_word_that_is_no_command(argv: str, wrong: str, next_step: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv.split()) == 2
    first, expected, *following = capsys.readouterr().err.splitlines()
    assert first == f"hvdtrain: there is no command {wrong}"
    assert expected.startswith("  expected: one of ")
    assert following == ([f"  next: {next_step}"] if next_step else [])


def test_a_working_directory_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err.startswith("hvdtrain: the working directory cannot be used: No such file")


def test_options_are_accepted_with_dashes_and_with_underscores() -> None:
    read = doctor.parser().parse_args(["--run-dir=a-b_c", "--ssh_port", "2222"])
    assert (str(read.run_dir), read.ssh_port) == ("a-b_c", 2222)
    assert build_horovod.parser().parse_args(["--dry_run"]).dry_run
    launched = launch_options.parse(["-np", "2", "--hang_timeout=5", "--", "python", "x.py", "--my_own", "--dry_run"])
    assert launched.hang_timeout == 5 and not launched.dry_run
    assert launched.arguments == ["--", "python", "x.py", "--my_own", "--dry_run"]
    run = parse_argv(["--run-dir", "a", "--train.global-batch=4", "--checkpoint.every", "0"], None)
    assert run.config.run_dir == "a" and run.config.train.global_batch == 4
    with pytest.raises(ConfigError, match=r"invalid --train\.global_batch"):
        parse_argv(["--train.global-batch=many"], None)
