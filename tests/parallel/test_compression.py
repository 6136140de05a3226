"""The compressors' contract over the communicator of a real job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hvdtrain.comm.base import Comm
from hvdtrain.compression.table import TABLE, Compression, parse
from tests.support.compression_contract import CLAUSES


def _named(one: Compression) -> str:
    return f"{one}{'' if one.halves else ' by owners'}"


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("compression", [*map(parse, TABLE), parse("fp16").where_halves_are_slow()], ids=_named)
def test_job(compression: Compression, clause: Callable[[Comm, Compression], None], job: Comm) -> None:
    clause(job, compression)
