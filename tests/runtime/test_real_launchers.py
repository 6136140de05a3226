"""Ranks started by real launchers, and by those of another MPI than Horovod's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hvdtrain.runtime.mpi import library_version
from tests.runtime.libraries import horovod, write_library
from tests.support.launch import ENVIRONMENT, program, run
from tests.support.mpis import any_of

pytestmark = pytest.mark.slow

TELL = """
import json, os, sys
from hvdtrain.runtime.tuning import prepare
info, choices = prepare()
assert "torch" not in sys.modules and "horovod" not in sys.modules
chosen = {c.setting.variable: c.setting.value for c in choices if c.applied}
line = {**vars(info), "folder": None, "set": chosen, "environ": {name: os.environ[name] for name in chosen}}
with open(f"told.{info.rank}", "w") as file:
    json.dump(line, file)
"""
READ_BACK = """
from hvdtrain.runtime.tuning import prepare
prepare()
import ctypes, sys
MPI_T = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
provided, index, value, count = (ctypes.c_int() for _ in range(4))
handle = ctypes.c_void_p()
assert MPI_T.MPI_Init(None, None) == 0
assert MPI_T.MPI_T_init_thread(0, ctypes.byref(provided)) == 0
for name in (b"mpi_yield_when_idle", b"coll_tuned_use_dynamic_rules", b"coll_tuned_allreduce_algorithm"):
    assert MPI_T.MPI_T_cvar_get_index(name, ctypes.byref(index)) == 0, name
    assert MPI_T.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)) == 0
    value.value = 0
    assert MPI_T.MPI_T_cvar_read(handle, ctypes.byref(value)) == 0
    print(f"\\nREAD {name.decode()} {value.value}", flush=True)
MPI_T.MPI_T_finalize()
MPI_T.MPI_Finalize()
"""


@pytest.mark.parametrize(
    ("launcher", "name"), [("mpirun", None), ("horovodrun", None), ("horovodrun --gloo", "horovod-gloo")]
)
def test_ranks_know_who_they_are(tmp_path: Path, launcher: str, name: str | None) -> None:
    run(["-c", TELL], size=2, launcher=launcher, cwd=tmp_path)
    ranks = [json.loads((tmp_path / f"told.{rank}").read_text()) for rank in (0, 1)]
    for rank, line in enumerate(ranks):
        assert [line[name] for name in ("rank", "local_rank", "size", "local_size")] == [rank, rank, 2, 2]
        assert line["launcher"] == name if name else line["launcher"] in ("openmpi", "hydra")
        assert line["set"] == line["environ"]
        assert "OMP_NUM_THREADS" not in line["set"]  # the test's own
    assert ranks[0]["set"] == ranks[1]["set"]


def test_the_settings_reach_open_mpi(tmp_path: Path) -> None:
    """Read back from the library itself, through MPI's tools interface."""
    version = subprocess.run([program("mpirun"), "--version"], capture_output=True, text=True, check=True).stdout
    libmpi = Path(program("mpirun")).parent.parent / "lib/libmpi.so.40"
    if "Open MPI" not in version or not libmpi.exists():
        pytest.skip(f"no libmpi.so.40 beside {program('mpirun')}")
    written = run(["-c", READ_BACK, str(libmpi)], size=2, cwd=tmp_path).stdout
    said = Counter(line.partition("READ ")[2] for line in written.splitlines() if "READ" in line)
    names = ("mpi_yield_when_idle 1", "coll_tuned_use_dynamic_rules 1", "coll_tuned_allreduce_algorithm 4")
    assert said == dict.fromkeys(names, 2)


CHECK = """
import sys
from pathlib import Path
from hvdtrain.errors import LaunchError
from hvdtrain.runtime.environment import rank_info, environ
from hvdtrain.runtime.mpi import check_launch
try:
    check_launch(rank_info(environ()), Path(sys.argv[1]))
    print("\\nFITS", flush=True)
except LaunchError as error:
    print("\\nREFUSED " + " | ".join(str(error).splitlines()), flush=True)
"""


SONAME = {"mpich": "libmpi.so.12", "openmpi4": "libmpi.so.40", "openmpi5": "libmpi.so.40"}


def prefix(name: str) -> Path:
    return Path(any_of(name).prefix)


@pytest.mark.parametrize("own_library_first", [False, True])
@pytest.mark.parametrize("built", SONAME)
@pytest.mark.parametrize("launched", SONAME)
def test_another_mpis_mpirun(tmp_path: Path, launched: str, built: str, own_library_first: bool) -> None:
    """Horovod's library is linked to one MPI, mpirun is another's; Open MPI's may bring its own library."""
    libraries = prefix(built) / "lib"
    library = horovod(tmp_path, SONAME[built], runpath=str(libraries))
    own = ["env", f"LD_LIBRARY_PATH={libraries}"] if own_library_first else []
    over = ["--map-by", ":OVERSUBSCRIBE"] if launched == "openmpi5" else []
    argv = [prefix(launched) / "bin/mpirun", "-np", "2", *over, *own, sys.executable, "-c", CHECK, str(library)]
    environ = ENVIRONMENT | {"PATH": f"{prefix(launched)}/bin:{os.environ['PATH']}", "LD_LIBRARY_PATH": ""}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
    fits = (launched == "mpich") == (built == "mpich")
    if (launched, built) == ("openmpi5", "openmpi4") and own_library_first:
        fits = False
    assert (done.stdout.count("FITS"), done.stdout.count("REFUSED")) == ((2, 0) if fits else (0, 2)), done.stdout


def test_real_libraries_tell_their_versions(tmp_path: Path) -> None:
    says = {"mpich": "MPICH Version:", "openmpi4": "Open MPI v4.", "openmpi5": "Open MPI v5.0.11"}
    for name, version in says.items():
        assert str(library_version(prefix(name) / "lib" / SONAME[name])).startswith(version)
    assert library_version(write_library(tmp_path / "broken.so", ["libnothing.so.1"])) is None
