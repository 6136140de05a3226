"""Load a user's functions and classes by name: ``file.py:name`` or ``module:name``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from hvdtrain.errors import HvdtrainError


def load(spec: str, error: type[HvdtrainError], expected: str, folder: Path = Path()) -> Any:
    """Return the function or class that `spec` names, ``file.py:name`` (relative to `folder`) or ``module:name``.

    Raises `error` if there is none. The message says which kind of function is `expected`, and lists the existing ones.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place.strip(".") or not name:
        raise error(f"invalid name {spec!r}", expected=f"file.py:name or module:name: {expected}")
    try:
        module = _import_file(folder / place, error) if place.endswith(".py") else _import_module(place, error)
    except SystemExit as ended:
        raise error(
            f"{place} exits when it is imported",
            expected=f"a file that can be imported: {expected}",
            found=f"sys.exit({ended.code!r})",
            next_step="move code that runs on import below: if __name__ == '__main__':",
        ) from ended
    found = getattr(module, name, None)
    if not callable(found):
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise error(f"{place} has no function {name!r}", expected=expected, found=", ".join(own) or "no functions")
    return found


def _import_module(name: str, error: type[HvdtrainError]) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name and name.startswith(missing.name):
            next_step = "use file.py:name for a file, or install the module into this environment"
            raise error(f"there is no module {name!r} to import", next_step=next_step) from missing
        raise


def _import_file(path: Path, error: type[HvdtrainError]) -> Any:
    if not path.is_file():
        raise error(f"there is no file {str(path)!r} to import", found=f"working directory {Path.cwd()}")
    # Its folder comes first on the path, as with `python file.py`: the file may import its neighbours, and
    # loader processes import it again by its name.
    sys.path.insert(0, str(path.resolve().parent))
    if path.stem not in sys.modules and path.stem.isidentifier():
        module = importlib.import_module(path.stem)
        if module.__file__ and Path(module.__file__).samefile(path):
            return module
    # Import it once, also if several of its names are loaded.
    name = f"loaded_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ and Path(loaded.__file__).samefile(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
