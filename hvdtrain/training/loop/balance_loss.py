"""The auxiliary loss that balances the experts of each sequence.

DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437, equations 17 to 20. It is a sum over sequences, so that it
depends neither on micro-batches nor on the number of ranks. transformers' auxiliary loss (`load_balancing_loss_func`)
is not used: it is one of all tokens of a micro-batch, and only some models have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.state.divided import on_stages
from hvdtrain.training.loop.router_loads import BIAS, TokenCounter, chosen_experts, routers_of
from hvdtrain.training.loop.step_part import StepPart

_OPTION = "--train.balance_loss"


class BalanceLoss(StepPart):
    """Adds up, over the routers of a model, what a forward pass costs in balance.

    Of a sequence of T tokens, it is `factor` * T * sum of f_i P_i over experts: f_i is the share of expert i in the
    tokens' choices over that of equal shares, P_i the mean of its normalized scores. Scores are sigmoids where the
    router has a bias, as DeepSeek-V3's, else a softmax.
    """

    def __init__(self, routers: Iterable[nn.Module], factor: float) -> None:
        self._factor, self._sequences, self._is_collecting, self._has_run = factor, 0, False, False
        self._chosen: list[tuple[Tensor, Tensor, bool]] = []  # scores, ids, and whether scores become sigmoids
        self._hooks = [router.register_forward_hook(self._on_forward) for router in routers]

    @contextmanager
    def around_forward(self, batch: Any) -> Iterator[None]:
        """Collect from the forward pass of a batch within.

        The first dimension of its tensors is that of sequences.
        """
        self._sequences = next(len(value) for value in tree_leaves(batch) if isinstance(value, Tensor))
        self._is_collecting, self._has_run = True, False
        self._chosen.clear()
        try:
            yield
        finally:
            self._is_collecting = False

    def extra_loss(self) -> Tensor | None:
        """Return the loss of the pass, a scalar; it has gradients. None if no router has run.

        Errors: TaskError: the routers return something else.
        """
        chosen, self._chosen = self._chosen, []
        if not self._has_run:
            return None
        if not chosen:
            raise TaskError(
                f"{_OPTION} is {self._factor:g}, but the routers of the model do not return what they chose",
                expected="scores of all experts, and ids of those chosen, as in DeepSeek-V3 of transformers",
                next_step=f"leave out {_OPTION}",
            )
        return self._factor * torch.stack([self._of_router(*each) for each in chosen]).sum()

    def _on_forward(self, router: nn.Module, inputs: Any, output: Any) -> None:
        self._has_run = True
        # Nothing is computed here: within a block, a recomputation in backward would have to do the same.
        if self._is_collecting and (found := chosen_experts(output)) is not None:
            ids, experts = found
            logits = next(part for part in output if part.is_floating_point() and part.shape[-1] == experts)
            self._chosen.append((logits, ids, BIAS in router._buffers))

    def _of_router(self, logits: Tensor, ids: Tensor, sigmoid: bool) -> Tensor:
        experts = logits.shape[-1]
        logits_STE = logits.float().view(self._sequences, -1, experts)
        scores_STE = logits_STE.sigmoid() if sigmoid else logits_STE.softmax(dim=-1)
        shares_SE = (scores_STE / scores_STE.sum(dim=-1, keepdim=True)).mean(dim=1)
        ids_SK = ids.view(self._sequences, -1)
        counter = TokenCounter(experts, ids_SK.device)
        counts_SE = counter.add(counter.zeros(len(ids_SK)), ids_SK)[:, 1:-1].to(shares_SE.dtype)
        frequencies_SE = counts_SE * (experts / ids_SK.shape[1])
        loss: Tensor = logits_STE.shape[1] * (frequencies_SE * shares_SE).sum()
        return loss


def make_balance_loss(model: nn.Module, factor: float, dimensions: Dimensions, *, compiled: bool) -> BalanceLoss | None:
    """Return the loss of this rank's routers; None if it has none, or if `factor` is 0.

    Errors:
        ConfigError: ranks divide sequences, or blocks are compiled.
        TaskError: the model has no routers.
    """
    if not factor:
        return None
    for is_set, option in ((dimensions.cp > 1, "--parallel.cp"), (compiled, "--train.compile")):
        if is_set:
            raise ConfigError(
                f"{_OPTION} does not support {option}",
                expected="whole sequences, and hooks on the routers",
                next_step=f"leave out {option}, or {_OPTION} 0; --train.router_bias balances experts, too",
                everywhere=True,
            )
    routers = routers_of(model)
    if not routers:
        raise TaskError(
            f"{_OPTION} is {factor:g}, but the model has no routers of experts",
            expected="a mixture of experts, with routers that return scores and chosen experts",
            next_step=f"leave out {_OPTION}",
            everywhere=True,
        )
    # Not those that another stage of a pipeline has.
    places = {router: [(p.shape, on_stages(p)) for p in router.parameters()] for router in routers.values()}
    own = [router for router, of in places.items() if all(place is None or shape == place.whole for shape, place in of)]
    return BalanceLoss(own, factor) if own else None
