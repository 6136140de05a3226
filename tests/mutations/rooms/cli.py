"""Mutations of `hvdtrain/cli/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "cli/launch_spec.py",
        "return tuple(name for name in names if name in environ and name not in hidden)",
        "return tuple(names)",
        "a batch script exports variables that do not exist",
        "tests/cli/test_launch_targets.py",
    ),
    mutation(
        "cli/train.py",
        "return EXIT_OF_SIGNAL.get(result.reason, 0)",
        "return 0",
        "a run that a signal stopped exits with 0",
        "tests/cli/test_report_at_end.py",
        "tests/cli/test_train.py",
        "tests/cli/test_launchers.py",
    ),
)
