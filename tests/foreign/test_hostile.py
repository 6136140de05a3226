"""What a user gives to the real command by mistake or malice ends soon, with the error that is named here."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support import hostile
from tests.support.gallery import Gallery
from tests.support.launch import run

pytestmark = pytest.mark.slow

ROWS: list[tuple[str, int, str]] = [
    ("nonsense", 2, "hvdtrain: there is no command 'nonsense'"),
    ("--train.stepz 5", 2, "hvdtrain: ConfigError: there is no option --train.stepz"),
    ("--train.steps x", 2, "hvdtrain: ConfigError: invalid --train.steps"),
    ("--train.steps 0", 2, "hvdtrain: ConfigError: --train.steps is 0, which is out of range"),
    ("--train.steps", 2, "hvdtrain: ConfigError: invalid options"),
    ("--train.steps 99999999999999", 2, "hvdtrain: ConfigError: --train.steps is 99999999999999"),
    ("--train '{a: {b: c}}'", 2, "hvdtrain: ConfigError: invalid options"),
    ("--optimizer.lr inf", 2, "hvdtrain: ConfigError: invalid --optimizer.lr"),
    ("--seed -1", 2, "hvdtrain: ConfigError: --seed is -1, which is out of range"),
    ("--precision fp8", 2, "hvdtrain: ConfigError: invalid --precision"),
    ("--parallel.compression topk:5", 2, "hvdtrain: ConfigError: invalid compression 'topk:5'"),
    ("--observe.timeline 5:1", 2, "hvdtrain: ConfigError: --observe.timeline is '5:1'"),
    ("--loader.workers 100000000", 2, "hvdtrain: ConfigError: --loader.workers is 100000000"),
    ("--log_level shout", 2, "hvdtrain: ConfigError: invalid --log_level"),
    ("--run_dir ''", 2, "hvdtrain: ConfigError: --run_dir is '', which is empty"),
    (
        "--run_dir empty.txt/x",
        2,
        "hvdtrain: UnusableRunDirectoryError: the run folder empty.txt/x cannot be used: Not a directory",
    ),
    (
        "--config nowhere.yaml",
        2,
        "hvdtrain: ConfigError: cannot read the config file 'nowhere.yaml': No such file or directory",
    ),
    ("--config folder", 2, "hvdtrain: ConfigError: cannot read the config file 'folder': Is a directory"),
    ("--config fifo", 2, "hvdtrain: ConfigError: cannot read the config file 'fifo': it is a FIFO, not a file"),
    (
        "--config dangling",
        2,
        "hvdtrain: ConfigError: cannot read the config file 'dangling': No such file or directory",
    ),
    ("--config binary", 2, "hvdtrain: ConfigError: the config file 'binary' is not YAML"),
    ("--config utf16.yaml", 2, "hvdtrain: ConfigError: the config file 'utf16.yaml' is not YAML"),
    ("--config broken.yaml", 2, "hvdtrain: ConfigError: the config file 'broken.yaml' is not YAML"),
    ("--config deep.yaml", 2, "hvdtrain: ConfigError: the config file 'deep.yaml' is nested too deeply"),
    ("--config self.yaml", 2, "hvdtrain: ConfigError: the config file 'self.yaml' is nested too deeply"),
    ("--config bomb.yaml", 2, "hvdtrain: ConfigError: the config file 'bomb.yaml' is nested too deeply"),
    ("--config twice.yaml", 2, "hvdtrain: ConfigError: the config file 'twice.yaml' has the key train twice"),
    ("--config dotted.yaml", 2, "hvdtrain: ConfigError: the config file 'dotted.yaml' has the key train.steps twice"),
    ("--config many.yaml", 2, "hvdtrain: ConfigError: invalid --train.steps"),
    ("--config value.yaml", 2, "hvdtrain: ConfigError: train is a section, but has a single value"),
    ("--config null.yaml", 2, "hvdtrain: ConfigError: invalid options"),
    ("--config list.yaml", 2, "hvdtrain: ConfigError: the config file 'list.yaml' is not a mapping"),
    ("--config unknown.yaml", 2, "hvdtrain: ConfigError: there is no option --train.stepz (in unknown.yaml)"),
    ("--config code.yaml", 2, "hvdtrain: ConfigError: the config file 'code.yaml' is not YAML"),
    ("--config date.yaml", 2, "hvdtrain: ConfigError: the config file 'date.yaml' is not YAML"),
    ("--config two.yaml", 2, "hvdtrain: ConfigError: the config file 'two.yaml' is not YAML"),
    ("--config other.yaml", 2, "hvdtrain: ConfigError: the config file 'other.yaml' refers to another config file"),
    ("--config number.yaml", 2, "hvdtrain: TaskError: there is no task '5'"),
    ("--config", 2, "hvdtrain: ConfigError: cannot read the config file '.': Is a directory"),
    ("--task ''", 2, "hvdtrain: TaskError: there is no task ''"),
    ("--task ..:x", 2, "hvdtrain: TaskError: invalid name '..:x'"),
    ("--task nowhere.py:x", 2, "hvdtrain: TaskError: there is no file 'nowhere.py' to import"),
    ("--task folder:x", 2, "hvdtrain: TaskError: folder has no function 'x'"),
    ("--task tasks.py:nowhere", 2, "hvdtrain: TaskError: tasks.py has no function 'nowhere'"),
    ("--task nosuchmodule:x", 2, "hvdtrain: TaskError: there is no module 'nosuchmodule' to import"),
    ("--task syntax.py:x", 2, "hvdtrain: syntax.py cannot be imported, see above"),
    ("--task importing.py:x", 1, "hvdtrain: ModuleNotFoundError in <module>, importing.py:1, see above"),
    ("--task dividing.py:x", 1, "hvdtrain: ZeroDivisionError in <module>, dividing.py:1, see above"),
    ("--task exiting.py:x", 2, "hvdtrain: TaskError: exiting.py exits when it is imported"),
    (
        "--task os.path:join",
        2,
        "hvdtrain: TaskError: the task function does not accept the given options",
    ),
    ("--task tasks.py:build --hiden 3", 2, "hvdtrain: ConfigError: there is no option --hiden"),
    ("--task tasks.py:build --hidden many", 2, "hvdtrain: ConfigError: invalid --hidden"),
    (
        "--task tasks.py:clash",
        2,
        "hvdtrain: ConfigError: the task function has a parameter 'seed', which is an option of every run",
    ),
    ("--task tasks.py:nothing", 2, "hvdtrain: TaskError: the task function returned an invalid value"),
    ("--task tasks.py:a_model", 2, "hvdtrain: TaskError: the task function returned an invalid value"),
    ("--task tasks.py:raising", 1, "hvdtrain: RuntimeError in raising, tasks.py:31, see above"),
    ("--task tasks.py:exiting", 2, "hvdtrain: TaskError: the task's code ended this process"),
    ("--task tasks.py:no_data", 1, "hvdtrain: DataError: the data set is empty"),
    ("--task tasks.py:negative", 1, "hvdtrain: DataError: the data set has an invalid length"),
    ("--task tasks.py:countless", 1, "hvdtrain: DataError: the data set has an invalid length"),
    ("--task tasks.py:a_number", 1, "hvdtrain: DataError: the data set cannot be indexed"),
    ("--task tasks.py:no_pairs", 2, "TaskError: the task's loss function returned an invalid value"),
    ("--task tasks.py:no_weight", 2, "TaskError: the task's loss function returned an invalid value"),
    ("--task tasks.py:not_finite", 1, "NonFiniteError: the loss or the gradient was not finite 10 steps in a row"),
    ("--task tasks.py:unreadable", 1, "OSError: no such picture"),
    ("--task tasks.py:unreadable --loader.workers 1", 1, "OSError: Caught OSError in DataLoader worker process 0."),
    ("--task tasks.py:ending", 2, "TaskError: the task's code ended this process"),
    ("--task tasks.py:empty_samples", 1, "TypeError: default_collate: batch must contain tensors"),
    (
        "--task tasks.py:build --observe.sinks '[\"nowhere.py:x\"]'",
        2,
        "ConfigError: there is no file 'nowhere.py' to import",
    ),
    (
        "--task tasks.py:build --resume nowhere",
        2,
        "hvdtrain: ConfigError: invalid --resume: 'nowhere' contains no checkpoint",
    ),
    (
        "--task tasks.py:build --resume folder",
        2,
        "hvdtrain: ConfigError: invalid --resume: 'folder' contains no checkpoint",
    ),
    ("--task tasks.py:build --resume cut", 1, "CheckpointError: cut/model.safetensors is damaged"),
    (
        "--task tasks.py:build --resume no-manifest",
        2,
        "hvdtrain: ConfigError: invalid --resume: 'no-manifest' contains no checkpoint",
    ),
    ("--task tasks.py:build --resume no-tensors", 1, "CheckpointError: no-tensors/model.safetensors is damaged"),
    ("--data.text nowhere.txt", 1, "hvdtrain: DataError: no file matches 'nowhere.txt'"),
    ("--data.text utf16.yaml", 1, "hvdtrain: DataError: utf16.yaml is not text that can be trained on"),
    ("--data.text binary", 1, "hvdtrain: DataError: binary is not text that can be trained on"),
    ("--data.text empty.txt", 1, "hvdtrain: DataError: the text is empty"),
    ("--data.text short.txt", 1, "hvdtrain: DataError: there are too few tokens in short.txt"),
    ("--data.text fifo", 1, "hvdtrain: DataError: no file matches 'fifo'"),
    ("--data.tokens nowhere.npy", 1, "hvdtrain: DataError: cannot read the tokens 'nowhere.npy'"),
    ("--data.tokens fifo.npy", 1, "hvdtrain: DataError: cannot read the tokens fifo.npy"),
    ("--data.tokens binary.npy", 1, "hvdtrain: DataError: binary.npy contains no tokens"),
    ("--data.tokens empty.txt", 1, "hvdtrain: DataError: empty.txt contains no tokens"),
    ("--data.tokens float.npy", 1, "hvdtrain: DataError: float.npy contains no tokens"),
    ("--data.tokens rows.npy", 1, "hvdtrain: DataError: rows.npy contains no tokens"),
    ("--data.tokens none.npy", 1, "hvdtrain: DataError: none.npy is empty"),
    ("--data.tokens negative.npy", 1, "hvdtrain: DataError: negative.npy contains negative ids"),
    ("--data.tokens large.npy", 1, "hvdtrain: DataError: the data has token ids up to "),
    ("--data.tokens few.npy", 1, "hvdtrain: DataError: there are too few tokens in few.npy"),
    ("--data.tokens folder", 1, "hvdtrain: DataError: cannot read the tokens folder"),
    ("--data.dataset folder", 1, "hvdtrain: DataError: there is no dataset in 'folder'"),
    ("--data.tokenizer fifo", 1, "hvdtrain: DataError: cannot read the tokenizer fifo"),
    ("--data.tokenizer deep.json", 1, "hvdtrain: DataError: deep.json is not a tokenizer"),
    ("--model.config fifo", 2, "hvdtrain: ConfigError: fifo does not describe a model"),
    ("--model.config deep.json", 2, "hvdtrain: ConfigError: deep.json does not describe a model"),
    ("--model.config list.json", 2, "hvdtrain: ConfigError: list.json does not describe a model"),
    ("--model.from folder", 2, "hvdtrain: ConfigError: folder/config.json does not describe a model"),
    ("timeline nonsense", 2, "hvdtrain: there is no command 'nonsense' of timeline"),
    ("timeline report nowhere.json", 1, "hvdtrain: TraceError: nowhere.json does not exist"),
    ("timeline report empty.txt", 1, "hvdtrain: TraceError: there is no event in empty.txt"),
    ("timeline report begun.json", 1, "hvdtrain: TraceError: there is no event in begun.json"),
    ("timeline report empty.json.gz", 1, "hvdtrain: TraceError: there is no event in empty.json.gz"),
    ("timeline report fifo", 1, "hvdtrain: TraceError: the trace fifo cannot be read"),
    ("timeline report /dev/zero", 1, "hvdtrain: TraceError: the trace /dev/zero cannot be read"),
    ("timeline report dangling", 1, "hvdtrain: TraceError: dangling does not exist"),
    ("timeline report binary", 1, "hvdtrain: TraceError: binary is not a Timeline of Horovod"),
    ("timeline report deep.json", 1, "hvdtrain: TraceError: there is no event in deep.json"),
    ("timeline report odd.json", 1, "hvdtrain: TraceError: odd.json is not a Timeline of Horovod"),
    ("timeline report torch.json", 1, "hvdtrain: TraceError: torch.json is not a Timeline of Horovod"),
    ("timeline report folder", 1, "hvdtrain: TraceError: folder is not a run"),
    ("timeline report start", 1, "hvdtrain: TraceError: start has no readable data of a run"),
    ("timeline report bytes", 1, "hvdtrain: TraceError: bytes has no readable data of a run"),
    ("timeline report long-name.json", 0, "long-name.json, 2 ranks: 4 steps"),
    ("timeline report damaged.json.gz", 0, "damaged.json.gz, 2 ranks:"),
    ("timeline report good.json --log fifo", 1, "hvdtrain: TraceError: the output fifo cannot be read"),
    ("timeline report good.json --html folder", 1, "hvdtrain: TraceError: the page folder cannot be written"),
    (
        "timeline report good.json --fail_if \"__import__('os')\"",
        2,
        "hvdtrain: ConfigError: invalid --fail_if \"__import__('os')\"",
    ),
    ("timeline diff good.json empty.txt", 1, "hvdtrain: TraceError: there is no event in empty.txt"),
    ("timeline diff good.json fifo", 1, "hvdtrain: TraceError: the trace fifo cannot be read"),
    ("compare run folder", 1, "hvdtrain: TraceError: folder is not a run"),
    ("compare run fifos", 1, "hvdtrain: TraceError: fifos is not a run"),
    ("compare run bytes", 1, "hvdtrain: TraceError: bytes has no steps yet"),
    (
        "compare run run --fail_if 'loss > eval(base)'",
        2,
        "hvdtrain: ConfigError: invalid --fail_if 'loss > eval(base)'",
    ),
    ("compare run run --html folder", 1, "hvdtrain: TraceError: the page folder cannot be written"),
    ("timeline merge fifo -o out.json", 1, "hvdtrain: TraceError: the trace fifo cannot be read"),
    ("timeline merge empty.txt -o out.json", 1, "hvdtrain: TraceError: there is no event in empty.txt"),
    ("timeline merge bytes -o out.json", 1, "hvdtrain: TraceError: there is no trace in bytes/timeline"),
    ("timeline merge good.json -o nowhere/x", 1, "hvdtrain: TraceError: the trace nowhere/x cannot be written"),
    ("timeline whatif folder", 1, "hvdtrain: DataError: folder is not the folder of an hvdtrain run"),
    ("timeline whatif deep", 1, "hvdtrain: DataError: deep is not the folder of an hvdtrain run"),
    ("timeline whatif other", 1, "hvdtrain: DataError: other is damaged, or was written by another program"),
    ("timeline whatif gradients", 1, "hvdtrain: DataError: gradients is damaged, or was written by another program"),
    ("timeline whatif fifos", 1, "hvdtrain: DataError: fifos is not the folder of an hvdtrain run"),
    ("timeline whatif run --size 0", 1, "hvdtrain: ConfigError: --size is out of range"),
    ("timeline whatif run --compression nonsense", 1, "hvdtrain: ConfigError: invalid compression 'nonsense'"),
    ("timeline start folder", 1, "hvdtrain: RunDirectoryError: folder is not a run folder"),
    ("timeline start fifos", 1, "hvdtrain: RunDirectoryError: fifos is not a run folder"),
    ("timeline stop run", 1, "hvdtrain: RunDirectoryError: the run in run is finished"),
    ("verify nonsense", 2, "hvdtrain: there is no command 'nonsense' of verify"),
    ("verify data folder", 1, "hvdtrain: RunDirectoryError: folder contains no ledger"),
    ("verify data bytes", 1, "hvdtrain: RunDirectoryError: bytes contains no ledger"),
    ("verify resume deep", 1, "hvdtrain: RunDirectoryError: the config file 'deep/config.yaml' is nested too deeply"),
    (
        "verify resume fifos",
        1,
        "hvdtrain: RunDirectoryError: cannot read the config file 'fifos/config.yaml': it is a FIFO, not a file",
    ),
    (
        "verify resume run --steps 0",
        2,
        "hvdtrain verify resume: error: argument --steps: '0' is not a positive whole number",
    ),
    ("config init empty.txt", 1, "hvdtrain: ConfigError: empty.txt exists already"),
    ("config init nowhere/x", 1, "hvdtrain: ConfigError: cannot write nowhere/x: No such file or directory"),
    ("config init new.yaml --task syntax.py:x", 2, "hvdtrain: syntax.py cannot be imported, see above"),
    ("completion bash --task nowhere.py:x", 2, "hvdtrain: TaskError: there is no file 'nowhere.py' to import"),
    ("doctor --nccl_log fifo", 2, "error: --nccl_log fifo cannot be read."),
    ("doctor --nccl_log folder", 2, "error: --nccl_log folder cannot be read."),
    ("launch", 2, "hvdtrain launch: error: the number of ranks is missing"),
    ("launch -np 2 -- script.py", 2, "hvdtrain launch: error: there is no program script.py on this machine"),
    ("launch -np 0", 2, "hvdtrain launch: error: argument -np/-n: invalid number '0'"),
    ("launch -np 2 -H a:x", 2, "hvdtrain launch: error: -H 'a:x' has an invalid number of slots"),
    ("launch -np 2 --elastic 3:2", 2, "hvdtrain launch: error: --elastic is not MIN:MAX"),
    ("launch -np 2 --to nonsense", 2, "hvdtrain launch: error: argument --to: invalid choice: 'nonsense'"),
    ("build-horovod --gpu nonsense", 2, "hvdtrain build-horovod: error: argument --gpu: invalid choice: 'nonsense'"),
    ("bundle", 2, "hvdtrain bundle: error: the following arguments are required: FOLDER"),
]
"""Arguments of the command, its exit code, how the first line of its message begins."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, gallery: Gallery) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    hostile.make(folder, gallery["one"].run)
    return folder


@pytest.mark.parametrize(("arguments", "code", "first_line"), ROWS, ids=[row[0] for row in ROWS])
def test_it_ends_as_it_should(arguments: str, code: int, first_line: str, files: Path) -> None:
    words = ["-m", "hvdtrain", *shlex.split(arguments)]
    done = run(words, cwd=files, environment={"PYTHONWARNINGS": "ignore"}, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert "unexpected error" not in said
    assert "Traceback" not in said or "see above" in said or "the run failed" in said
    assert _message(done).replace(f"{files}/", "").startswith(first_line), said
    assert not (files / "pasted").exists()


def _message(done: subprocess.CompletedProcess[str]) -> str:
    """The line that says what is wrong, of a failure card with the error's class; the first line where nothing is."""
    if done.returncode == 0:
        return done.stdout.splitlines()[0]
    if card := re.search(r"^rank 0 on .* failed: (\w+).*\n  (.*(?:\n    .*)*)", done.stderr, re.MULTILINE):
        return f"{card[1]}: {' '.join(card[2].split())}"
    told = re.search(r"^(?:hvdtrain|error).*(?:[Ee]rror|there is|cannot be).*", done.stderr + done.stdout, re.MULTILINE)
    return told[0] if told else ""
