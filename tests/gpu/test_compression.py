"""The compressors' contract on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hvdtrain.comm.base import Comm
from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.base import commit_all
from hvdtrain.compression.table import TABLE, Compression, parse
from tests.support.compression import bucket, drive, gradients
from tests.support.compression_contract import CLAUSES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

EVERY = pytest.mark.parametrize("compression", [*map(parse, TABLE), parse("topk:0.2"), parse("topk:1e-5")], ids=str)


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda c: c.__name__)
@EVERY
def test_solo(compression: Compression, clause: Callable[[Comm, Compression], None]) -> None:
    with torch.device("cuda"):
        clause(SoloComm(), compression)


@EVERY
def test_an_exchange_does_not_wait_for_the_device(compression: Compression) -> None:
    with torch.device("cuda"):
        compressor = compression.load()(bucket(((400, 300), (7,), (400, 300))), SoloComm())
        values = gradients(compressor.shape, 1)
        for mode in ("default", "error"):  # the first step may set things up
            torch.cuda.set_sync_debug_mode(mode)
            try:
                for index, value in enumerate(values):
                    compressor.pack(index, value, 0.5)
                drive(compressor)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            commit_all([compressor], applied=True)
