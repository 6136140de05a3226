"""Lines of Horovod and NCCL in a job's output: those of a real stalled job, and NCCL's as it writes them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hvdtrain.errors import TraceError
from hvdtrain.timeline.logs import STALLED, collect_lines, find_logs
from hvdtrain.timeline.run import load
from tests.support.launch import train

WAITING = (
    "[2026-11-20 16:35:35. 64381: W stall_inspector.cc:107] One or more tensors were submitted to be reduced, gathered "
    "or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 seconds. This may\n"
)


@pytest.mark.parametrize("prefix", ["", "[1,0]<stderr>:", "[0]<stderr>:", "0: ", "[0] "])
def test_what_launchers_put_before_a_line_is_no_part_of_it(prefix: str, tmp_path: Path) -> None:
    block = f"{WAITING}Missing ranks:\n3: [allreduce.a, allreduce.b]\n5!: [allreduce.a, b, c, d, e, f ...]\n"
    block += 'One or more rank (marked by "!") is stalled for longer than 120 seconds. Will shutdown.\n'
    lines = [f"{prefix}{line}\n" for line in block.splitlines()]
    lines.insert(2, f"{prefix}step 7/10  loss 3.2\n")
    (tmp_path / "out").write_text("".join(lines * 2))
    assert collect_lines([tmp_path / "out"]) == [
        "Horovod stalled on rank 3 for more than 60 s, 2 times: allreduce.a, allreduce.b",
        "Horovod stalled on rank 5 for more than 60 s, 2 times: allreduce.a, b, c, d, e, f",
        "Horovod shut the job down for a stall (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)",
    ]


def test_a_stall_by_unknown_ranks_is_reported(tmp_path: Path) -> None:
    (tmp_path / "out").write_text(WAITING)
    (line,) = collect_lines([tmp_path / "out"])
    assert line.startswith(STALLED)


def nccl(rank: int) -> list[str]:
    head = f"node{rank // 2}:{100 + rank}:{200 + rank} [{rank % 2}]"
    return [
        f"{head} NCCL INFO NET/Socket : Using [0]eth0:10.0.0.{rank // 2}<0>",
        f"{head} NCCL INFO Using network Socket",
        "NCCL version 2.29.7+cuda13.0",
        f"{head} NCCL INFO NCCL_IB_DISABLE set by environment to 0.",
        f"{head} NCCL INFO Channel 00/0 : {rank}[{rank % 2}] -> {rank ^ 1}[{rank % 2 ^ 1}] via P2P/IPC/read",
        f"{head} NCCL INFO Channel 00/0 : {rank}[0] -> {(rank + 2) % 4}[0] [send] via NET/Socket/{rank % 3}",
        f"{head} NCCL INFO 2 coll channels, 2 collnet channels, 0 nvls channels, 2 p2p channels",
        f"{head} NCCL INFO P2P is disabled between connected GPUs 0 and 1. You can repress this message",
        f"{head} transport/net_socket.cc:402 NCCL WARN NET/Socket : peer 10.0.0.9 closed",
        "an ordinary line",
    ]


def test_nccl_warnings_are_reported_once_with_their_count(tmp_path: Path) -> None:
    lines = [line for rank in range(4) for line in nccl(rank)]
    random.Random(0).shuffle(lines)
    (tmp_path / "a").write_text("\n".join(f"[1,2]<stdout>:{line}" for line in lines[::2]))
    (tmp_path / "b").write_text("\n".join(lines[1::2]))
    assert sorted(collect_lines([tmp_path / "a", tmp_path / "b"])) == [
        "NCCL 2.29.7+cuda13.0",
        "NCCL has 2 channels for collectives (4 GPUs)",
        "NCCL setting NCCL_IB_DISABLE=0 (4 GPUs)",
        "NCCL uses the network Socket (4 GPUs)",
        "NCCL warning: NET/Socket : peer 10.0.0.9 closed (4 times, 4 GPUs)",
        "NCCL's links: NET/Socket between 4 pairs, P2P/IPC between 4 pairs",
        "NCCL's network devices: Socket: Using [0]eth0:10.0.0.0<0> (2 GPUs)",
        "NCCL's network devices: Socket: Using [0]eth0:10.0.0.1<0> (2 GPUs)",
        "NCCL: P2P is disabled between connected GPUs (4 GPUs)",
    ]


def test_output_that_says_nothing_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"\xff\xfe\0" * 100_000 + b"\nstep 1: [loss 3]\n1: [2]\n")
    assert collect_lines([tmp_path / "out"]) == []
    with pytest.raises(TraceError, match="cannot be read"):
        collect_lines([tmp_path / "none"])


def test_output_in_the_runs_folder_is_found_by_itself_unless_it_is_very_long(tmp_path: Path) -> None:
    (tmp_path / "timeline").mkdir()
    (tmp_path / "output/rank.0").mkdir(parents=True)
    (tmp_path / "output/rank.0/stderr").write_text(f"{WAITING}Missing ranks:\n1: [a]\n")
    (tmp_path / "job.log").write_text("node:1:2 [0] NCCL INFO Using network IB\n")
    (tmp_path / "journal.jsonl").write_text("")
    assert [path.name for path in find_logs(tmp_path)] == ["job.log", "stderr"]
    expected = [f"{STALLED}on rank 1 for more than 60 s, once: a", "NCCL uses the network IB (1 GPU)"]
    assert list(load(tmp_path).warnings) == expected
    assert list(load(tmp_path, logs=[tmp_path / "job.log"]).warnings) == expected
    (tmp_path / "long.out").write_text("node:1:2 [0] NCCL WARN Call to connect failed\n" * 1000)
    short = load(tmp_path, most_bytes=10_000)
    assert list(short.warnings) == expected and any("long.out" in note for note in short.notes)
    assert len(load(tmp_path).warnings) == 3


@pytest.mark.slow
def test_what_nccl_writes_where_its_variable_says_belongs_to_the_run(tmp_path: Path) -> None:
    (tmp_path / "nccl [1]").mkdir()
    variables = {"NCCL_DEBUG_FILE": "nccl [1]/%h.%p.txt"}
    toy = f"{Path(__file__).parents[1]}/support/toy.py:toy"
    train("--task", toy, "--train.steps=2", "--run_dir=run", cwd=tmp_path, environment=variables)
    (tmp_path / "nccl [1]/node7.4321.txt").write_text("node7:4321:4399 [0] NCCL WARN Call to connect failed\n")
    (tmp_path / "nccl [1]/other.log").write_text("node7:4321:4399 [0] NCCL WARN Of another job\n")
    (line,) = [line for line in load(tmp_path / "run").warnings if "NCCL" in line]
    assert "Call to connect failed" in line
