"""The command `train`: what a user sees, and what wrong input is answered with."""

from __future__ import annotations

import fcntl
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hvdtrain.__main__ import main
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.runtime.environment import JOB
from tests.support.journals import read_journal

TOY = str(Path(__file__).parents[1] / "support" / "toy.py") + ":toy"
SHORT = ["--task", TOY, "--train.steps=6", "--checkpoint.every=2", "--train.global_batch=4", "--train.micro_batch=2"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("custom", None)


def _task_file(body: str) -> str:
    Path("custom.py").write_text("import torch\nfrom torch import nn\nfrom hvdtrain import Task\n" + body)
    return f"--task={Path.cwd() / 'custom.py'}:build"


def _fails(capsys: pytest.CaptureFixture[str], *options: str, code: int = 1) -> str:
    assert main(list(options)) == code
    return capsys.readouterr().err


def test_a_task_file_that_is_no_python_is_wrong_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert "custom.py" in _fails(capsys, _task_file("def build(:\n"), code=2)
    assert "ZeroDivisionError" in _fails(capsys, _task_file("1 / 0\n"))


def test_a_run_leaves_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--run_dir=run"]) == 0
    out = capsys.readouterr().out
    for words in ("finished at step 6 of 6", "held-out loss", "positive ", "step time: ", "run/timeline/report.html"):
        assert words in out
    assert sorted(p.name for p in Path("run/checkpoints").iterdir())[-1] == "step-000006"
    steps = read_steps(Path("run/journal.jsonl"))
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    needed = {"step", "loss", "lr", "grad_norm", "position", "tokens", "step_s", "data_s", "exposed_comm_s"}
    assert needed <= steps[6].keys()
    assert steps[6]["position"] == 24
    assert all(0 <= line["data_s"] + line["exposed_comm_s"] <= line["step_s"] for line in steps.values())


def test_the_same_command_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--train.stop_at=3"]) == 0
    assert main(SHORT) == 0
    assert "resuming from step 3" in capsys.readouterr().out
    assert len(list(Path("runs").iterdir())) == 1
    assert main(SHORT) == 0, "a finished run is not taken again"
    assert len(list(Path("runs").iterdir())) == 2
    assert main([*SHORT, "--seed=1", "--train.stop_at=2"]) == 0, "nor is one of another config"
    assert len(list(Path("runs").iterdir())) == 3


@pytest.mark.parametrize("stop", [[], ["--train.stop_at=3"]])
def test_the_resume_command_is_exact(stop: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--hidden=3", "--run_dir=run", *stop]) == 0
    label, command_line = re.split(" {2,}", capsys.readouterr().out.splitlines()[-1].strip())
    assert label == ("continue" if stop else "train longer")
    command = command_line.split()
    assert Path(command[0]).exists() and command[1:3] == ["-m", "hvdtrain"]
    assert main(command[3:]) == 0
    assert sorted(read_steps(Path("run/journal.jsonl"))) == list(range(1, 7 if stop else 13))


def test_a_changed_config_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--run_dir=run", "--train.stop_at=2"]) == 0
    assert main([*SHORT, "--run_dir=run", "--optimizer.lr=0.5", "--train.clip=0"]) == 0
    assert "optimizer.lr: 0.002 -> 0.5" in capsys.readouterr().out
    events = [line for line in read_journal(Path("run/journal.jsonl")) if line.get("event") == "config_changed"]
    assert events[0]["changes"] == ["optimizer.lr: 0.002 -> 0.5", "train.clip: 1.0 -> 0.0"]


def test_resume_from_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--run_dir=a"]) == 0
    command = [*SHORT, "--run_dir=b", "--resume=a/checkpoints/step-000002"]
    assert main([*command, "--train.stop_at=4"]) == 0
    assert main([*SHORT, "--run_dir=c", "--resume=a", "--train.steps=7"]) == 0
    assert main(command) == 0, "the same command goes on with its own run"
    assert "resuming from step 4 (b/checkpoints/step-000004)" in capsys.readouterr().out
    assert yaml.safe_load(Path("b/config.yaml").read_text())["resume"] == "auto"
    a, b, c = (read_steps(Path(f"{name}/journal.jsonl")) for name in "abc")
    assert sorted(b) == [3, 4, 5, 6] and sorted(c) == [7]
    assert b[6]["loss"] == a[6]["loss"]


def test_going_back_sets_the_way_that_was_left_aside(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--run_dir=run"]) == 0
    back = [*SHORT, "--run_dir=run", "--resume=run/checkpoints/step-000002", "--train.stop_at=3", "--checkpoint.keep=1"]
    assert main(back) == 0
    assert "step-000006 is set aside" in capsys.readouterr().out
    assert main([*SHORT, "--run_dir=run"]) == 0
    assert "resuming from step 3" in capsys.readouterr().out


@pytest.mark.parametrize("resume", ["never", "run/checkpoints/step-000002"])
def test_a_restarted_job_resumes_whatever_it_began_from(
    resume: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if resume != "never":
        assert main([*SHORT, "--run_dir=run"]) == 0
    command = [*SHORT, "--run_dir=run", f"--resume={resume}"]
    monkeypatch.setenv(JOB, "one")
    assert main([*command, "--train.stop_at=4"]) == 0
    assert main(command) == 0
    assert "resuming from step 4" in capsys.readouterr().out
    monkeypatch.setenv(JOB, "another")
    if resume == "never":
        assert "give another --run_dir" in _fails(capsys, *command, code=2)
    else:
        assert main(command) == 0
        assert "resuming from step 2" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["train: [", "seed: 1\nseed: 2"])
def test_a_run_with_a_broken_config_is_not_resumed_from_it(content: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--run_dir=run", "--train.stop_at=2"]) == 0
    Path("run/config.yaml").write_text(content)
    capsys.readouterr()
    error = _fails(capsys, *SHORT, "--run_dir=run", code=2)
    assert "the config file" in error and "run/config.yaml" in error and "rm " in error
    assert "--config" not in error and "the run failed" not in error
    assert Path("run/config.yaml").read_text() == content
    Path("run/config.yaml").unlink()
    assert main([*SHORT, "--run_dir=run"]) == 0
    assert "resuming from step 2" in capsys.readouterr().out


def test_a_run_directory_in_use_or_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    with Path("run/.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "in use by another job" in _fails(capsys, *SHORT, "--run_dir=run")
    Path("file").write_text("")
    assert "cannot be used" in _fails(capsys, *SHORT, "--run_dir=file/run", code=2)


def test_a_damaged_checkpoint_is_named_and_the_previous_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--run_dir=run", "--train.stop_at=4"]) == 0
    file = Path("run/checkpoints/step-000004/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert main([*SHORT, "--run_dir=run"]) == 0
    out = capsys.readouterr().out
    assert f"{file.absolute()} is damaged" in out and "resuming from step 2" in out
    assert sorted(read_steps(Path("run/journal.jsonl"))) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--train.stpes=3", "--train.steps?"),
        ("--hiden=3", "--hidden?"),
        ("--observe.sinks=my.py:Sink", "my.py"),
        ("train.steps=3", "--train.steps?"),
        ("docs/b.md", "in quotes"),  # the shell has expanded a pattern
    ],
)
def test_wrong_options(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in _fails(capsys, *SHORT, option, code=2)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("nothing", "task 'nothing'"),
        ("spiral.py", "spiral.py:FUNCTION"),
        ("missing.py:build", "file 'missing.py'"),
        ("missing.module:build", "module 'missing.module'"),
        (TOY.replace(":toy", ":tory"), "function 'tory'"),
    ],
)
def test_tasks_that_cannot_be_found(task: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in _fails(capsys, f"--task={task}", code=2)


MODEL = "    model = nn.Linear(2, 1)\n    data = torch.utils.data.TensorDataset(torch.ones(5, 2))\n"
LOSS = "    loss = lambda model, batch: (model(batch[0]).sum(), 1)\n"


def _body(returned: str) -> str:
    return f"def build():\n{MODEL}{LOSS}    return {returned}\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def build():\n    return 3\n", "int 3"),
        ("def build(seed: int = 3):\n    return 3\n", "a parameter 'seed'"),
        ("def build(**more):\n    return Task(**more)\n", "cannot be options"),
        (_body("Task(model, None, data)"), "task's loss"),
        (_body("Task('model', loss, data)"), "task's model"),
        (_body("Task(model, lambda m, b: m(b[0]).sum(), data)"), "task's loss function"),
        (_body("Task(model, loss, data, files={'state.json': b''})"), "'state.json'"),
        (_body("Task(model, loss, data, optimizer=3)"), "task's optimizer"),
        (_body("Task(model, loss, torch.utils.data.TensorDataset(torch.ones(0, 2)))"), "data set is empty"),
        (_body("Task(model, loss, iter([1]))"), "data set can be read only once"),
        (_body("Task(model.requires_grad_(False), loss, data)"), "all frozen"),
        (_body("Task(nn.Sequential(model, nn.LazyLinear(1)), loss, data)"), "such as 1.weight"),
        (_body("Task(model.to('meta'), loss, data)"), "such as weight"),
        (_body("Task(model, loss, data, schedule=0.5)"), "task's schedule"),
        (_body("Task(model, loss, data, schedule=lambda step: 'fast')"), "task's schedule"),
        (_body("Task(model, loss, data, files={'a.txt': 'text'})"), "text.encode()"),
        (_body("Task(model, loss, data, optimizer=torch.optim.LBFGS(model.parameters()))"), "LBFGS"),
        *(
            (_body(f"Task(model, loss, data, data, metrics=lambda m, b: {metrics})"), "task's metrics function")
            for metrics in ("None", "{'right': 1.0}", "{'right': (1, 'two')}")
        ),
    ],
)
def test_a_task_that_returns_the_wrong_thing(body: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in _fails(capsys, _task_file(body), "--run_dir=run", code=2)
    assert not Path("run/checkpoints").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nn.BatchNorm1d(2), model", "batch statistics (0)"),
        ("nn.utils.spectral_norm(model)", "spectral norm (0)"),
        ("nn.utils.parametrizations.spectral_norm(model)", "spectral norm (0)"),
    ],
)
def test_what_makes_the_curve_depend_on_passes_is_named(
    model: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option = _task_file(_body(f"Task(nn.Sequential({model}), loss, data)"))
    assert main([option, "--train.steps=1"]) == 0
    assert f"the model has {words}" in capsys.readouterr().out


def test_a_slow_start_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Each call is one of the timer while the task's file is imported, its model is made, and it trains."""
    say = "import sys\nfrom hvdtrain.cli.train import _say_phase\n_say_phase(sys._getframe())\n"
    loss = "    def loss(model, batch):\n        _say_phase(sys._getframe())\n        return model(batch[0]).sum(), 1\n"
    body = f"{say}def build():\n    _say_phase(sys._getframe())\n{MODEL}{loss}    return Task(model, loss, data)\n"
    assert main([_task_file(body), "--train.steps=1"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "still starting after 10 s" in line]
    phases = ("importing torch and the task", "making the task's model and data")
    assert said == [f"hvdtrain: still starting after 10 s: rank 0 is {phase}" for phase in phases]


@pytest.mark.parametrize("option", ["--train.steps=-5", "--parallel.compression=zip", "--observe.timeline=5:1"])
def test_print_config_refuses_what_training_would_refuse(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, option, "--print_config"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and option.partition("=")[2] in said.err


def test_print_config_can_be_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*SHORT, "--print_config"])
    assert caught.value.code == 0
    Path("run.yaml").write_text(capsys.readouterr().out)
    assert main(["--config=run.yaml", "--run_dir=run"]) == 0
    assert sorted(read_steps(Path("run/journal.jsonl"))) == [1, 2, 3, 4, 5, 6]
