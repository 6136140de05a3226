"""One loop over data, in a process of its own: python data_loops.py LOOP FOLDER SEQ_LEN. Prints tokens and seconds.

LOOP is WHAT/WHO. `parquet`: documents of FOLDER/text.parquet are tokenised, packed into windows and batched, from
nothing; `prepared`: each one's own format of the same tokens is read, shuffled and batched; `prepare`: that is made,
and not timed; `resume`: the time to the first batch at nine tenths of an epoch. `streamed` and `resume_streamed`: the
same as `parquet` and `resume` by --data.streaming, on a host that has no tokens yet. All in one thread.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any

BATCH = 32
SHARE = 0.9

Result = dict[str, float]


def config(folder: Path, seq_len: int) -> Any:
    from hvdtrain.task.text_config import TextConfig

    return TextConfig(
        text=str(folder / "text.parquet"),
        field="text",
        tokenizer=str(folder / "tokenizer.json"),
        seq_len=seq_len,
        heldout=0.0,
    )


def stream(folder: Path, seq_len: int) -> tuple[Any, int]:
    """Our samples in their order, and the steps of an epoch."""
    from hvdtrain.data.loader import Stream
    from hvdtrain.task.corpus import open_corpus

    train = open_corpus(config(folder, seq_len)).train
    return Stream(train, 0, BATCH, BATCH, 0, 1), len(train) // BATCH


def ours(folder: Path, seq_len: int, share: float = 0.0) -> Iterator[Any]:
    made, steps = stream(folder, seq_len)
    yield from drawn(made, int(share * steps), steps)


def drawn(made: Any, first: int, steps: int) -> Iterator[Any]:
    """The batches of a stream from a step on."""
    from hvdtrain.config.schema import LoaderConfig
    from hvdtrain.data.loader import train_batches

    for batch in train_batches(made, first * BATCH, steps - first, LoaderConfig(), None, on_cuda=False):
        yield batch.batch


def streamed(folder: Path, seq_len: int, share: float = 0.0) -> Result:
    """As many batches as an epoch has, or the first one after a part of it: the place is as in a checkpoint."""
    from hvdtrain.data.loader import Stream
    from hvdtrain.task.corpus import open_corpus

    _, steps = stream(folder, seq_len)  # of the prepared tokens
    first, place = int(share * steps), {}
    if first:
        read = open_corpus(replace(config(folder, seq_len), streaming=True)).train.by_position(0, {}, BATCH)
        read[first * BATCH]
        read.note_place()
        place = json.loads(read.state())
    shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"]) / "hvdtrain/streamed", ignore_errors=True)

    def batches() -> Iterator[Any]:
        train = open_corpus(replace(config(folder, seq_len), streaming=True)).train
        yield from drawn(Stream(train, 0, BATCH, BATCH, 0, 1, data_state=place), first, steps)

    return timed(batches, first=bool(first))


def documents(folder: Path, seq_len: int) -> Any:
    """Windows of tokens by datasets, as its documentation packs them."""
    from datasets import load_dataset
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<end>")

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = list(chain.from_iterable([*e.ids, end] for e in tokenizer.encode_batch(rows["text"])))
        whole = len(ids) // seq_len * seq_len
        return {"ids": [ids[i : i + seq_len] for i in range(0, whole, seq_len)]}

    rows = load_dataset("parquet", data_files=str(folder / "text.parquet"), split="train", streaming=True)
    return rows.map(encode, batched=True, batch_size=64, remove_columns=["text"]).with_format("torch")


def hf(folder: Path, seq_len: int, skipped: int = 0) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    made = documents(folder, seq_len).shuffle(seed=0, buffer_size=1000)
    return DataLoader(made.skip(skipped) if skipped else made, batch_size=BATCH)


def hf_prepared(folder: Path, seq_len: int) -> Iterable[Any]:
    from datasets import load_from_disk
    from torch.utils.data import DataLoader

    return DataLoader(load_from_disk(str(folder / "hf")).with_format("torch"), batch_size=BATCH, shuffle=True)


def litdata(folder: Path, seq_len: int) -> Iterable[Any]:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    made = StreamingDataset(str(folder / "litdata"), item_loader=TokensLoader(block_size=seq_len), shuffle=True)
    return StreamingDataLoader(made, batch_size=BATCH, num_workers=0)


def mosaic(folder: Path, seq_len: int) -> Iterable[Any]:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    made = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH)
    return DataLoader(made, batch_size=BATCH)


def use_streaming() -> None:
    """Import MosaicML's package: at once it imports torchvision, which text needs not."""
    names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
    for name in names:
        stand_in: Any = ModuleType(name)
        stand_in.__spec__, stand_in.VisionDataset = ModuleSpec(name, None), object
        stand_in.to_tensor = stand_in.transforms = stand_in.functional = None
        sys.modules[name] = stand_in
    importlib.import_module("streaming")
    for name in names:
        del sys.modules[name]


def windows(folder: Path, seq_len: int) -> Iterator[Any]:
    """The same windows for all formats, as arrays."""
    for row in documents(folder, seq_len).with_format("numpy"):
        yield row["ids"]


def prepare_ours(folder: Path, seq_len: int) -> None:
    from hvdtrain.task.corpus import prepare_corpus

    prepare_corpus(config(folder, seq_len), None, lambda *facts: None)


def prepare_hf(folder: Path, seq_len: int) -> None:
    from datasets import Dataset

    Dataset.from_generator(lambda: ({"ids": ids} for ids in windows(folder, seq_len))).save_to_disk(str(folder / "hf"))


def prepare_mosaic(folder: Path, seq_len: int) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mds"), columns={"ids": f"ndarray:int64:{seq_len}"}) as writer:
        for ids in windows(folder, seq_len):
            writer.write({"ids": ids.astype("int64")})


def prepare_litdata(folder: Path, seq_len: int) -> None:
    import torch
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    (folder / "litdata").mkdir(exist_ok=True)
    writer = BinaryWriter(str(folder / "litdata"), chunk_bytes="64MB", item_loader=TokensLoader(block_size=seq_len))
    for number, ids in enumerate(windows(folder, seq_len)):
        writer.add_item(number, torch.from_numpy(ids.astype("int64")))
    writer.done()
    writer.merge()


def timed(batches: Callable[[], Iterable[Any]], first: bool = False) -> Result:
    """Tokens of all batches and the seconds for them, or the seconds to the first one."""
    began, tokens = time.perf_counter(), 0
    for batch in islice(batches(), 1 if first else None):
        ids = batch["ids"] if isinstance(batch, dict) else batch
        tokens += ids.shape[0] * SEQ_LEN
    return {"tokens": tokens, "seconds": time.perf_counter() - began}


LOOPS: dict[str, Callable[[Path, int], Any]] = {
    "parquet/ours": lambda folder, n: timed(lambda: ours(folder, n)),
    "parquet/hf": lambda folder, n: timed(lambda: hf(folder, n)),
    "prepare/ours": prepare_ours,
    "prepare/hf": prepare_hf,
    "prepare/mosaic": prepare_mosaic,
    "prepare/litdata": prepare_litdata,
    "prepared/ours": lambda folder, n: timed(lambda: ours(folder, n)),
    "prepared/hf": lambda folder, n: timed(lambda: hf_prepared(folder, n)),
    "prepared/mosaic": lambda folder, n: timed(lambda: mosaic(folder, n)),
    "prepared/litdata": lambda folder, n: timed(lambda: litdata(folder, n)),
    "streamed/ours": streamed,
    "resume_streamed/ours": lambda folder, n: streamed(folder, n, SHARE),
    "resume/ours": lambda folder, n: timed(lambda: ours(folder, n, SHARE), first=True),
}
IMPORTS = {
    "ours": ("hvdtrain.task.corpus", "hvdtrain.data.loader", "tokenizers", "pyarrow.parquet"),
    "hf": ("datasets", "tokenizers", "torch.utils.data"),
    "mosaic": ("datasets", "tokenizers", "torch.utils.data"),
    "litdata": ("litdata", "datasets", "tokenizers", "torch.utils.data"),
}
"""Modules that are imported before the time begins."""

if __name__ == "__main__":
    from peer_packages import use_packages

    use_packages()
    LOOP, FOLDER, SEQ_LEN = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    who = LOOP.partition("/")[2]
    if who == "mosaic":
        use_streaming()
    for module in IMPORTS[who]:
        importlib.import_module(module)
    if LOOP == "resume/hf":  # the number of samples is no part of the time
        count = int(SHARE * sum(1 for _ in windows(FOLDER, SEQ_LEN)))
        found = timed(lambda: hf(FOLDER, SEQ_LEN, count), first=True)
    else:
        found = LOOPS[LOOP](FOLDER, SEQ_LEN)
    print(json.dumps(found))
