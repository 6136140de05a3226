"""The compressors' contract over the communicator of a real job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hvdtrain.comm.base import Comm
from hvdtrain.compression.table import TABLE, Compression, parse
from tests.support.compression_contract import CLAUSES


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("compression", [parse(name) for name in TABLE], ids=str)
def test_job(compression: Compression, clause: Callable[[Comm, Compression], None], job: Comm) -> None:
    clause(job, compression)
