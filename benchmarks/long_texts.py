"""What large vocabularies and masks of documents cost, and what ours saves: ``python benchmarks/long_texts.py``.

``vocabulary``: a Llama with 128,000 words, 4,096 tokens: whole logits, and a loss by chunks of tokens. ``documents``: a
Llama of width 256, 16 documents in 8,192 tokens: one mask of all tokens, and attention by blocks. Both have 2 layers,
in fp32 on one core. Each runs in a process of its own, in turns with the other. It prints the peak of the memory that
a forward and a backward pass take, and the time of the thread: a median of each process, and its ratio.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

from common import Figure, figure, main, ratios

ROUNDS, PASSES = 3, 3
CASES = {"vocabulary": ("whole", "chunks"), "documents": ("one mask", "blocks")}
SIZES = {
    "vocabulary": {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 128_000, "tie_word_embeddings": True},
    "documents": {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 8192},
}


def measure(case: str, how: str) -> dict[str, float]:
    """Return the loss, the seconds of a pass, and the peak of the memory that one takes, in MiB."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from transformers import AutoConfig, AutoModelForCausalLM

    from hvdtrain.task.blocked_attention import use_blocks
    from hvdtrain.task.token_loss import Targets, token_loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = AutoConfig.for_model("llama", **SIZES[case], **heads)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if how == "blocks":
        use_blocks(model)
    rows = torch.randint(0, config.vocab_size, (4, 1025) if case == "vocabulary" else (1, 8193))
    places = None if case == "vocabulary" else (torch.arange(8192) % 512)[None]

    def run() -> float:
        model.zero_grad()
        targets = Targets(rows[:, :-1], rows[:, 1:], places)
        loss, _ = token_loss(model, None, targets=lambda _: targets, chunks=how == "chunks")
        loss.backward()
        return loss.item()

    seconds = []
    for _ in range(PASSES):
        began_s = time.thread_time()
        loss = run()
        seconds.append(time.thread_time() - began_s)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    return {"loss": loss, "s": statistics.median(seconds), "mib": _peak_bytes(profiled) / 2**20}


def _peak_bytes(profiled: Any) -> int:
    events = profiled.profiler.kineto_results.events()
    held = peak = 0
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += change
        peak = max(peak, held)
    return peak


def compared(quick: bool) -> list[Figure]:
    """Print a line for each process; return the ratios."""
    figures = []
    for case, (before, now) in CASES.items():
        found: dict[str, list[dict[str, float]]] = {before: [], now: []}
        for _ in range(1 if quick else ROUNDS):
            for how, rows in found.items():
                command = [sys.executable, __file__, case, how]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                told = f"loss {rows[-1]['loss']:.3f}  {rows[-1]['s']:.2f} s  {rows[-1]['mib']:,.0f} MiB"
                print(f"{case} {how:8}  {told}", flush=True)
        for name in ("s", "mib"):
            ours, before_us = ([row[name] for row in found[how]] for how in (now, before))
            figures.append(figure(f"long_texts/{case}/{name}", ratios(ours, before_us), "of before"))
    return figures


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in CASES:
        print(json.dumps(measure(*sys.argv[1:])))
    else:
        main(__doc__, compared)
