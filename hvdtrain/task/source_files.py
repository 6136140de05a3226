"""Files of a corpus, on this machine or behind a URL: listed by patterns, and read as bytes.

fsspec reads URLs, and pyarrow Zstandard: both are of the extra `data`.
"""

from __future__ import annotations

import glob
import gzip
import io
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from hvdtrain.errors import DataError, HvdtrainError, TransientDataError
from hvdtrain.files import is_url
from hvdtrain.object_store import describe_fault, open_url
from hvdtrain.task.base import import_library

EXTRA = "data"

_BUFFER_BYTES = 1 << 20
_HTTP = ("http:", "https:")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_FILE_TYPES = {".txt", ".md", ".py", ".json", ".jsonl", ".npy", ".parquet", ".csv", ".gz", ".zst"}
_VERSIONS = ("ETag", "etag", "Content-MD5", "Digest", "md5Hash", "Last-Modified", "LastModified", "last_modified",
             "mtime", "updated", "created")  # fmt: skip
"""What stores call the property of an object that changes with its content. The first one that it has is used."""

_DECOMPRESSIONS: Mapping[str, Callable[[Any], Any]] = {
    ".gz": lambda stream: gzip.GzipFile(fileobj=stream),
    ".zst": lambda stream: import_library("pyarrow", "a .zst file", EXTRA).CompressedInputStream(stream, "zstd"),
}


@dataclass
class ReadBytes:
    """How far a list of files is read, in bytes on the disk; they are read one after the other."""

    total: int
    _done: int = 0
    _stream: Any = None

    def begin(self) -> None:
        """Begin with the first file."""
        self._done, self._stream = 0, None

    def fraction(self) -> float:
        """Return how far it is."""
        at = 0
        with suppress(Exception):  # it is closed, or does not say where it is
            at = self._stream.tell() if self._stream is not None else 0
        return min(1.0, (self._done + at) / max(1, self.total))

    @contextmanager
    def reading(self, stream: Any, size_bytes: int) -> Iterator[None]:
        """Count a file as read at the end."""
        self._stream = stream
        try:
            yield
            self._done += size_bytes
        finally:
            self._stream = None


@dataclass(frozen=True)
class SourceFile:
    """A file that an option names."""

    path: str  # absolute, or a URL
    name: str  # relative to the common folder of all files, so it is the same on every host
    size_bytes: int
    version: int | str | None  # changes with the content: the time of its last change in ns, or for a URL the etag
    option: str
    read: ReadBytes = field(compare=False, repr=False)  # of all files of its list

    @property
    def identity(self) -> list[Any]:
        """JSON values that change with the content."""
        return [self.path, self.size_bytes, self.version]

    @property
    def endings(self) -> tuple[str, str]:
        """The ending that names the format, and that of the compression or an empty text, in lower case."""
        name, ending = os.path.splitext(_without_query(self.path).lower())  # noqa: PTH122 (a URL is no Path)
        return (os.path.splitext(name)[1], ending) if ending in _DECOMPRESSIONS else (ending, "")  # noqa: PTH122


def files_matching(patterns: Sequence[str], option: str = "--data.text") -> list[SourceFile]:
    """List the files that match any of the patterns of an option, which may contain **, by name.

    Errors: DataError: a pattern matches no file, a file is not accessible, or all files are empty.
    """
    found: dict[str, tuple[int, int | str | None]] = {}
    for pattern in patterns:
        if is_url(pattern):
            matches = dict(_behind_url(pattern, option))
        else:  # Path.glob takes no absolute pattern
            plain = Path(pattern).expanduser()  # its name may have brackets
            paths = [plain] if plain.is_file() else map(Path, glob.glob(str(plain), recursive=True))  # noqa: PTH207
            matches = dict(_described(path.absolute(), option) for path in paths if path.is_file())
        if not matches:
            raise DataError(
                f"no file matches {pattern!r}",
                expected="files, by name, URL or a pattern such as 'books/**/*.txt' in quotes",
                found=f"nothing; working directory {Path.cwd()}",
                next_step=hub_advice(pattern) or f"correct {option}",
            )
        found |= matches
    files = _named(found, option)
    if not sum(file.size_bytes for file in files):
        raise DataError(
            "the text is empty",
            expected="text to train on",
            found=f"{len(files)} file(s) of 0 bytes, such as {files[0].path}",
            next_step=f"correct {option}",
        )
    return files


def local_files(paths: Iterable[Path], option: str = "--data.text") -> list[SourceFile]:
    """Describe files of this machine, by name. Errors: DataError: one is not accessible."""
    return _named(dict(_described(path, option) for path in paths), option)


def check_unchanged(file: SourceFile) -> None:
    """Check that a file is as it was when it was listed. Errors: DataError."""
    found = _behind_url(file.path, file.option) if is_url(file.path) else [_described(Path(file.path), file.option)]
    if dict(found).get(file.path) != (file.size_bytes, file.version):
        what = f"{file.path} has changed while it was trained on"
        raise DataError(what, expected="the same size and time, or etag", next_step="resume, to train on the new text")


def hub_advice(name: str) -> str:
    """Return how to get a data set, if a name looks like one of the Hugging Face Hub, otherwise an empty text."""
    if not _HUB_ID.fullmatch(name) or Path(name).suffix in _FILE_TYPES:
        return ""
    return (
        f"for a data set of the Hugging Face Hub: hf download {name} --repo-type dataset --local-dir DIR. Then use"
        " --data.text 'DIR/**/*.parquet' or --data.chat 'DIR/**/*.jsonl', with the ending of its files"
    )


def _named(found: Mapping[str, tuple[int, int | str | None]], option: str) -> list[SourceFile]:
    folders = [path.split("/")[:-1] for path in found]
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(min(folders), max(folders), strict=False)))
    read = ReadBytes(sum(size_bytes for size_bytes, _ in found.values()))
    names = {path: "/".join(path.split("/")[common:]) for path in found}
    files = [SourceFile(path, names[path], *about, option, read) for path, about in found.items()]
    return sorted(files, key=lambda file: file.name)


def _described(path: Path, option: str) -> tuple[str, tuple[int, int]]:
    try:
        about = path.stat()
    except OSError as error:
        raise _unreadable(str(path), error, option) from error
    return str(path), (about.st_size, about.st_mtime_ns)


def _without_query(path: str) -> str:
    return path.partition("?")[0] if path.startswith(_HTTP) else path


def _behind_url(pattern: str, option: str) -> Iterator[tuple[str, tuple[int, int | str | None]]]:
    system, path = open_url(pattern, option)
    try:
        # A listing would take a file that cannot be read for one that does not exist.
        found = system.glob(path, detail=True) if glob.has_magic(_without_query(path)) else {path: system.info(path)}
        for name, about in found.items():
            if about["type"] == "file":
                known = about if about.get("size") is not None else system.info(name)
                size = known.get("size")
                version = next((known[key] for key in _VERSIONS if known.get(key)), None)
                yield system.unstrip_protocol(name), (1 if size is None else size, version and str(version))
    except Exception as error:
        raise _unreadable(pattern, error, option) from error


@contextmanager
def opened(file: SourceFile, *, seeks: bool = False) -> Iterator[BinaryIO]:
    """Open the content, decompressed. `seeks`: the reader seeks; what cannot do that is copied to the disk first.

    Errors: DataError: it cannot be opened or, in the body, read.
    """
    compression = file.endings[1]
    streams = file.path.startswith(_HTTP)  # in one request; some servers send no parts of a file
    try:
        with ExitStack() as stack:
            if not is_url(file.path):
                stream: Any = stack.enter_context(Path(file.path).open("rb"))
            else:
                system, path = open_url(file.path, file.option)
                stream = stack.enter_context(system.open(path, "rb", **({"block_size": 0} if streams else {})))
            stack.enter_context(file.read.reading(stream, file.size_bytes))
            if compression:
                stream = stack.enter_context(_DECOMPRESSIONS[compression](stream))
            if seeks and (compression or streams):
                whole = stack.enter_context(TemporaryFile())
                shutil.copyfileobj(stream, whole, _BUFFER_BYTES)
                whole.seek(0)
                stream = whole
            yield stream if seeks else io.BufferedReader(stream, _BUFFER_BYTES)
    except HvdtrainError:
        raise
    except Exception as error:  # libraries of stores and formats have classes of their own
        raise _unreadable(file.path, error, file.option) from error


def _unreadable(path: str, error: Exception, option: str) -> DataError:
    """Return the error for a file that `option` names; for a network that fails, one that may pass."""
    found, lasting = describe_fault(error)
    is_permission = isinstance(error, PermissionError) or isinstance(error.__cause__, PermissionError)
    wrong = "its permissions" if is_permission else "that it is whole, readable and not encrypted"
    return (DataError if lasting or not is_url(path) else TransientDataError)(
        f"cannot read the file {path}",
        expected="a readable file",
        found=found,
        next_step=f"check {wrong}, or exclude it from {option}",
    )
