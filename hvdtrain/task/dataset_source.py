"""Read token ids from a folder written by datasets' `save_to_disk`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.errors import ConfigError, DataError
from hvdtrain.task.base import import_library
from hvdtrain.task.encode import Document, Encoder, Ids, TokenizerEncoder
from hvdtrain.task.source_files import hub_advice
from hvdtrain.task.text_sources import Source

_HELDOUT_SPLITS = ("validation", "test")
_EXPECTED = "a folder written by datasets' save_to_disk, with a column text or input_ids"
_ROWS = 1000


def dataset_source(folder: str, encoder: Encoder, option: str, *, wants_text: bool) -> Source:
    """Read the ids in column `input_ids`, or encode the column `text`.

    Of a DatasetDict, `train` is for training, and `validation`, otherwise `test`, is held out. Without these, the
    last rows are held out. `wants_text`: the user named a tokenizer, so `text` is required.

    Errors: DataError: there is no such folder, or no usable column.
    """
    path = Path(folder).expanduser()
    files = sorted(file for file in path.rglob("*") if file.is_file())
    if not files:
        raise DataError(
            f"there is no dataset in {folder!r}",
            expected=_EXPECTED,
            found=f"no files; working directory {Path.cwd()}",
            next_step=hub_advice(folder) or f"correct {option}",
        )
    rows = _Rows(path, encoder, wants_text)
    about = [(file, file.stat()) for file in files]
    return Source(
        name=f"the dataset {folder}",
        identity=[
            str(path.resolve()),
            encoder.identity(),
            *([file.relative_to(path).as_posix(), s.st_size, s.st_mtime_ns] for file, s in about),
        ],
        train=lambda: rows.ids(rows.splits[0]),
        heldout=lambda: rows.ids(rows.splits[1]) if rows.splits[1] is not None else None,
        vocabulary=rows.vocabulary,
        tokenizer=rows.tokenizer,
        end=rows.end,
        paths=[str(path.resolve())],
        skip=encoder.skip_pieces,
    )


@dataclass
class _Rows:
    """The rows of a dataset, which is opened on first use."""

    path: Path
    encoder: Encoder
    wants_text: bool

    @cached_property
    def splits(self) -> tuple[Any, Any]:
        """The dataset to train on, and the held-out one or None."""
        datasets = import_library("datasets", "--data.dataset", "datasets")
        try:
            loaded = datasets.load_from_disk(str(self.path))
        except Exception as error:  # damaged files raise errors of many classes
            raise DataError(
                f"cannot read the dataset {self.path}", expected=_EXPECTED, found=f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded, None
        if "train" not in loaded:
            raise DataError(
                f"the dataset {self.path} has no split to train on", expected="a split train", found=", ".join(loaded)
            )
        return loaded["train"], next((loaded[name] for name in _HELDOUT_SPLITS if name in loaded), None)

    def vocabulary(self) -> int:
        """Return the encoder's vocabulary, or one more than the largest id."""
        if self._column(self.splits[0]) == "text":
            return self.encoder.vocabulary()
        largest = (int(ids.max()) for split in self.splits if split is not None for ids in self.ids(split) if len(ids))
        return max(largest, default=-1) + 1

    def tokenizer(self) -> dict[str, bytes]:
        """Return the encoder's files, unless the ids in the dataset are of an unknown tokenizer."""
        return self.encoder.files() if self._knows_ids() else {}

    def end(self) -> int | None:
        """Return the encoder's id after each document, likewise."""
        return self.encoder.end_id() if self._knows_ids() else None

    def _knows_ids(self) -> bool:
        return isinstance(self.encoder, TokenizerEncoder) or self._column(self.splits[0]) == "text"

    def ids(self, split: Any) -> Iterator[Ids]:
        """Yield the ids of the rows of a split, in order."""
        column = self._column(split)
        if column == "text":
            texts = (str(row or "").encode("utf-8") for row in self._values(split, column))
            yield from self.encoder.encode(Document([text], f"a row of {self.path}") for text in texts)
            return
        for row in self._values(split, column):
            ids = np.asarray(row if len(row) else [], np.int64)
            if ids.size and int(ids.min()) < 0:
                wrong = f"the dataset {self.path} contains negative ids"
                raise DataError(wrong, expected="ids of 0 or more", found=str(ids.min()))
            yield ids.reshape(-1)

    def _values(self, split: Any, column: str) -> Iterator[Any]:
        for rows in split.select_columns([column]).iter(batch_size=_ROWS):
            yield from rows[column]

    def _column(self, split: Any) -> str:
        columns = split.column_names
        if "text" in columns and (self.wants_text or "input_ids" not in columns):
            return "text"
        if "input_ids" not in columns:
            raise DataError(
                f"the dataset {self.path} has no usable column",
                expected="a column text or input_ids",
                found=", ".join(columns),
                next_step="rename the column (Dataset.rename_column) and save again",
            )
        if self.wants_text:
            raise ConfigError(
                f"the dataset {self.path} has no text for the tokenizer",
                expected="a column text",
                found=", ".join(columns),
                next_step="omit --data.tokenizer, as input_ids are tokens",
            )
        return "input_ids"
