"""Tasks of lm-evaluation-harness on all ranks, with equal results on any number of them.

The harness itself divides tasks by torch.distributed, in batches that depend on the number of processes; accuracies
differed with it (its issue 1719). Here it runs on each rank as if it were alone; only the model's answers are divided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from torch import nn

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.errors import ConfigError
from hvdtrain.runtime.environment import change_variables
from hvdtrain.task.base import import_library

_SEED = 1234  # of the choice of examples; the harness's own default
_BOOTSTRAPS = 1000
"""Resamples for the standard error of a metric that has no formula."""


@dataclass(frozen=True)
class TaskOptions:
    """Which tasks to evaluate, and how.

    Attributes:
        names: of tasks or groups of the harness, or of those in `folder`.
        folder: with YAML files of further tasks. They may name Python functions, which then run.
        fewshot: examples before each question; None for what a task says.
        samples: the first ones of each task; 0 for all.
    """

    names: Sequence[str]
    folder: Path | None = None
    fewshot: int | None = None
    samples: int = 0


@dataclass(frozen=True)
class TaskResults:
    """Results by task, equal on all ranks.

    Attributes:
        metrics: value by name, such as "acc", and its standard error as "acc_stderr", if it has one.
        samples: what the harness notes of each sample.
    """

    metrics: Mapping[str, Mapping[str, float]]
    samples: Mapping[str, Sequence[Mapping[str, Any]]]


def evaluate_tasks(model: nn.Module, tokenizer: Any, options: TaskOptions, comm: Comm) -> TaskResults:
    """Evaluate a causal language model, in passes of one sample. Collective: yes.

    The model is whole, on the device of this rank.

    Errors:
        ConfigError: a task is unknown, or its data are not on this machine.
    """
    change_variables({"DISABLE_MULTIPROC": "1"})  # it would fork processes, in which MPI does not work
    logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)  # it warns that the model is loaded
    harness = import_library("lm_eval", "hvdtrain evaluate --tasks", "harness")
    answering = import_module("lm_eval.models.huggingface").HFLM(
        pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1
    )
    # loglikelihood_rolling would show a progress bar for each document.
    answering._loglikelihood_tokens = partial(_quiet, answering._loglikelihood_tokens)
    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(answering, kind, partial(_answer_all, getattr(answering, kind), comm))
    folder = None if options.folder is None else str(options.folder)
    manager = import_module("lm_eval.tasks").TaskManager(include_path=folder)
    if unknown := [name for name in options.names if not manager.match_tasks([name])]:
        raise ConfigError(
            f"there is no task {unknown[0]!r} of lm-evaluation-harness",
            expected="the name of a task or a group, such as arc_easy, or of a YAML file in --task_folder",
            next_step="lm-eval ls tasks",
            everywhere=True,
        )
    try:
        tasks = manager.load(list(options.names))
        for task in tasks["tasks"].values():
            fewshot = task.get_config("num_fewshot")
            if fewshot != 0:  # a task that says 0 makes no sense with more
                task.set_config(key="num_fewshot", value=(fewshot or 0) if options.fewshot is None else options.fewshot)
            task.set_fewshot_seed(seed=_SEED)
        # simple_evaluate would also run programs that describe the machine, and return nothing on some ranks.
        limit, bootstraps = options.samples or None, _BOOTSTRAPS
        found: Any = harness.evaluate(lm=answering, task_dict=tasks, limit=limit, bootstrap_iters=bootstraps)
    except OSError as error:
        raise ConfigError(
            f"the data of a task cannot be read: {error}",
            expected="a machine that reaches the Hugging Face Hub, or has the data in its cache",
            next_step="hf download REPOSITORY --repo-type dataset on a machine that reaches it, copy its cache, and set"
            " HF_HUB_OFFLINE=1 here",
        ) from error
    return TaskResults({name: _metrics(values) for name, values in found["results"].items()}, found["samples"])


def _quiet(answer: Callable[..., list[Any]], requests: Any, disable_tqdm: bool = True, **options: Any) -> list[Any]:
    return answer(requests, disable_tqdm=True, **options)


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
