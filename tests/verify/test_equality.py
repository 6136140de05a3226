"""What `verify resume` compares: runs are equal only where everything is; the first thing that differs is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvdtrain.state.pieces import StateDict
from hvdtrain.verify import resume
from hvdtrain.verify.resume import Comparison, Outcome, compare


def _outcome(**changes: Any) -> Outcome:
    tensors = {
        "model": {"a": torch.arange(4.0), "b": torch.ones(2)},
        "optimizer": {"a/step": torch.tensor(3), "a/exp_avg": torch.zeros(4)},
    }
    values = {"progress": {"step": 3, "position": 12}, "scaler": {}}
    known = {"losses": [3.0, 2.0, None], "positions": [4, 8, 12], "tensors": tensors, "values": values, **changes}
    return Outcome(known["losses"], known["positions"], StateDict(known["tensors"], known["values"]))


def _with(group: str, name: str, tensor: torch.Tensor | None) -> dict[str, dict[str, torch.Tensor]]:
    tensors = {name: dict(group) for name, group in _outcome().state.tensors.items()}
    if tensor is None:
        del tensors[group][name]
    else:
        tensors[group][name] = tensor
    return tensors


@pytest.mark.parametrize("exact", [True, False])
def test_equal_is_equal(exact: bool) -> None:
    found = compare("", _outcome(), _outcome(), exact=exact)
    assert (found.first, found.loss, found.tensor, found.steps, found.tensors) == (None, 0.0, 0.0, 3, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"losses": [3.0, 2.0 + 1e-15, None]}, "step 2: loss 2.000000000000001 instead of 2.0"),
        ({"losses": [3.0, 2.0, 1.0]}, "step 3: loss 1.0 instead of None"),
        ({"positions": [4, 9, 12]}, "step 2 ended at position 9 instead of 8"),
        ({"positions": [4, 8], "losses": [3.0, 2.0]}, "2 steps instead of 3"),
        ({"tensors": _with("model", "b", torch.tensor([1.0, 1.0000001]))}, "tensor model: b"),
        ({"tensors": _with("model", "b", torch.tensor([1.0, 1.0], dtype=torch.float64))}, "tensor model: b"),
        ({"tensors": _with("optimizer", "a/exp_avg", torch.tensor([0.0, 0.0, -0.0, 0.0]))}, "optimizer: a/exp_avg"),
        ({"tensors": _with("optimizer", "a/step", None)}, "optimizer: a/step"),
        ({"values": {"progress": {"step": 3, "position": 13}, "scaler": {}}}, "progress.position is 13 instead of 12"),
    ],
)
def test_the_first_bit_that_differs_is_named(changes: dict[str, Any], words: str) -> None:
    found = compare("", _outcome(**changes), _outcome(), exact=True)
    assert found.first is not None
    assert words in found.first


@pytest.mark.parametrize(
    ("what", "off", "holds"),
    [("loss", 1e-6, True), ("loss", 1e-3, False), ("tensor", 1e-5, True), ("tensor", 0.1, False)],
)
def test_across_sizes_a_loss_or_tensor_may_differ_a_little(what: str, off: float, holds: bool) -> None:
    tensors = _with("model", "b", torch.ones(2) * (1 + off))
    changed = _outcome(losses=[3.0, 2.0 * (1 + off), None]) if what == "loss" else _outcome(tensors=tensors)
    found = compare("", changed, _outcome(), exact=False)
    assert (found.first is None) == holds
    assert getattr(found, what) == pytest.approx(off, rel=1e-2)


@pytest.mark.parametrize("means", [False, True])
@pytest.mark.parametrize(("precision", "across"), [("fp32", ()), ("bf16", ("--precision", "fp32"))])
def test_across_numbers_of_ranks_all_is_trained_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, across: tuple[str, ...], means: bool
) -> None:
    """On as many ranks bit for bit, unless the checkpoint has the mean of the ranks' residuals."""
    trained: list[tuple[str, tuple[str, ...]]] = []
    compared: list[tuple[Any, Any, bool]] = []

    def run(runner: Any, name: str, size: int, what: str, *options: str) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        trained.append((name, tuple(runner.options)))
        return SimpleNamespace(name=name, state=state)

    def compare(name: str, found: Any, wanted: Any, *, exact: bool) -> Comparison:
        compared.append((found.name, wanted.name, exact))
        return Comparison(name, exact, 0, 0, 0.0, 0.0, None)

    monkeypatch.setattr(resume._Runner, "_run", run)
    state = StateDict({"exchange": {"w/residual": torch.ones(2)} if means else {}}, {"exchange": {}})

    monkeypatch.setattr(resume, "compare", compare)
    said: list[str] = []
    list(resume.verify_resume({"precision": precision}, tmp_path, 4, [1, 2], said.append))
    of = "-fp32" if across else ""
    assert compared == [
        ("resumed-1", "whole-1", True),
        *([] if means else [("resumed-2", "whole-2", True)]),
        ("resized-1-2", f"whole-1{of}", False),
        ("resized-2-1", f"whole-2{of}", False),
    ]
    assert {options for name, options in trained if name.startswith("resized")} == {across}
    assert any("trained in fp32" in text for text in said) == bool(across)
    assert any("the mean of their residuals" in text for text in said) == means
