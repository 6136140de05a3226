"""Token ids in one file, mapped into memory, and the windows of it that a model is trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.utils.data import Dataset

    Ids = NDArray[np.integer[Any]]
    TensorDataset = Dataset[Tensor]
else:
    TensorDataset = object

FORMAT = 1
"""Version of what stands in the cache; another one is built anew."""

_ABOUT = "about.json"
_TOKENS = "tokens.bin"


@dataclass(frozen=True)
class TokenFile:
    """Where the ids stand.

    Args:
        path: the file.
        dtype: numpy's name of the ids' type, byte order included.
        offset_bytes: where the first id begins.
        train: how many ids, from the first on, are trained on.
        heldout: how many ids after those are held out.
        vocabulary: one more than the largest id.
        digest: SHA-256 of the ids as they stand in the file: equal on all hosts where the data is.
    """

    path: str
    dtype: str
    offset_bytes: int
    train: int
    heldout: int
    vocabulary: int
    digest: str

    def save(self, folder: Path) -> None:
        """Describe the file inside of `folder`; a file of that folder is named relative to it."""
        (folder / _ABOUT).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> TokenFile | None:
        """What `save` described, None where that is not whole."""
        try:
            about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
            if about.pop("format") != FORMAT:
                return None
            about["path"] = str(folder / about["path"])
            file = cls(**about)
            return file if Path(file.path).stat().st_size >= file.size_bytes() else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def size_bytes(self) -> int:
        """How long the file has to be at least."""
        import numpy as np

        return self.offset_bytes + (self.train + self.heldout) * np.dtype(self.dtype).itemsize

    def map(self) -> Ids:
        """All ids (train + heldout,), read where they are touched."""
        import numpy as np

        mapped = np.memmap(
            self.path, np.dtype(self.dtype), mode="r", offset=self.offset_bytes, shape=(self.train + self.heldout,)
        )
        return np.asarray(mapped)  # a plain array over the map: slicing a memmap costs microseconds


def write_tokens(
    folder: Path, train: Iterable[Ids], heldout: Iterable[Ids] | None, *, tail: float, vocabulary: int
) -> TokenFile:
    """Write ids as they come to a file in `folder`.

    Args:
        folder: holds the file and its description afterwards.
        train: ids (n,), piece by piece.
        heldout: likewise; without it the last of `train` are held out.
        tail: what share of `train` is held out where `heldout` is None.
        vocabulary: one more than the largest id.
    """
    import numpy as np

    dtype = np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")
    digest = hashlib.sha256()

    def written(pieces: Iterable[Ids]) -> int:
        count = 0
        for piece in pieces:
            content = piece.astype(dtype).tobytes()
            digest.update(content)
            file.write(content)
            count += len(piece)
        return count

    with (folder / _TOKENS).open("wb") as file:
        train_count = written(train)
        heldout_count = int(train_count * tail) if heldout is None else written(heldout)
        if heldout is None:
            train_count -= heldout_count
    about = TokenFile(_TOKENS, dtype.str, 0, train_count, heldout_count, vocabulary, digest.hexdigest())
    about.save(folder)
    return about


class Windows(TensorDataset):
    """Windows of seq_len + 1 ids, one seq_len after the other: each token is predicted once, but for a tail.

    Windows overlap in one id, the last target of one being the first input of the next. Pickles as the place of
    the file, which is mapped anew.

    Args:
        file: where the ids stand.
        start: the first id.
        count: how many ids.
        seq_len: ids that are predicted in a window.
    """

    def __init__(self, file: TokenFile, start: int, count: int, seq_len: int) -> None:
        self.file = file
        self.start = start
        self.count = count
        self.seq_len = seq_len
        self._ids: Ids | None = None

    def __len__(self) -> int:
        return max(0, (self.count - 1) // self.seq_len)

    def __getitem__(self, index: int) -> Tensor:
        """The ids (seq_len + 1,), int64."""
        import torch

        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        if self._ids is None:
            self._ids = self.file.map()
        begin = self.start + index * self.seq_len
        return torch.from_numpy(self._ids[begin : begin + self.seq_len + 1].astype("int64"))

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ids": None}
