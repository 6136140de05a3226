"""The Horovod that is installed where the tests run: two ranks sum, and its library depends on no environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.install import record
from hvdtrain.install.build_plan import DROPPED_PREFIXES
from hvdtrain.install.build_probe import probe
from tests.support.launch import TIMEOUT_S

SHUT_DOWN_AMID = """
import itertools, pathlib, time, torch, horovod.torch as hvd
hvd.init()
tensor, amid = torch.ones(1), pathlib.Path("amid")
hvd.barrier()
if hvd.rank() == 0:
    while not amid.exists():
        time.sleep(0.001)
else:
    handles = []
    try:
        for number in itertools.count():
            handles.append(hvd.allreduce_async_(tensor, name=str(number)))
            if number == 10_000:
                amid.touch()
    except hvd.mpi_ops.HorovodInternalError:
        print("unanswered", len(handles))
hvd.shutdown()
"""
"""Rank 0 shuts down while rank 1 enqueues one tensor after the other, until it gets an error."""


def installed() -> record.BuildRecord:
    found = record.installed()
    if found is None:
        pytest.skip("Horovod is not installed: hvdtrain build-horovod")
    return found


def test_its_threads_sleep_instead_of_polling() -> None:
    found = installed()
    record.check()  # it fits the installed torch
    if "CI" not in os.environ and not (found.quiet and found.prompt):
        pytest.skip("this Horovod was not built by this version's hvdtrain build-horovod")
    assert found.quiet and found.prompt


@pytest.mark.slow
def test_a_shutdown_does_not_deadlock_with_a_rank_that_enqueues(tmp_path: Path) -> None:
    if "CI" not in os.environ and not installed().fixed:
        pytest.skip("this Horovod was not built by this version's hvdtrain build-horovod")
    here = probe(os.environ)
    assert here.mpi is not None, "Horovod is installed, and no MPI to start it with"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED_PREFIXES)}
    environment = {**kept, **record.proof_environment(here, here.mpi)}
    command = [SHUT_DOWN_AMID if word == record.PROGRAM else word for word in record.proof_command(here, here.mpi)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.partition("unanswered")[2]) > 10_000


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf, which comes with g++")
def test_its_library_names_no_folder_of_an_environment() -> None:
    if installed().mpi is None:
        pytest.skip("this Horovod was not built by hvdtrain build-horovod")
    library = next(probe(os.environ).python.site.glob("horovod/torch/mpi_lib_v2*.so"))
    done = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    paths = [line.partition("[")[2].rstrip("]") for line in done.stdout.splitlines() if "RUNPATH" in line]
    assert paths, "no RUNPATH: libmpi of the environment would not be found"
    for path in paths[0].split(":"):
        assert path.startswith("$ORIGIN/") or not path.startswith(sys.prefix), path
    assert "$ORIGIN/../../torch/lib" in paths[0].split(":")
