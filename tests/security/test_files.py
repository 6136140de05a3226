"""The same pickles in the files that a run reads: none is unpickled, each is refused or passed over."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from hvdtrain.__main__ import main
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.state.checkpoint_store import MANIFEST, load
from tests.support.launch import ROOT
from tests.support.payload import MakesFolder


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: make setup")
    from hvdtrain.task.causal_lm import ModelConfig, causal_lm

    marker = tmp_path / "was here"
    (tmp_path / "evil.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).mkdir()\n")
    facts = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError):
        causal_lm(ModelConfig(config=str(tmp_path / "config.json")), vocabulary=64, seq_len=8)
    llama = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**facts, **llama, "num_attention_heads": 1}))
    causal_lm(ModelConfig(config=str(tmp_path / "config.json")), vocabulary=64, seq_len=8)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", MANIFEST])
def test_a_pickle_in_a_checkpoint_is_damage(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "was here"
    (tmp_path / name).write_bytes(pickle.dumps(MakesFolder(marker)))
    with pytest.raises(CheckpointError):
        load(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("where", ["file", "option", "run"])
def test_yaml_creates_no_objects(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker = tmp_path / "was here"
    evil = f"!!python/object/apply:os.mkdir ['{marker}']"
    for folder, name in (("", "evil.yaml"), ("run", "config.yaml")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(f"train:\n  steps: {evil}\n")
    arguments = {
        "file": ["--config", str(tmp_path / "evil.yaml")],
        "option": ["--train.steps", evil],
        "run": ["--train.steps=1", f"--run_dir={tmp_path / 'run'}"],
    }[where]
    assert main([*arguments, f"--task={ROOT}/tests/support/toy.py:toy"]) != 0
    assert not marker.exists()
    assert capsys.readouterr().err
