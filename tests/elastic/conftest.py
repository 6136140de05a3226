"""What elastic runs are held against."""

from __future__ import annotations

import pytest

from tests.support import chaos, scenario


@pytest.fixture(scope="session")
def matrix_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Of the kill matrix's run, undisturbed."""
    return chaos.undisturbed(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="session")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Of the scenarios' run, undisturbed."""
    return chaos.undisturbed(tmp_path_factory.mktemp("scenario"), scenario.LENGTH)
