"""What the ranks settle once, before gradients travel: that they hold the same parameters, and one plan for all."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, broadcast_json
from hvdtrain.errors import LaunchError
from hvdtrain.exchange.buckets import Named, Plan
from hvdtrain.exchange.rows import touched

_FEW = 1 / 4
"""Of the rows of a gradient."""


def agree(
    comm: Comm,
    named: Named,
    draft: Callable[..., Plan],
    finished: Sequence[str],
    owed: Callable[[str], bool],
    name: str,
    *,
    sparse_as_dense: bool = False,
) -> Plan:
    """Make the plan that all ranks use: by the order in which rank 0 finished its gradients. Collective: yes.

    Args:
        comm: the ranks.
        named: this rank's parameters.
        draft: makes a plan of `named`, `finished`, the names of sparse gradients, and those of which few rows are not
            zero.
        finished: names in the order in which this rank's backward finished.
        owed: whether compression owes something to a parameter, so that it has to be packed with its gradient.
        name: what the collectives' names begin with.
        sparse_as_dense: treat sparse gradients like others; otherwise what is sparse on one rank is sparse for all.

    Errors:
        LaunchError: on every rank, where the parameters of one are not those of rank 0.
    """
    described: list[list[object]] = [[n, list(p.shape), str(p.dtype)] for n, p in named]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    sparse = [n for n, p in named if p.grad is not None and p.grad.is_sparse and not sparse_as_dense]
    # On one host, what it takes to learn from a GPU how many rows there are does not pay.
    asked = [(n, p) for n, p in named if p.device.type == "cpu" or comm.local_size < comm.size]
    rows = {n: sys.maxsize if owed(n) else count for n, count in touched(asked).items()}
    answers = allgather_json(comm, [digest, sparse, rows], name=f"{name}/plan")
    if any(other != answers[0][0] for other, *_ in answers):
        _name_the_difference(comm, described, name)
    order = broadcast_json(comm, list(finished), name=f"{name}/order")
    alone = {n for _, names, _ in answers for n in names}
    counts = {n: sum(here.get(n, 0) for *_, here in answers) for n in rows}  # no fewer than some rank has touched
    # Of one that was zero throughout, such as that behind weights that begin at zero, nothing is known.
    few = {n: count for n, p in named if n not in alone and 0 < (count := counts.get(n, 0)) <= _FEW * len(p)}
    return draft(named, finished=order, sparse=alone, rows=few)


def _name_the_difference(comm: Comm, described: list[list[object]], name: str) -> None:
    everyone = allgather_json(comm, described, name=f"{name}/parameters")
    for rank, other in enumerate(everyone):
        if other == everyone[0]:
            continue
        length = min(len(other), len(everyone[0]))
        at = next((i for i in range(length) if other[i] != everyone[0][i]), length)
        there, here = (parts[at] if at < len(parts) else "none" for parts in (other, everyone[0]))
        error = LaunchError(
            f"the parameters of rank {rank} are not those of rank 0: number {at} differs",
            expected=f"{here}, as on rank 0 (of {len(everyone[0])})",
            found=f"{there} (of {len(other)})",
            next_step="build, freeze and give the optimizer the same parameters in the same order on every rank",
        )
        error.everywhere = True
        raise error
