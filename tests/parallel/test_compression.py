"""The compressors' contract over the communicator of a real job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hvdtrain.comm.base import Comm
from hvdtrain.compression.table import Compression
from tests.support.compression_contract import AS_USED, CLAUSES, named


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("compression", AS_USED, ids=named)
def test_job(compression: Compression, clause: Callable[[Comm, Compression], None], job: Comm) -> None:
    clause(job, compression)
