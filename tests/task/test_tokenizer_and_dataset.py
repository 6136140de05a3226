"""Text by a tokenizer.json, and folders of datasets."""

import json
from pathlib import Path

import pytest

from hvdtrain.errors import ConfigError, DataError
from hvdtrain.task.corpus import open_corpus
from hvdtrain.task.text_config import TextConfig

tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

LINES = "".join(f"line {i} says: näïve 東京 {'word ' * (i % 7)}\n" for i in range(400))


def all_ids(corpus):
    parts = [corpus.train] + ([corpus.heldout] if corpus.heldout else [])
    return corpus.train.file.map()[: sum(part.count for part in parts)].tolist()


def train_tokenizer(path, special=()):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    made.train_from_iterator([LINES], trainer)
    made.save(str(path))
    return made


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(LINES, encoding="utf-8")
    return str(tmp_path / "text.txt")


@pytest.mark.parametrize("batch_characters", [1, 500, 1 << 23])
@pytest.mark.parametrize("piece_bytes", [7, 100, 1 << 20])
def test_ids_say_the_text_however_it_is_read(tmp_path, text, monkeypatch, piece_bytes, batch_characters):
    monkeypatch.setattr("hvdtrain.task.encode._BATCH_CHARACTERS", batch_characters)
    made = train_tokenizer(tmp_path / "tokenizer.json")
    monkeypatch.setattr("hvdtrain.task.text_sources._PIECE_BYTES", piece_bytes)
    corpus = open_corpus(TextConfig(text=text, tokenizer=str(tmp_path / "tokenizer.json"), seq_len=16))
    ids = all_ids(corpus)
    assert made.decode(ids) == LINES
    assert len(ids) < len(LINES.encode()) / 2
    assert corpus.train.file.vocabulary == made.get_vocab_size() > max(ids)


def test_a_document_has_the_ids_that_its_tokenizer_gives(tmp_path):
    """Also where line ends are merged: a cut after one would change them."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["pass\n\n\nhello\n\n there"] * 50, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    document = "hello\n\n\npass\n\nhello there"
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": document}) + "\n") * 3)
    config = TextConfig(text=f"{tmp_path}/a.jsonl", tokenizer=str(tmp_path / "tokenizer.json"), seq_len=1, heldout=0)
    assert all_ids(open_corpus(config)) == 3 * made.encode(document).ids


@pytest.mark.parametrize("batch_characters", [1, 40, 1 << 23])
def test_documents_stay_in_order_in_any_batch_each_with_the_vocabulary_s_own_end(
    tmp_path, monkeypatch, batch_characters
):
    monkeypatch.setattr("hvdtrain.task.encode._BATCH_CHARACTERS", batch_characters)
    made = train_tokenizer(tmp_path / "tokenizer.json", special=["<unk>", "</s>"])
    texts = [f"document {i} says {'word ' * (i % 5)}" if i % 4 else "" for i in range(30)]
    for i, content in enumerate(texts):
        (tmp_path / f"{i:02}.txt").write_text(content)
    config = TextConfig(text=f"{tmp_path}/*.txt", tokenizer=str(tmp_path / "tokenizer.json"), seq_len=1, heldout=0)
    assert made.decode(all_ids(open_corpus(config)), skip_special_tokens=False) == "".join(t + "</s>" for t in texts)


def test_another_tokenizer_makes_other_tokens_and_a_wrong_one_none(tmp_path, text, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("hvdtrain.task.corpus._PROGRESS_S", 0.0)
    config = TextConfig(text=text, tokenizer=str(tmp_path / "tokenizer.json"), seq_len=16)
    train_tokenizer(tmp_path / "tokenizer.json")
    first = open_corpus(config)
    assert "tokenizing text.txt: 100%, 0.0 million tokens" in caplog.text, "progress"
    train_tokenizer(tmp_path / "tokenizer.json", special=["</s>"])
    assert open_corpus(config).train.file.digest != first.train.file.digest
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(DataError, match="is not a tokenizer"):
        open_corpus(config)


@pytest.mark.parametrize("piece_bytes", [5, 1 << 20])
def test_text_that_is_not_utf8_is_reported_with_its_place(tmp_path, monkeypatch, piece_bytes):
    train_tokenizer(tmp_path / "tokenizer.json")
    monkeypatch.setattr("hvdtrain.task.text_sources._PIECE_BYTES", piece_bytes)
    (tmp_path / "latin.txt").write_bytes(b"first line\nna\xefve\n")
    config = TextConfig(text=str(tmp_path / "latin.txt"), tokenizer=str(tmp_path / "tokenizer.json"), seq_len=2)
    with pytest.raises(DataError, match="UTF-8") as caught:
        open_corpus(config)
    assert caught.value.found == "byte 0xef at 13"
    assert "latin.txt" in caught.value.what
    assert len(open_corpus(TextConfig(text=config.text, seq_len=2)).train) > 0


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets", reason="the datasets library is not installed")


def test_rows_of_text(tmp_path, datasets):
    rows = [f"row {i} é" for i in range(100)]
    datasets.Dataset.from_dict({"text": rows, "n": list(range(100))}).save_to_disk(str(tmp_path / "d"))
    corpus = open_corpus(TextConfig(dataset=str(tmp_path / "d"), seq_len=8))
    assert all_ids(corpus) == [token for row in rows for token in [*row.encode(), 256]]
    assert corpus.heldout.count == len(all_ids(corpus)) // 20 and corpus.tokenizer


def test_rows_of_ids(tmp_path, datasets):
    rows = [[i, 70_000 + i] * (i % 5) for i in range(100)]
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(str(tmp_path / "d"))
    corpus = open_corpus(TextConfig(dataset=str(tmp_path / "d"), seq_len=8))
    assert all_ids(corpus) == [token for row in rows for token in row]
    assert corpus.train.file.vocabulary == 70_100 and not corpus.tokenizer, "it is unknown"


@pytest.mark.parametrize(("held", "unused"), [("validation", "test"), ("test", "other"), (None, "other")])
def test_splits_are_kept(tmp_path, datasets, held, unused):
    parts = {unused: ["c"] * 20, "train": ["aaaa"] * 200} | ({held: ["b"] * 20} if held else {})
    made = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": rows}) for name, rows in parts.items()})
    made.save_to_disk(str(tmp_path / "d"))
    corpus = open_corpus(TextConfig(dataset=str(tmp_path / "d"), seq_len=8))
    assert (corpus.train.count, corpus.heldout.count) == ((1000, 40) if held else (950, 50)), "a twentieth if none is"
    assert set(all_ids(corpus)[-40:]) == {ord("b" if held else "a"), 256}


@pytest.mark.parametrize(
    ("columns", "tokenizer", "error", "message"),
    [
        ({"words": ["a"]}, False, DataError, "words"),
        ({"input_ids": [[1, 2]]}, True, ConfigError, "no text for the tokenizer"),
        ({"input_ids": [[1, -2]]}, False, DataError, "-2"),
        ({"text": [None, ""]}, True, DataError, "empty"),
        ({"input_ids": [[], []]}, False, DataError, "empty"),
    ],
)
def test_datasets_that_do_not_fit(tmp_path, datasets, columns, tokenizer, error, message):
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "d"))
    train_tokenizer(tmp_path / "tokenizer.json")
    chosen = str(tmp_path / "tokenizer.json") if tokenizer else None
    with pytest.raises(error, match=message):
        open_corpus(TextConfig(dataset=str(tmp_path / "d"), tokenizer=chosen))


def test_a_damaged_dataset(tmp_path, datasets):
    datasets.Dataset.from_dict({"text": ["a"] * 100}).save_to_disk(str(tmp_path / "d"))
    for path in Path(tmp_path / "d").glob("*.arrow"):
        path.write_bytes(b"broken")
    with pytest.raises(DataError, match="cannot read"):
        open_corpus(TextConfig(dataset=str(tmp_path / "d")))


def test_the_model_s_own_tokenizer_is_for_text_alone(tmp_path, datasets):
    made = train_tokenizer(tmp_path / "tokenizer.json")
    own = str(tmp_path / "tokenizer.json")
    datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 9}).save_to_disk(str(tmp_path / "ids"))
    assert all_ids(open_corpus(TextConfig(dataset=str(tmp_path / "ids"), seq_len=8, heldout=0), own)) == [1, 2, 3] * 9
    datasets.Dataset.from_dict({"text": [LINES]}).save_to_disk(str(tmp_path / "text"))
    corpus = open_corpus(TextConfig(dataset=str(tmp_path / "text"), seq_len=8), own)
    assert made.decode(all_ids(corpus)) == LINES
