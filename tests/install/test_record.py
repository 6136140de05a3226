from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from hvdtrain.errors import HorovodError
from hvdtrain.install.compiler import FIX_MARKS, PROMPT_MARKS, QUIET_MARK
from hvdtrain.install.record import MARK, BuildRecord, check_record, installed
from hvdtrain.install.versions import Label, MpiBuild, TorchBuild

number = st.integers(0, 999).map(str)
release = st.lists(number, min_size=2, max_size=3).map(".".join)
vendor_mark = st.from_regex(r"(\+[0-9a-z]{1,9}(\.[0-9a-z]{1,4}){0,2})?", fullmatch=True)
stage = st.sampled_from(["", "a0", "rc1", ".dev20260101", ".post2"])
torch_version = st.builds("{}{}{}".format, release, stage, st.one_of(st.sampled_from(["+cpu", "+cu130"]), vendor_mark))
torches = st.builds(TorchBuild.from_strings, torch_version, st.sampled_from([None, "11.8", "12.8", "13.0"]))
mpi_version = st.builds("{}{}".format, release, st.sampled_from(["", "rc1", "b2"]))
mpis = st.builds(MpiBuild, st.sampled_from(["openmpi", "mpich", "intelmpi"]), mpi_version)
labels = st.builds(Label, torches, mpis, st.one_of(st.none(), release))

CPU = TorchBuild("2.13.0", "cpu")
OPEN_MPI = MpiBuild("openmpi", "4.1.8")


@settings(max_examples=30)
@given(labels)
def test_a_label_survives_the_version_number_that_carries_it(label: Label) -> None:
    version = Version(f"0.28.1+{label}")
    assert version.local == str(label)  # PEP 440 has nothing to normalise
    assert Label.parse(version.local) == label


@pytest.mark.parametrize(
    ("version", "cuda", "expected"),
    [
        ("2.13.0+cpu", None, "torch2.13.0.cpu"),
        ("2.12.1+cu130", "13.0", "torch2.12.1.cu130"),
        ("2.12.1", "13.0", "torch2.12.1.cu130"),
        ("2.06.0", None, "torch2.6.0.cpu"),
        ("2.14.0.dev20261101+cu130", "13.0", "torch2.14.0.dev20261101.cu130"),
        ("2.6.0a0+ecf3bae40a.nv25.01", "12.6", "torch2.6.0a0.cu126.becf3bae40anv2501"),
    ],
)
def test_torch_is_named_by_its_release_and_its_cuda(version: str, cuda: str | None, expected: str) -> None:
    assert TorchBuild.from_strings(version, cuda).label == expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to", OPEN_MPI),
        ("mpirun (Open MPI) 5.0.11\n", MpiBuild("openmpi", "5.0.11")),
        ("HYDRA build details:\n    Version:         4.3.2\n    Release Date:", MpiBuild("mpich", "4.3.2")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701", MpiBuild("intelmpi", "2021.13")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.09 Build", MpiBuild("intelmpi", "2021.9")),
        ("mpirun (Open MPI) 5.0.11rc1", MpiBuild("openmpi", "5.0.11rc1")),
        ("Open MPI v4.1.8", OPEN_MPI),
        ("MPICH 5.0.2", MpiBuild("mpich", "5.0.2")),
        ("MPICH Version:      5.0.2", MpiBuild("mpich", "5.0.2")),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)", MpiBuild("mpich", "8.1.28.15")),
        ("mpicxx for MPICH version 4.3.2", MpiBuild("mpich", "4.3.2")),
        ("Intel(R) MPI Library 2021.11 for Linux* OS", MpiBuild("intelmpi", "2021.11")),
        ("prrte 3.0.1", None),
        ("mpirun of somebody 1.0", None),
        (None, None),
    ],
)
def test_the_mpi_is_read_from_what_programs_and_libraries_say(output: str | None, expected: MpiBuild | None) -> None:
    assert MpiBuild.from_version_text(output) == expected


def ours(**changes: object) -> BuildRecord:
    values = {"version": "0.28.1+x", "torch": CPU, "mpi": OPEN_MPI, "has_mpi": True}
    return BuildRecord(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (None, ["not installed", "torch 2.13.0+cpu"]),
        (ours(torch=TorchBuild("2.12.1", "cpu")), ["another torch", "torch 2.13.0+cpu", "torch 2.12.1+cpu"]),
        (ours(torch=TorchBuild("2.13.0", "cu130")), ["another torch", "torch 2.13.0+cu130"]),
        (BuildRecord("0.28.1", torch=CPU, has_mpi=False), ["without MPI"]),
        (ours(), []),
        (BuildRecord("0.28.1"), []),  # it cannot be known
    ],
)
def test_a_horovod_that_cannot_run_here_is_refused(record: BuildRecord | None, words: list[str]) -> None:
    with pytest.raises(HorovodError) if words else nullcontext() as caught:
        check_record(record, CPU)
    assert not words or all(word in str(caught.value) for word in [*words, "hvdtrain build-horovod"])


def install_fake(site: Path, version: str, library: bytes) -> None:
    info = site / f"horovod-{version.replace('+', '_')}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: horovod\nVersion: {version}\n")
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///cache/horovod.whl"}))
    (site / "horovod" / "torch").mkdir(parents=True)
    (site / "horovod" / "metadata.json").write_text('{"pytorch": "2.11.0+cpu", "dummy": "none"}')
    (site / "horovod" / "torch" / "mpi_lib_v2.cpython-311.so").write_bytes(b"\0" * 100 + library)


OURS = "0.28.1+torch2.13.0.cpu.openmpi4.1.8"


@pytest.mark.parametrize(
    ("version", "library", "expected"),
    [
        (OURS, b"libmpi.so.40", (CPU, OPEN_MPI, True)),
        ("0.28.1", b"libmpi.so.40", (TorchBuild("2.11.0", "cpu"), None, True)),  # known by what its build left
        ("0.28.1", b"libgloo", (TorchBuild("2.11.0", "cpu"), None, False)),
    ],
)
def test_what_is_installed_is_read_from_its_version_or_its_files(
    version: str, library: bytes, expected: object, tmp_path: Path
) -> None:
    assert installed([str(tmp_path)]) is None
    install_fake(tmp_path, version, library)
    found = installed([str(tmp_path)])
    assert found is not None
    assert (found.torch, found.mpi, found.has_mpi) == expected
    assert found.source == "file:///cache/horovod.whl" and found.tested
    for marked in (version, "0.27"):  # of another Horovod: it was installed before this one
        (tmp_path / MARK).write_text(f"{marked}\n")
        again = installed([str(tmp_path)])
        assert again is not None and again.tested == (marked != version)


@pytest.mark.parametrize("version", ["0.28.1", OURS])
@pytest.mark.parametrize(
    ("marks", "effects"),
    [
        ((), ()),
        ((QUIET_MARK,), ("quiet",)),
        (PROMPT_MARKS, ("prompt",)),
        (FIX_MARKS, ("fixed",)),
        ((*PROMPT_MARKS[1:], *FIX_MARKS[1:]), ()),  # all the changes of an effect are needed
    ],
)
def test_which_changes_took_effect_is_read_from_the_library_itself(
    marks: tuple[str, ...], effects: tuple[str, ...], version: str, tmp_path: Path
) -> None:
    install_fake(tmp_path, version, "\0".join(["libmpi.so.40", *marks]).encode())
    found = installed([str(tmp_path)])
    assert tuple(name for name in ("quiet", "prompt", "fixed") if getattr(found, name)) == effects
