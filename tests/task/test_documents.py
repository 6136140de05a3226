"""Documents of a sample that do not see each other: logits, losses, and models that cannot do it."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.task.causal_lm import ModelConfig, causal_lm
from hvdtrain.task.corpus import open_corpus
from hvdtrain.task.language_model import language_model
from hvdtrain.task.text_config import TextConfig
from hvdtrain.task.token_loss import check_separation, next_token_loss, positions, separate_targets, token_loss
from tests.task.test_architectures import MODELS, SHAPE

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")

END = 7
LENGTHS = (9, 1, 14, 3, 20, 2)
KERNELS = [("deepseek_v3", "sdpa"), ("deepseek_v3", "eager"), ("llama", "eager")]
KERNELS += [(name, "auto") for name in ("llama", "gpt2", "mistral", "qwen3_moe", "gemma2", "gpt_neox")]


def a_model(tmp_path: Any, name: str, attention: str = "auto") -> Any:
    torch.manual_seed(3)
    if name == "deepseek_v3":
        made = causal_lm(ModelConfig(preset="tiny", attention=attention), vocabulary=257, seq_len=64)
    else:
        config = tmp_path / "config.json"
        config.write_text(json.dumps({**SHAPE, "model_type": name, **MODELS.get(name, {})}))
        made = causal_lm(ModelConfig(config=str(config), attention=attention), vocabulary=257, seq_len=64)
    return made.eval()


def documents(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(10, 250, (length,), generator=generator) for length in lengths]
    for document in made:
        document[-1] = END
    return made


@pytest.mark.parametrize(("name", "attention"), KERNELS)
def test_logits_of_a_document_are_those_of_the_document_alone(tmp_path: Any, name: str, attention: str) -> None:
    model, parts = a_model(tmp_path, name, attention), documents(*LENGTHS)
    if attention != "auto":
        assert model.config._attn_implementation == attention
    row = torch.cat(parts)[None]
    places = positions((row == END).roll(1, dims=1))
    assert places[0].tolist() == [i for length in LENGTHS for i in range(length)]
    with torch.no_grad():
        packed = model(input_ids=row, position_ids=places, use_cache=False).logits[0].split(LENGTHS)
        for part, found in zip(parts, packed, strict=True):
            alone = model(input_ids=part[None], use_cache=False).logits[0]
            torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    check_separation(model)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt2"])
def test_the_loss_is_that_of_each_document_alone(tmp_path: Any, name: str, flash: bool) -> None:
    model = a_model(tmp_path, name)
    config = SimpleNamespace(_attn_implementation="flash_attention_2") if flash else model.config
    parts = documents(*LENGTHS[:5], 30, 1, 16)  # two rows of 47, the second with the end of a document first
    rows = torch.cat(parts)[:94].view(2, 47)
    alone = [next_token_loss(model, part[None]) for row in rows for part in _cut(row) if len(part) > 1]
    loss, weight = token_loss(model, rows, targets=partial(separate_targets, end=END, config=config))
    assert float(weight) == sum(count for _, count in alone) < 92
    expected = sum(value for value, _ in alone)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    own, wanted = (torch.autograd.grad(value, list(model.parameters())) for value in (loss, expected))
    for found, reference in zip(own, wanted, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-4)


def _cut(row: torch.Tensor) -> list[torch.Tensor]:
    ends = (row == END).nonzero().flatten().tolist()
    cuts = [0, *(end + 1 for end in ends), len(row)]
    return [row[a:b] for a, b in pairwise(cuts) if a < b]


@pytest.mark.parametrize(
    ("name", "shape"), [("mamba", {"state_size": 4, "num_hidden_layers": 2}), ("bloom", {"n_layer": 2, "n_head": 4})]
)
def test_a_model_that_ignores_positions_is_refused(tmp_path: Any, name: str, shape: dict[str, Any]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": name, "hidden_size": 32, "vocab_size": 257, **shape}))
    model = causal_lm(ModelConfig(config=str(config)), vocabulary=257, seq_len=16)
    with pytest.raises(TaskError, match="cannot keep the documents of a sample separate"):
        check_separation(model)
    assert model.training


def test_the_end_of_documents(tmp_path: Any) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 200)
    np.save(tmp_path / "t.npy", np.arange(1000) % 100)
    text, tokens = {"text": f"{tmp_path}/*.txt", "seq_len": 8}, {"tokens": str(tmp_path / "t.npy"), "seq_len": 8}
    assert open_corpus(TextConfig(**text)).end is None
    assert open_corpus(TextConfig(**text, documents="separate")).end == 256
    for more, words in (({"documents": "separate"}, "is unknown"), ({"end_token": 99}, "no effect")):
        with pytest.raises(ConfigError, match=words):
            open_corpus(TextConfig(**tokens, **more))


@pytest.mark.parametrize(("end", "reported"), [(99, False), (100, True)])
def test_data_without_an_end_of_documents_is_reported(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, end: int, reported: bool
) -> None:
    np.save(tmp_path / "t.npy", np.arange(1000) % 100)
    data = TextConfig(tokens=str(tmp_path / "t.npy"), seq_len=8, documents="separate", end_token=end)
    assert open_corpus(data).end == end and ("not separate" in caplog.text) == reported


def test_separate_documents_are_asked_for(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("line\n" * 500)
    torch.manual_seed(0)
    data = TextConfig(text=str(tmp_path / "text.txt"), documents="separate", seq_len=16)
    task = language_model(ModelConfig(preset="tiny"), data)
    batch = torch.stack([torch.cat([torch.arange(8), torch.tensor([256]), torch.arange(8)])])
    loss, weight = task.loss(task.model, batch)
    joined, all_tokens = next_token_loss(task.model, batch)
    assert (float(weight), all_tokens) == (15, 16)
    assert loss.item() != pytest.approx(joined.item(), rel=1e-3)
    checked: list[Any] = []
    monkeypatch.setattr("hvdtrain.task.token_loss.check_separation", checked.append)
    assert task.prepare is not None and task.prepare(torch.device("cpu"), torch.float32)
    assert checked == [task.model]
