"""Commands to be typed again: a shell's words, and no launcher that was not there."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.observe.shell_commands import resume_command, resume_program
from hvdtrain.runtime.environment import GLOO_LAUNCHER, LAUNCH_OPTIONS, RankInfo
from hvdtrain.runtime.host import HostFacts

RUN = Path("runs/my run")
ALONE = RankInfo()
ONE_HOST = RankInfo("openmpi", size=4, local_size=4)
TWO_HOSTS = RankInfo("openmpi", size=4, local_size=2)
OVER_GLOO, BY_SLURM, BY_HYDRA = (RankInfo(name, size=4, local_size=4) for name in (GLOO_LAUNCHER, "slurm", "hydra"))


def _words(command: str) -> list[str]:
    return shlex.split(command, comments=True)


@pytest.fixture(autouse=True)
def _nobody_special(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("hvdtrain.observe.shell_commands.read_host", lambda environ: HostFacts(cores=4))


def test_one_host_under_open_mpi_is_a_whole_command(monkeypatch: pytest.MonkeyPatch) -> None:
    words = _words(resume_command(RUN, ONE_HOST, "--train.steps 9"))
    assert Path(words[0]).name == "mpirun" and words[1:3] == ["-np", "4"]
    assert words[4:7] == ["-m", "hvdtrain", "--config"]
    assert words[7:] == [f"{RUN}/config.yaml", "--run_dir", str(RUN), "--train.steps", "9"]
    assert _words(resume_command(RUN, ALONE, "--train.steps 9")) == words[3:]
    assert "#" not in resume_command(RUN, ONE_HOST) + resume_command(RUN, ALONE)
    monkeypatch.setattr("os.geteuid", lambda: 0)  # Open MPI does not let root run it unasked
    assert _words(resume_command(RUN, ONE_HOST))[1:4] == ["--allow-run-as-root", "-np", "4"]
    assert "root" not in resume_command(RUN, ALONE) + resume_command(RUN, TWO_HOSTS)
    assert _words(resume_command(RUN, replace(ONE_HOST, size=8, local_size=8)))[2:5] == ["--oversubscribe", "-np", "8"]


def test_the_resume_command_repeats_the_setting_for_a_missing_ssh() -> None:
    def told(info: RankInfo, shell: str) -> str:
        return resume_command(RUN, replace(info, variables={"OMPI_MCA_plm_rsh_agent": shell}))

    assert "rsh" not in told(ONE_HOST, "docker exec")
    assert told(ONE_HOST, "/bin/false").startswith("OMPI_MCA_plm_rsh_agent=/bin/false ")
    assert "rsh" not in told(ALONE, "/bin/false") + told(TWO_HOSTS, "/bin/false")


@pytest.mark.parametrize(
    ("info", "started_by"),
    [
        (TWO_HOSTS, "mpirun"),
        (OVER_GLOO, "horovodrun --gloo"),
        (BY_SLURM, "srun"),
        (BY_HYDRA, "mpirun or mpiexec"),
    ],
)
def test_another_start_is_named_and_not_guessed(info: RankInfo, started_by: str) -> None:
    for command in (resume_command(RUN, info, "--a b"), resume_program(RUN, info, [sys.executable, "train.py"])):
        assert "mpirun" not in _words(command)[0]
        assert f"on 4 ranks, started by {started_by}" in command
    assert _words(resume_command(RUN, info, "--a b")) == _words(resume_command(RUN, ALONE, "--a b"))


def test_a_program_is_started_again_as_it_was() -> None:
    argv = [sys.executable, "-W", "ignore", "train it.py", "--name=a b"]
    alone, four = (resume_program(RUN, info, argv) for info in (ALONE, ONE_HOST))
    assert _words(alone)[1:] == argv[1:]
    assert _words(four)[1:3] == ["-np", "4"] and _words(four)[3:] == _words(alone)
    assert alone.endswith(f"# with run_dir set to '{RUN}'")


@pytest.mark.parametrize("argv", [[sys.executable], [sys.executable, "-c", "a\nb"], [sys.executable, "x" * 1000]])
def test_a_program_without_a_command_line_of_its_own_is_no_command(argv: list[str]) -> None:
    for info in (ALONE, ONE_HOST, TWO_HOSTS):
        text = resume_program(RUN, info, argv)
        assert _words(text) == [] and text.startswith("# the same program again, with run_dir")


def test_a_job_of_our_own_launcher_is_launched_again() -> None:
    launched = {LAUNCH_OPTIONS: '["-np", "2", "--discover", "my hosts.sh"]'}
    words = _words(resume_command(RUN, replace(ONE_HOST, variables=launched), "--train.steps 9"))
    assert words[1:7] == ["launch", "-np", "2", "--discover", "my hosts.sh", "--"]
    assert words[7] == "--config" and words[-2:] == ["--train.steps", "9"]
    for other in ("no json", '{"a": 1}', "[1]"):
        assert "launch" not in _words(resume_command(RUN, replace(ALONE, variables={LAUNCH_OPTIONS: other})))
