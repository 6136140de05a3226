"""Which runs `verify resume` compares, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdtrain.verify import resume
from hvdtrain.verify.equality import Comparison


@pytest.mark.parametrize(("precision", "across"), [("fp32", ()), ("bf16", ("--precision", "fp32"))])
def test_across_numbers_of_ranks_all_is_trained_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, across: tuple[str, ...]
) -> None:
    trained: list[tuple[str, tuple[str, ...]]] = []
    compared: list[tuple[Any, Any, bool]] = []

    def run(runner: Any, name: str, size: int, what: str, *options: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        trained.append((name, tuple(runner.options)))

    def compare(name: str, found: Any, wanted: Any, *, exact: bool) -> Comparison:
        compared.append((found, wanted, exact))
        return Comparison(name, exact, 0, 0, 0.0, 0.0, None)

    monkeypatch.setattr(resume._Runner, "_run", run)
    monkeypatch.setattr(resume._Runner, "_outcome", lambda runner, name: name)
    monkeypatch.setattr(resume, "compare", compare)
    said: list[str] = []
    list(resume.verify_resume({"precision": precision}, tmp_path, 4, [1, 2], said.append))
    of = "-fp32" if across else ""
    assert compared == [
        ("resumed-1", "whole-1", True),
        ("resumed-2", "whole-2", True),
        ("resized-1-2", f"whole-1{of}", False),
        ("resized-2-1", f"whole-2{of}", False),
    ]
    assert {options for name, options in trained if name.startswith("resized")} == {across}
    assert any("trained in fp32" in text for text in said) == bool(across)
