"""Compare the gradients of ranks that divide a model with those of one rank that has all of it, by parameter."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.comm.dimensions import ONE
from hvdtrain.comm.objects import allgather_json
from hvdtrain.comm.rounds import STARTED, start_rounds
from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.parse import RunConfig
from hvdtrain.data.loader import Stream, fetch_step, seed_forward
from hvdtrain.data.order import MicroBatch
from hvdtrain.errors import ETC, listed
from hvdtrain.plan.plan import plan_of
from hvdtrain.plan.refusals import resolve
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.state.exchange_state import Owned
from hvdtrain.state.train_state import TrainState
from hvdtrain.task.causal_lm import ModelConfig, architecture
from hvdtrain.task.saved_model import find_model
from hvdtrain.task.text_config import TextConfig
from hvdtrain.training.elastic.worker_state import WorkerState, make_worker_state
from hvdtrain.training.loop.forward import checked_loss, to_device
from hvdtrain.training.start.build import engine_of_worker
from hvdtrain.training.start.device import pick_device
from hvdtrain.training.start.make_task import make_task

TOLERANCE = 1e-5
"""Of a gradient in fp32, relative to its norm: other sums of the same numbers differ by less."""
_VOCABULARY, _SEQ_LEN = 512, 32
_WIDTHS = {
    "intermediate_size": 64, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "head_dim": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
"""Sizes of matrices of a small copy that no plan divides by heads or experts."""
_LAYERS = 2
"""Layers of a small copy after those without experts."""


@dataclass(frozen=True)
class Compared:
    """A parameter's gradient on all ranks, next to that of one rank."""

    parameter: str  # its name in the model
    error: float  # norm of the difference over the norm of the gradient
    factor: float  # of the gradient that is nearest: 2 if it was counted twice, 0 if it is missing
    norm: float  # of the gradient

    @property
    def wrong(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.error <= TOLERANCE:
            return ""
        if abs(self.factor) < TOLERANCE:
            return "the gradient is missing"
        whole = round(self.factor, 3)
        if abs(self.error - abs(self.factor - 1)) <= TOLERANCE and whole != 1:
            return f"the gradient is {whole:g} times as large"
        return f"the gradient differs by {self.error:.2g} of its norm"


def for_plan(run: RunConfig) -> RunConfig:
    """Return a config with which two ways to a gradient have equal results: in fp32, without compression.

    Its steps have 5 micro-batches of 2 samples, so that ranks have different numbers of them.
    """
    config = run.config
    exact = replace(config.parallel, compression="none", sync="every_step", workers=None, balance="equal")
    batch = replace(config.train, global_batch=10, micro_batch=2, compile=False)
    return replace(run, config=replace(config, precision="fp32", parallel=exact, train=batch))


def compare_gradients(run: RunConfig, build: Callable[[], Any], comm: Comm, info: RankInfo) -> list[Compared]:
    """Return the comparison of each trained parameter in the first step, equal on all ranks. Collective: yes.

    Errors: ConfigError: the ranks or the model cannot be divided as the config says.
    """
    device = pick_device(run.config.parallel.device, comm.local_rank, comm.local_size, comm)
    whole = replace(run.config.parallel, engine="horovod", shard="none", dp_shard=None, **vars(ONE))
    alone = _after_backward(replace(run, config=replace(run.config, parallel=whole)), build, SoloComm(), info, device)
    own, optimized = dict(alone.task.model.named_parameters()), alone.state.optimized()
    trained = {name: p for name, p in own.items() if p.requires_grad and name in optimized}
    expected = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
    divided = _after_backward(run, build, comm, info, device)
    found = allgather_json(comm, list(_sums(divided.state, expected)), name="plan/sums")
    pieces: dict[str, dict[tuple[int, ...], list[float]]] = {name: {} for name in expected}
    for name, offset, sums in (each for rank in found for each in rank):
        # Of copies, the one with the largest difference counts.
        kept = pieces[name].setdefault(tuple(offset), sums)
        pieces[name][tuple(offset)] = max(kept, sums)
    return [_compared(name, list(held.values())) for name, held in pieces.items()]


def _after_backward(
    run: RunConfig, build: Callable[[], Any], comm: Comm, info: RankInfo, device: torch.device
) -> WorkerState:
    """Return the state with the gradients of the first global batch, summed over ranks. Collective: yes."""
    config = run.config
    task = make_task(build, config)
    if task.prepare is not None:
        task.prepare(device, torch.float32)
    worker = make_worker_state(run, plan_of(config), task, device, info)
    engine = engine_of_worker(worker, comm)
    task = worker.task
    worker.use_exchange(engine)
    place, places, _ = worker.plan.dimensions.samples(comm.rank, comm.size)
    batch, uniform = (config.train.global_batch, config.train.micro_batch), engine.uniform_passes
    in_turn = worker.plan.deals_in_turn
    stream = Stream(task.train_data, config.seed, *batch, place, places, uniform=uniform, in_turn=in_turn)
    collate = task.collate or torch.utils.data.default_collate
    drawn = [(where, samples, 1.0) for where, _, samples in fetch_step(replace(stream, uniform=False), 0)]
    drawn += [(*drawn[-1][:2], 0.0) for _ in stream.repeated(0)]
    engine.begin(len(drawn), stream.positions(0) if worker.plan.bits else None)

    def forward(where: MicroBatch, samples: list[Any], weight: float) -> Callable[[], None]:
        seed_forward(config.seed, where.start)
        batch_there = to_device(collate(samples), device)
        loss, _ = engine.forward(partial(checked_loss, task, task.model, batch_there))
        return partial(engine.backward, loss * (weight / (config.train.global_batch * float(task.nominal_weight))))

    engine.accumulate(partial(forward, *each) for each in drawn)
    engine.finish()
    return worker


def _sums(state: TrainState, expected: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[int, ...], list[float]]]:
    """Yield the offset of what this rank holds of each gradient; its squared difference, product and squared norm."""
    owned = state.exchange.owned() if state.exchange is not None else None
    parameters = dict(state.model.named_parameters())
    for name, whole in expected.items():
        own = Owned(parameters[name]) if owned is None else owned[name]
        if (parameter := own.parameter) is None:
            continue
        part, offset = whole.double(), (0,) * whole.dim()
        if own.place is not None:
            part, offset = own.place.cut(part, parameter.shape), (*own.place.offset, own.place.first)
        gradient = torch.zeros_like(part) if parameter.grad is None else parameter.grad.double()
        pairs = ((gradient - part, gradient - part), (gradient, part), (part, part))
        yield name, offset, [float((a * b).sum()) for a, b in pairs]


def _compared(name: str, pieces: list[list[float]]) -> Compared:
    difference, product, square = (math.fsum(each[index] for each in pieces) for index in range(3))
    if not square:
        return Compared(name, math.sqrt(difference), 1.0, 0.0)
    return Compared(name, math.sqrt(difference / square), product / square, math.sqrt(square))


def small_copy(config: Any, vocabulary: int) -> Any:
    """Return the configuration (of transformers) of a small copy: one kind of layer less often, and narrow."""
    found = config.to_dict()
    if config.get_text_config() is not config:
        return config  # of several models: as it is
    dense = min(1, found.get("first_k_dense_replace") or 0)
    layers = min(found.get("num_hidden_layers", _LAYERS), dense + _LAYERS)
    for name, value in list(found.items()):
        if isinstance(value, list) and len(value) == found.get("num_hidden_layers"):
            found[name] = value[:layers]
    sizes: dict[str, Any] = {name: width for name, width in _WIDTHS.items() if found.get(name)}
    sizes |= {"hidden_size": 8 * found.get("num_attention_heads", 8), "num_hidden_layers": layers}
    if "first_k_dense_replace" in found:
        sizes["first_k_dense_replace"] = dense
    sizes |= {"vocab_size": vocabulary, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    found.pop("model_type", None)
    return type(config)(**{**found, **{name: value for name, value in sizes.items() if name in found}})


@dataclass(frozen=True)
class PlanCheck:
    """What was compared on how many ranks, with the model in words."""

    model: str
    ranks: int
    compared: list[Compared]

    @property
    def wrong(self) -> list[Compared]:
        """The gradients that differ, the most different first."""
        return sorted((each for each in self.compared if each.wrong), key=lambda each: -each.error)

    def to_text(self) -> str:
        """Return lines for a terminal."""
        lines = [f"{len(self.compared)} parameters of {self.model}, {self.ranks} ranks against one"]
        lines += [f"WRONG: {each.parameter}: {each.wrong}" for each in self.wrong]
        worst = max(self.compared, key=lambda each: each.error)
        lines.append(f"largest difference: {worst.error:.1e} of the gradient's norm ({worst.parameter})")
        if silent := [each.parameter for each in self.compared if not each.norm]:
            few = listed(silent, rest=ETC)
            lines.append(f"{len(silent)} have no gradient in this step, which proves nothing: {few}")
        return "\n".join([*lines, "the gradients differ" if self.wrong else "the gradients are equal"])


def check_plan(run: RunConfig, function: Callable[..., Any], info: RankInfo) -> PlanCheck:
    """Compare, with the same result on all ranks. Collective: yes. Errors: those of `compare_gradients`."""
    run = for_plan(run)
    args, what = dict(run.task_args), "the task's model"
    with tempfile.TemporaryDirectory(prefix="hvdtrain-plan-") as scratch:
        if isinstance(model := args.get("model"), ModelConfig):
            source = find_model(model.from_) if model.from_ else None
            small = small_copy(architecture(model, source, _VOCABULARY, _SEQ_LEN), _VOCABULARY)
            file = Path(scratch) / "config.json"
            file.write_text(small.to_json_string(use_diff=False))
            args["model"], args["data"] = replace(model, config=str(file), from_=None), TextConfig(seq_len=_SEQ_LEN)
            what = f"a small copy of {small.model_type}"
        plan = resolve(run.config)
        comm = start_rounds(info, plan.groups, horovod=plan.by_horovod).enter(STARTED)
        found = compare_gradients(run, partial(function, **args), comm, info)
    comm.barrier()
    return PlanCheck(what, comm.size, found)
