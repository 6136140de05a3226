"""Use a user's .npy file of token ids in place."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import DataError
from hvdtrain.regular import open_regular
from hvdtrain.task.token_file import TokenFile

if TYPE_CHECKING:
    import numpy as np

_STRIDE = 1 << 22
_EXPECTED = "a .npy of token ids, as numpy.save writes a one-dimensional array of integers"


def describe_npy(path: Path, tail: float) -> TokenFile:
    """Check each id, and describe the file. The last ids are held out.

    Args:
        path: the .npy file.
        tail: fraction of the ids to hold out.

    Errors:
        DataError: it is no .npy file, is empty, has other than one dimension or integers, or has a negative id.
    """
    ids = _mapped(path)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(f"{path} contains no tokens", expected=_EXPECTED, found=f"dtype {ids.dtype}, shape {ids.shape}")
    if not len(ids):
        raise DataError(f"{path} is empty", expected=_EXPECTED, found="an array without elements")
    digest, smallest, largest = hashlib.sha256(), 0, 0
    for begin in range(0, len(ids), _STRIDE):
        part = ids[begin : begin + _STRIDE]
        smallest, largest = min(smallest, int(part.min())), max(largest, int(part.max()))
        digest.update(part.tobytes())
    if smallest < 0:
        raise DataError(f"{path} contains negative ids", expected="ids of 0 or more", found=str(smallest))
    heldout = int(len(ids) * tail)
    return TokenFile(str(path), ids.dtype.str, ids.offset, len(ids) - heldout, heldout, largest + 1, digest.hexdigest())


def _mapped(path: Path) -> np.memmap[Any, Any]:
    import numpy as np

    try:
        open_regular(path).close()  # numpy would block on a FIFO
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise DataError(
            f"cannot read the tokens {path}",
            expected=_EXPECTED,
            found=error.strerror or str(error),
            next_step="correct --data.tokens",
        ) from error
    except (ValueError, EOFError) as error:  # no .npy file, a pickle, an array of objects, a truncated file
        raise DataError(f"{path} contains no tokens", expected=_EXPECTED, found=str(error)) from error
    if not isinstance(loaded, np.memmap):
        loaded.close()
        raise DataError(f"{path} contains no tokens", expected=_EXPECTED, found="an archive of arrays (.npz)")
    return loaded
