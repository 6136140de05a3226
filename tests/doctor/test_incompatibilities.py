"""What is known not to fit together: each is provoked, and doctor has to name it and its cure.

Really where that can be had: another mpirun first on PATH, a Horovod of another torch, a small /dev/shm. Else by facts
that are made up. What only a build can meet stands at the end, with what the build does about it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.install.build_plan import plan
from hvdtrain.install.compiler import rewrite
from hvdtrain.install.versions import MpiBuild
from tests.doctor import rows_installation, rows_machine, rows_start
from tests.doctor.facts import WELL
from tests.doctor.provoke import MadeUp, Provoke, told
from tests.install.probe_examples import NCCL, TOOLKIT, TORCH_CUDA, example_probe


def _slow_if_real(row: Any) -> Any:
    """What is provoked for real takes processes that import torch."""
    values, marks = (row.values, row.marks) if hasattr(row, "marks") else (row, ())
    slow = () if isinstance(values[1], MadeUp) else (pytest.mark.slow,)
    return pytest.param(*values, marks=[*marks, *slow])


ROWS = list(map(_slow_if_real, [*rows_installation.ROWS, *rows_start.ROWS, *rows_machine.ROWS]))

SAID = {
    "the rendezvous server of horovodrun --gloo listens to all": "replace ranks' addresses",
    "horovodrun --gloo writes secrets on command lines": "HF_TOKEN",
    "an upgraded torch gives undefined symbols": "built for another torch",
    "bf16, which Horovod does not know": "exchanges bf16 gradients itself",
    "Horovod's wheel names the environment in which it was built, which is gone": "/gone/lib",
    "a Timeline that was never switched off": "HOROVOD_TIMELINE=/tmp/timeline.json",
    "an interface that is not there": "NCCL_SOCKET_IFNAME names =ib7",
    "an interface that is not there, in a site's file": "names ib0",
    "torch was changed after the build": "torch 1.13.0+cu117",
    "mpirun of a wheel needs its prefix between hosts": "--prefix /venv",
    "more ranks than cores": "the machine has 64",
    "a host name that does not resolve": "nobody-knows-me does not resolve",
}
"""Words of the finding itself, where its name and cure could be those of another."""


@pytest.mark.parametrize(
    ("row", "provoke", "name", "level", "cure"),
    ROWS,
    ids=lambda part: part if isinstance(part, str) and " " in part else "",
)
def test_it_is_named_with_its_cure(
    row: str, provoke: Provoke, name: str, level: str, cure: str, tmp_path: Path
) -> None:
    found = provoke(tmp_path)
    assert name in found, f"nobody names: {row}"
    finding = found[name]
    assert finding["level"] == level, finding
    assert cure in finding["mend"], finding
    assert level == "ok" or (finding["mend"] and finding["why"]), "what, why and the cure"
    assert SAID.get(row, "") in f"{finding['found']} {finding['why']}", finding


def test_on_a_machine_that_is_well_none_of_them_is_named() -> None:
    assert not [finding for finding in told(WELL).values() if finding["level"] != "ok"]


CPU, CUDA = example_probe(), example_probe(torch=TORCH_CUDA, cuda=TOOLKIT, nccl=NCCL, environ={"PATH": "/usr/bin"})
CALLED = ["-std=c++14", "-c", "/src/x.cc"]


@pytest.mark.parametrize(
    ("row", "does"),
    [
        ("C++14 is forced, torch needs a newer one", lambda: rewrite(CALLED, "c++20", ())[0] == "-std=c++20"),
        ("nvcc needs the standard it names", lambda: rewrite(["-D__CUDACC__", *CALLED], "c++20", ())[1:] == CALLED),
        ("GCC 13 wants headers included", lambda: {"stdexcept", "string"} <= set(rewrite(CALLED, "c++20", ()))),
        ("CMake 4 refuses old projects", lambda: "CMAKE_POLICY_VERSION_MINIMUM=3.5" in str(plan(CPU))),
        (
            "suffixes of architectures break the build",
            lambda: "HOROVOD_BUILD_CUDA_CC_LIST=75,80,90,100,120" in str(plan(CUDA)),
        ),
        ("NCCL's wheel has no libnccl.so", lambda: "nccl/lib/libnccl.so -> " in str(plan(CUDA))),
        ("NCCL has to be found at run time", lambda: "$ORIGIN/../../nvidia/nccl/lib" in plan(CUDA).wrapper),
        (
            "a CUDA toolkit adds CUDA by itself",
            lambda: plan(example_probe(torch=TORCH_CUDA, cuda=TOOLKIT), "none").gpu == "copy",
        ),
        (
            "the label tells torch, MPI and NCCL",
            lambda: str(plan(CUDA).label) == "torch2.12.1.cu130.openmpi4.1.8.nccl2.29",
        ),
    ],
)
def test_our_build_meets_requirements_that_only_a_build_can_meet(row: str, does: Callable[[], bool]) -> None:
    assert does(), row


def test_the_build_names_the_mpi_that_it_is_for() -> None:
    assert plan(example_probe()).label.mpi == MpiBuild("openmpi", "4.1.8")
