"""Evaluate a model on all ranks, without training: on samples, or by tasks of lm-evaluation-harness.

Each sample counts once, with sums that do not depend on the ranks. The harness itself divides tasks by
torch.distributed, in batches that depend on the number of processes; accuracies differed with it (its issue 1719). Here
it runs on each rank as if it were alone; only the model's answers are divided.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, on_rank_0
from hvdtrain.config.schema import Config
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.plan.plan import BF16_WEIGHTS
from hvdtrain.runtime.environment import change_variables
from hvdtrain.state.frozen import find_frozen
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.sync import broadcast_state
from hvdtrain.state.train_state import Progress, TrainState
from hvdtrain.task.base import import_library
from hvdtrain.training.loop.bf16_weights import Bf16Weights
from hvdtrain.training.loop.evaluate import HeldOut, evaluate
from hvdtrain.training.loop.forward import Precision, autocast_experts
from hvdtrain.training.start.device import pick_device
from hvdtrain.training.start.make_task import make_task

Split = Literal["heldout", "train"]
Sums = dict[str, list[float]]  # sum and weight of the loss, and of each metric as ``metric/NAME``

_SEED = 1234  # of the choice of examples; the harness's own default
_BOOTSTRAPS = 1000  # resamples for the standard error of a metric that has no formula

Samples = Mapping[str, Sequence[Mapping[str, Any]]]  # what the harness notes of each sample, by task


@dataclass(frozen=True)
class Evaluated:
    """Values of a model over samples, equal on all ranks."""

    means: Mapping[str, float]  # of the loss, and of each metric by name
    samples: int  # their number
    unit: str  # of the weight of the loss
    passes: list[tuple[int, Sums]]  # the first sample of each forward pass, and its sums; in order


def evaluate_run(
    config: Config, build: Callable[[], Any], load: Callable[[], StateDict] | None, comm: Comm, split: Split
) -> Evaluated:
    """Evaluate the model of a task, with the state that `load` returns on rank 0. Collective: yes.

    The model is whole on each rank, whichever engine trained it. `load` is None for the task's own weights.

    Errors: DataError: there are no samples of the split; CheckpointError: the state is that of another model; others:
    those of the task.
    """
    device = pick_device(config.parallel.device, comm.local_rank, comm.local_size, comm)
    task = make_task(build, config)
    task = replace(task, heldout_data=task.train_data) if split == "train" else task
    if task.prepare is not None:
        task.prepare(device, torch.float32)
    model = task.model.to(device)
    if config.precision != "fp32":
        autocast_experts(model)
    frozen = find_frozen(task.model) if task.remakes_frozen else None
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler(enabled=False)
    state = TrainState(model, optimizer, scaler, Progress(), frozen=frozen)
    if load is not None:
        on_rank_0(comm, lambda: state.load_model(load()), name="evaluate/load")
    if comm.size > 1:
        broadcast_state(state, comm)
    precision = Precision(config.precision, device, Bf16Weights(model) if config.precision == BF16_WEIGHTS else None)
    samples = HeldOut(task, comm, config, device)
    if not samples.count:
        raise DataError(
            "there are no samples to evaluate on",
            expected="held-out samples",
            next_step="hold some out (--data.heldout), or evaluate on the training data: --split train",
            everywhere=True,
        )
    own: list[tuple[int, dict[str, Any]]] = []
    found = evaluate(samples, model, precision, on_pass=lambda place, sums: own.append((place.start, sums)))
    numbers = [(start, {name: [float(part) for part in pair] for name, pair in sums.items()}) for start, sums in own]
    gathered = allgather_json(comm, numbers, name="evaluate/passes")
    passes: list[tuple[int, Sums]] = [(start, sums) for each in gathered for start, sums in each]
    names = sorted({name for _, sums in passes for name in sums})
    means = {name.removeprefix("metric/"): _mean([sums[name] for _, sums in passes if name in sums]) for name in names}
    means |= {name: value for name, value in found.metrics.items() if name in task.metric_objects} if found else {}
    return Evaluated(means, samples.count, task.unit, passes)


def _mean(pairs: list[list[float]]) -> float:
    """Return the sum over the weight, each rounded once: in any order the same."""
    value, weight = (math.fsum(pair[part] for pair in pairs) for part in (0, 1))
    return value / weight if weight else math.nan


def for_evaluation(config: Config, samples: int, *, one_by_one: bool) -> Config:
    """Return a config that evaluates `samples` (0: all), in passes of one sample if wanted."""
    size = 1 if one_by_one else config.train.micro_batch
    return replace(config, train=replace(config.train, eval_samples=samples, micro_batch=size))


def evaluate_tasks(
    model: nn.Module,
    tokenizer: Any,
    comm: Comm,
    names: Sequence[str],
    folder: Path | None = None,
    fewshot: int | None = None,
    samples: int = 0,
) -> tuple[dict[str, dict[str, float]], Samples]:
    """Evaluate a causal language model, in passes of one sample. Collective: yes.

    The model is whole, on the device of this rank. `names` are those of tasks or groups of the harness, or of YAML
    files in `folder`, which may name Python functions that then run. `fewshot`: examples before each question (default:
    what a task says). `samples`: the first ones of each task; 0 for all.

    Returns for each task the values by name, such as "acc" and its standard error "acc_stderr"; and the samples.

    Errors: ConfigError: a task is unknown, or its data are not on this machine.
    """
    change_variables({"DISABLE_MULTIPROC": "1"})  # it would fork processes, in which MPI does not work
    logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)  # it warns that the model is loaded
    harness = import_library("lm_eval", "hvdtrain evaluate --tasks", "harness")
    answering = import_module("lm_eval.models.huggingface").HFLM(
        pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1
    )
    tokens = answering._loglikelihood_tokens
    # loglikelihood_rolling would show a progress bar for each document.
    answering._loglikelihood_tokens = lambda *given, **options: tokens(*given, **{**options, "disable_tqdm": True})
    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(answering, kind, partial(_answer_all, getattr(answering, kind), comm))
    manager = import_module("lm_eval.tasks").TaskManager(include_path=None if folder is None else str(folder))
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise ConfigError(
            f"there is no task {unknown[0]!r} of lm-evaluation-harness",
            expected="the name of a task or a group, such as arc_easy, or of a YAML file in --task_folder",
            next_step="lm-eval ls tasks",
        )
    try:
        tasks = manager.load(list(names))
        for task in tasks["tasks"].values():
            own = task.get_config("num_fewshot")
            if own != 0:  # a task that says 0 makes no sense with more
                task.set_config(key="num_fewshot", value=(own or 0) if fewshot is None else fewshot)
            task.set_fewshot_seed(seed=_SEED)
        # simple_evaluate would also run programs that describe the machine, and return nothing on some ranks.
        limits = {"limit": samples or None, "bootstrap_iters": _BOOTSTRAPS}
        found: Any = harness.evaluate(lm=answering, task_dict=tasks, **limits)
    except OSError as error:
        raise ConfigError(
            f"the data of a task cannot be read: {error}",
            expected="a machine that reaches the Hugging Face Hub, or has the data in its cache",
            next_step="hf download REPOSITORY --repo-type dataset on a machine that reaches it, copy its cache, and set"
            " HF_HUB_OFFLINE=1 here",
        ) from error
    return {name: _metrics(values) for name, values in found["results"].items()}, found["samples"]


def _answer_all(answer: Callable[..., list[Any]], comm: Comm, requests: Sequence[Any], **options: Any) -> list[Any]:
    """Answer requests on all ranks, those of a document together, and return all answers. Collective: yes."""
    documents = [list(each) for _, each in groupby(requests, key=lambda request: (request.task_name, request.doc_id))]
    own = [answer(each, disable_tqdm=True) for each in documents[comm.rank :: comm.size]]
    answers: list[list[Any]] = [[]] * len(documents)
    for rank, theirs in enumerate(allgather_json(comm, own, name="harness/answers")):
        answers[rank :: comm.size] = theirs
    # JSON has made lists of tuples.
    return [tuple(each) if isinstance(each, list) else each for each in chain.from_iterable(answers)]


def _metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the harness's values, which it names such as "acc,none"."""
    numbers = {name: value for name, value in values.items() if "," in name and isinstance(value, (int, float))}
    return {name.removesuffix(",none").replace(",", "/"): float(value) for name, value in numbers.items()}
