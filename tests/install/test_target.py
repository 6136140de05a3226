"""What a bundle is for: the tags of its wheels against pip's own, its markers against this machine's."""

from __future__ import annotations

import platform
from sysconfig import get_python_version

import pytest
from packaging.markers import default_environment
from packaging.tags import compatible_tags, cpython_tags, sys_tags

from hvdtrain.errors import BuildError
from hvdtrain.install.target import Target, this_platform

HERE = Target(get_python_version(), this_platform(), "2.13.0")


def tags(target: Target) -> set[str]:
    """The tags of wheels that pip takes when it is told `abi`, `python` and `platforms`."""
    version = (3, int(target.python.split(".")[1]))
    specific = cpython_tags(version, abis=[target.abi], platforms=target.platforms)
    return {str(tag) for tag in (*specific, *compatible_tags(version, target.abi, target.platforms))}


def test_this_machine_takes_what_is_fetched_for_it_and_no_wheel_is_left_aside() -> None:
    assert tags(HERE) <= {str(tag) for tag in sys_tags()}
    assert {str(tag) for tag in sys_tags() if tag.interpreter.startswith(("cp", "py3"))} <= tags(HERE)
    assert HERE.machine == platform.machine()
    assert HERE.python == ".".join(platform.python_version_tuple()[:2])


def test_markers_mean_what_they_mean_on_such_a_machine() -> None:
    same = {"platform_release", "platform_version", "implementation_version", "python_full_version"}
    real = {name: value for name, value in default_environment().items() if name not in same}
    assert {name: value for name, value in HERE.markers.items() if name not in same} == real
    other = Target("3.10", "manylinux_2_28_aarch64", "1").markers
    assert (other["python_version"], other["platform_machine"]) == ("3.10", "aarch64")


def test_an_older_glibc_takes_no_newer_wheels() -> None:
    taken = tags(Target("3.12", "manylinux_2_17_x86_64", "1"))
    assert {"cp312-cp312-manylinux_2_17_x86_64", "cp312-cp312-manylinux2014_x86_64", "py3-none-any"} <= taken
    assert {"cp38-abi3-manylinux2010_x86_64", "py3-none-manylinux1_x86_64"} <= taken
    assert not any("_2_18_" in tag or "cp313" in tag or "aarch64" in tag for tag in taken)


PYTHONS = ("3.9", "2.7", "3.11.7", "3", "3.11t", "")
PLATFORMS = ("linux_x86_64", "macosx_11_0_arm64", "manylinux2014_x86_64", "musllinux_1_2_x86_64", "")


@pytest.mark.parametrize(
    ("python", "platform"), [*((p, "manylinux_2_28_x86_64") for p in PYTHONS), *(("3.11", name) for name in PLATFORMS)]
)
def test_a_python_or_a_platform_without_bundles_is_refused(python: str, platform: str) -> None:
    with pytest.raises(BuildError, match="manylinux_2_MINOR" if python == "3.11" else r"3\.10 or newer"):
        Target(python, platform, "1")


def test_a_machine_without_glibc_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise ValueError(name)

    monkeypatch.setattr("os.confstr", none)
    with pytest.raises(BuildError, match="not glibc"):
        this_platform()
