"""Mutations of `hvdtrain/install/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "install/build.py",
        "                fcntl.flock(file, fcntl.LOCK_EX)\n",
        "",
        "a second build announces that it waits, and does not",
        "tests/install/test_build_cache.py",
    ),
    mutation(
        "install/versions.py",
        'return cls(flavour, _normal(found[1].rstrip(".")))',
        'return cls(flavour, found[1].rstrip("."))',
        "a leading zero in an MPI's version makes the label unlike the installed one",
        "tests/install/test_record.py",
    ),
    mutation(
        "install/versions.py",
        "return cls(_normal(public), flavour,",
        "return cls(public, flavour,",
        "a leading zero in torch's version makes the label unlike the installed one",
        "tests/install/test_record.py",
    ),
    mutation(
        "install/venv.py",
        "    (venv / _STAMP).unlink(missing_ok=True)\n",
        "",
        "an environment whose update was interrupted counts as current",
        "tests/install/test_venv.py",
    ),
)
