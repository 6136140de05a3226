"""`hvdtrain export`: other programs read the model of a run, with its values; an error leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.cli.export import main
from hvdtrain.errors import CheckpointError, ConfigError, TaskError
from hvdtrain.export import formats
from hvdtrain.export.formats import model_card
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.pieces import StateDict
from hvdtrain.task.causal_lm import load_model
from hvdtrain.task.saved_model import find_model
from tests.support.checkpoints import save
from tests.support.gallery import LANGUAGE, Recorded, record_on_threads

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")

IDS = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=["full", "lora"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    options = ("--model.lora=rank=4", "--optimizer.lr=0.03") if request.param == "lora" else ("--checkpoint.every=2",)
    return record_on_threads(tmp_path_factory.mktemp(request.param), *LANGUAGE, "--train.steps=4", *options)


def _logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model.eval()(input_ids=IDS).logits
    return logits


def test_a_folder_for_transformers_and_one_file_of_safetensors(
    job: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    assert main([str(job.run), str(tmp_path / "out")]) == 0
    assert "step-000004" in capsys.readouterr().out
    model = load_model(find_model(str(job.run)))
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(_logits(read), _logits(model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a ü").input_ids == list("a ü".encode())
    names = {name.name for name in (tmp_path / "out").iterdir()}
    assert names >= {"config.json", "model.safetensors", "README.md"} and "base_config.json" not in names
    card = (tmp_path / "out/README.md").read_text()
    evaluations = {event["at_step"]: event["loss"] for event in job.events("evaluation")}
    assert f"| last | 4 | {evaluations[4]:.4f} |" in card and f"| first | 0 | {evaluations[0]:.4f} |" in card
    assert "32 samples in all" in card and f"torch {torch.__version__}" in card and "preset: tiny" in card
    main([str(job.run), str(tmp_path / "a.safetensors"), "--format=safetensors"])
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_a_card_has_the_losses_up_to_its_step(tmp_path: Path) -> None:
    losses = {0: 5.0, 10: 2.0, 20: 3.0, 30: 1.0}
    events = [{"event": "evaluation", "at_step": step, "loss": loss} for step, loss in losses.items()]
    (tmp_path / "journal.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    path = save(CheckpointStore(tmp_path / "checkpoints", pytest.fail), 20, StateDict({"model": {}}, {}))
    rows = [line for line in model_card(path).splitlines() if line.startswith("|")][2:]
    assert rows == ["| first | 0 | 5.0000 |", "| best | 10 | 2.0000 |", "| last | 20 | 3.0000 |"]


def test_what_cannot_be_exported_leaves_nothing(job: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="there exists already"):
        main([str(job.run), str(tmp_path / "there")])
    with pytest.raises(ConfigError, match="not a run or checkpoint"):
        main([str(tmp_path / "there"), str(tmp_path / "out")])
    monkeypatch.setattr(formats, "model_card", lambda checkpoint: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main([str(job.run), str(tmp_path / "out")])
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_another_task_has_no_model_of_transformers_but_a_state_dict(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    options = ("--task=tests/support/stack.py:stack", "--train.steps=1", "--train.global_batch=2")
    for name, more in (("a", ()), ("b", ("--remade=true",))):
        record_on_threads(tmp_path / name, *options, "--train.micro_batch=1", *more)
    store = CheckpointStore(tmp_path / "wrapped/checkpoints", pytest.fail)
    wrapped = {f"module._orig_mod.{name}": torch.ones(1) for name in ("weight", "bias")}
    save(store, 1, StateDict({"model": wrapped}, {"aliases": {"module.tied": "module._orig_mod.weight"}}))
    main([str(tmp_path / "wrapped"), str(tmp_path / "plain"), "--format=safetensors"])
    assert load_file(tmp_path / "plain").keys() == {"weight", "bias", "tied"}
    with pytest.raises(CheckpointError, match="does not describe its model"):
        main([str(tmp_path / "a/run"), str(tmp_path / "out")])
    main([str(tmp_path / "a/run"), str(tmp_path / "out"), "--format=safetensors"])
    found = load_file(tmp_path / "out")
    assert torch.equal(found["head.weight"], found["embedding.weight"]), "tied, under each name"
    with pytest.raises(CheckpointError, match="frozen parameters"):
        main([str(tmp_path / "b/run"), str(tmp_path / "other"), "--format=safetensors"])


@pytest.mark.slow
@pytest.mark.parametrize("job", ["full"], indirect=True)
@pytest.mark.filterwarnings("ignore")  # of torch.onnx
def test_onnx(job: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="the onnxruntime library is not installed")
    main([str(job.run), str(tmp_path / "out"), "--format=onnx"])
    session = onnxruntime.InferenceSession(str(tmp_path / "out/model.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input_ids": IDS.numpy()})
    assert torch.allclose(torch.from_numpy(found), _logits(load_model(find_model(str(job.run)))), atol=1e-4)
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == found.shape[-1]
    check = formats._check_onnx

    def check_other_weights(model: Any, *rest: Any) -> None:
        with torch.no_grad():
            model.model.get_output_embeddings().weight.add_(0.1)
        check(model, *rest)

    monkeypatch.setattr(formats, "_check_onnx", check_other_weights)
    with pytest.raises(TaskError, match="other logits than torch"):
        main([str(job.run), str(tmp_path / "wrong"), "--format=onnx"])
    assert not (tmp_path / "wrong").exists()
