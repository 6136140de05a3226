"""Mutations of `hvdtrain/task/`."""

from tests.mutations.table import Table

MUTATIONS: Table = {
    ("task/token_loss.py", "tests/task/test_documents.py"): {
        "the end of a document predicts the next document": (
            "tokens_BT[:, 1:].masked_fill(ends_BT, IGNORED)",
            "tokens_BT[:, 1:]",
        ),
    },
    ("task/token_loss.py", "tests/task/test_chat.py"): {
        "the tokens after those of the assistant have the loss": (
            "masked_fill(~counted_BT[:, 1:], IGNORED)",
            "masked_fill(~counted_BT[:, :-1], IGNORED)",
        ),
    },
    ("task/token_file.py", "tests/task/test_windows.py"): {
        "one token between two windows is never predicted": (
            "begin = index * (self.seq_len + 1 - self.overlap)\n",
            "begin = index * (self.seq_len + 1)\n",
        ),
    },
    ("task/sequence.py", "tests/task/test_attention.py"): {
        "a model with dropout never gets flash attention": (
            'if version != 2 and getattr(model.config, "attention_dropout", None):',
            'if getattr(model.config, "attention_dropout", None):',
        ),
    },
    ("task/causal_lm.py", "tests/task/test_saved_model.py"): {
        "weights of parameters that the model lacks are left out unseen": (
            "if missing or (unknown and weights is not None):",
            "if missing:",
        ),
    },
    ("task/chat.py", "tests/task/test_chat.py"): {
        "turns are counted at places where the whole conversation has other tokens": (
            "or whole[: len(after)] != after:",
            "or len(whole) < len(after):",
        ),
        "a conversation that just fits counts as truncated": (
            "self.truncated += len(whole.ids) > self.length",
            "self.truncated += len(whole.ids) >= self.length",
        ),
    },
    ("task/corpus.py", "tests/task/test_corpus.py"): {
        "with another --data.heldout the split of an earlier run is used": (
            "return _cached(build, [source.identity, heldout], continues=True)",
            "return _cached(build, [source.identity], continues=True)",
        ),
    },
    ("task/token_file.py", "tests/task/test_prepare.py"): {
        "tokens that a killed process has written are written again": (
            "                if number <= before:\n                    continue\n",
            "",
        ),
    },
    ("task/corpus.py", "tests/task/test_formats.py"): {
        "with --data.validation, some of the data are neither trained on nor evaluated": (
            "training = replace(config, heldout=0.0) if config.validation else config",
            "training = config",
        ),
    },
    ("task/text_sources.py", "tests/task/test_formats.py"): {
        "rows that are left out count twice": (
            "skipped = Skipped(self.skipped.allowed) if held else self.skipped",
            "skipped = self.skipped",
        ),
    },
    ("task/streamed_text.py", "tests/task/test_streamed_text.py"): {
        "a resume reads its file from the beginning": ("files[number], skipped, begin)", "files[number], skipped, 0)"),
        "each pass has the files in the same order": ("+ epoch * len(files)", "+ 0 * len(files)"),
        "samples are in the order of the text": (
            "sample_indices(positions, self._count, self._seed)",
            "positions % self._count",
        ),
        "a place is that of the last unit": ("unit.place.tokens <= first * self._text.seq_len]", "unit.place]"),
        "the disk holds all units": ("<= block - self._ahead:", "< 0:"),
        "a place of other text is used": ('if state and state.get("of") != self._of:', "if False:"),
        "a file may change": ("                check_unchanged(files[number])\n", ""),
        "each rank tokenizes for itself": ("[self._text.key, self._seed,", "[self._text.key, id(self),"),
    },
    ("task/formats.py", "tests/task/test_streamed_text.py"): {
        "a resume of CSV repeats a row": ("if values and number > begin:", "if values and number >= begin:"),
        "a resume of Parquet repeats rows of its group": ("batch.slice(skipped)", "batch.slice(0)"),
        "a resume of lines that are compressed reads a line again": ("while begin > 0 and", "while begin < 0 and"),
    },
    ("task/source_files.py", "tests/task/test_streamed_text.py"): {
        "a loader process gets an open file": ("            self._stream = None\n", "            pass\n"),
    },
    ("task/formats.py", "tests/task/test_formats.py"): {
        "an error names the line before": ("number, end = 0, begin", "number, end = -1, begin"),
    },
    ("task/encode.py", "tests/task/test_tokenizer_and_dataset.py"): {
        "the place of a wrong byte does not count earlier pieces of its line": (
            "done_bytes += len(head) + 1",
            "done_bytes += len(head)",
        ),
    },
    ("task/lora.py", "tests/task/test_lora.py"): {
        "a target adapts layers whose names only end alike": (
            'if f".{name}".endswith(f".{target}")',
            "if name.endswith(target)",
        ),
    },
    ("task/multi_token.py", "tests/task/test_multi_token.py"): {
        "the first layer for multi-token prediction counts as one of the model": (
            "int(match[1]) >= config.get_text_config().num_hidden_layers",
            "int(match[1]) > config.get_text_config().num_hidden_layers",
        ),
    },
    ("task/once_per_host.py", "tests/task/test_once_per_host.py"): {
        "prepared data that is used each day looks old": (
            "            os.utime(whole)  # its time is that of the last use\n",
            "            pass\n",
        ),
    },
    ("task/text_sources.py", "tests/task/test_corpus.py"): {
        "hosts with the files in other folders hold out other files": (
            "held = {file for file in files if _hash01(file.name) < share}",
            "held = {file for file in files if _hash01(str(file.path)) < share}",
        ),
    },
    ("task/chunked_loss.py", "tests/task/test_chunked_loss.py"): {
        "the head learns from the last chunk only": (
            "                sums = sums or [gradient.float() for gradient in gradients]\n",
            "                sums = [gradient.float() for gradient in gradients]\n",
        ),
        "models that scale or limit their logits train without that": (
            "    return found is made and not made._version\n",
            "    return True\n",
        ),
    },
    ("task/blocked_attention.py", "tests/task/test_blocked_attention.py"): {
        "a token does not see the part of its document in the block before": (
            "[:, :, begin:end], *(each[:, :, first:end]",
            "[:, :, begin:end], *(each[:, :, begin:end]",
        ),
        "a row sees no more than another row of the batch": (".amin(dim=0)", ".amax(dim=0)"),
        "what a model sees after a block is left out": ("    return [] if is_later else first\n", "    return first\n"),
    },
    ("task/dataset_source.py", "tests/task/test_tokenizer_and_dataset.py"): {
        "the test split is evaluated during training, although there is a validation split": (
            '_HELDOUT_SPLITS = ("validation", "test")',
            '_HELDOUT_SPLITS = ("test", "validation")',
        ),
    },
    ("task/other_trainers.py", "tests/task/test_other_trainers.py"): {
        "the metadata of a checkpoint may name any function of allowed modules": (
            "        if (module, name) not in _ALLOWED:\n",
            "        if module not in {allowed for allowed, _ in _ALLOWED}:\n",
        ),
    },
    ("task/saved_model.py", "tests/task/test_stored_weights.py"): {
        "a weight stays in the mapped file": (
            "get_tensor(found[-1][0]).to(dtype, copy=True)",
            "get_tensor(found[-1][0]).to(dtype)",
        ),
    },
    ("task/source_files.py", "tests/task/test_formats.py"): {
        "a link has the format of the file behind it": (
            "_described(path.absolute(), option)",
            "_described(path.resolve(), option)",
        ),
        "brackets in the name of a file are a pattern": ("if plain.is_file() else", "if False else"),
    },
}
