"""Mutations of `hvdtrain/task/`."""

from tests.mutations.mutation import Mutation, mutation

MUTATIONS: tuple[Mutation, ...] = (
    mutation(
        "task/token_loss.py",
        "tokens_BT[:, 1:].masked_fill(ends_BT, IGNORED)",
        "tokens_BT[:, 1:]",
        "the end of a document predicts the next document",
        "tests/task/test_documents.py",
    ),
    mutation(
        "task/token_loss.py",
        "masked_fill(~counted_BT[:, 1:], IGNORED)",
        "masked_fill(~counted_BT[:, :-1], IGNORED)",
        "the tokens after those of the assistant have the loss",
        "tests/task/test_chat.py",
    ),
    mutation(
        "task/token_file.py",
        "return index * self.seq_len\n",
        "return index * (self.seq_len + 1)\n",
        "one token between two windows is never predicted",
        "tests/task/test_windows.py",
    ),
)
