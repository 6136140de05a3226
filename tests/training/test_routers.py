"""Routers of experts: a bias and an auxiliary loss balance experts, equally at any number of ranks."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.comm.solo import SoloComm, imagined_ranks
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.state.divided import OnStages
from hvdtrain.training.loop.balance_loss import BalanceLoss, make_balance_loss
from hvdtrain.training.loop.router_loads import EVERY, RouterLoads, routers_of
from tests.laws.test_fsdp import check_equal
from tests.support.divided_models import DIVIDED, divided
from tests.support.gallery import Recorded
from tests.support.thread_comm import ThreadComm, on_ranks


class Router(nn.Module):
    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, 2))
        self.e_score_correction_bias = nn.Buffer(torch.zeros(experts))

    def forward(self, experts_T: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(experts_T), len(self.weight)), experts_T


def _model(experts: int = 4) -> nn.Module:
    return nn.Sequential(OrderedDict(gate=Router(experts)))


def _loads(model: nn.Module, comm: Any, events: list[Any], *, counts: bool = True) -> RouterLoads:
    return RouterLoads(routers_of(model), comm, 0.1, events.append, counts=counts)


def _step(loads: RouterLoads, model: nn.Module, experts: list[int], step: int = 1, *, applied: bool = True) -> None:
    loads.begin(1)
    with loads.around_forward(None):
        model(torch.tensor(experts))
    model(torch.tensor([3, 3, 3]))  # the recomputation in backward, or a pass that does not count
    loads.start()
    loads.finish(step, applied=applied)


def test_each_layer_counts_its_own_tokens() -> None:
    """Of equally and of unequally many tokens and experts, and of a layer that runs twice in a pass."""
    model, events = nn.ModuleDict({"a": _model(), "b": _model(), "c": _model(), "d": _model(2)}), list[Any]()
    loads = _loads(model, SoloComm(), events)
    loads.begin(1)
    for _ in range(2):
        with loads.around_forward(None):
            passes = (("a", [0, 0, 1, 3]), ("b", [2, 2, 2, 2]), ("c", [1, 3]), ("c", [3]), ("d", [0, 0, 1]))
            for name, experts in passes:
                model[name](torch.tensor(experts))
    loads.start()
    loads.finish(EVERY, applied=True)
    loads.begin(1)
    loads.start()
    loads.finish(EVERY + 1, applied=False)
    found = {name: (layer["tokens"], round(layer["busiest"], 3)) for name, layer in events[0]["layers"].items()}
    assert found == {"a.gate": (8, 2.0), "b.gate": (8, 4.0), "c.gate": (6, 2.667), "d.gate": (6, 1.333)}
    signs = {"a": [-1, 0, 1, 0], "b": [1, 1, -1, 1], "c": [1, -1, 1, -1], "d": [-1, 1]}
    for name, expected in signs.items():
        assert model[name].gate.e_score_correction_bias.tolist() == pytest.approx([0.1 * sign for sign in expected])


def test_experts_with_few_tokens_become_more_likely() -> None:
    model, events = _model(), list[Any]()
    loads, expected = _loads(model, SoloComm(), events), pytest.approx([-0.1, 0.0, -0.1, 0.1])
    _step(loads, model, [0, 0, 0, 1, 1, 2, 2, 2], EVERY)
    assert model.gate.e_score_correction_bias.tolist() == expected
    assert not events  # until the loads are on the host
    _step(loads, model, [3, 3, 3, 3], applied=False)
    assert model.gate.e_score_correction_bias.tolist() == expected
    (event,) = events
    assert event["event"] == "experts" and event["at_step"] == EVERY
    layer = event["layers"]["gate"]
    assert (layer["tokens"], layer["busiest"]) == (8, pytest.approx(1.5)) and 0.7 < layer["entropy"] < 0.9
    loads.close()
    _step(loads, model, [0, 0, 0, 0])  # nothing is counted any more
    assert model.gate.e_score_correction_bias.tolist() == expected


def test_the_busiest_expert_of_this_rank_is_known_where_asked_for() -> None:
    """Of the most uneven router, over all passes of the step after the question; not of an evaluation."""
    model = nn.ModuleDict({"a": _model(), "b": _model(2), "c": _model()})
    loads = _loads(model, SoloComm(), [])
    assert math.isnan(loads.own_share())
    for experts in ([0, 0, 0, 0], [2, 2, 2, 2]):
        loads.begin(2)
        for chosen in (experts, [3, 3, 1, 0]):
            with loads.around_forward(None):
                model["a"](torch.tensor(chosen))
                model["b"](torch.tensor([0, 1]))
        model["b"](torch.tensor([0, 0]))
        loads.start()
        loads.finish(1, applied=False)
    assert loads.own_share() == 0.625 and math.isnan(loads.own_share())


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "qwen3_moe", "gpt_oss"])
def test_routers_of_transformers_are_found(family: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make setup")
    options = {
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 0},
        **{"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2},
        **{"topk_group": 1, "pad_token_id": 0},
        **dict.fromkeys(("head_dim", "kv_lora_rank", "q_lora_rank", "v_head_dim"), 8),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    }
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **options))
    loads, ids = _loads(model.train(), SoloComm(), []), torch.arange(32).reshape(2, 16)
    loads.own_share()
    loads.begin(1)
    with loads.around_forward(None):
        model(ids)
    loads.start()
    assert 1 / 4 <= loads.own_share() <= 1 / 2


def test_tokens_are_counted_on_all_ranks_and_once() -> None:
    """Ranks 0 and 1 have the same samples, of which one counts."""

    def body(comm: ThreadComm) -> list[float]:
        model = _model()
        loads = _loads(model, comm, [], counts=comm.rank != 1)
        _step(loads, model, [[1], [1], [0, 0, 0, 2, 3]][comm.rank])
        return model.gate.e_score_correction_bias.tolist()

    assert on_ranks(3, body) == [pytest.approx([-0.1, 0.1, 0.1, 0.1])] * 3


@pytest.mark.parametrize("options", [(), ("--memory.checkpointing=full",)])
def test_biases_do_not_depend_on_the_number_of_ranks(
    options: tuple[str, ...], trained: Callable[..., Recorded]
) -> None:
    found = [_bias(trained(str(size), *DIVIDED, *options, size=size)) for size in (1, 3)]
    assert found[0].abs().max() > 0 and all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("size", [2, 6])
def test_workers_that_train_apart_have_biases_of_their_own(size: int, trained: Callable[..., Recorded]) -> None:
    """Ranks that serve several workers, one, or a part of one: none waits for another's tokens."""
    options = (*DIVIDED, "--parallel.sync=local:2", "--parallel.workers=3", "--outer.compression=none")
    one, more = (trained(str(count), *options, size=count) for count in (1, size))
    assert _bias(one).abs().max() > 0
    torch.testing.assert_close(_bias(more), _bias(one))
    assert more.losses() == pytest.approx(one.losses(), rel=2e-6)


def _bias(run: Recorded) -> Tensor:
    return run.state().tensors["model"]["model.layers.1.mlp.gate.e_score_correction_bias"]


def test_a_rate_of_zero_changes_nothing(trained: Callable[..., Recorded]) -> None:
    assert _bias(trained("one", *DIVIDED, "--train.router_bias=0", size=1)).abs().max() == 0


BALANCED = (*DIVIDED, "--train.balance_loss=0.05", "--train.router_bias=0")


class ScoringRouter(nn.Module):
    def __init__(self, *, sigmoid: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2))
        if sigmoid:
            self.e_score_correction_bias = nn.Buffer(torch.zeros(4))

    def forward(self, logits_NE: Tensor) -> tuple[Tensor, Tensor]:
        return logits_NE, logits_NE.topk(2).indices


@pytest.mark.parametrize("sigmoid", [True, False])
def test_the_formula(sigmoid: bool) -> None:
    """Equations 17 to 20 in loops, for two sequences of three tokens."""
    router = ScoringRouter(sigmoid=sigmoid)
    loss = BalanceLoss([router], 0.1)
    logits_STE = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with loss.around_forward({"ids": torch.zeros(2, 3)}):
        router(logits_STE.view(6, 4))
    found = loss.extra_loss()
    expected = torch.zeros(())
    for sequence in logits_STE:
        scores = sequence.sigmoid() if sigmoid else sequence.softmax(dim=-1)
        for expert in range(4):
            chosen = sum(expert in token.topk(2).indices for token in sequence)
            frequency = 4 / (2 * 3) * chosen
            mean = sum(token[expert] / token.sum() for token in scores) / 3
            expected = expected + 0.1 * 3 * frequency * mean
    torch.testing.assert_close(found, expected)
    (slope,) = torch.autograd.grad(found, logits_STE)
    assert slope.abs().max() > 0
    router(logits_STE.view(6, 4))  # the recomputation in backward
    with pytest.raises(TaskError, match="do not return what they chose"):
        loss.extra_loss()


@pytest.mark.parametrize("options", [(), ("--memory.checkpointing=selective",), ("--parallel.shard=gradients",)])
@pytest.mark.some(1)
def test_parameters_do_not_depend_on_ranks_and_micro_batches(
    options: tuple[str, ...], trained: Callable[..., Recorded]
) -> None:
    one = trained("1", *BALANCED, *(each for each in options if "shard" not in each), size=1)
    for size, micro_batch in ((3, 2),) if options else ((2, 1), (3, 2)):
        check_equal(one, trained(str(size), *BALANCED, *options, f"--train.micro_batch={micro_batch}", size=size))


def test_it_changes_the_router_and_no_loss_that_is_shown(trained: Callable[..., Recorded]) -> None:
    found = [trained(weight, *BALANCED, f"--train.balance_loss={weight}", size=1) for weight in ("0.05", "0")]
    assert found[0].losses()[0] == found[1].losses()[0] and found[0].losses() != found[1].losses()
    routers = [each.state().tensors["model"]["model.layers.1.mlp.gate.weight"] for each in found]
    assert (routers[0] - routers[1]).norm() > 1e-3 * routers[1].norm()


def test_training_leaves_no_hooks(trained: Callable[..., Recorded]) -> None:
    """Nor do biases. A program goes on with its model, and an elastic job begins another round with it."""
    task = divided()
    trained("one", *DIVIDED, "--train.balance_loss=0.05", size=1, build=lambda rank: task)
    assert not any(module._forward_hooks for module in task.model.modules())


def test_what_it_does_not_support_is_refused() -> None:
    model: Any = divided().model
    for dimensions, compiled, option in ((Dimensions(cp=2), False, "cp"), (Dimensions(), True, "compile")):
        with pytest.raises(ConfigError, match=f"--train.balance_loss does not support --(parallel|train).{option}"):
            make_balance_loss(model, 0.1, dimensions, compiled=compiled)
    with pytest.raises(TaskError, match="no routers"):
        make_balance_loss(nn.Linear(2, 2), 0.1, Dimensions(), compiled=False)
    assert make_balance_loss(nn.Linear(2, 2), 0.0, Dimensions(cp=2), compiled=True) is None
    loss = make_balance_loss(model, 0.1, Dimensions(pp=2, virtual_stages=2), compiled=False)
    assert loss is not None
    with loss.around_forward(torch.zeros(1)):
        pass
    assert loss.extra_loss() is None  # of a virtual stage without routers
    for router in routers_of(model).values():
        router.weight = OnStages((8, 32), (1,), ((0,), (1,))).of(torch.empty(0, 32))
    assert make_balance_loss(model, 0.1, Dimensions(pp=2), compiled=False) is None  # of another stage
    with imagined_ranks(16, 15):  # FSDP gives this rank no rows of 8
        mesh = DeviceMesh("cpu", range(16))
        for router in routers_of(model).values():
            whole = {"shape": torch.Size((8, 32)), "stride": (32, 1)}
            rows = DTensor.from_local(torch.empty(0, 32), mesh, [Shard(0)], run_check=False, **whole)
            router.weight = nn.Parameter(rows)
        assert make_balance_loss(model, 0.1, Dimensions(), compiled=False) is not None
