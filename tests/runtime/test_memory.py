"""Memory that is freed in one step is used again in the next one, without the kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from hvdtrain.runtime.tuning import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(3)
for step in range(8):
    tensors = [bytearray(8 << 20) for _ in range(4)]
    del tensors
    if step == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 3:
        pytest.skip("this C library has no mallopt")
    assert not done.returncode, done.stderr
    return int(done.stdout)


def test_freed_memory_is_kept() -> None:
    assert faults("keep") < 50 < faults("default")
