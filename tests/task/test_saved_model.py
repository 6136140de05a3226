"""`--model.from`: a run, a checkpoint of any engine, or a folder of transformers gives the initial weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.config.parse import parse_argv, parse_object
from hvdtrain.errors import CheckpointError, ConfigError, TaskError
from hvdtrain.state.checkpoint_store import CheckpointStore, load
from hvdtrain.state.pieces import StateDict
from hvdtrain.task.causal_lm import ModelConfig, causal_lm
from hvdtrain.task.encode import ByteEncoder
from hvdtrain.task.language_model import language_model
from hvdtrain.task.saved_model import find_model
from hvdtrain.task.text_config import TextConfig
from hvdtrain.training.start.make_task import make_task
from hvdtrain.yaml_file import read_yaml
from tests.support.checkpoints import save, save_in_parts
from tests.support.gallery import LANGUAGE, Recorded, record_on_threads

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")

IDS = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(1))


def _train(folder: Path, *options: str, size: int = 1) -> Recorded:
    return record_on_threads(folder, *LANGUAGE, "--train.steps=4", *options, size=size)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A run with a checkpoint of step 2, and the newest of step 4."""
    return _train(tmp_path_factory.mktemp("saved") / "full", "--checkpoint.every=2", "--optimizer.lr=0.03")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    pytest.importorskip("peft", reason="the peft library is not installed")
    return _train(tmp_path_factory.mktemp("saved") / "lora", "--model.lora=rank=4,alpha=16", "--optimizer.lr=0.03")


def _step(job: Recorded, step: int) -> Path:
    return job.run / "checkpoints" / f"step-{step:06d}"


def _model(name: Any, **options: Any) -> nn.Module:
    return causal_lm(ModelConfig(from_=str(name), **options), vocabulary=257, seq_len=32).eval()


def _in_rows(job: Recorded, folder: Path) -> Path:
    """The newest checkpoint as three ranks with FSDP write it."""
    newest = _step(job, 4)
    files = {name: (newest / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    return save_in_parts(CheckpointStore(folder, pytest.fail, files=files), 4, load(newest), 3, divided=True)


def test_a_run_names_its_checkpoints(job: Recorded) -> None:
    """The held-out loss of step 2 is worse than that of the newest."""
    for name, step in ((f"{job.run}@2", 2), (f"{job.run}@best", 4), (f"{job.run}@latest", 4), (job.run, 4)):
        found = find_model(str(name))
        assert found.is_checkpoint and found.folder == _step(job, step), name
    for wrong in ("3", "worst", ""):
        with pytest.raises(ConfigError, match=f"no checkpoint '{wrong}'") as caught:
            find_model(f"{job.run}@{wrong}")
        assert "steps 2, 4" in str(caught.value)


def _by_transformers(job: Recorded, folder: Path) -> Path:
    transformers.AutoModelForCausalLM.from_pretrained(_step(job, 4)).save_pretrained(folder)
    return folder


SOURCES: dict[str, Callable[[Recorded, Path], Path]] = {
    "a run, which means its newest checkpoint": lambda job, folder: job.run,
    "a checkpoint": lambda job, folder: _step(job, 4),
    "an older checkpoint": lambda job, folder: _step(job, 2),
    "a checkpoint of pieces": _in_rows,
    "a folder of transformers": _by_transformers,
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_weights_are_equal_bit_for_bit(source: str, job: Recorded, tmp_path: Path) -> None:
    model, step = _model(SOURCES[source](job, tmp_path / "source")), 2 if "an older" in source else 4
    stored, found = load(_step(job, step)).tensors["model"], model.state_dict()
    assert found.keys() == stored.keys() and all(torch.equal(found[name], tensor) for name, tensor in stored.items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    read = transformers.AutoModelForCausalLM.from_pretrained(_step(job, step))
    assert torch.equal(model(input_ids=IDS).logits, read(input_ids=IDS).logits)


def test_no_weight_stays_in_a_file(job: Recorded, tmp_path: Path) -> None:
    """The run may remove its checkpoint, and on some file systems a removed file cannot be read again."""
    shutil.copytree(_step(job, 4), tmp_path / "step")
    model = _model(tmp_path / "step")
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    mapped = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    for name, tensor in model.state_dict().items():
        assert not any(begin <= tensor.data_ptr() < end for begin, end in mapped), name


def test_adapters_are_merged(adapted: Recorded) -> None:
    run = parse_argv([f"--config={adapted.run / 'config.yaml'}"], language_model)
    own = make_task(partial(language_model, **run.task_args), run.config).model.eval()
    before = own(input_ids=IDS).logits
    own.load_state_dict(adapted.state().tensors["model"], strict=False)
    torch.manual_seed(1)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    merged = _model(adapted.run)
    assert torch.equal(drawn, torch.rand(1)), "making the base draws no random numbers of this run"
    logits = merged(input_ids=IDS).logits
    assert torch.allclose(own(input_ids=IDS).logits, logits, atol=1e-5)
    assert not torch.allclose(before, logits, atol=1e-2)
    assert not any(".lora_" in name or ".base_layer" in name for name in merged.state_dict())


def test_adapters_of_other_weights_are_refused(adapted: Recorded, tmp_path: Path) -> None:
    shutil.copytree(adapted.run, tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    file.write_text(file.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(CheckpointError, match="were trained with have changed"):
        _model(tmp_path / "run")
    file.unlink()
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        _model(tmp_path / "run")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_damage_is_an_error(job: Recorded, name: str, tmp_path: Path) -> None:
    """Also of the newest checkpoint of a run: an older one would be other weights."""
    shutil.copytree(job.run, tmp_path / "run")
    file = tmp_path / "run/checkpoints/step-000004" / name
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises((CheckpointError, ConfigError), match=name):
        _model(tmp_path / "run")


def test_weights_of_another_model_are_refused(job: Recorded, tmp_path: Path) -> None:
    stored, files = load(_step(job, 4)), {"config.json": (_step(job, 4) / "config.json").read_bytes()}
    tensors = dict(stored.tensors["model"])
    for number, change in enumerate((tensors | {"extra": torch.ones(1)}, dict(list(tensors.items())[1:]))):
        store = CheckpointStore(tmp_path / str(number), pytest.fail, files=files)
        with pytest.raises(TaskError, match="are not those of the model"):
            _model(save(store, 4, StateDict({"model": change, "optimizer": {}}, stored.values)))


def test_names_without_a_model_are_refused(job: Recorded, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(job.run / "journal.jsonl", tmp_path / "run")
    for name, found, next_step in (
        ("deepseek-ai/DeepSeek-V3", "no folder", "hf download deepseek-ai/DeepSeek-V3 --local-dir DIR"),
        (str(tmp_path / "none"), "no folder", "correct --model.from"),
        (str(tmp_path / "run"), "a run without checkpoints", "correct --model.from"),
    ):
        with pytest.raises(ConfigError, match="there is no model in") as caught:
            find_model(name)
        assert found in str(caught.value.found) and next_step in str(caught.value.next_step)
    other = save(CheckpointStore(tmp_path / "other", pytest.fail), 1, StateDict({"model": {}}, {"aliases": {}}))
    with pytest.raises(CheckpointError, match="does not describe its model"):
        _model(other)


def test_the_source_s_tokenizer_reads_text(job: Recorded, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
    text = tmp_path / "latin.txt"
    text.write_bytes(bytes(range(1, 256)) * 3)  # no UTF-8
    data = TextConfig(text=str(text), seq_len=16)
    task = language_model(ModelConfig(from_=str(job.run)), data)
    assert task.train_data[0][:16].tolist() == list(range(1, 17)), "bytes stay bytes"
    assert task.files["tokenizer.json"] == ByteEncoder().files()["tokenizer.json"]
    shutil.copytree(_step(job, 4), tmp_path / "step")
    (tmp_path / "step/manifest.json").unlink()  # a folder now
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "step/tokenizer.json"))
    text.write_text("a b c " * 20)
    task = language_model(ModelConfig(from_=str(tmp_path / "step")), data)
    assert task.train_data[0][:3].tolist() == [1, 2, 0]
    assert task.files["tokenizer.json"] == (tmp_path / "step/tokenizer.json").read_bytes()


def test_a_run_from_a_run_begins_at_step_0_and_law_1(job: Recorded, tmp_path: Path) -> None:
    one, two = (_train(tmp_path / str(size), f"--model.from={job.run}", size=size) for size in (1, 2))
    assert two.losses() == pytest.approx(one.losses(), rel=2e-6)
    assert [line["step"] for line in one.journal if "step" in line and "loss" in line][:2] == [1, 2]
    assert one.losses()[0] < job.losses()[0] - 0.2, "it has learned"
    assert read_yaml(one.run / "config.yaml")["model"]["from"] == str(job.run)


def test_the_option_is_named_from_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model: {from: there}")
    for run in (
        parse_argv(["--model.from", "there"], language_model),
        parse_argv([f"--config={file}"], language_model),
        parse_object({"model": {"from": "there"}}, language_model),
    ):
        assert run.task_args["model"] == ModelConfig(from_="there")
        assert run.resolved["model"]["from"] == "there" and "from_" not in json.dumps(run.resolved)
