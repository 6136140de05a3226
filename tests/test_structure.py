"""Which modules import which, read the environment or print: checked in the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.mutations.table import MUTATIONS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hvdtrain"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = (
    "errors files host_copy muon programs spans",
    "lease object_store yaml_file",
    "run_layout",
    "config install loading",
    "runtime",
    "comm launch",
    "compression data observe state",
    "plan",
    "exchange task",
    "timeline",
    "compare engine",
    "doctor training",
    "export fit verify",
    "cli torch",
)
"""A room imports rooms of the lines above its own, and itself. `hvdtrain` and `hvdtrain.__main__` import all."""


pytestmark = pytest.mark.xdist_group("structure")  # one process reads all files


@cache
def _nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text())))


@cache
def _imports(file: Path) -> list[str]:
    """Modules that `file` imports, but for those that only a type checker reads."""
    typing_only = {
        id(child)
        for node in _nodes(file)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    found: list[str] = []
    for node in _nodes(file):
        if isinstance(node, ast.Import) and id(node) not in typing_only:
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and id(node) not in typing_only:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def _name(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


def _room(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_rooms_import_downwards() -> None:
    layer = {room: number for number, rooms in enumerate(LAYERS) for room in rooms.split()}
    assert {_room(file) for file in FILES} - {"__init__", "__main__"} == set(layer)
    wrong = []
    for file in FILES:
        room = _room(file)
        for module in _imports(file) if room not in ("__init__", "__main__") else ():
            ours, _, rest = module.partition(".")
            other = rest.partition(".")[0]
            if ours == "hvdtrain" and other in layer and other != room and layer[other] >= layer[room]:
                wrong.append(f"{_name(file)} imports {module}")
    assert not wrong


def test_no_imports_go_in_a_circle() -> None:
    """Those within functions and for type checkers count, too. `hvdtrain` itself only names what others have."""
    modules = {_name(file).removesuffix(".py").replace("/", ".").removesuffix(".__init__"): file for file in FILES}
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        imports = [node for node in _nodes(file) if isinstance(node, ast.ImportFrom) and node.module]
        named = {(str(node.module)[9:], f"{node.module}.{alias.name}"[9:]) for node in imports for alias in node.names}
        graph[module] = {inner if inner in modules else outer for outer, inner in named} & modules.keys() - {module}
    TopologicalSorter(graph).prepare()  # raises CycleError, with a circle


def test_one_module_imports_horovod() -> None:
    found = {_name(file) for file in FILES if any(module.split(".")[0] == "horovod" for module in _imports(file))}
    assert found <= {"comm/horovod.py"}


WITHOUT_TORCH = (
    *("errors.py", "spans.py", "loading.py", "__init__.py", "config/", "runtime/", "launch/", "install/", "doctor/"),
    *("plan/", "timeline/", "cli/timeline/", "compare/", "cli/compare.py"),
)


def test_rooms_without_torch() -> None:
    found = [_name(f) for f in FILES if any(module.split(".")[0] == "torch" for module in _imports(f))]
    assert not [name for name in found if name.startswith(WITHOUT_TORCH)]


ENTRANCES = ("cli/", "doctor/", "launch/", "runtime/", "task/")
"""Where `environ()` may be called: by what starts a process, and by tasks. Elsewhere the variables are handed in."""


def test_the_environment_is_read_in_one_room_and_asked_for_at_the_entrances() -> None:
    reads, asks = [], []
    for file in FILES:
        for node in _nodes(file):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
                reads += [f"{_name(file)}:{node.lineno}"] * (ast.unparse(node.value) == "os")
            elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "environ":
                asks.append(f"{_name(file)}:{node.lineno}")
    assert not [place for place in reads if not place.startswith("runtime/")]
    assert not [place for place in asks if not place.startswith(ENTRANCES)]


def test_prints_stand_where_they_may() -> None:
    wrong = []
    for file in FILES:
        if _room(file) != "cli" and _name(file) != "observe/output.py":
            wrong += [f"{_name(file)}:{call.lineno}" for name, call in _calls(file) if name == "print"]
    assert not wrong


UNPICKLING = (
    *("pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "xmlrpc"),
    *("multiprocessing.connection", "multiprocessing.managers"),
)
"""Modules that make objects, or code, of bytes."""

CALLS = (
    *("eval", "exec", "compile", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("pickle.load", "pickle.loads", "torch.load", "torch.save", "torch.package.PackageImporter", "torch.hub.load"),
    *("torch.distributed.broadcast_object_list", "hvd.broadcast_object", "hvd.allgather_object"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"),
    *("multiprocessing.Queue", "multiprocessing.Manager", "multiprocessing.Pipe"),
)
"""Calls that are made nowhere: they run text, unpickle, or make any object."""

READERS_OF_PICKLES = {
    "task/other_trainers.py": {"imports pickle", "torch.load"},
}
"""Files that may load pickles, by a list of allowed names or with `weights_only`, and what they use for it."""

KEYWORDS: dict[str | None, set[bool]] = {
    "allow_pickle": {False},
    "trust_remote_code": {False},
    "use_safetensors": {True},
    "local_files_only": {True},
    "shell": set(),
    "weights_only": {True},
}
"""Keywords of calls, and the constants that they may have."""


@cache
def _calls(file: Path) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in _nodes(file) if isinstance(node, ast.Call)]


def _allowed(keyword: ast.keyword) -> bool:
    if keyword.arg not in KEYWORDS:
        return True
    return isinstance(keyword.value, ast.Constant) and keyword.value.value in KEYWORDS[keyword.arg]


def test_nothing_is_unpickled_and_no_text_is_run() -> None:
    wrong = []
    for file in FILES:
        allowed = READERS_OF_PICKLES.get(_name(file), set())
        for module in _imports(file):
            if module.split(".")[0] in UNPICKLING or module in UNPICKLING:
                wrong += [] if f"imports {module}" in allowed else [f"{_name(file)} imports {module}"]
        for name, call in _calls(file):
            if name in CALLS and name not in allowed:
                wrong.append(f"{_name(file)}:{call.lineno}: {name}")
            wrong += [f"{_name(file)}:{call.lineno}: {word.arg}" for word in call.keywords if not _allowed(word)]
    assert not wrong


@pytest.mark.parametrize(
    ("call", "keyword"),
    [
        ("np.load", "allow_pickle"),
        ("torch.load", "weights_only"),
        ("from_pretrained", "trust_remote_code"),
        ("from_pretrained", "use_safetensors"),
    ],
)
def test_readers_of_foreign_files_state_that_they_run_no_code(call: str, keyword: str) -> None:
    named = [(name, node) for file in FILES for name, node in _calls(file) if name.endswith(call)]
    found = [node for name, node in named if keyword != "use_safetensors" or "Tokenizer" not in name]  # no weights
    assert found
    assert all(any(part.arg == keyword for part in node.keywords) for node in found)


@pytest.mark.parametrize(
    "argument",
    [
        *("--help", "--version", "doctor --help", "build-horovod --help", "timeline --help", "verify data --help"),
        *("bundle --help", "export --help"),
    ],
)
def test_help_imports_no_torch(argument: str) -> None:
    program = (
        "import sys\nfrom hvdtrain.__main__ import main\n"
        f"try:\n    main({argument.split()!r})\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy', 'horovod', 'transformers'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "hvdtrain" in done.stdout


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, hvdtrain; hvdtrain.Config; hvdtrain.Task; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_each_mutation_finds_the_text_that_it_replaces() -> None:
    wrong = [m for m in MUTATIONS if (PACKAGE / m.file).read_text(encoding="utf-8").count(m.old) != 1]
    assert not wrong, "tests/mutations/table.py is to follow the source"


def test_programs_in_texts_and_benchmarks_import_existing_names() -> None:
    """No type checker reads the programs that tests and the package hold as text, nor benchmarks."""
    wrong = []
    for file in sorted(ROOT.rglob("*.py")):
        if file.relative_to(ROOT).parts[0] not in ("hvdtrain", "tests", "benchmarks"):
            continue
        for node in _nodes(file):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("hvdtrain", "tests"):
                missing = [alias.name for alias in node.names if not _has(str(node.module), alias.name)]
                wrong += [f"{file}:{node.lineno}: {node.module}.{name}" for name in missing]
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            for module, names in re.findall(r"from (hvdtrain[\w.]*) import ([\w ,]+)", node.value):
                wanted = [name.split(" as ")[0].strip() for name in names.split(",")]
                wrong += [f"{file}:{node.lineno}: {module}.{n}" for n in wanted if not _has(module, n)]
            for module in re.findall(r"(?<![\w.])-m (hvdtrain[\w.]+)", node.value):
                wrong += [] if _file(module) else [f"{file}:{node.lineno}: {module}"]
    assert wrong == []


@cache
def _file(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((f for f in (path.with_suffix(".py"), path / "__init__.py", path / "__main__.py") if f.exists()), None)


@cache
def _has(module: str, name: str) -> bool:
    file = _file(module)
    return bool(_file(f"{module}.{name}") or (file and re.search(rf"\b{name}\b", file.read_text())))
