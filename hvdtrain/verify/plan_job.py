"""Compare the gradients of a plan on the ranks of this job, on a small copy of the model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.comm.rounds import STARTED, start_rounds
from hvdtrain.config.parse import RunConfig
from hvdtrain.plan.refusals import resolve
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.task.causal_lm import ModelConfig, architecture
from hvdtrain.task.corpus import TextConfig
from hvdtrain.task.saved_model import find_model
from hvdtrain.verify.plan import Compared, compare_gradients, for_plan
from hvdtrain.verify.small_model import small_copy

_VOCABULARY, _SEQ_LEN = 512, 32


@dataclass(frozen=True)
class PlanCheck:
    """What was compared.

    Attributes:
        model: in words.
        ranks: their number.
    """

    model: str
    ranks: int
    compared: list[Compared]

    @property
    def wrong(self) -> list[Compared]:
        """The gradients that differ, the most different first."""
        return sorted((each for each in self.compared if each.wrong), key=lambda each: -each.error)

    def to_text(self) -> str:
        """Return lines for a terminal."""
        lines = [f"{len(self.compared)} parameters of {self.model}, {self.ranks} ranks against one"]
        lines += [f"WRONG: {each.parameter}: {each.wrong}" for each in self.wrong]
        worst = max(self.compared, key=lambda each: each.error)
        lines.append(f"largest difference: {worst.error:.1e} of the gradient's norm ({worst.parameter})")
        silent = [each.parameter for each in self.compared if not each.norm]
        if silent:
            names = f"{', '.join(silent[:3])}{', ...' if silent[3:] else ''}"
            lines.append(f"{len(silent)} have no gradient in this step, which proves nothing: {names}")
        return "\n".join([*lines, "the gradients differ" if self.wrong else "the gradients are equal"])


def check_plan(run: RunConfig, function: Callable[..., Any], info: RankInfo) -> PlanCheck:
    """Compare, with the same result on all ranks. Collective: yes. Errors: those of `compare_gradients`."""
    run = for_plan(run)
    args, what = dict(run.task_args), "the task's model"
    with tempfile.TemporaryDirectory(prefix="hvdtrain-plan-") as scratch:
        if isinstance(model := args.get("model"), ModelConfig):
            source = find_model(model.from_) if model.from_ else None
            small = small_copy(architecture(model, source, _VOCABULARY, _SEQ_LEN), _VOCABULARY)
            file = Path(scratch) / "config.json"
            file.write_text(small.to_json_string(use_diff=False))
            args["model"], args["data"] = replace(model, config=str(file), from_=None), TextConfig(seq_len=_SEQ_LEN)
            what = f"a small copy of {small.model_type}"
        plan = resolve(run.config)
        comm = start_rounds(info, plan.groups, horovod=plan.by_horovod).enter(STARTED)
        found = compare_gradients(run, partial(function, **args), comm, info)
    comm.barrier()
    return PlanCheck(what, comm.size, found)
