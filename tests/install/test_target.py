"""What a bundle is for: the tags of its wheels against pip's own, its markers against this machine's; and its wheels.

Markers of the wheels are the target's, versions the pins' unless a wheel wants another.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from pathlib import Path
from sysconfig import get_python_version

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags, sys_tags

from hvdtrain.errors import BuildError
from hvdtrain.install.fetch import Target, closure, pins, this_platform
from tests.support.wheels import ROOT, wheel

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


OLD = Target("3.10", "manylinux_2_28_x86_64", "1").markers
NEW = Target("3.13", "manylinux_2_28_aarch64", "1").markers


@dataclass
class Registry:
    """Wheels by name; notes what is asked of it."""

    folder: Path
    asked: list[str] = field(default_factory=list)

    def add(self, name: str, version: str, *needs: str) -> None:
        wheel(self.folder, name, version, needs)

    def fetch(self, requirement: Requirement) -> Path:
        self.asked.append(str(requirement))
        wheels = self.folder.glob(f"{requirement.name}-*.whl")
        return max(path for path in wheels if requirement.specifier.contains(path.name.split("-")[1]))


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path)


def test_markers_are_judged_for_the_target(registry: Registry) -> None:
    registry.add("a", "1", "old; python_version<'3.11'", "new; python_version>'3.10'", "mac; sys_platform=='darwin'")
    registry.add("old", "1")
    registry.add("new", "1", "arm; platform_machine == 'aarch64'")
    registry.add("arm", "1")
    assert closure(["a"], {}, OLD, registry.fetch).keys() == {"a", "old"}
    assert closure(["a"], {}, NEW, registry.fetch).keys() == {"a", "new", "arm"}


def test_extras_are_followed_where_they_are_asked_for(registry: Registry) -> None:
    registry.add("a", "1", "b[fast]", "c; extra == 'more'")
    registry.add("b", "1", "d; extra == 'fast'", "e; extra == 'slow'", "a")
    registry.add("c", "1")
    registry.add("d", "1")
    assert closure(["a"], {}, NEW, registry.fetch).keys() == {"a", "b", "d"}
    assert closure(["a", "a[more]"], {}, NEW, registry.fetch).keys() == {"a", "b", "c", "d"}


def test_pins_decide_unless_a_wheel_wants_another(registry: Registry) -> None:
    registry.add("a", "1", "b>=1", "c==3")
    for version in ("1", "2", "3"):
        registry.add("b", version)
        registry.add("c", version)
    wheels = closure(["a"], {"b": "2", "c": "2"}, NEW, registry.fetch)
    assert wheels["b"].name.startswith("b-2-") and wheels["c"].name.startswith("c-3-")
    assert registry.asked == ["a", "b==2", "c==3"], "each is fetched once"


def test_what_does_not_go_together_is_named(registry: Registry) -> None:
    registry.add("a", "1", "c<2")
    registry.add("b", "1", "c>=2")
    registry.add("c", "1")
    with pytest.raises(BuildError) as caught:
        closure(["a", "b"], {}, NEW, registry.fetch)
    assert all(text in str(caught.value) for text in ("c 1 is incompatible with b 1", "c>=2", "a 1 (c<2)"))


def test_pins_are_those_of_the_target_and_names_are_one_however_they_are_written(registry: Registry) -> None:
    text = (ROOT / "constraints.txt").read_text()
    assert pins(text, OLD)["numpy"] == "2.2.6" and pins(text, NEW)["numpy"] == "2.4.6"
    assert "exceptiongroup" in pins(text, OLD) and "exceptiongroup" not in pins(text, NEW)
    registry.add("a", "1", "Typing_Extensions")
    registry.add("Typing_Extensions", "4")
    found = closure(["a", "a"], pins("typing-extensions==4\n", NEW), NEW, registry.fetch)
    assert found.keys() == {"a", "typing-extensions"}
