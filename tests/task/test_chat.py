"""Conversations: what has a loss, what is packed together, and lines and templates that are wrong."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.errors import ConfigError, DataError
from hvdtrain.task.chat import ChatEncoder, Conversation, chat_files
from hvdtrain.task.corpus import open_corpus
from hvdtrain.task.encode import SEPARATOR, SETTINGS, ByteEncoder
from hvdtrain.task.language_model import ModelConfig, language_model
from hvdtrain.task.text_config import TextConfig
from hvdtrain.task.token_loss import COUNTED, FIRST, MARKS
from tests.support.gallery import Recorded, record_on_threads
from tests.task.test_formats import as_csv, as_parquet

pytest.importorskip("transformers", reason="the transformers library is not installed")

PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}" + PROMPT
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{%- generation -%}{{ m.content }}\n"
    "{%- endgeneration -%}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)
FORGETFUL = (  # earlier answers are shortened, as templates do that drop earlier thoughts
    "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last or m.role == 'user' else '...' }}\n{% endfor %}"
    + PROMPT
)


def talk(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(contents)]


def encoder(template: str | None) -> ChatEncoder:
    files = dict(chat_files(ByteEncoder()))
    about = {**json.loads(files[SETTINGS]), "chat_template": template}
    return ChatEncoder({**files, SETTINGS: json.dumps(about).encode()})


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def shown(ids: list[int]) -> str:
    return b"".join(b"|" if i == SEPARATOR else bytes([i]) for i in ids).decode()


def turns(found: Any) -> list[str]:
    """The texts of the runs of counted tokens."""
    runs: list[list[int]] = [[]]
    for id_, counted in zip(found.ids, found.counted, strict=True):
        if counted:
            runs[-1].append(id_)
        elif runs[-1]:
            runs.append([])
    return [shown(run) for run in runs if run]


def test_bytes_have_a_template_whose_assistant_ends_with_the_separator() -> None:
    made = ChatEncoder(chat_files(ByteEncoder()))
    messages = [{"role": "system", "content": "Be kind."}, *talk("Hé?", "Grüße €", "x", "y")]
    found = made.encode(Conversation(messages, ""))
    assert shown(found.ids) == "system: Be kind.\nuser: Hé?\nassistant: Grüße €|\nuser: x\nassistant: y|\n"
    assert turns(found) == ["Grüße €|", "y|"]


BARE = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "contents", "expected"),
    [
        (PLAIN, ("a", "b €", "c", "d"), ["b €\n", "d\n"]),
        (MARKED, ("a", "b €", "c", "d"), ["b €", "d"]),
        (BARE, ("abc", "d"), ["bcd"]),  # the first token has no loss
    ],
)
def test_marks_and_prefixes_find_the_assistant_s_tokens(
    template: str, contents: tuple[str, ...], expected: list[str]
) -> None:
    assert turns(encoder(template).encode(Conversation(talk(*contents), ""))) == expected


@pytest.mark.parametrize(
    ("template", "messages", "error", "words"),
    [
        (FORGETFUL, talk("a", "long", "b", "c"), DataError, "cannot be found in here"),
        (PLAIN, talk("a", "b")[1:], DataError, "cannot be found in here"),
        ("{{ raise_exception('No.') }}", talk("a", "b"), DataError, "refuses here"),
        (None, talk("a", "b"), ConfigError, "no chat template"),
    ],
)
def test_templates_that_do_not_show_the_turns(template: str, messages: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        encoder(template).encode(Conversation(messages, "here"))
    assert caught.value.next_step or "No." in caught.value.found


def samples(windows: Any) -> list[tuple[list[int], list[bool], list[bool]]]:
    rows = [windows[i].tolist() for i in range(len(windows))]
    return [([v >> MARKS for v in r], [bool(v & COUNTED) for v in r], [bool(v & FIRST) for v in r]) for r in rows]


def test_samples_are_whole_conversations(tmp_path: Path) -> None:
    made = [talk("q" * (1 + 7 * i % 40), "a" * (1 + 5 * i % 30)) for i in range(60)]
    chat = write(tmp_path / "c.jsonl", *({"messages": messages} for messages in made))
    corpus = open_corpus(TextConfig(chat=chat, seq_len=127, heldout=0.1))
    alone = [ChatEncoder(chat_files(ByteEncoder())).encode(Conversation(messages, "")) for messages in made]
    found: dict[bool, list[tuple[list[int], list[bool]]]] = {False: [], True: []}
    for held, windows in ((False, corpus.train), (True, corpus.heldout)):
        for ids, counted, first in samples(windows):
            assert len(ids) == 128 and first[0]
            cuts = [i for i, mark in enumerate(first) if mark] + [128]
            parts = [(ids[a:b], counted[a:b]) for a, b in pairwise(cuts)]
            padding = [part for part in parts if not any(part[1])]
            assert not padding or (padding == parts[-1:] and set(padding[0][0]) == {0})
            found[held] += [part for part in parts if any(part[1])]
    assert len(found[True]) == 6
    assert sorted(found[False] + found[True]) == sorted((one.ids, one.counted) for one in alone)
    assert corpus.vocabulary == SEPARATOR + 1
    assert "60 conversations" in corpus.note


@pytest.mark.parametrize(("spare", "rows"), [(0, 2), (-1, 4), (1, 2)])
def test_a_sample_holds_as_many_conversations_as_fit(tmp_path: Path, spare: int, rows: int) -> None:
    chat = write(tmp_path / "c.jsonl", *({"messages": talk("q", "a")} for _ in range(4)))
    length = len("user: q\nassistant: a|\n")
    corpus = open_corpus(TextConfig(chat=chat, seq_len=2 * length + spare - 1, heldout=0))
    assert len(corpus.train) == rows
    assert sum(sum(counted) for _, counted, _ in samples(corpus.train)) == 4 * len("a|")


def test_what_is_too_long_or_has_no_answer_is_counted(tmp_path: Path) -> None:
    rows = [talk("q", "a" * 100), talk("q" * 100, "a"), talk("only a question"), talk("q", "a" * 19)]  # of 40 tokens
    chat = write(tmp_path / "c.jsonl", *({"messages": messages} for messages in rows))
    for _ in range(2):  # the second time from the cache
        corpus = open_corpus(TextConfig(chat=chat, seq_len=39, heldout=0))
        assert "2 conversations, 1 of them truncated to 40 tokens; 2 without" in corpus.note
    assert sum(sum(counted) for _, counted, _ in samples(corpus.train)) == (40 - 19) + (19 + 1)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{", "unexpected end of data"),
        ("[]", "list"),
        ('{"text": "x"}', "text"),
        ('{"messages": []}', "messages"),
        ('{"messages": ["x"]}', "message 1 without a text as role"),
        ('{"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]}', "message 2 without a text"),
        ('{"prompt": 3, "completion": "x"}', "message 1 without a text as content"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "tools"),
    ],
)
def test_lines_that_are_no_conversation(tmp_path: Path, line: str, found: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": talk("q", "a")}) + "\n\n" + line + "\n")
    with pytest.raises(DataError, match=r"c\.jsonl, line 3 is not a conversation") as caught:
        open_corpus(TextConfig(chat=str(path), seq_len=8))
    assert found in caught.value.found
    left = open_corpus(TextConfig(chat=str(path), seq_len=40, heldout=0, on_error="skip"))
    assert f": 1 conversations; left out: 1 no conversation (first: {path}, line 3)" in left.note


@pytest.mark.parametrize(("documents", "separate"), [(None, True), ("separate", True), ("joined", False)])
def test_the_loss_is_that_of_the_counted_tokens_of_each_conversation(
    tmp_path: Path, documents: Any, separate: bool
) -> None:
    made = [talk("question", "answer one"), talk("another", "answer", "more", "end")]
    chat = write(tmp_path / "c.jsonl", *({"messages": messages} for messages in made))
    torch.manual_seed(1)
    data = TextConfig(chat=chat, seq_len=120, heldout=0, documents=documents)
    task = language_model(ModelConfig(preset="tiny"), data)
    assert len(task.train_data) == 1  # type: ignore[arg-type]
    expected, count = 0.0, 0
    for messages in made:
        alone = ChatEncoder(chat_files(ByteEncoder())).encode(Conversation(messages, ""))
        ids = torch.tensor(alone.ids)
        log_p = task.model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        expected -= sum(log_p[i - 1, ids[i]].item() for i in range(1, len(ids)) if alone.counted[i])
        count += sum(alone.counted)
    with torch.no_grad():
        loss, weight = task.loss(task.model, torch.stack([task.train_data[0]]))
    assert float(weight) == count == task.nominal_weight
    assert (loss.item() == pytest.approx(expected, rel=1e-5)) == separate
    assert task.prepare is not None
    assert task.prepare(torch.device("cpu"), torch.float32).startswith("c.jsonl: 2 conversations; attention: ")


@pytest.mark.parametrize("ending", ["csv.gz", "parquet"])
def test_conversations_of_other_formats(tmp_path: Path, ending: str) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"q{i}, x", "completion": "a\n" * i} for i in range(9)]
    if ending == "parquet":
        rows = [{"id": i, "messages": talk(row["prompt"], row["completion"])} for i, row in enumerate(rows)]
    content = as_parquet(rows) if ending == "parquet" else gzip.compress(as_csv(rows))
    (tmp_path / f"c.{ending}").write_bytes(content)
    names = [write(tmp_path / "c.jsonl", *rows), str(tmp_path / f"c.{ending}")]
    lines, others = (open_corpus(TextConfig(chat=name, seq_len=60, heldout=0.2)) for name in names)
    assert others.digest == lines.digest and len(samples(others.train)) > 2


def test_what_the_template_refuses_can_be_left_out(tmp_path: Path) -> None:
    strict = PLAIN.replace(
        "{% for", "{% if messages[0].role != 'user' %}{{ raise_exception('No.') }}{% endif %}{% for", 1
    )
    for name, content in {**chat_files(ByteEncoder()), "chat_template.jinja": strict.encode()}.items():
        (tmp_path / name).write_bytes(content)
    rows = [talk("q", "a"), [{"role": "system", "content": "s"}, *talk("q", "a")]]
    chat = write(tmp_path / "c.jsonl", *({"messages": messages} for messages in rows))
    data = {"chat": chat, "seq_len": 40, "heldout": 0.0, "tokenizer": str(tmp_path / "tokenizer.json")}
    with pytest.raises(DataError, match=r"refuses .*line 2"):
        open_corpus(TextConfig(**data))  # type: ignore[arg-type]
    left = open_corpus(TextConfig(**data, on_error="skip"))  # type: ignore[arg-type]
    assert "1 conversations; left out: 1 refused by the chat template" in left.note


def test_a_checkpoint_has_the_template(tmp_path: Path) -> None:
    chat = write(tmp_path / "c.jsonl", {"messages": talk("q", "a")})
    corpus = open_corpus(TextConfig(chat=chat, seq_len=40, heldout=0))
    assert "generation" in json.loads(corpus.tokenizer[SETTINGS])["chat_template"]
    (tmp_path / "t.txt").write_text("text " * 100)
    text = open_corpus(TextConfig(text=str(tmp_path / "t.txt"), seq_len=8))
    assert "chat_template" not in json.loads(text.tokenizer[SETTINGS])


def test_weights_of_chat_files(tmp_path: Path) -> None:
    rows: dict[str, Any] = {
        "x": {"prompt": "x" * 20, "completion": "x"},
        "y": {"messages": talk("x" * 20, "x"), "id": 7},  # the same in other words
    }
    names = [write(tmp_path / f"{name}.jsonl", *[row] * 9) for name, row in rows.items()]
    corpus = open_corpus(TextConfig(chat=names, weights=[2, 1], seq_len=48))
    assert [weight for _, weight in corpus.train.sources] == [2, 1]
    assert corpus.train[0].tolist() == corpus.train[len(corpus.train) - 1].tolist()
    with pytest.raises(ConfigError, match="in two sources"):
        open_corpus(TextConfig(chat=[names[0], f"{tmp_path}/*.jsonl"], weights=[2, 1], seq_len=48))
    with pytest.raises(ConfigError, match="no effect"):
        open_corpus(TextConfig(chat=names, end_token=3))


def _train(folder: Path, *options: str, size: int) -> Recorded:
    common = ("--model.preset=tiny", "--train.epochs=0.2", "--train.global_batch=6", "--data.seq_len=96")
    common += ("--optimizer.warmup_steps=1", "--optimizer.name=sgd", "--train.eval_samples=2")
    return record_on_threads(folder, *common, *options, size=size)
