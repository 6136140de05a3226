"""Layers for multi-token prediction: their losses by hand, transformers' own, weights, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hvdtrain import Task
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.state.placeholder import Placeholder, values_read_later
from hvdtrain.task.causal_lm import ModelConfig, causal_lm, load_model
from hvdtrain.task.language_model import language_model
from hvdtrain.task.saved_model import SavedModel
from hvdtrain.task.text_config import TextConfig
from hvdtrain.task.token_loss import (
    MARKS,
    chat_targets,
    joined_targets,
    mtp_metrics,
    separate_targets,
    token_loss,
)
from tests.support.gallery import record_on_threads
from tests.task.test_sequence import check_parts

transformers = pytest.importorskip("transformers", minversion="5.23")

TOKENS, END, MTP = 12, 1, (2, 0.3)
ROWS = torch.randint(2, 257, (3, TOKENS + 1), generator=torch.Generator().manual_seed(5))


def _model(layers: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    made: Any = causal_lm(ModelConfig("tiny", mtp_layers=layers, **options), vocabulary=257, seq_len=TOKENS)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)  # one for all would hide a norm that is left out
    return made


def test_the_model_itself_is_as_without_them() -> None:
    torch.manual_seed(0)
    plain: Any = causal_lm(ModelConfig("tiny"), vocabulary=257, seq_len=TOKENS)
    torch.manual_seed(0)
    made: Any = causal_lm(ModelConfig("tiny", mtp_layers=2), vocabulary=257, seq_len=TOKENS)
    assert plain.config.num_mtp_layers == 0 and made.config.num_mtp_layers == 2
    assert type(made).__name__ == type(plain).__name__
    for name, value in plain.state_dict().items():
        assert torch.equal(value, made.state_dict()[name])
    assert torch.equal(plain(input_ids=ROWS).logits, made(input_ids=ROWS).logits)
    assert torch.equal(plain(input_ids=ROWS).logits, made(input_ids=ROWS, mtp_ids=[ROWS, ROWS])[0])


def test_the_logits_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`MtpModel` reads the saved weights, and its layers compute the same."""
    from transformers.modeling_layers import MtpModel

    made = _model().eval()
    made.save_pretrained(tmp_path)
    kind = transformers.DeepseekV3ForCausalLM
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[23]\."])  # as of its own sizes
    theirs = MtpModel.from_pretrained(kind.from_pretrained(tmp_path).eval()).eval()
    hidden = made.model(input_ids=ROWS, use_cache=False).last_hidden_state
    _, logits = made(input_ids=ROWS, use_cache=False, mtp_ids=[ROWS, ROWS.flip(1)])
    places = torch.arange(TOKENS + 1)[None]
    for layer, (ids, own) in enumerate(zip((ROWS, ROWS.flip(1)), logits, strict=True)):
        hidden = theirs.forward_layer(layer, hidden, places, None, input_ids=ids)
        torch.testing.assert_close(theirs._project_to_logits(hidden), own, rtol=1e-5, atol=1e-6)


def _by_hand(model: Any, row: Tensor, counted: Any = lambda index: True) -> tuple[Tensor, Tensor, int]:
    """Return the losses of one document: of the next tokens, of those further ahead, and how many these are.

    `counted`: whether the token at an index has a loss.
    """
    length = len(row) - 1
    further = [row[number : number + length] for number in (1, 2)]
    padded = [torch.cat([ids, ids.new_zeros(length - len(ids))])[None] for ids in further]
    logits, more = model(input_ids=row[None, :-1], use_cache=False, mtp_ids=padded)
    first, rest, count = torch.zeros(()), torch.zeros(()), 0
    for index in range(length):
        for ahead, each in enumerate([logits, *more]):
            if index + 1 + ahead <= length and counted(index + 1 + ahead):
                loss = cross_entropy(each[0, index][None], row[index + 1 + ahead][None])
                first, rest = (first + loss, rest) if ahead == 0 else (first, rest + loss)
                count += ahead > 0
    return first, rest, count


@pytest.mark.parametrize("kind", ["joined", "separate", "chat"])
def test_losses_and_gradients_by_hand(kind: str) -> None:
    model, rows = _model(), ROWS.clone()
    cuts: list[list[Tensor]] = [[row] for row in rows]
    counted, batch, targets = (lambda index: True), rows, joined_targets
    if kind == "separate":
        rows[0, 4] = rows[1, 0] = rows[1, 7] = rows[1, 8] = rows[2, TOKENS] = END
        ends = ([5], [1, 8, 9], [])
        cuts = [list(row.tensor_split(cut)) for row, cut in zip(rows, ends, strict=True)]
        targets = partial(separate_targets, end=END, config=model.config)
    if kind == "chat":
        counted = lambda index: index % 3 != 0  # noqa: E731
        marks = torch.tensor([counted(index) for index in range(TOKENS + 1)]).long()
        batch, targets = rows << MARKS | marks, partial(chat_targets, apart=False, config=model.config)
    parts = [_by_hand(model, part, counted) for row in cuts for part in row if len(part) > 1]
    first, rest = sum(part[0] for part in parts), sum(part[1] for part in parts)
    loss, weight = token_loss(model, batch, targets=targets, mtp=MTP)
    alone, alone_weight = token_loss(model, batch, targets=targets)
    assert loss.item() == pytest.approx(first.item(), rel=1e-5) == alone.item()
    assert float(weight) == float(alone_weight)
    own, wanted = (torch.autograd.grad(value, list(model.parameters())) for value in (loss, first + 0.3 / 2 * rest))
    for found, reference in zip(own, wanted, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-5)
    total, number = mtp_metrics(model.eval(), batch, targets=targets, count=2)["mtp_loss"]
    assert number == sum(part[2] for part in parts)
    assert total.item() == pytest.approx(rest.item(), rel=1e-5)


def test_an_evaluation_has_the_loss_of_the_next_token() -> None:
    model = _model().eval()
    monitored: list[int] = []
    model.model.layers[2].register_forward_hook(lambda *_: monitored.append(1))
    assert torch.equal(*(token_loss(model, ROWS, targets=joined_targets, mtp=each)[0] for each in ((0, 0.0), MTP)))
    assert not monitored


def test_a_model_that_runs_all_its_layers_is_refused() -> None:
    model = _model()
    model.config.num_hidden_layers += 1  # it takes the first of them for its own
    with pytest.raises(TaskError, match="the model runs all of its layers"):
        token_loss(model, ROWS, targets=joined_targets, mtp=MTP)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_does_not_depend_on_ranks_and_its_checkpoint_has_the_layers(tmp_path: Path, ranks: int) -> None:
    def build(rank: int) -> Task:
        torch.manual_seed(0)
        return language_model(ModelConfig("tiny", mtp_layers=2), TextConfig(seq_len=16))

    batch = ("--train.global_batch=6", "--train.micro_batch=1", "--train.eval_samples=4", "--train.steps=3")
    job, two = (record_on_threads(tmp_path / str(size), *batch, size=size, build=build) for size in (ranks, 2))
    assert job.losses() == pytest.approx(two.losses(), rel=1e-6)
    evaluated = job.events("evaluation")[-1]
    assert evaluated["at_step"] == 3 and evaluated["metrics"]["mtp_loss"] > 5
    checkpoint = SavedModel(next((job.run / "checkpoints").glob("step-*")), is_checkpoint=True)
    plain: Any = load_model(checkpoint)
    assert plain.config.num_mtp_layers == 0 and len(plain.model.layers) == 2
    loaded: Any = load_model(checkpoint, mtp=True)
    assert loaded.config.num_mtp_layers == 2 and len(loaded.model.layers) == 4
    for layers in (0, 1, 2):
        options = ModelConfig(from_=str(job.run), mtp_layers=layers)
        again: Any = causal_lm(options, vocabulary=257, seq_len=16)
        assert len(again.model.layers) == 2 + layers
        for name, value in again.state_dict().items():
            assert torch.equal(value, loaded.state_dict()[name]), name


def test_weights_of_a_folder_are_read_one_by_one(tmp_path: Path) -> None:
    made = _model()
    made.save_pretrained(tmp_path, max_shard_size="20KB")
    options = ModelConfig(from_=str(tmp_path), mtp_layers=2)
    with values_read_later() as read:
        later: Any = causal_lm(options, vocabulary=257, seq_len=TOKENS, may_read_later=True)
    assert read == [later]
    for name, parameter in later.named_parameters():
        assert isinstance(parameter, Placeholder) and parameter.read is not None
        assert torch.equal(parameter.read(), dict(made.named_parameters())[name])
    loaded: Any = load_model(SavedModel(tmp_path, is_checkpoint=False), mtp=True)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in made.state_dict().items())


def test_a_folder_that_lacks_a_weight_or_is_damaged_is_an_error(tmp_path: Path) -> None:
    made, options = _model(), ModelConfig(from_=str(tmp_path), mtp_layers=2)
    kept = {name: value for name, value in made.state_dict().items() if name != "model.layers.2.enorm.weight"}
    made.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(TaskError, match="not those of the model") as caught:
        causal_lm(options, vocabulary=257, seq_len=TOKENS)
    assert "model.layers.2.enorm.weight" in str(caught.value.found)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(TaskError, match="cannot create the model of") as caught:
        causal_lm(options, vocabulary=257, seq_len=TOKENS)
    assert "copy the folder" in str(caught.value.next_step)


def test_such_layers_of_other_models_are_left_out(tmp_path: Path) -> None:
    config = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **config))
    more = {**model.state_dict(), "model.layers.2.eh_proj.weight": torch.zeros(16, 32)}
    model.save_pretrained(tmp_path, state_dict=more)
    loaded: Any = load_model(SavedModel(tmp_path, is_checkpoint=False), mtp=True)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"mtp_layers": -1}, "mtp_layers is -1"),
        ({"mtp_layers": 1, "mtp_weight": -0.5}, "mtp_weight is -0.5"),
        ({"mtp_layers": 1, "mtp_weight": float("nan")}, "mtp_weight is nan"),
        ({"mtp_layers": 1, "lora": "rank=2"}, "mtp_layers and --model.lora conflict"),
        ({"mtp_layers": 1, "config": {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2}}, "llama"),
        ({"mtp_layers": 1, "config": {"model_type": "bailing_hybrid"}}, "bailing_hybrid"),
    ],
)
def test_bad_options_and_models_without_such_layers_are_refused(
    tmp_path: Path, options: dict[str, Any], found: str
) -> None:
    if "config" in options:
        (tmp_path / "config.json").write_text(json.dumps(options["config"] | {"vocab_size": 300}))
        options = options | {"config": str(tmp_path / "config.json")}
    with pytest.raises(ConfigError, match=found):
        causal_lm(replace(ModelConfig("tiny"), **options), vocabulary=257, seq_len=TOKENS)


@pytest.mark.parametrize("apart", [False, True])
def test_ranks_with_parts_of_a_sequence_have_the_same_losses(apart: bool) -> None:
    rows = ROWS.clone()
    rows[0, 4] = rows[1, 5] = rows[1, 6] = rows[2, 0] = END
    targets = partial(separate_targets, end=END, config=_model().config) if apart else joined_targets

    def metrics(model: Any, rows: Tensor, part: Any) -> Any:
        return mtp_metrics(model, rows, targets=targets, count=2, part=part)["mtp_loss"]

    check_parts(_model, [rows], apart=apart, metrics=metrics, targets=targets, mtp=MTP)
