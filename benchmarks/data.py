"""How fast are text and tokens read, next to peers, and how soon does a run go on in the middle of an epoch?

Documents of Python's standard library in one Parquet file, a BPE tokenizer made of them, windows of 128 tokens. Loops
take turns, each in a process of its own with one thread (data_loops.py). The figures are tokens a second:
`data/parquet/WHO`, tokenised in the loop, for ours into its cache and then read; `data/streamed/ours`, by
--data.streaming; `data/prepared/WHO`, read from each one's own format of the same tokens. `data/parquet_over_best_peer`
and the like are the median over rounds of ours over the best peer of the round. `data/resume_s/WHO`: seconds to the
first batch after a resume at 90% of an epoch; `data/resume_streamed_s/ours` on a host that has none of the tokens yet.

Peers: datasets (Hugging Face), streaming (MosaicML) and litdata; one that is not installed, or fails, is named:

    .venv/bin/pip install --no-deps --target build/peers mosaicml-streaming litdata boto3 s3transfer cramjam obstore \
        tifffile jmespath catalogue lightning-utilities
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from common import Figure, figure, main

from hvdtrain.task.text_sources import standard_library
from tests.runner.sessions import variables

SEQ_LEN, VOCABULARY, ROUNDS = 128, 8000, 3
PEERS = ("hf", "mosaic", "litdata")
HERE = Path(__file__).parent


def make_text(folder: Path, share: float) -> None:
    """Write the documents and the tokenizer."""
    import pyarrow as pa
    from pyarrow import parquet
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    files = standard_library()
    texts = [Path(file.path).read_text(errors="replace") for file in files[: int(share * len(files))]]
    parquet.write_table(pa.table({"text": texts}), folder / "text.parquet", row_group_size=100)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator(texts[::20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def run(loop: str, folder: Path, environment: dict[str, str]) -> dict[str, float] | None:
    """Run a loop; None, with a line that says why, if it fails."""
    command = [sys.executable, str(HERE / "data_loops.py"), loop, str(folder), str(SEQ_LEN)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE)
    if done.returncode:
        print(f"{loop} failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    found = done.stdout.strip().splitlines()[-1]
    return dict(json.loads(found) or {})


def measure(quick: bool) -> list[Figure]:
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="data-") as name:
        folder = Path(name)
        make_text(folder, 0.25 if quick else 1.0)
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "RAYON_RS_NUM_CPUS"), "1")
        base = variables({**os.environ, "TOKENIZERS_PARALLELISM": "false"}) | one_thread | {"HF_HOME": f"{name}/home"}
        base |= {"PYTHONPATH": f"{HERE.parent}", "XDG_CACHE_HOME": f"{name}/cache"}
        ready = [who for who in ("ours", *PEERS) if run(f"prepare/{who}", folder, base) is not None]
        loops = ["parquet/ours", "parquet/hf", *(f"prepared/{who}" for who in ready), "resume/ours", "resume/hf"]
        loops += ["streamed/ours", "resume_streamed/ours"]
        for round_number in range(1 if quick else ROUNDS):
            for loop in loops:
                own = base | {"XDG_CACHE_HOME": f"{name}/cache-{round_number}"} if loop == "parquet/ours" else base
                if (result := run(loop, folder, own)) is not None:
                    per = result["seconds"] if loop.startswith("resume") else result["tokens"] / result["seconds"]
                    found.setdefault(loop, []).append(per)
    figures = []
    for loop, values in found.items():
        what, _, who = loop.partition("/")
        is_resume = loop.startswith("resume")
        figures.append(
            figure(f"data/{f'{what}_s' if is_resume else what}/{who}", values, "s" if is_resume else "tokens/s")
        )
    for what, of_peers in (("parquet", "parquet"), ("streamed", "parquet"), ("prepared", "prepared")):
        peers = [found[f"{of_peers}/{peer}"] for peer in PEERS if f"{of_peers}/{peer}" in found]
        best = max(peers, key=median, default=None)
        if best is not None and f"{what}/ours" in found:
            ratios = [mine / other for mine, other in zip(found[f"{what}/ours"], best, strict=False)]
            figures.append(figure(f"data/{what}_over_best_peer", ratios, "ratio"))
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
