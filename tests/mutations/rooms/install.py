"""Mutations of `hvdtrain/install/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("install/build.py", "tests/install/test_build_cache.py"): {
        "a second build announces that it waits, and does not": (
            "                fcntl.flock(file, fcntl.LOCK_EX)\n",
            "",
        ),
    },
    ("install/versions.py", "tests/install/test_record.py"): {
        "a leading zero in an MPI's version makes the label unlike the installed one": (
            'return cls(flavour, _normal(found[1].rstrip(".")))',
            'return cls(flavour, found[1].rstrip("."))',
        ),
        "a leading zero in torch's version makes the label unlike the installed one": (
            "return cls(_normal(public), flavour,",
            "return cls(public, flavour,",
        ),
    },
    ("install/venv.py", "tests/install/test_venv.py"): {
        "an environment whose update was interrupted counts as current": (
            "    (venv / _STAMP).unlink(missing_ok=True)\n",
            "",
        ),
    },
}
