"""Options of a causal language model, and of its training data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """Architecture and initial weights.

    Attributes:
        preset: DeepSeek-V3 with latent attention and a mixture of experts: tiny (for tests), small (7 million
            parameters), 125m, 1b (0.2 billion of them active for each token), 16b (2.2 billion active) or 671b (36
            billion active). The vocabulary depends on the data, and is not counted here
        config: train another architecture with new weights: config.json of any causal language model that transformers
            supports (default: model.preset)
        from_: begin with the weights of a run (RUN, RUN@best, RUN@STEP), a checkpoint, or a folder with config.json
            and safetensors files, at step 0; or of another trainer's checkpoint next to a config.json or with
            model.config: dcp:FOLDER, deepspeed:FOLDER, lightning:FILE, torch:FILE or FOLDER (default: new
            weights of model.preset)
        dropout: dropout rate of the attention weights (default: the model's own)
        attention: kernel of attention: flash (the flash_attn library, on GPUs in bf16 or fp16), sdpa (torch's), eager
            (whole scores in memory), or auto: the first of these that works
        lora: freeze the model, and train low-rank matrices next to its linear layers: rank=16, or
            rank=16,alpha=32,dropout=0.05,targets=q_proj+v_proj. Checkpoints contain only these matrices (default: train
            the whole model; alpha twice the rank, no dropout, all linear layers but the LM head)
        mtp_layers: also train this many layers for multi-token prediction, as in DeepSeek-V3: the first predicts the
            token after the next one, and so on. The loss that is shown is that of the next token
        mtp_weight: weight of the mean of their losses in training
    """

    preset: Literal["tiny", "small", "125m", "1b", "16b", "671b"] = "small"
    config: str | None = None
    from_: str | None = None
    dropout: float | None = None
    attention: Literal["auto", "flash", "sdpa", "eager"] = "auto"
    lora: str | None = None
    mtp_layers: int = 0
    mtp_weight: float = 0.3


_COLUMNS = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "n_routed_experts", "n_shared_experts",
    "num_experts_per_tok", "first_k_dense_replace", "num_hidden_layers", "num_attention_heads", "q_lora_rank",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group",
    "routed_scaling_factor",
)  # fmt: skip
_ROWS: dict[str, tuple[int | float | None, ...]] = {
    "tiny": (32, 64, 16, 4, 1, 2, 1, 2, 2, 16, 16, 8, 8, 8, 1, 1, 1.0),
    "small": (256, 688, 256, 8, 1, 2, 1, 4, 8, 128, 64, 32, 16, 32, 1, 1, 1.0),
    "125m": (512, 1408, 384, 16, 1, 4, 1, 12, 8, 256, 128, 64, 32, 64, 1, 1, 1.0),
    "1b": (1024, 2816, 512, 32, 1, 4, 1, 19, 16, 384, 256, 64, 32, 64, 1, 1, 1.0),
    "16b": (2048, 11264, 1408, 64, 2, 6, 1, 27, 16, None, 512, 128, 64, 128, 1, 1, 2.446),
    "671b": (7168, 18432, 2048, 256, 1, 8, 3, 61, 128, 1536, 512, 128, 64, 128, 8, 4, 2.5),
}
_SHARED: dict[str, Any] = {"num_mtp_layers": 0, "bos_token_id": None, "eos_token_id": None, "use_cache": False}


def preset_config(name: str, *, vocabulary: int, positions: int) -> Any:
    """Return the transformers configuration of a preset."""
    from transformers import DeepseekV3Config

    sizes = dict(zip(_COLUMNS, _ROWS[name], strict=True))
    heads = sizes["num_attention_heads"]
    return DeepseekV3Config(
        **_SHARED, **sizes, num_key_value_heads=heads, vocab_size=vocabulary, max_position_embeddings=positions
    )


_KINDS = ("text", "tokens", "dataset", "chat")


@dataclass(frozen=True)
class TextConfig:
    """Training data. The default is the source code of Python's standard library, as bytes.

    Attributes:
        text: train on files: names, URLs or quoted patterns such as 'books/**/*.txt'. A row of a .jsonl, .csv or
            .parquet file is a document, other files are one each; all may be compressed (.gz, .zst). Some of the files
            are held out, or the end of the file if there is only one; with rows, some of the documents (default: source
            code of Python's standard library)
        tokens: train on token ids: .npy files with one dimension of integers. The end of each is held out (default: use
            data.text)
        dataset: train on folders written by datasets' save_to_disk, with a column text or input_ids. The validation or
            test split is held out, otherwise the end (default: use data.text)
        chat: train the assistant's turns of conversations: rows of files as for data.text, with messages, or prompt and
            completion, by the tokenizer's chat template. Samples are whole conversations, and some of them are held out
            (default: use data.text)
        validation: evaluate on this data, of the same kind as the data to train on, instead of holding some of it out:
            names of files or folders (default: hold out data.heldout)
        streaming: tokenize data.text while training reads it, instead of all before: training begins at once, and the
            disk holds some million tokens. Files are shuffled in each pass, samples among a million tokens. Nothing is
            held out (see data.validation)
        field: field of rows with the text, such as text, or meta.text for the field text in meta (default: text or
            content, otherwise the only one with text)
        on_error: what to do with a row that cannot be read, or has no text or conversation: refuse, with an error that
            names file and line, or skip, and count it
        weights: fraction of samples from each name in the option of the data, as [0.7, 0.3]; smaller sources repeat
            (default: each sample once per epoch)
        tokenizer: tokenizer.json for the text (default: the tokenizer of model.from, otherwise each byte is a
            token)
        documents: what a token sees of its sample: joined, all tokens before it; separate, those of its own document
            or conversation, and positions restart with each (default: separate for data.chat, otherwise joined)
        end_token: id of the last token of each document, for data.documents separate (default: that of the tokenizer)
        seq_len: tokens per sample, and the weight of a sample in the loss
        heldout: fraction of the data to hold out for evaluation, if data.validation is not set
    """

    text: list[str] | str | None = None
    tokens: list[str] | str | None = None
    dataset: list[str] | str | None = None
    chat: list[str] | str | None = None
    validation: list[str] | str | None = None
    streaming: bool = False
    field: str | None = None
    on_error: Literal["refuse", "skip"] = "refuse"
    weights: list[float] | None = None
    tokenizer: str | None = None
    documents: Literal["joined", "separate"] | None = None
    end_token: int | None = None
    seq_len: int = 128
    heldout: float = 0.05

    @property
    def separate(self) -> bool:
        """Whether documents do not see each other."""
        return self.documents == "separate" or (self.documents is None and bool(self.chat))

    @property
    def names(self) -> list[str]:
        """The names of files or folders that are given; empty for the standard library."""
        given = self.text or self.tokens or self.dataset or self.chat or []
        return [given] if isinstance(given, str) else given

    @property
    def kind(self) -> str:
        """The option of the data: text, tokens, dataset or chat."""
        return next((kind for kind in _KINDS if getattr(self, kind)), "text")


def check_data(config: TextConfig) -> None:
    """Check that options of the data have valid values, and do not conflict. Errors: ConfigError, DataError."""
    given = [name for name in _KINDS if getattr(config, name)]
    if len(given) > 1:
        raise ConfigError(
            "more than one kind of data is set",
            expected=f"one of {', '.join(f'data.{name}' for name in _KINDS)}, or none for the standard library",
            found=" and ".join(f"data.{name}" for name in given),
        )
    if config.tokens and config.tokenizer:
        raise ConfigError(
            "data.tokens and data.tokenizer conflict",
            expected="a tokenizer only for text; data.tokens contains ids",
            next_step="omit --data.tokenizer",
        )
    if config.end_token is not None and (config.chat or not config.separate):
        raise ConfigError(
            "data.end_token has no effect",
            expected="an end token only if documents, not conversations, are separate",
            next_step="add --data.documents separate, or omit --data.end_token",
        )
    if config.field is not None and not config.text:
        raise ConfigError(
            "data.field has no effect",
            expected="a field with the text of rows, for data.text",
            found=f"data.{config.kind}" if config.names else "no data.text",
            next_step="omit --data.field",
        )
    if config.validation and (config.weights is not None or config.heldout != TextConfig.heldout):
        other = "data.heldout" if config.weights is None else "data.weights"
        raise ConfigError(
            f"data.validation and {other} conflict",
            expected="one of them",
            next_step="omit one; null overrides data.validation and data.weights of a config file",
        )
    holds_out = config.heldout not in (0.0, TextConfig.heldout)
    if config.streaming and (not config.text or config.weights is not None or holds_out):
        raise ConfigError(
            "data.streaming streams text, and holds out none",
            expected="data.text, without data.weights and data.heldout",
            next_step="hvdtrain data prepare for other data; --data.validation for evaluations",
        )
    if config.weights is not None:
        from hvdtrain.data.mixture import whole_weights

        whole_weights(config.weights, len(config.names) or 1)
    if config.seq_len < 1:
        raise ConfigError("invalid --data.seq_len", expected="1 or more", found=str(config.seq_len))
    if not 0 <= config.heldout < 1:
        raise ConfigError("invalid --data.heldout", expected="0 or more, and less than 1", found=str(config.heldout))
