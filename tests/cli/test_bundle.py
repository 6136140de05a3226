from __future__ import annotations

from importlib import metadata
from pathlib import Path
from sysconfig import get_python_version

import pytest

from hvdtrain.cli.bundle import main
from hvdtrain.install import bundle
from hvdtrain.install.bundle import Source
from hvdtrain.install.fetch import Target, this_platform
from hvdtrain.install.steps import Say

ROOT = Path(__file__).parents[2]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Source, Target]]:
    calls: list[tuple[Source, Target]] = []

    def make(source: Source, out: Path, target: Target, say: Say) -> int:
        calls.append((source, target))
        return 3 << 20

    monkeypatch.setattr(bundle, "make", make)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return calls


def test_it_is_for_this_machine(made: list[tuple[Source, Target]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/nowhere/offline"]) == 0
    ((source, target),) = made
    assert target == Target(get_python_version(), this_platform(), metadata.version("torch"))
    assert source.project == ROOT
    out = capsys.readouterr().out
    assert "3 MiB" in out and "offline/install.sh VENV" in out


def test_without_torch_it_has_the_pinned(made: list[tuple[Source, Target]], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    main(["/nowhere"])
    assert f"torch=={made[0][1].torch}\n" in (ROOT / "constraints.txt").read_text()


def test_it_is_for_what_is_stated(made: list[tuple[Source, Target]]) -> None:
    main(["/nowhere", "--python", "3.10", "--torch", "2.13.0+cu130", "--platform", "manylinux_2_28_aarch64"])
    assert made[0][1] == Target("3.10", "manylinux_2_28_aarch64", "2.13.0+cu130")


def test_what_cannot_be_is_an_error(made: list[tuple[Source, Target]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/nowhere", "--python", "3.9"]) == 1
    assert "Python" in capsys.readouterr().err and not made


def test_an_interrupt_says_how_to_continue(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(bundle, "make", stopped)
    assert main(["/nowhere"]) == 130
    assert "the same command continues" in capsys.readouterr().err
