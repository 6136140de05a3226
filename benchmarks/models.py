"""The models that benchmarks train, as tasks: the package's default and a plain Llama."""

from __future__ import annotations

from hvdtrain import Task
from hvdtrain.task.corpus import TextConfig, open_corpus
from hvdtrain.task.language_model import language_model, next_token_loss


def default() -> Task:
    """The task that `make train` trains."""
    return language_model()


def llama15m(seq_len: int = 128) -> Task:
    """A Llama of about 15 million parameters on the default text: 4 x 128 tokens a micro-batch of 4.

    Args:
        seq_len: tokens a sample
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    corpus = open_corpus(TextConfig(seq_len=seq_len))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192,
            hidden_size=320,
            intermediate_size=864,
            num_hidden_layers=8,
            num_attention_heads=5,
            num_key_value_heads=5,
            max_position_embeddings=seq_len,
            use_cache=False,
        )
    )
    return Task(model, next_token_loss, corpus.train, nominal_weight=float(seq_len), unit="tokens")


MODELS = {"default": default, "llama15m": llama15m}
