import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache and a temporary folder of the test's own."""
    monkeypatch.setattr("hvdtrain.task.once_per_host.gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hvdtrain" / "corpus"
