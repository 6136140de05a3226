"""Links measured between ranks on this machine, and what stops that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.cli.doctor import main
from hvdtrain.doctor.links.start_probe import command, common_interface, obstacle, other_library
from hvdtrain.launch.spec import JobSpec, Mpi
from hvdtrain.runtime.environment import RankInfo
from tests.doctor.hosts.surveys import WELL, other
from tests.support.launch import run

DOCTOR = ["-m", "hvdtrain", "doctor"]
MAPS = """\
7f00-7f10 r-xp 00000000 08:01 11  /v/lib/libmpi.so.40.30.8
7f10-7f20 r-xp 00000000 08:01 12  /v/lib/libmpi_mpifh.so.40
7f20-7f30 rw-p 00000000 00:00 0
7f30-7f40 r-xp 00000000 08:01 13  /usr/lib/libc.so.6
"""


@pytest.mark.slow
def test_two_ranks_of_one_host(tmp_path: Path) -> None:
    options = ["--probe", "--json", "--model_parameters", "1e6", "--step_ms", "100"]
    said = json.loads(run([*DOCTOR, *options], size=2, cwd=tmp_path).stdout)
    (way,) = said["links"]["ways"]
    assert way["source"] == way["target"] == said["links"]["hosts"][0]
    assert way["latency_s"] > 0 and way["bytes_per_s"] > 0
    assert [row["ranks"]["size"] for row in said["outlook"]["rows"]] == [1, 2]
    text = run([*DOCTOR, "--probe"], size=2, cwd=tmp_path).stdout
    assert "in a host" in text and "from / to" in text and "a step to expect" not in text


@pytest.mark.slow
def test_mpi4py_that_is_not_there_is_named_with_its_extra(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no mpi4py here')")
    done = run(
        [*DOCTOR, "--probe"], size=2, cwd=tmp_path, check=False, environment={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    )
    assert done.returncode == 2
    assert "hvdtrain[bench]" in done.stdout and "no mpi4py here" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--probe"], "single process"),
        (["--step_ms", "5", "--probe"], "--model_parameters"),
        (["--model_parameters", "5", "--step_ms", "5"], "--probe"),
        (["--probe", "--run", "x", "--model_parameters", "5", "--step_ms", "5"], "--run"),
        (["--hosts", "a;b"], "host name"),
    ],
)
def test_incompatible_options_are_reported(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hvdtrain.cli.doctor.prepare", lambda: (RankInfo(), []))
    assert main(options) == 2
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_ranks_started_without_mpi_get_an_error(tmp_path: Path) -> None:
    done = run([*DOCTOR, "--probe"], size=2, launcher="horovodrun --gloo", cwd=tmp_path, check=False)
    assert done.returncode and "--probe needs MPI" in done.stdout


def test_a_loaded_mpi_other_than_horovods_is_found(tmp_path: Path) -> None:
    assert other_library(MAPS, Path("/v/lib/libmpi.so.40.30.8")) is None
    assert other_library(MAPS, Path("/other/lib/libmpi.so.40")) == "/v/lib/libmpi.so.40.30.8"
    assert other_library("", Path("/other/lib/libmpi.so.40")) is None, "nothing is known of it"
    link = tmp_path / "libmpi.so.40"
    link.symlink_to("/v/lib/libmpi.so.40.30.8")
    assert other_library(MAPS, link) is None


def test_where_something_is_missing_on_a_host_it_is_named() -> None:
    assert obstacle(WELL, ["a", "b"]) == ""
    assert "on b" in obstacle(other(mpi4py=""), ["a", "b"]) and "hvdtrain[bench]" in obstacle(other(mpi4py=""), ["b"])
    assert obstacle(other(mpi4py=""), ["a"]) == ""
    assert "on b" in obstacle(other(libmpi=""), ["a", "b"])


def test_the_network_between_hosts_is_that_of_their_routes() -> None:
    assert common_interface(WELL, ["a", "b"]) == "eth0"
    assert common_interface(WELL, ["a"]) == ""


def test_the_probe_is_started_like_any_job(tmp_path: Path) -> None:
    arguments = ("doctor", "--probe", "--json")
    job = JobSpec(arguments, 16, hosts={"a": 8, "b": 8}, host="a", folder=str(tmp_path), ssh_port=2222)
    words = " ".join(command(job, ["a", "b"], "eth0", Mpi("openmpi", "4.1.8")).argv)
    assert words.startswith("mpirun -np 4 --host a:2,b:2") and "btl_tcp_if_include eth0" in words
    assert "-p 2222" in words
    assert words.endswith("-m hvdtrain doctor --probe --json")
