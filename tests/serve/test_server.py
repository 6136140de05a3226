"""A real server and OpenAI's client: answers are the model's, and it ends without harm."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.cli.serve import main
from hvdtrain.errors import ConfigError
from hvdtrain.task.causal_lm import load_model
from hvdtrain.task.encode import load_tokenizer
from hvdtrain.task.saved_model import find_model
from tests.support.gallery import LANGUAGE
from tests.support.thread_job import train_on_threads

openai = pytest.importorskip("openai", reason="hvdtrain[serve] is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serve")]

KEY = "a key of the tests".replace(" ", "-")
JSON = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
TEMPLATE = """{% for m in messages %}{% if m.role == 'none' %}{{ raise_exception('no such role') }}{% endif %}
{{- m.content }}{% endfor %}"""
LONG = {"prompt": "def ", "max_tokens": 200, "temperature": 0, "stream": True}


@dataclass
class Server:
    port: int

    def client(self, key: str = KEY) -> Any:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0)

    def ask(self, body: bytes, path: str) -> tuple[int, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("POST", path, body, JSON)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def begin_to_ask(self) -> None:
        """Cut the connection after the first bytes of an answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(LONG), JSON)
            assert connection.getresponse().read(20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a chat template."""
    run = tmp_path_factory.mktemp("run") / "run"
    train_on_threads(*LANGUAGE, "--train.steps=20", "--optimizer.lr=0.01", f"--run_dir={run}", size=1)
    found = find_model(str(run)).folder
    (found / "chat_template.jinja").write_text(TEMPLATE)
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """In the end it is stopped while it generates."""
    key = folder.parent / "key.txt"
    key.write_text(KEY + "\n")
    argv = [sys.executable, "-m", "hvdtrain", "serve", str(folder), "--port=0", "--name=mine", "--tokens=200"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*argv, "--seconds=60", "--key_file", str(key)], **pipes) as process:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", process.stdout.readline())  # type: ignore[union-attr]
        if found is None:
            raise AssertionError(process.communicate(timeout=30)[1])
        made = Server(int(found[1]))
        yield made
        made.begin_to_ask()
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0 and "Traceback" not in error, error


def _likeliest(folder: Path, prompt: str, count: int) -> str:
    ids = torch.tensor([list(prompt.encode())])
    model: Any = load_model(find_model(str(folder))).eval()
    for _ in range(count):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    return str(load_tokenizer(folder).decode(ids[0, -count:]))


def test_answers_are_the_models(server: Server, folder: Path) -> None:
    expected = _likeliest(folder, "def ", 12)
    settings = {"model": "mine", "max_tokens": 12, "temperature": 0}
    message = [{"role": "user", "content": "def "}]
    with server.client() as client:
        assert [entry.id for entry in client.models.list()] == ["mine"]
        answer = client.completions.create(prompt="def ", **settings)
        pieces = list(client.completions.create(prompt="def ", stream=True, **settings))
        chat = client.chat.completions.create(model="mine", messages=message, max_completion_tokens=12, temperature=0)
    assert answer.choices[0].text == expected and answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 12)
    assert "".join(piece.choices[0].text for piece in pieces) == expected and len(pieces) > 3
    assert chat.choices[0].message.content == expected


def test_a_seed_repeats_an_answer_while_others_are_generated(server: Server) -> None:
    def text(seed: int) -> str:
        with server.client() as client:
            pieces = client.completions.create(model="mine", prompt="a", max_tokens=30, seed=seed, stream=True)
            return "".join(piece.choices[0].text for piece in pieces)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(text, [1, 2, 1]))
    assert found[0] == found[2] != found[1]


def test_messages_that_the_template_refuses(server: Server) -> None:
    body = json.dumps({"messages": [{"role": "none", "content": "a"}]}).encode()
    status, text = server.ask(body, "/v1/chat/completions")
    assert status == 400 and "no such role" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "0.0.0.0"), "0.0.0.0"),
        (("--key_file", "short"), "short"),
        (("--port", "taken"), "cannot be listened on"),
        (("--backend", "vllm"), "vllm is not installed"),
    ],
)
def test_what_does_not_start(
    options: tuple[str, ...], message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    Path("short").write_text("short")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [str(taken.getsockname()[1]) if option == "taken" else option for option in options]
        with pytest.raises(ConfigError, match=message):
            main([str(folder), *given])


def test_vllm_gets_the_folder_and_the_key(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("hvdtrain.cli.serve.shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    (tmp_path / "key").write_text(KEY)
    options = ("--backend", "vllm", "--name", "mine", "--host", "0.0.0.0", "--key_file", str(tmp_path / "key"))
    main([str(folder), *options])
    ((program, argv, variables),) = started
    expected = ("serve", str(folder), "--served-model-name", "mine", "--host", "0.0.0.0", "--port", "8000")
    assert (program, argv) == ("/bin/vllm", ["/bin/vllm", *expected])
    assert variables["VLLM_API_KEY"] == KEY
