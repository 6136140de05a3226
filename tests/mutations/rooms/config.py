"""Mutations of `hvdtrain/config/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "config/windows.py",
        "return self.last is not None and step > self.last",
        "return self.last is not None and step >= self.last",
        "the last step of a window is left out",
        "tests/config/test_windows.py",
    ),
)
