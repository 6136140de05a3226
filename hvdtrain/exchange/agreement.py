"""What the ranks settle once, before gradients travel: that they hold the same parameters, and one plan for all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, broadcast_json
from hvdtrain.errors import LaunchError
from hvdtrain.exchange.buckets import Named, Plan


def agree(
    comm: Comm, named: Named, draft: Callable[..., Plan], finished: Sequence[str], sparse: Sequence[str], name: str
) -> Plan:
    """Make the plan that all ranks use: by the order in which rank 0 finished its gradients. Collective: yes.

    Args:
        comm: the ranks.
        named: this rank's parameters.
        draft: makes a plan of `named`, `finished` and the names of sparse gradients.
        finished: names in the order in which this rank's backward finished.
        sparse: names of those whose gradients are sparse here; what is sparse on one rank is sparse for all.
        name: what the collectives' names begin with.

    Errors:
        LaunchError: on every rank, where the parameters of one are not those of rank 0.
    """
    described: list[list[object]] = [[n, list(p.shape), str(p.dtype)] for n, p in named]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    answers = allgather_json(comm, [digest, list(sparse)], name=f"{name}/plan")
    if any(other != answers[0][0] for other, _ in answers):
        _name_the_difference(comm, described, name)
    order = broadcast_json(comm, list(finished), name=f"{name}/order")
    return draft(named, finished=order, sparse={n for _, names in answers for n in names})


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
