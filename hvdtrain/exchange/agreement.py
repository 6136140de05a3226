"""Check that all ranks have the same parameters, and make one plan of buckets for them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, broadcast_json
from hvdtrain.errors import LaunchError
from hvdtrain.exchange.buckets import Named
from hvdtrain.exchange.rows import count_rows
from hvdtrain.plan.buckets import BucketPlan, are_few


def check_same_names(comm: Comm, names: Sequence[str], *, name: str) -> None:
    """Check that all ranks train the parameters of these names, in this order. Collective: yes.

    Args:
        comm: the ranks.
        names: of the parameters that this rank trains.
        name: of the collective.

    Errors: LaunchError: a rank trains other parameters than rank 0; raised on every rank.
    """
    answers = allgather_json(comm, [_digest(names), len(names)], name=name)
    if any(digest != answers[0][0] for digest, _ in answers):
        raise LaunchError(
            "the ranks train different parameters",
            expected=f"the {answers[0][1]} of rank 0 on every rank",
            found=", ".join(f"{count} on rank {rank}" for rank, (_, count) in enumerate(answers)),
            next_step="freeze and add parameters in the same steps on every rank",
            everywhere=True,
        )


def agree_on_plan(
    comm: Comm,
    named: Named,
    make_plan: Callable[..., BucketPlan],
    finished: Sequence[str],
    has_residual: Callable[[str], bool],
    name: str,
    *,
    sparse_as_dense: bool = False,
) -> BucketPlan:
    """Return the plan that all ranks use, in the order in which rank 0 finished its gradients. Collective: yes.

    Args:
        comm: the ranks.
        named: this rank's parameters.
        make_plan: makes a plan of `named`, `finished`, the names of sparse gradients, and the row counts of gradients
            with few rows.
        finished: names in the order in which this rank's backward finished them.
        has_residual: whether a parameter has a residual, which must be packed with the whole gradient.
        name: prefix of the collectives' names.
        sparse_as_dense: treat sparse gradients like dense ones. Otherwise a gradient that is sparse on one rank is
            sparse on all.

    Errors: LaunchError: a rank has other parameters than rank 0; raised on every rank.
    """
    described: list[list[object]] = [[n, list(p.shape), str(p.dtype)] for n, p in named]
    sparse = [n for n, p in named if p.grad is not None and p.grad.is_sparse and not sparse_as_dense]
    # On one host, sending rows does not save the time that counting them on a GPU takes.
    counted = [(n, p) for n, p in named if p.device.type == "cpu" or comm.local_size < comm.size]
    rows = {n: sys.maxsize if has_residual(n) else count for n, count in count_rows(counted).items()}
    answers = allgather_json(comm, [_digest(described), sparse, rows], name=f"{name}/plan")
    if any(other != answers[0][0] for other, *_ in answers):
        _raise_difference(comm, described, name)
    order = broadcast_json(comm, list(finished), name=f"{name}/order")
    any_sparse = {n for _, names, _ in answers for n in names}
    counts = {n: sum(own.get(n, 0) for *_, own in answers) for n in rows}  # at least the rows touched on some rank
    few = {n: c for n, p in named if n not in any_sparse and (c := counts.get(n, 0)) and are_few(c, len(p))}
    return make_plan(named, finished=order, sparse=any_sparse, rows=few)


def _digest(value: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _raise_difference(comm: Comm, described: list[list[object]], name: str) -> None:
    everyone = allgather_json(comm, described, name=f"{name}/parameters")
    for rank, other in enumerate(everyone):
        if other == everyone[0]:
            continue
        length = min(len(other), len(everyone[0]))
        at = next((i for i in range(length) if other[i] != everyone[0][i]), length)
        found, expected = (parts[at] if at < len(parts) else "none" for parts in (other, everyone[0]))
        raise LaunchError(
            f"rank {rank} has other parameters than rank 0: the first difference is parameter {at}",
            expected=f"{expected}, as on rank 0 (which has {len(everyone[0])} parameters)",
            found=f"{found} (of {len(other)} parameters)",
            next_step="build, freeze and pass to the optimizer the same parameters in the same order on every rank",
            everywhere=True,
        )
