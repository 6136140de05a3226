"""`hvdtrain.torch` against stock Horovod, by more launchers and on more ranks; as a rank is killed, and one joins."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S, program, run

pytestmark = pytest.mark.slow

SCRIPT = """
import importlib, os, signal, sys, time
from pathlib import Path
import torch
from torch import nn

hvd = importlib.import_module(sys.argv[1])
what, hosts = sys.argv[2], Path("hosts")
hvd.init()
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
)

@hvd.elastic.run
def train(state):
    while state.step < 10:
        if what == "join" and state.step == 5 and hvd.size() == 1:
            new = Path("new")  # by a rename: one that is read half written takes hosts away
            new.write_text("localhost:1\\n127.0.0.1:1\\n")
            new.replace(hosts)
            time.sleep(0.1)
            state.commit()  # raises once the launcher has noticed
            continue
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * state.step + hvd.rank()))
        optimizer.zero_grad()
        if what == "kill" and state.step == 5 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # after backward its gradients may have been averaged
        (model(x).pow(2).mean() + (model.bias - 1).pow(2).sum()).backward()
        optimizer.step()
        state.step += 1
        state.commit()

state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
train(state)
print("END", hvd.rank(), hvd.size(), repr(sum(p.double().sum().item() for p in model.parameters())), flush=True)
"""


FILES = [f"tests/parallel/{name}.py" for name in ("test_drop_in", "test_drop_in_divided", "test_drop_in_misuse")]


@pytest.mark.parametrize(("launcher", "size"), [("mpirun", 1), ("mpirun", 3), ("horovodrun --gloo", 2)])
def test_the_drop_in_does_as_stock_horovod_does(launcher: str, size: int) -> None:
    done = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES], size=size, launcher=launcher, cwd=ROOT)
    assert "passed" in done.stdout and "no Horovod job" not in done.stdout


def _end(module: str, what: str, folder: Path, *, ours: bool = False) -> set[tuple[str, str]]:
    """(size, sum of the parameters) that each rank has at the end. `ours`: by our driver, not by horovodrun."""
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "hosts").write_text("localhost:1\n" + "127.0.0.1:1\n" * (what == "kill"))
    (folder / "discover").write_text("#!/bin/sh\ncat hosts\n")
    (folder / "discover").chmod(0o755)
    start = "2" if what == "kill" else "1"
    python = program("python")
    flags = ["-np", start, "--min-np", "1", "--max-np", "2", "--network-interface", "lo"]
    argv = [program("horovodrun"), "--gloo", *flags, "--host-discovery-script", "./discover"]
    if ours:
        argv = [python, "-m", "hvdtrain", "launch", "-np", start, "--elastic", "1:2", "--discover", "./discover", "--"]
    argv += [python, "script.py", module, what]
    given = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "PATH": f"{Path(python).parent}:{ENVIRONMENT['PATH']}"}
    done = subprocess.run(argv, cwd=folder, env=given, capture_output=True, text=True, timeout=TIMEOUT_S)
    found = set(re.findall(r"END \d (\d) (\S+)", done.stdout))
    assert found, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return found


@pytest.mark.parametrize("what", ["kill", "join"])
def test_law_6_also_where_ranks_come_and_go(what: str, tmp_path: Path) -> None:
    ours = _end("hvdtrain.torch", what, tmp_path / "ours")
    assert ours == _end("horovod.torch", what, tmp_path / "stock")
    assert ours == _end("hvdtrain.torch", what, tmp_path / "our driver", ours=True)
    assert {size for size, _ in ours} == {"1" if what == "kill" else "2"}
