"""Programs that the tests of hvdtrain launch need."""

from __future__ import annotations

import os
import shutil

import pytest


@pytest.fixture
def shellcheck() -> str:
    """The linter of shell scripts."""
    found = shutil.which("shellcheck")
    if found is None and "CI" in os.environ:
        pytest.fail("shellcheck is missing, which .ci/run installs")
    return found or pytest.skip("shellcheck is not installed")
