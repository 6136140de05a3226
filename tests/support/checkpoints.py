"""Write a checkpoint of one rank without a background thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.shard_files import ShardedWrite


def save(store: CheckpointStore, step: int, state: StateDict, notes: Mapping[str, Any] | None = None) -> Path:
    """Write a checkpoint, remove none, and return its path."""
    write = ShardedWrite(store.begin(step, 1), step, 1, lambda: state, 0, notes or {}, None)
    return store.directory / write.write_on_rank_0(store, store.progress, threading.Event())
