"""The paths of a run folder: unlike each other, inside it, and found by the patterns that readers use."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from hvdtrain.errors import ConfigError
from hvdtrain.run_layout import RunLayout, TimelineLayout


def test_every_path_is_inside_the_folder_and_no_two_are_the_same() -> None:
    layout = RunLayout(Path("run"))
    files = {**vars(layout), **vars(layout.timeline), "timeline": layout.timeline.folder}
    paths = [path for name, path in files.items() if name != "folder"]
    assert all(path.is_relative_to("run") and path != Path("run") for path in paths)
    assert len(set(paths)) == len(paths)


def test_patterns_find_the_files_that_are_named_here() -> None:
    timeline = TimelineLayout(Path("timeline"))
    assert fnmatch(timeline.spans(12).name, timeline.SPANS)
    assert fnmatch(timeline.horovod(3, 8).name, timeline.HOROVOD)
    assert fnmatch(timeline.torch_profile(3, 8, 12).name, timeline.TORCH)


def test_a_config_is_read_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    assert not layout.is_run
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        layout.read_config()
    layout.config.write_text("train: {steps: 5}\n")
    layout.journal.touch()
    assert layout.is_run and layout.read_config() == {"train": {"steps": 5}}
