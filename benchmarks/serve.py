"""How fast does `hvdtrain serve` answer, beside `transformers serve` and beside generate() without a server?

A language model of the default run's kind (--model.preset small), 1 thread each. Clients ask for 32 tokens each, over
HTTP, as many at once as the figure says; the servers take turns. Ratios are ours over the peer's: seconds of all
requests, and the 95th percentile of the time of one.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from common import Figure, figure, in_turn, main, ratios
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENS = 32
CLIENTS = (1, 8)
PROMPT = "def "
SETTINGS = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
BIN = Path(sys.executable).parent


def make_model(folder: Path) -> Path:
    """Train one step, and return the exported folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run, out = folder / "run", folder / "model"
    small = ["--model.preset=small", "--train.steps=1", "--train.eval_samples=4", f"--run_dir={run}"]
    for argv in (["-m", "hvdtrain", *small], ["-m", "hvdtrain", "export", str(run), str(out)]):
        subprocess.run([sys.executable, *argv], env=environment, check=True, capture_output=True)
    return out


@contextmanager
def served(argv: list[str], port: int) -> Iterator[None]:
    """Run a server until it answers, and end it after."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(argv)} ended with {process.returncode}")
            try:
                with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
                    connection.request("GET", "/health")
                    if connection.getresponse().status == 200:
                        break
            except OSError:
                pass
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as found:
        return int(found.getsockname()[1])


def request(port: int, model: str) -> str:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as connection:
        body = json.dumps({"model": model, **SETTINGS})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {text}")
    return str(json.loads(text)["choices"][0]["text"])


def bare(folder: Path) -> Callable[[], str]:
    """Return generate() of transformers on the same text."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    end = {"eos_token_id": None, "pad_token_id": 0}

    def generate() -> str:
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, **end
            )
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    return generate


def load(answer: Callable[[], str], clients: int, requests: int) -> tuple[float, float, set[str]]:
    """Return seconds of all requests, the 95th percentile of one's seconds, and the texts."""

    def timed(_: int) -> tuple[float, str]:
        began = time.perf_counter()
        return (text := answer()) and (time.perf_counter() - began, text)

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(timed, range(requests)))
    seconds = time.perf_counter() - began
    return seconds, statistics.quantiles([s for s, _ in found], n=20)[-1], {text for _, text in found}


def measure(quick: bool) -> list[Figure]:
    torch.set_num_threads(1)
    requests, rounds = (16, 3) if quick else (32, 7)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch))
        ours, theirs = free_port(), free_port()
        commands = {
            "ours": [sys.executable, "-m", "hvdtrain", "serve", str(folder), "--port", str(ours)],
            "transformers": [str(BIN / "transformers"), "serve", str(folder), "--port", str(theirs)],
        }
        answers = {
            "ours": lambda: request(ours, folder.name),
            "transformers": lambda: request(theirs, str(folder)),
            "generate": bare(folder),
        }
        found: dict[tuple[str, int], list[tuple[float, float]]] = {}
        with served(commands["ours"], ours), served(commands["transformers"], theirs):
            expected = {text for answer in answers.values() for text in load(answer, 1, 2)[2]}  # the first are slower
            for number in range(rounds):
                for name in in_turn(list(answers), number):
                    for clients in CLIENTS if name != "generate" else (1,):
                        seconds, high, texts = load(answers[name], clients, requests)
                        found.setdefault((name, clients), []).append((seconds, high))
                        expected |= texts
        if len(expected) != 1:
            raise RuntimeError(f"the answers differ: {sorted(expected)}")
    figures = []
    for clients in CLIENTS:
        place = f"serve/{clients}_client" + "s" * (clients > 1)
        (seconds, high), (their_seconds, their_high) = (
            zip(*found[name, clients], strict=True) for name in ("ours", "transformers")
        )
        figures += [
            figure(f"{place}/over_transformers_serve", ratios(seconds, their_seconds), "ratio"),
            figure(f"{place}/p95_over_transformers_serve", ratios(high, their_high), "ratio"),
            figure(f"{place}/requests_per_s", [requests / s for s in seconds], "1/s"),
        ]
        if clients == 1:
            alone = [s for s, _ in found["generate", 1]]
            figures.append(figure(f"{place}/over_generate", ratios(seconds, alone), "ratio"))
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
