"""What each compressor says that it hands to Comm is what crosses the link, by the interface's own counters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hvdtrain.compression.sizes import Bucket
from hvdtrain.compression.table import TABLE, parse
from tests.support.two_hosts import TwoHosts

ROOT = Path(__file__).parents[2]
SHAPES = ((512, 1024), (1024,), (1024, 512))
LENGTH = 2 * 512 * 1024 + 1024
TIMES = 10
LEAVES = {"allreduce": 1.0, "allgather": 1.0, "alltoall": 0.5, "reducescatter": 0.5}
"""Of what one of two ranks hands to a collective, the share that is not for itself."""
HEADERS = 0.1
"""More than the payload, at most: the frames' headers, acknowledgements, Horovod's negotiation."""
EXCHANGES = """
import json, sys
from pathlib import Path
from hvdtrain.runtime.tuning import prepare
info, _ = prepare()
from hvdtrain.comm.rounds import start_comm
import torch
from hvdtrain.compression.base import commit_all
from hvdtrain.compression.table import parse
from tests.support.compression import bucket, exchange, gradients
from tests.support.two_hosts import LINK

def counted():
    comm.barrier()
    return int(Path("/proc/net/dev").read_text().partition(LINK + ":")[2].split()[8])

comm = start_comm(info)
shapes, names, times = json.loads(sys.argv[2])
sent = {}
for name in names:
    compressor = parse(name).load()(bucket([tuple(s) for s in shapes], torch.float32), comm)
    for number in range(times + 1):
        if number == 1:  # the first is not like the others: Horovod learns the names
            before = counted()
        exchange(compressor, gradients(compressor.shape, number))
        commit_all([compressor], applied=True)
    sent[name] = (counted() - before) / times
Path(sys.argv[1], str(comm.rank)).write_text(json.dumps(sent))
"""


def test_wire_bytes(hosts: TwoHosts, tmp_path: Path) -> None:
    arguments = [str(tmp_path), json.dumps([SHAPES, list(TABLE), TIMES])]
    environment = {"PYTHONPATH": str(ROOT)}
    hosts.mpirun([sys.executable, "-c", EXCHANGES, *arguments], cwd=ROOT, environment=environment)
    for rank in ("0", "1"):
        sent = json.loads((tmp_path / rank).read_text())
        for name in TABLE:
            payload = parse(name).payload(Bucket(SHAPES, "float32", LENGTH), 2)
            expected = sum(LEAVES[kind] * size for kind, size in payload.items())
            assert sent[name] / expected == pytest.approx(1 + HEADERS / 2, abs=HEADERS / 2), name
