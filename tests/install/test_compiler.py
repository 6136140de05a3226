"""The compiler wrapper: standards, run paths, and a library that is still found after its environment has moved."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest

from hvdtrain.install import compiler
from hvdtrain.install.compiler import CHANGES, PROMPT_MARKS, QUIET_MARK, relocate, rewrite, wrapper_text
from tests.support.launch import TIMEOUT_S

TABLE = [
    ("/scratch/nccl/lib", "$ORIGIN/../../nvidia/nccl/lib"),
    ("/scratch", ""),
    ("/env/lib/python3.11/site-packages", "$ORIGIN/../.."),
    ("/env", "$ORIGIN/../../../../.."),
]


needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def gxx(*words: str | Path, standard: str = "c++17") -> None:
    """Run g++ with these arguments, as the wrapper would if it compiles."""
    argv = rewrite(list(map(str, words)), standard, []) if "-c" in words else words
    subprocess.run(["g++", *argv], check=True, timeout=TIMEOUT_S)


def test_a_source_is_compiled_by_the_standard_asked_for_with_the_headers_that_newer_compilers_left_out() -> None:
    arguments = rewrite(["-std=c++14", "-g", "-c", "a.cc", "-std=gnu++11", "--std=c++11"], "c++20", [])
    assert [argument for argument in arguments if "std=" in argument] == ["-std=c++20"]
    included = {after for before, after in pairwise(arguments) if before == "-include"}
    assert included == {"cstdint", "stdexcept", "string"}
    assert "-g" not in arguments
    assert "-include" not in rewrite(["a.o", "-o", "a"], "c++20", [])
    for mark in ("-D__CUDACC__", "/tmp/kernels.cudafe1.cpp"):
        arguments = ["-std=c++17", mark, "-g", "-shared", "-Wl,-rpath,/env/lib", "-c", "a.cu"]
        assert rewrite(arguments, "c++20", TABLE) == arguments, "nvcc is passed through"


@pytest.mark.parametrize("inner", ["third_party/gloo/gloo/transport/tcp/pair.cc", "horovod/common/operations.cc"])
@needs_gxx
def test_messages_name_a_source_without_the_folder_of_the_build(inner: str, tmp_path: Path) -> None:
    source = tmp_path / "horovod/torch2.build/tmp" / inner  # as in the cache
    source.parent.mkdir(parents=True)
    source.write_text("const char* file() { return __FILE__; }\n")
    made = tmp_path / "a.o"
    gxx("-c", source, "-o", made)
    content = made.read_bytes()
    assert inner.encode() in content and b"torch2.build" not in content


QUIET_HEADER = str(Path(compiler.__file__).with_name("quiet_timeline.h"))

WRITER = """
#include <condition_variable>
#include <future>
#include <memory>
namespace other { inline int yield(int k) { return k; } }
#ifdef WITH_YIELD
extern "C" void look_for_work() { other::yield(3); std::this_thread::yield(); }
#endif
"""


def source_of(mark: str, folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    """A source of Horovod's that counts as one that was read: what the change with this mark is for."""
    change = next(change for change in CHANGES if change.mark == mark)
    file = folder / change.source
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    read = dataclasses.replace(change, read=hashlib.sha256(text.encode()).hexdigest())
    changes = tuple(read if other is change else other for other in compiler.CHANGES)
    monkeypatch.setattr(compiler, "CHANGES", tuple(c for c in changes if c.mark != mark or c is read))
    return str(file)


def test_the_timeline_and_nothing_else_is_made_to_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(QUIET_MARK, tmp_path, monkeypatch, WRITER)
    assert QUIET_HEADER in rewrite(["-O3", "-c", source, "-o", "a.o"], "c++20", [])
    for name in ("timeline.h", "operations.cc", "my_timeline.cc"):
        other = tmp_path / "horovod" / "common" / name
        other.write_text(WRITER)
        assert QUIET_HEADER not in rewrite(["-c", str(other)], "c++20", [])
    assert QUIET_HEADER not in rewrite([source, "-shared", "-o", "a.so"], "c++20", [])
    Path(source).write_text(WRITER + "// of another version\n")
    assert QUIET_HEADER not in rewrite(["-c", source], "c++20", [])


def test_another_header_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that others include too."""
    before = compiler.digest()
    shutil.copytree(Path(compiler.__file__).parent, tmp_path / "install")
    monkeypatch.setattr(compiler, "__file__", str(tmp_path / "install/compiler.py"))
    assert compiler.digest() == before
    with (tmp_path / "install/prompt.h").open("a") as header:
        header.write("// another\n")
    assert compiler.digest() != before


@needs_gxx
@pytest.mark.parametrize(("calls", "standard"), [(True, "c++17"), (True, "c++20"), (False, "c++17")])
def test_only_where_the_writer_yielded_it_sleeps_and_the_library_says_so(
    calls: bool, standard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, library = source_of(QUIET_MARK, tmp_path, monkeypatch, WRITER), tmp_path / "a.so"
    flags = ["-Wall", "-Werror", "-O3", "-fPIC", *(["-DWITH_YIELD"] if calls else [])]
    gxx(*flags, "-c", source, "-o", tmp_path / "a.o", standard=standard)
    gxx("-shared", "-s", "-o", library, tmp_path / "a.o")
    content = library.read_bytes()
    assert (QUIET_MARK.encode() in content, b"nanosleep" in content) == (calls, calls)
    assert b"sched_yield" not in content


# Horovod's three sources as far as the changes look at them, and a program that uses what they make.
HANDLES_H = """
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
struct Handles {
  void mark_done(int result);
  bool poll();
  std::shared_ptr<int> result;
  std::mutex mutex;
};
extern Handles handles;
extern std::atomic_int looks;
"""
HANDLES = """
#include "handle_manager.h"
Handles handles;
void Handles::mark_done(int value) { std::lock_guard<std::mutex> guard(mutex); result = std::make_shared<int>(value); }
bool Handles::poll() { std::lock_guard<std::mutex> guard(mutex); return result != nullptr; }
"""
QUEUE_H = """
#pragma once
#include <atomic>
namespace horovod { namespace common {
struct TensorQueue {
  int AddToTensorQueue(int& entry, int& message) { put = entry; return message; }
  int AddToTensorQueueMulti(int& entry, int& message) { return AddToTensorQueue(entry, message); }
  void FinalizeTensorQueue(int status) { put = status; }
  std::atomic_int put{0};
};
const int SHUT_DOWN_ERROR = -1;
struct ProcessSet { TensorQueue tensor_queue; };
} }
"""
CYCLE = """
#include <thread>
#include "tensor_queue.h"
horovod::common::ProcessSet process_set;
int put(bool multi, int entry, int message) {
  if (!multi) return process_set.tensor_queue.AddToTensorQueue(entry, message);
  return process_set.tensor_queue.AddToTensorQueueMulti(entry, message);
}
int cycle(std::chrono::nanoseconds most) {
  if (most > std::chrono::steady_clock::duration::zero()) std::this_thread::sleep_for(most);
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return process_set.tensor_queue.put;
}
"""
WAIT = """
#include <thread>
#include "handle_manager.h"
namespace py { struct gil_scoped_release { ~gil_scoped_release() {} }; }
std::atomic_int looks{0};
void wait_for_result() {
  while (++looks, !handles.poll()) {
    py::gil_scoped_release release_python_gil;
    std::this_thread::yield();
  }
}
"""
PROGRAM = """
#include <cstdio>
#include <cstring>
#include <sys/resource.h>
#include <thread>
#include "torch/handle_manager.h"
int put(bool, int, int), cycle(std::chrono::nanoseconds);
void wait_for_result();
int main(int, char** argv) {
  using namespace std::chrono;
  int least = atoi(argv[3]);
  std::thread background([=] {
    while (cycle(milliseconds(atoi(argv[2]))) != 3) {}
    cycle(milliseconds(atoi(argv[2])));  // others were not ready
    while (looks < least) std::this_thread::sleep_for(milliseconds(1));
    handles.mark_done(7);
  });
  if (put(strcmp(argv[1], "multi") == 0, 3, 5) != 5) return 1;
  rusage before, after;
  getrusage(RUSAGE_THREAD, &before);
  auto began = steady_clock::now();
  wait_for_result();
  auto took_ms = duration<double, std::milli>(steady_clock::now() - began).count();
  getrusage(RUSAGE_THREAD, &after);
  printf("%d %f %ld\\n", looks.load(), took_ms, after.ru_nvcsw - before.ru_nvcsw);
  background.join();
}
"""


def built(folder: Path, sources: Iterable[tuple[str, str]], main: str = "") -> Path:
    """Build a program of sources of Horovod's, by the marks of the changes that they are for."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    for name, text in (("torch/handle_manager.h", HANDLES_H), ("common/tensor_queue.h", QUEUE_H), ("main.cc", main)):
        (folder / "horovod" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "horovod" / name).write_text(text)
    objects = [folder / "horovod/main.cc"]
    with pytest.MonkeyPatch.context() as patch:
        for mark, text in sources:
            objects.append(folder / f"{mark}.o")
            gxx("-Wall", "-Werror", "-O2", "-c", source_of(mark, folder, patch, text), "-o", objects[-1])
    gxx("-std=c++17", "-pthread", "-o", folder / "program", *objects)
    return folder / "program"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = zip(PROMPT_MARKS, (CYCLE, HANDLES, WAIT), strict=True)
    return built(tmp_path_factory.mktemp("prompt"), sources, PROGRAM)


def waiting(program: Path, kind: str, period_ms: int, least: int, environment: dict[str, str]) -> list[float]:
    """How often was looked for a result that comes after `least` looks, for how many ms, how often it was slept."""
    argv = [program, kind, str(period_ms), str(least)]
    done = subprocess.run(argv, env=environment, capture_output=True, timeout=TIMEOUT_S, check=True)
    return [float(word) for word in done.stdout.split()]


@pytest.mark.parametrize("kind", ["one", "multi"])
def test_work_and_what_waits_for_others_end_a_long_cycle_and_a_result_ends_the_waiting(
    program: Path, kind: str
) -> None:
    assert all(mark.encode() in program.read_bytes() for mark in PROMPT_MARKS), "which changes took effect"
    looks, took_ms, _ = waiting(program, kind, 10**9, 50, {"HVDTRAIN_PROMPT": "1"})
    assert looks <= took_ms + 2  # one a millisecond, at most, besides the first and the last


def test_unasked_the_sources_do_what_they_did(program: Path) -> None:
    looks, _, sleeps = waiting(program, "one", 1, 10_000, {})
    assert sleeps < looks / 10


# As Horovod starts and joins its thread; ranks cannot meet at first. Then a tensor is enqueued after the loop is over,
# and one when the thread has ended.
MEETING = """
#include <atomic>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <thread>
#include "tensor_queue.h"
struct Table { horovod::common::ProcessSet set; auto& Get(int) { return set; } };
struct State {
  Table process_set_table;
  std::atomic_bool initialization_done{false}, initialization_failed{false}, shut_down{false};
  std::thread background;
  int tries = 0;
} global;
int enqueue() {
  int tensor = 3, message = 0;
  auto& process_set = global.process_set_table.Get(0);
  process_set.tensor_queue.AddToTensorQueue(tensor, message);
  return process_set.tensor_queue.put;
}
namespace {
void Loop(State& state) {
  if (state.tries++ == 0) throw std::runtime_error("nobody is there");
  state.initialization_done = true;
  while (!state.shut_down) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  enqueue();
}
}
bool init() {
  global.background = std::thread(Loop, std::ref(global));
  while (!global.initialization_done && !global.initialization_failed) {}
  return !global.initialization_failed;
}
void shut_down() {
  global.shut_down = true;
  global.background.join();
  global.shut_down = global.initialization_done = false;
}
int main() {
  auto& put = global.process_set_table.Get(0).tensor_queue.put;
  for (int i = 0; i < 2; ++i) {
    std::printf("%d\\n", init());
    if (i == 1) std::printf("%d\\n", enqueue());
    shut_down();
    std::printf("%d\\n", put.load());
  }
  enqueue();
  while (put != -1) std::this_thread::yield();
  if (!init()) return 1;
  enqueue();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  std::printf("%d\\n", put.load());
  shut_down();
}
"""


def test_ranks_that_could_not_meet_may_try_again(tmp_path: Path) -> None:
    program = built(tmp_path, [(PROMPT_MARKS[0], MEETING)])
    done = subprocess.run([program], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout.split()) == (0, ["0", "0", "1", "3", "-1", "3"]), done.stderr
    assert "nobody is there" in done.stderr


@pytest.mark.parametrize(
    "spelling",
    [
        ["-Wl,-rpath,/env/lib:/opt/mpi/lib"],
        ["-Wl,-rpath=/env/lib", "-Wl,-rpath,/opt/mpi/lib"],
        ["-Wl,-rpath", "-Wl,/env/lib", "-Wl,--rpath", "-Wl,/opt/mpi/lib"],
    ],
)
def test_each_spelling_of_a_run_path_is_relocated(spelling: list[str]) -> None:
    arguments = rewrite(["-shared", *spelling, "a.o"], "c++20", TABLE)
    assert "-Wl,-rpath,$ORIGIN/../../../../../lib:/opt/mpi/lib" in arguments
    assert "a.o" in arguments
    leftovers = [argument for argument in arguments if argument.endswith("/env/lib")]
    assert leftovers == ["-Wl,-rpath-link,/env/lib"]  # the linker itself still finds what it found
    program = ["main.o", *spelling, "-o", "try_compile"]
    assert rewrite(program, "c++20", TABLE)[1:] == program, "programs keep theirs"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("/env/lib/python3.11/site-packages/torch/lib", "$ORIGIN/../../torch/lib"),
        ("/env/lib", "$ORIGIN/../../../../../lib"),
        ("/environment/lib", "/environment/lib"),
        ("/scratch/nccl/lib", "$ORIGIN/../../nvidia/nccl/lib"),
        ("/scratch/tmp/build", ""),
        ("/usr/local/cuda/lib64/stubs", ""),
        ("/usr/local/cuda/lib64", "/usr/local/cuda/lib64"),
    ],
)
def test_where_a_run_path_points_afterwards(found: str, expected: str) -> None:
    assert relocate(found, TABLE) == expected


@needs_gxx
def test_a_library_built_through_the_wrapper_is_found_after_its_environment_has_moved(tmp_path: Path) -> None:
    first, second = tmp_path / "first place", tmp_path / "elsewhere" / "second"
    site = first / "lib" / "site"
    (site / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "dep.cc").write_text('extern "C" int answer() { return 42; }\n')
    # std::span is C++20: this compiles only if -std=c++14 is overruled; std::string comes by -include.
    source = '#include <span>\nextern "C" int answer();\nextern "C" int ask() { std::string s; return answer(); }\n'
    (tmp_path / "use.cc").write_text(source)
    table = [(str(site), "$ORIGIN/../.."), (str(first), "$ORIGIN/../../../..")]
    wrapper = tmp_path / "cxx"
    wrapper.write_text(wrapper_text(sys.executable, "g++", "c++20", table))
    wrapper.chmod(0o755)
    gxx("-shared", "-fPIC", "-o", first / "lib" / "libdep.so", tmp_path / "dep.cc")
    made, libraries = site / "horovod" / "torch" / "libuse.so", first / "lib"
    linking = ("-shared", "-o", made, tmp_path / "use.o", f"-L{libraries}", "-ldep", f"-Wl,-rpath,{libraries}")
    for words in (("-fPIC", "-c", tmp_path / "use.cc", "-o", tmp_path / "use.o"), linking):
        subprocess.run([wrapper, "-std=c++14", *words], check=True, timeout=TIMEOUT_S)
    second.parent.mkdir()
    first.rename(second)
    assert ctypes.CDLL(str(second / made.relative_to(first))).ask() == 42
