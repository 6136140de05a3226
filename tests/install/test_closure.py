"""Which wheels are needed: markers are the target's, versions the pins' unless a wheel wants another."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hvdtrain.errors import BuildError
from hvdtrain.install.fetch import closure, pins
from hvdtrain.install.target import Target
from tests.support.wheels import ROOT, wheel

OLD = Target("3.10", "manylinux_2_28_x86_64", "1").markers
NEW = Target("3.13", "manylinux_2_28_aarch64", "1").markers


class Registry:
    """Wheels by name; notes what is asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []

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
