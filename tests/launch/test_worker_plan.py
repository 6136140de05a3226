"""The commands of a job: no text of a user reaches a shell, and variables left by other launchers are ignored."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from hvdtrain.launch.job import Limits
from hvdtrain.launch.spec import JobSpec
from hvdtrain.launch.variables import agent_environment, passed_variables, secret_variables, submit_environment
from hvdtrain.launch.worker_plan import WorkerPlan, agent_command, describe_plan, hello_message, rank_environment
from hvdtrain.runtime.channel import MessageWriter, read_messages
from tests.support.launch import TIMEOUT_S

NASTY = "a b'c\"d\n$(touch pwned);`x` -- -o"
JOB = JobSpec((), 2, folder=f"/work/{NASTY}", python="/opt/my python/bin/python")
PLAN = WorkerPlan(
    JOB,
    program=("python", "-m", "hvdtrain", NASTY),
    limits=Limits(2, 1, 4),
    hosts={"localhost": 2, "b": 2},
    environment={"HVDTRAIN_X": NASTY, "SECRET": "s", "HOROVOD_RANK": "7", "HOROVOD_CYCLE_TIME": "2", "PATH": "/bin"},
)
PLACE = {"rank": 1, "size": 2, "local_rank": 0, "local_size": 1, "cross_rank": 1, "cross_size": 2}


def test_ssh_gets_one_word_of_constants() -> None:
    *options, dashes, host, command = agent_command(PLAN, "b")
    assert options[0] == "ssh" and (dashes, host) == ("--", "b")
    assert "BatchMode=yes" in options and not any("Strict" in option for option in options)
    assert shlex.split(command)[:3] == ["exec", JOB.python, "-c"] and NASTY not in command
    assert "pwned" not in " ".join(agent_command(PLAN, "localhost"))


def test_options_of_ssh_are_whole_arguments_before_the_host() -> None:
    plan = replace(PLAN, job=replace(JOB, ssh_port=2222, ssh_options=("-F", "my config")))
    command = agent_command(plan, "b")
    assert command[command.index("-p") + 1] == "2222" and command[command.index("-F") + 1] == "my config"
    assert command.index("-F") < command.index("--")


def test_other_hosts_get_only_the_named_variables() -> None:
    given = hello_message(PLAN, "b")["environment"]
    assert given == {"HVDTRAIN_X": NASTY, "HOROVOD_CYCLE_TIME": "2"}
    assert hello_message(replace(PLAN, pass_on=("SECRET",)), "b")["environment"]["SECRET"] == "s"
    assert hello_message(PLAN, "localhost")["environment"] == {}, "its agent has the environment already"


def test_ranks_do_not_see_the_launcher_around_the_driver() -> None:
    around = {"OMPI_COMM_WORLD_RANK": "3", "PMI_RANK": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "9"}
    assert agent_environment({**around, "HOROVOD_RANK": "1"}) == {"SLURM_JOB_ID": "9"}


def test_a_rank_knows_its_place_from_the_start() -> None:
    variables = rank_environment(PLAN, "b", PLACE)
    assert (variables["HOROVOD_RANK"], variables["HOROVOD_CROSS_SIZE"]) == ("1", "2")
    assert variables["HOROVOD_HOSTNAME"] == "b" and variables["HOROVOD_CONTROLLER"] == "gloo"


def test_shown_commands_can_be_parsed() -> None:
    lines = describe_plan(PLAN, PLAN.hosts).splitlines()
    assert shlex.split("\n".join(lines)).count(NASTY) == 1
    commands = [shlex.split(line) for line in lines if line.lstrip().startswith("ssh")]
    assert commands == [agent_command(PLAN, "b")]


def test_the_ssh_command_works_from_any_folder(tmp_path: Path) -> None:
    """The command goes through a shell, as sshd does it, in a home with a module that is in the way."""
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong one')")
    root = Path(__file__).parents[2]
    job = JobSpec((), 1, folder=str(root), python=sys.executable)
    plan = WorkerPlan(job, ("sh", "-c", 'echo "$FIRST"; pwd'), Limits(1, 1, 1), {"b": 1})
    stream = io.BytesIO()
    writer = MessageWriter(stream)
    writer.send("hello", **{**hello_message(plan, "b"), "path": [str(root)]})
    writer.send("start", worker=1, argv=list(plan.program), environment={"FIRST": NASTY})
    environment = {"PATH": os.environ["PATH"], "SSH_CONNECTION": "127.0.0.1 1 127.0.0.1 22"}
    argv, pipe = ["sh", "-c", agent_command(plan, "b")[-1]], subprocess.PIPE
    process = subprocess.Popen(argv, cwd=tmp_path, env=environment, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(stream.getvalue())
    process.stdin.flush()
    got = []
    for message in read_messages(process.stdout):
        got.append(message)
        if message["type"] == "exited":
            break
    process.stdin.close()
    assert process.wait(TIMEOUT_S) == 0
    ready = next(message for message in got if message["type"] == "ready")
    assert ready["interface"] == "lo" and ready["store"].startswith("127.0.0.1:")
    rest = [m for m in [*got, *read_messages(process.stdout)] if m["type"] == "line"]
    process.stdout.close()
    assert [m["text"] for m in rest] == [*NASTY.splitlines(), str(root)]
    assert not (tmp_path / "pwned").exists()


def test_lines_that_are_no_messages_are_passed_over() -> None:
    stream = io.BytesIO(b'{"type": "a"}\nnonsense\n[1]\n{"type": 3}\n' + json.dumps({"type": "b"}).encode())
    assert [m["type"] for m in read_messages(stream)] == ["a"], "the last has no end"


def test_variables_of_the_libraries_go_to_other_hosts() -> None:
    """Except those that a launcher set for this process, and names that no shell could set."""
    there = {"HF_HOME": "1", "NCCL_DEBUG": "2", "HOME": "3", "HF_%": "4", "HOROVOD_RANK": "5", "OMPI_X": "6"}
    there |= {"UCX_TLS": "7", "FI_PROVIDER": "8", "https_proxy": "9", "SSL_CERT_FILE": "10", "my_proxy": "11"}
    there |= {"APPTAINERENV_X": "12"}
    expected = ["HF_HOME", "NCCL_DEBUG", "UCX_TLS", "FI_PROVIDER", "https_proxy", "SSL_CERT_FILE", "APPTAINERENV_X"]
    assert passed_variables(there) == expected


def test_a_command_of_a_scheduler_gets_no_secrets_and_nothing_of_the_job_around_it() -> None:
    secrets = {"HF_TOKEN": "a", "WANDB_API_KEY": "b", "https_proxy": "http://me:word@proxy", "Aws_Secret": "c"}
    secrets |= {"APPTAINER_ENCRYPTION_PASSPHRASE": "d"}
    around = {"SLURM_MEM_PER_CPU": "1", "SLURMD_NODENAME": "n", "PMIX_RANK": "0"}
    kept = {"TOKENIZERS_PARALLELISM": "false", "http_proxy": "http://proxy", "SLURM_CONF": "f", "SBATCH_ACCOUNT": "me"}
    assert secret_variables({**secrets, **around, **kept}) == sorted(secrets)
    assert submit_environment({**secrets, **around, **kept}) == kept
