"""Windows of a token file."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.task.token_file import TokenFile, Windows, write_tokens


@pytest.fixture
def file(tmp_path):
    write_tokens(tmp_path, [np.arange(1000)], [np.arange(1000, 1100)], tail=0.5, vocabulary=1100)
    found = TokenFile.load(tmp_path)
    assert found
    return found


@given(count=st.integers(0, 200), seq_len=st.integers(1, 50))
def test_every_token_is_predicted_once_up_to_the_tail(tmp_path_factory, count, seq_len):
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder, [np.arange(count)], None, tail=0.0, vocabulary=count + 1)
    windows = Windows(TokenFile.load(folder), 0, count, seq_len)
    predicted = [token for window in windows for token in window[1:].tolist()]
    assert predicted == list(range(1, 1 + len(predicted)))
    assert max(count - 1, 0) - len(predicted) in range(seq_len)
    assert all(window.shape == (seq_len + 1,) and window.dtype == torch.int64 for window in windows)
    assert all((window[1:] - window[:-1] == 1).all() for window in windows), "each target follows its input"


def test_train_and_heldout_share_no_token(file):
    train = {t for window in Windows(file, 0, file.train, 9) for t in window.tolist()}
    heldout = {t for window in Windows(file, file.train, file.heldout, 9) for t in window.tolist()}
    assert max(train) < 1000 <= min(heldout)


@pytest.mark.parametrize("index", [-1, 142, 10**9])
def test_no_window_beyond_the_last(file, index):
    windows = Windows(file, 0, file.train, 7)
    assert len(windows) == 142
    with pytest.raises(IndexError):
        windows[index]


def test_pickles_as_a_place_not_as_tokens(file):
    windows = Windows(file, 0, file.train, 7)
    windows[0]
    carried = pickle.dumps(windows)
    assert len(carried) < 1000
    assert torch.equal(pickle.loads(carried)[5], windows[5])


@pytest.mark.parametrize(("vocabulary", "itemsize"), [(257, 2), (1 << 16, 2), ((1 << 16) + 1, 4)])
def test_ids_are_kept_whole_in_the_smallest_type(tmp_path, vocabulary, itemsize):
    ids = np.array([0, vocabulary - 1])
    write_tokens(tmp_path, [ids], None, tail=0.0, vocabulary=vocabulary)
    file = TokenFile.load(tmp_path)
    assert file.map().tolist() == ids.tolist()
    assert file.map().dtype.itemsize == itemsize


def test_the_digest_follows_the_tokens_alone(tmp_path):
    def digest(name, *pieces):
        folder = tmp_path / name
        folder.mkdir()
        return write_tokens(folder, map(np.array, pieces), None, tail=0.0, vocabulary=9).digest

    assert digest("a", [1, 2, 3]) == digest("b", [1], [2, 3]) != digest("c", [1, 2, 4])


def test_a_file_cut_short_is_not_whole(tmp_path, file):
    path = Path(file.path)
    path.write_bytes(path.read_bytes()[:-1])
    assert TokenFile.load(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"format": 0}', '{"format": 1, "path": "tokens.bin"}'])
def test_a_damaged_description_is_not_whole(tmp_path, file, content):
    (tmp_path / "about.json").write_text(content)
    assert TokenFile.load(tmp_path) is None
