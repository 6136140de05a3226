"""What an exchange starts with: the variant of its compression, the size of its buckets, the priority of its thread."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hvdtrain.comm.base import Comm
from hvdtrain.compression.table import Compression, parse
from hvdtrain.runtime.environment import by_gloo
from hvdtrain.runtime.rules import NICE
from hvdtrain.runtime.threads import lower_own_priority


def prepare_exchange(
    compression: Compression, comm: Comm, variables: Mapping[str, str], bucket_mib: float | None = None
) -> int:
    """Return the bytes of the largest bucket; lower this thread's priority if bulk data is sent between hosts.

    `variables` is the environment of this process. Without `bucket_mib`, the compression's default counts.
    """
    one_host = comm.local_size >= comm.size
    if compression.kind.bulk and not one_host:
        lower_own_priority(variables.get(NICE, ""))
    return int(bucket_mib * (1 << 20)) if bucket_mib else compression.bucket_bytes(one_host=one_host)


def resolve_compression(text: str, device: torch.device, variables: Mapping[str, str]) -> Compression:
    """Return the compression that an option names, in its best variant for `device` and the job of `variables`."""
    compression = parse(text)
    return compression.where_halves_are_slow() if device.type == "cpu" and by_gloo(variables) else compression
