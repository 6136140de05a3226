"""Tasks of lm-evaluation-harness: the same answers on any number of ranks, and those of the model."""

from __future__ import annotations

import copy
import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.comm.solo import SoloComm
from hvdtrain.errors import ConfigError
from hvdtrain.task.encode import byte_tokenizer
from hvdtrain.training.evaluate_run import evaluate_tasks
from tests.support.thread_comm import ThreadComm, on_ranks

pytest.importorskip("lm_eval", reason="hvdtrain[harness] is not installed")
pytestmark = pytest.mark.slow

COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}", "target_delimiter": ""}
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_target": "x",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match"}],
    },
}
QUESTIONS = [f"{number} + 2 =" for number in range(7)]


@pytest.fixture(autouse=True)
def _looks_for_no_other_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are thousands, which it reads each time."""
    tasks = import_module("lm_eval.tasks")
    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": text, "choices": [" 1", " 23", " x"], "answer": n % 3} for n, text in enumerate(QUESTIONS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **COMMON, **data, **task}))
    return folder


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=64, **sizes)).eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    (folder / "tokenizer.json").write_bytes(byte_tokenizer("<end>"))
    named = {"eos_token": "<end>", "pad_token": "<end>"}
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **named)


def _log_likelihood(model: Any, context: bytes, text: bytes) -> float:
    ids = torch.tensor([[*context, *text]])
    logs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), -1)
    own = logs.gather(1, ids[0, 1:, None])[-len(text) :]
    return float(own.detach().sum())


def test_answers_are_those_of_the_model_on_any_number_of_ranks(folder: Path, model: Any, tokenizer: Any) -> None:
    metrics, samples = evaluate_tasks(model, tokenizer, SoloComm(), list(TASKS), folder)
    assert set(metrics) == set(TASKS)
    for question, sample in zip(QUESTIONS, samples["choices"], strict=True):
        expected = [_log_likelihood(model, question.encode(), text) for text in (b" 1", b" 23", b" x")]
        found = [answer[0] for answer in sample["filtered_resps"]]
        assert sorted(found) == pytest.approx(sorted(expected), abs=1e-4)
    likely = [sample["acc"] for sample in samples["choices"]]
    assert metrics["choices"]["acc"] == pytest.approx(sum(likely) / 7)
    plain: set[str] = set()
    for size in (2, 3):
        copies = [copy.deepcopy(model) for _ in range(size)]

        def evaluate(comm: ThreadComm, models: list[Any] = copies) -> Any:
            return evaluate_tasks(models[comm.rank], tokenizer, comm, list(TASKS), folder)

        for each in ((metrics, samples), *on_ranks(size, evaluate)):
            plain.add(json.dumps(each, default=str))
    assert len(plain) == 1


def test_fewer_samples_and_unknown_tasks(folder: Path, model: Any, tokenizer: Any) -> None:
    _, found = evaluate_tasks(model, tokenizer, SoloComm(), ["choices"], folder, samples=2)
    assert len(found["choices"]) == 2
    with pytest.raises(ConfigError, match="there is no task 'nothing'"):
        evaluate_tasks(model, tokenizer, SoloComm(), ["nothing"], folder)
