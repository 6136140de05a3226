"""Programs that the tests of hvdtrain launch need."""

from __future__ import annotations

import pytest

from tests.support.host import required_tool


@pytest.fixture
def shellcheck() -> str:
    """The linter of shell scripts."""
    return required_tool("shellcheck")
