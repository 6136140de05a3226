"""The index of a model in several safetensors files, in the form that transformers reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from hvdtrain.state.shard_files import file_group
from hvdtrain.state.tensor_file import read_header

INDEX = "model.safetensors.index.json"


def index_of(folder: Path, files: Iterable[str]) -> dict[str, bytes]:
    """Return the content of the index by its name, for the tensors of the model in `files`.

    Nothing if one file has them all, and nothing if a tensor is divided over files: other programs would take a piece
    for the whole. Without an index, transformers refuses to load several files.

    Errors: OSError.
    """
    shards = sorted(name for name in files if name.endswith(".safetensors") and file_group(name) == "model")
    if len(shards) < 2:
        return {}
    places: dict[str, str] = {}
    total_bytes = 0
    for name in shards:
        entries, pieces = read_header(folder / name)
        if pieces:
            return {}
        places |= dict.fromkeys(entries, name)
        total_bytes += sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries.values())
    content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(places.items()))}
    return {INDEX: json.dumps(content, indent=1).encode()}
