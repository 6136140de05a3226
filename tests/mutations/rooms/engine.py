"""Mutations of `hvdtrain/engine/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "engine/exchange.py",
        "        if not self._schedule.left:\n",
        "        if self._schedule.left <= 1:\n",
        "the exchange starts one micro-batch too early",
        "tests/training/test_step.py",
        "tests/laws/test_laws.py",
    ),
    mutation(
        "engine/fsdp_collectives.py",
        "                coding.decode(received, out.view(comm.size, -1))\n",
        "                kept = own.clone()\n"
        "                coding.decode(received, out.view(comm.size, -1))\n"
        "                own.copy_(kept)\n",
        "an owner computes with parameters that are not rounded, unlike the other ranks",
        "tests/engine/test_fsdp_collectives.py",
    ),
    mutation(
        "engine/groups.py",
        "if self._schedule.left or self._runs[module] != 1:",
        "if self._runs[module] != 1:",
        "groups of ranks exchange the gradients of each pass instead of their sum",
        "tests/engine/test_fsdp_engine.py",
    ),
    mutation(
        "engine/saved_exchange.py",
        "tensor[ranks.index(comm.rank)] if len(ranks) == len(tensor) else tensor.mean(0)",
        "tensor.mean(0)",
        "a resume gives each rank the mean of the residuals",
        "tests/engine/test_saved_exchange.py",
    ),
)
