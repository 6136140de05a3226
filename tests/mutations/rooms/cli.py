"""Mutations of `hvdtrain/cli/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("cli/launch_spec.py", "tests/cli/test_launch_targets.py"): {
        "a batch script exports variables that do not exist": (
            "return tuple(name for name in names if name in environ and name not in hidden)",
            "return tuple(names)",
        ),
    },
    ("cli/train.py", "tests/cli/test_report_at_end.py", "tests/cli/test_train.py", "tests/cli/test_launchers.py"): {
        "a run that a signal stopped exits with 0": ("return EXIT_OF_SIGNAL.get(result.reason, 0)", "return 0"),
    },
}
