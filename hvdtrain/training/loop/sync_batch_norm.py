"""`nn.SyncBatchNorm` in a task: statistics of the micro-batches that all ranks run at the same time.

torch's own needs a process group of torch.distributed, and is plain batch norm without one. It and Horovod's need a
GPU, and wait forever for a rank with fewer micro-batches. Here the job's communicator adds up counts, means and squares
in the forward pass, and two sums in the backward pass. So ranks must run equally many passes. One that a rank repeats,
to fill up, counts nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hvdtrain.comm.base import Comm
from hvdtrain.errors import ConfigError
from hvdtrain.plan.plan import Plan
from hvdtrain.training.loop.step_part import StepPart


@dataclass
class Statistics(StepPart):
    """What the modules of a model share."""

    comm: Comm  # of the ranks that add up their statistics
    counts: bool = True  # whether the samples of the pass that runs count
    collective_passes = True

    def begin(self, count: int) -> None:  # noqa: D102
        self.counts = True

    def around_repeated(self) -> AbstractContextManager[object]:
        """Count no further pass of the step."""
        self.counts = False
        return nullcontext()


class Synchronized(nn.modules.batchnorm._BatchNorm):
    """Batch norm over the samples of all ranks; in an evaluation, by running statistics.

    It is no subclass of `nn.SyncBatchNorm`, which torch's DDP refuses on a CPU.
    """

    statistics: Statistics
    label: str
    """Prefix of the names of its collectives."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:
        """Normalize the channels, which are dimension 1. Collective: yes, in training."""
        if not self.training:
            alone = self.running_mean is None  # then torch, too, uses this batch
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, alone, 0.0, self.eps
            )
        factor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        normalized: Tensor = _Normalize.apply(input, self.weight, self.bias, self, factor)  # type: ignore[no-untyped-call]
        return normalized


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, module: Synchronized, factor: float
    ) -> Tensor:
        statistics, channels = module.statistics, x.shape[1]
        dims, count = [0, *range(2, x.dim())], x.numel() // max(channels, 1)
        sums = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
        if statistics.counts and count:
            var, mean = (each.double() for each in torch.var_mean(_wide(x), dims, correction=0))
            sums = torch.cat([sums.new_full((1,), count), count * mean, count * (var + mean.square())])
        sums = statistics.comm.allreduce(sums, name=f"{module.label}/forward").wait()
        total, mean, squares = sums[0], sums[1 : 1 + channels] / sums[0], sums[1 + channels :] / sums[0]
        var = (squares - mean.square()).clamp(min=0)
        if module.running_mean is not None and module.running_var is not None:
            module.running_mean.lerp_(mean.to(module.running_mean), factor)
            module.running_var.lerp_((var * total / (total - 1).clamp(min=1)).to(module.running_var), factor)
        scale = (var + module.eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.of, ctx.counts = (statistics.comm, f"{module.label}/backward"), statistics.counts
        out = _normalized(x, mean, scale)
        if weight is not None and bias is not None:
            out = out * _by_channel(weight, out) + _by_channel(bias, out)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight, mean, scale, total = ctx.saved_tensors
        comm, name = ctx.of
        dims, wide, normalized = [0, *range(2, x.dim())], _wide(gradient), _normalized(x, mean, scale)
        own = torch.stack([wide.sum(dims), (wide * normalized).sum(dims)])
        sums = comm.allreduce(own.double(), name=name).wait() / total
        if ctx.counts:
            wide = wide - _by_channel(sums[0], wide) - normalized * _by_channel(sums[1], wide)
        factor = scale if weight is None else scale * weight
        gradient_x = (wide * _by_channel(factor, wide)).to(x.dtype)
        if weight is None:
            return gradient_x, None, None, None, None
        return gradient_x, own[1].to(weight.dtype), own[0].to(weight.dtype), None, None


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    """Return values by channel in the dtype of a tensor, so that they multiply it."""
    return values.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))


def _normalized(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    wide = _wide(x)
    return (wide - _by_channel(mean, wide)) * _by_channel(scale, wide)


def synchronize_batch_norm(model: nn.Module, comm: Comm, plan: Plan) -> Statistics | None:
    """Make each `nn.SyncBatchNorm` of a model one of these; return what they share, None if there are none.

    Errors: ConfigError: on every rank: options with which ranks do not run the same passes of the whole model.
    """
    found = {name: m for name, m in model.named_modules() if isinstance(m, nn.SyncBatchNorm)}
    if not found:
        return None
    wrong = [plan.dimensions.options] if plan.dimensions else []
    wrong += ["--parallel.sync"] if plan.outer is not None else []
    wrong += [f"--parallel.balance {plan.balance}"] if plan.balance != "equal" else []
    if wrong:
        raise ConfigError(
            f"nn.SyncBatchNorm ({next(iter(found))}) does not go with {wrong[0]}",
            expected="ranks that run the same passes of the whole model, on different samples",
            next_step="leave out the option, or use nn.GroupNorm, which needs no other samples",
            everywhere=True,
        )
    statistics = Statistics(comm)
    for name, module in found.items():
        module.__class__ = Synchronized  # type: ignore[assignment]
        module.statistics, module.label = statistics, f"sync_batch_norm/{name}"  # type: ignore[assignment]
    return statistics


def restore_batch_norm(model: nn.Module) -> None:
    """Undo `synchronize_batch_norm`, so that a model can be copied and saved, and used without the job."""
    for module in model.modules():
        if isinstance(module, Synchronized):
            del module.statistics, module.label
            module.__class__ = nn.SyncBatchNorm  # type: ignore[assignment]
