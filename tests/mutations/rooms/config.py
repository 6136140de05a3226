"""Mutations of `hvdtrain/config/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("config/windows.py", "tests/config/test_windows.py"): {
        "the last step of a window is left out": (
            "return self.last is not None and step > self.last",
            "return self.last is not None and step >= self.last",
        ),
    },
}
