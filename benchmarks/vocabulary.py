"""What a loss by chunks of tokens saves where the vocabulary is large: ``python benchmarks/vocabulary.py``.

A Llama of 2 layers and width 128 with 128,000 words, 4,096 tokens in fp32 on one core, with whole logits and by chunks,
each in a process of its own, in turns. It prints the peak of the process, and the time of the main thread for a forward
and a backward pass: the median of each process, and its ratio to the whole logits before it.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time

ROUNDS, PASSES = 3, 4


def measure(how: str) -> dict[str, float]:
    """Return the loss, the seconds of a pass and the peak in MiB. `how`: whole or chunks."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hvdtrain.task.token_loss import token_loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", **sizes, vocab_size=128_000, num_key_value_heads=4, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    rows = torch.randint(0, config.vocab_size, (4, 1025))
    seconds = []
    for _ in range(PASSES):
        model.zero_grad()
        began_s = time.thread_time()
        loss, _ = token_loss(model, rows, chunks=how == "chunks")
        loss.backward()
        seconds.append(time.thread_time() - began_s)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"loss": loss.item(), "s": statistics.median(seconds[1:]), "mib": peak_kib / 1024}


def main() -> None:
    """Print a line for each process, and the ratios."""
    found: dict[str, list[dict[str, float]]] = {"whole": [], "chunks": []}
    for _ in range(ROUNDS):
        for how, rows in found.items():
            done = subprocess.run([sys.executable, __file__, how], check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{how:6}  loss {rows[-1]['loss']:.2f}  {rows[-1]['s']:.2f} s  {rows[-1]['mib']:,.0f} MiB", flush=True)
    ratios = sorted(c["s"] / w["s"] for c, w in zip(found["chunks"], found["whole"], strict=True))
    print(f"vocabulary/time_ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    print(f"vocabulary/peak_mib {max(row['mib'] for row in found['chunks']):.0f}")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(measure(sys.argv[1])))
    else:
        main()
