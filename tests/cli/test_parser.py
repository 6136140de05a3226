"""Wrong options of the subcommands: what is wrong and what to do, in two lines."""

from __future__ import annotations

import pytest

from hvdtrain.__main__ import main


@pytest.mark.parametrize(
    ("argv", "wrong", "next_step"),
    [
        ("doctor --hosst a", "there is no option --hosst", "did you mean --hosts?"),
        ("doctor --host a", "there is no option --host", "did you mean --hosts?"),  # no part of a name
        ("doctor --run-dir=x", "there is no option --run-dir", "did you mean --run_dir?"),
        ("doctor --q", "there is no option --q", "hvdtrain doctor --help"),
        ("bundle", "required: folder", "hvdtrain bundle --help"),
        ("bundle a b", "'b' is one argument too many", "hvdtrain bundle --help"),
        ("launch --time 90", "a time such as 2h", "hvdtrain launch --help"),
        ("launch --to sge", "invalid choice: 'sge'", "hvdtrain launch --help"),
        ("timeline merge x -o y --y", "there is no option --y", "hvdtrain timeline merge --help"),
        ("verify data", "required: RUN", "hvdtrain verify data --help"),
        ("completion tcsh", "invalid choice: 'tcsh'", "hvdtrain completion --help"),
    ],
)
def test_it_is_told_without_the_whole_usage(
    argv: str, wrong: str, next_step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv.split())
    assert ended.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"hvdtrain {argv.split()[0]}") and wrong in first
    assert second == f"  next: {next_step}"
