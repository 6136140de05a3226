"""The task: its loss, its models, and what does not fit together."""

import itertools
import json
import math
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.errors import ConfigError, DataError, TaskError
from hvdtrain.task.causal_lm import ModelConfig, causal_lm
from hvdtrain.task.corpus import open_corpus
from hvdtrain.task.image import image
from hvdtrain.task.language_model import language_model
from hvdtrain.task.lora import LoraOptions, add_adapters
from hvdtrain.task.text_config import TextConfig
from hvdtrain.task.token_loss import next_token_loss

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")

TINY = ModelConfig(preset="tiny")


def tiny(**options):
    torch.manual_seed(0)
    return causal_lm(ModelConfig(**{"preset": "tiny", **options}), vocabulary=257, seq_len=32)


def tokens(batch=4, seq_len=32, below=257):
    return torch.randint(0, below, (batch, seq_len + 1), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a text\n" for i in range(500)))
    return str(tmp_path / "text.txt")


class Lookup(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.table = nn.Parameter((torch.randn(50, 50, generator=generator) * 4).to(dtype))

    def forward(self, input_ids, use_cache):
        assert use_cache is False
        return SimpleNamespace(logits=self.table[input_ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (4, 32), (16, 128)])
def test_loss_is_the_sum_in_float64(dtype, shape):
    model, batch = Lookup(dtype), tokens(*shape, below=50)
    loss, weight = next_token_loss(model, batch)
    table = model.table.detach().double().numpy()
    log_p = table - np.log(np.exp(table).sum(-1, keepdims=True))
    reference = -sum(log_p[a, b] for row in batch.tolist() for a, b in itertools.pairwise(row))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(reference, rel=1e-5)
    assert weight == math.prod(shape)
    loss.backward()
    assert model.table.grad is not None


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_a_new_model_knows_nothing_and_can_learn_in_every_parameter(preset):
    model = tiny(preset=preset)
    loss, weight = next_token_loss(model, tokens())
    assert loss.item() / weight == pytest.approx(math.log(320), abs=0.15)
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.training


def test_weights_follow_from_the_seed_alone(text):
    def weights(seed):
        torch.manual_seed(seed)
        return language_model(TINY, TextConfig(text=text, seq_len=32)).model.state_dict()

    first, cached, other = weights(3), weights(3), weights(4)  # the first makes the tokens, too
    assert all(torch.equal(first[name], cached[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_the_vocabulary_follows_the_tokens(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(1000) % 901)
    task = language_model(TINY, TextConfig(tokens=str(tmp_path / "t.npy"), seq_len=16))
    assert task.model.config.vocab_size == 960 and (task.unit, task.nominal_weight) == ("tokens", 16)


def gpt2(path):
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 257}
    config = transformers.GPT2Config(**shape)
    config.dtype, config.architectures = "bfloat16", ["GPT2LMHeadModel"]
    config.to_json_file(path / "config.json")
    return str(path / "config.json")


def test_any_config_json(tmp_path):
    model = tiny(config=gpt2(tmp_path), dropout=0.25)
    loss, weight = next_token_loss(model, tokens())
    assert type(model).__name__ == "GPT2LMHeadModel" and model.config.attn_pdrop == 0.25
    assert loss.item() / weight == pytest.approx(math.log(257), abs=0.15)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_deepseek_config_with_its_default_of_mtp_layers_has_no_idle_parameter(tmp_path):
    content = {**tiny().config.to_dict(), "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = tiny(config=str(tmp_path / "config.json"))
    next_token_loss(model, tokens())[0].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_a_folder_in_bfloat16_is_trained_in_float32_and_pickled_weights_are_not_read(tmp_path):
    saved = tiny().to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    loaded = tiny(from_=str(tmp_path))
    assert all(torch.equal(value.float(), loaded.state_dict()[name]) for name, value in saved.state_dict().items())
    assert {p.dtype for p in loaded.parameters()} == {torch.float32} and loaded.training
    (tmp_path / "model.safetensors").unlink()
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(TaskError, match="safetensors"):
        tiny(from_=str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "vit"}', "model"),
        (None, "No such file"),
        ("{", "JSONDecodeError"),
        ("[]", "does not describe a model"),
        ("{}", "model_type"),
        ('{"model_type": "no such"}', "no such"),
        ('{"model_type": "deepseek_v3", "hidden_size": "large"}', "hidden_size"),
    ],
)
def test_a_config_json_that_is_wrong(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises((ConfigError, TaskError), match=message):
        tiny(config=str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("options", "vocabulary", "seq_len", "words"),
    [
        ({"config": "a", "from_": "b"}, 257, 32, "model.config and model.from"),
        ({"dropout": 1.0}, 257, 32, "model.dropout"),
        ({"dropout": -0.1}, 257, 32, "model.dropout"),
        ({"config": gpt2}, 1000, 32, "vocabulary is too small"),
        ({}, 1000 << 24, 32, "the preset model has a vocabulary of"),
        ({"config": gpt2}, 257, 65, "at most 64"),
    ],
)
def test_options_that_are_wrong_and_data_that_a_model_cannot_take(tmp_path, options, vocabulary, seq_len, words):
    options = {name: value(tmp_path) if value is gpt2 else value for name, value in options.items()}
    with pytest.raises((ConfigError, DataError), match=words):
        causal_lm(ModelConfig(**options), vocabulary=vocabulary, seq_len=seq_len)
    assert causal_lm(ModelConfig(config=gpt2(tmp_path)), vocabulary=257, seq_len=64)


@pytest.mark.parametrize(
    ("missing", "extra", "make"),
    [
        ("transformers", "lm", lambda text: language_model(TINY, TextConfig(text=text, seq_len=8))),
        ("transformers", "image", lambda text: image()),
        ("peft", "lm", lambda text: add_adapters(tiny(), LoraOptions(2, 4.0))),
        ("sklearn.datasets", "image", lambda text: image()),
        ("pyarrow.parquet", "data", lambda text: open_corpus(TextConfig(text=shutil.copy(text, f"{text}.parquet")))),
        ("fsspec", "data", lambda text: language_model(TINY, TextConfig(text="s3://bucket/*"))),
    ],
)
def test_a_missing_library_is_named_with_its_extra(text, monkeypatch, missing, extra, make):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises((TaskError, ConfigError), match=r"pip install") as caught:
        make(text)
    assert f'"hvdtrain[{extra}]"' in caught.value.next_step


def test_tasks_are_found_by_name_and_import_nothing_heavy_before_it_is_needed():
    script = (
        "import sys; from hvdtrain.task.base import NAMED, load_task_function\n"
        "for name in NAMED: load_task_function(name).__name__ == name or sys.exit(name)\n"
        'print(*{"torch", "numpy", "transformers", "tokenizers", "datasets", "sklearn"} & set(sys.modules))'
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
