"""The documents of a corpus: source files of the standard library, or the user's files."""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import DataError
from hvdtrain.task.encode import Document

if TYPE_CHECKING:
    from hvdtrain.task.encode import Encoder, Ids

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_PIECE_BYTES = 1 << 20
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_FILE_TYPES = {".txt", ".md", ".py", ".json", ".jsonl", ".npy", ".parquet", ".csv"}
_TO_DATASET = (
    "datasets.load_dataset('{kind}', data_files='{path}').save_to_disk('OUT') in Python, then --data.dataset OUT"
)
_MARKS = {  # longer ones first, because one begins with a shorter one
    codecs.BOM_UTF32_LE: ("UTF-32", "iconv -f UTF-32 -t UTF-8"),
    codecs.BOM_UTF32_BE: ("UTF-32", "iconv -f UTF-32 -t UTF-8"),
    codecs.BOM_UTF16_LE: ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
    codecs.BOM_UTF16_BE: ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
    b"\x1f\x8b": ("gzip", "gunzip '{path}'"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", "unzstd '{path}'"),
    b"\xfd7zXZ": ("xz", "unxz '{path}'"),
    b"PK\3\4": ("zip", "unzip '{path}'"),
    b"%PDF-": ("PDF", "pdftotext '{path}'"),
    b"PAR1": ("Parquet", _TO_DATASET.replace("{kind}", "parquet")),
}
_JSON_LINES = {".jsonl", ".ndjson"}


@dataclass(frozen=True)
class Source:
    """Documents as ids."""

    name: str
    identity: list[Any]  # JSON values that change with the documents' content, order or split
    train: Callable[[], Iterator[Ids]]  # starts to yield the ids to train on, in pieces
    heldout: Callable[[], Iterator[Ids] | None]  # starts to yield them; None: hold out the end of `train`
    vocabulary: Callable[[], int]  # returns one more than the largest id; called when the ids are written
    tokenizer: Callable[[], Mapping[str, bytes]]  # its files for transformers, by name; empty if unknown
    end: Callable[[], int | None]  # returns the id after each document; None if there is none, or it is unknown
    note: Callable[[], str] = str  # returns a line about the ids after they have been written


@dataclass(frozen=True)
class TextFile:
    """A file. Its name is relative to the common folder of all files, so it is the same on every host."""

    path: Path
    name: str
    size_bytes: int
    changed_ns: int


def standard_library() -> list[TextFile]:
    """List the source files of the interpreter's standard library without its tests, by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        files += [Path(place, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(
            "this Python has no source files of its standard library to train on",
            expected=f"*.py in {folder}",
            next_step="use your own text: --data.text 'FILES'",
        )
    return _text_files(files, folder)


def files_matching(patterns: Sequence[str], option: str = "--data.text") -> list[TextFile]:
    """List the files that match any of the patterns of an option, which may contain **, by name.

    Errors: DataError: a pattern matches no file, a file is not accessible, or all files are empty.
    """
    files: set[Path] = set()
    for pattern in patterns:
        names = glob.glob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207 (Path.glob takes no absolute)
        found = [path for path in map(Path.resolve, map(Path, names)) if path.is_file()]
        if not found:
            raise DataError(
                f"no file matches {pattern!r}",
                expected="files, by name or by a pattern such as 'books/**/*.txt' in quotes",
                found=f"nothing; working directory {Path.cwd()}",
                next_step=hub_advice(pattern) or f"correct {option}",
            )
        files.update(found)
    folder = Path(os.path.commonpath([path.parent for path in files]))
    described = _text_files(sorted(files), folder)
    if not sum(file.size_bytes for file in described):
        raise DataError(
            "the text is empty",
            expected="text to train on",
            found=f"{len(described)} file(s) of 0 bytes in {folder}",
            next_step=f"correct {option}",
        )
    return described


def hub_advice(name: str) -> str:
    """Return how to get a data set, if a name looks like one of the Hugging Face Hub, otherwise an empty text."""
    if not _HUB_ID.fullmatch(name) or Path(name).suffix in _FILE_TYPES:
        return ""
    return (
        f"for a data set of the Hugging Face Hub: hf download {name} --repo-type dataset --local-dir DIR. Then use"
        " --data.text 'DIR/**/*.txt' or --data.chat 'DIR/**/*.jsonl'; Parquet files are converted in Python:"
        " datasets.load_dataset('DIR').save_to_disk('OUT'), then --data.dataset OUT"
    )


def _text_files(paths: list[Path], folder: Path) -> list[TextFile]:
    files = []
    for path in paths:
        try:
            about = path.stat()
        except OSError as error:
            raise unreadable(path, error) from error
        files.append(TextFile(path, path.relative_to(folder).as_posix(), about.st_size, about.st_mtime_ns))
    return sorted(files, key=lambda file: file.name)


def text_source(files: list[TextFile], encoder: Encoder, heldout: float) -> Source:
    """Make a source that holds out whole files, by a hash of their name, or the end of a single file.

    Errors: DataError: a file is JSON.
    """
    for file in files:
        if file.path.suffix in _JSON_LINES:
            raise DataError(
                f"{file.path} is JSON, not plain text",
                expected="text; the model would learn JSON's names and quotes, too",
                next_step=f"for its field text: {_TO_DATASET.format(kind='json', path=file.path)}; for conversations:"
                " --data.chat; to train on JSON itself, end its name in .txt",
            )
    held = _choose_heldout(files, heldout)
    train = [file for file in files if file not in held]
    single = _has_single(files)
    return Source(
        name=files[0].name if len(files) == 1 else f"{len(files)} files",
        identity=[encoder.identity(), *([str(f.path), f.size_bytes, f.changed_ns, f in held] for f in files)],
        train=lambda: _encoded(train, encoder),
        heldout=lambda: None if single else _encoded([f for f in files if f in held], encoder),
        vocabulary=encoder.vocabulary,
        tokenizer=encoder.files,
        end=encoder.end_id,
    )


def _has_single(files: list[TextFile]) -> bool:
    return sum(file.size_bytes > 0 for file in files) == 1


def _choose_heldout(files: list[TextFile], share: float) -> set[TextFile]:
    """Choose files by their hashed names: never all with text, and at least one with text if `share` is not 0."""
    if _has_single(files) or not share:
        return set()
    held = {file for file in files if _hash01(file.name) < share}
    if not any(file.size_bytes for file in held):  # few files: choose the one with the size nearest to the share
        filled = [file for file in files if file.size_bytes]
        wanted_bytes = share * sum(file.size_bytes for file in filled)
        held = {min(filled, key=lambda file: (abs(file.size_bytes - wanted_bytes), file.name))}
    if not sum(file.size_bytes for file in files if file not in held):
        held -= {max(files, key=lambda file: (file.size_bytes, file.name))}
    return held


def _hash01(name: str) -> float:
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:7], "big") / (1 << 56)


def _encoded(files: list[TextFile], encoder: Encoder) -> Iterator[Ids]:
    return encoder.encode(Document(_pieces(file.path), str(file.path)) for file in files)


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield the content of a text file. Errors: DataError: it cannot be read, or is not text."""
    at_bytes = 0
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                begins = () if at_bytes else [about for mark, about in _MARKS.items() if piece.startswith(mark)]
                if begins or b"\0" in piece:
                    mark, convert = next(iter(begins), ("", "iconv -f UTF-16LE -t UTF-8"))
                    raise DataError(
                        f"{path} is not text that can be trained on",
                        expected="UTF-8, or another encoding without zero bytes",
                        found=f"{mark}, according to its first bytes"
                        if mark
                        else f"a zero byte at {at_bytes + piece.index(0)}: a binary file, or UTF-16 without its mark",
                        next_step=f"convert it ({convert.format(path=path)}), or exclude it from --data.text",
                    )
                yield piece
                at_bytes += len(piece)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError, option: str = "--data.text") -> DataError:
    """Return the error for a file that `option` names."""
    return DataError(
        f"cannot read the file {path}",
        expected="a readable file",
        found=error.strerror,
        next_step=f"check its permissions, or exclude it from {option}",
    )
