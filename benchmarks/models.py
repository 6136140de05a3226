"""The models that benchmarks train, as tasks: the package's default, plain Llamas, a ResNet on one batch."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Literal

import torch
from torch.utils.data import default_collate

from hvdtrain import Task
from hvdtrain.task.corpus import open_corpus
from hvdtrain.task.image import ImageConfig, ResNetConfig, image
from hvdtrain.task.language_model import language_model
from hvdtrain.task.text_config import TextConfig
from hvdtrain.task.token_loss import next_token_loss


def default() -> Task:
    """The task that `make train` trains."""
    return language_model()


def llama15m(seq_len: int = 128) -> Task:
    """A Llama of about 15 million parameters on the default text: 4 x 128 tokens a micro-batch of 4.

    Args:
        seq_len: tokens a sample
    """
    return _llama(seq_len, hidden_size=320, intermediate_size=864, num_hidden_layers=8, heads=5)


def llama60m(seq_len: int = 16) -> Task:
    """A Llama of about 60 million parameters, with few tokens: more to exchange than to compute.

    Args:
        seq_len: tokens a sample
    """
    return _llama(seq_len, hidden_size=640, intermediate_size=1728, num_hidden_layers=10, heads=10)


def _llama(seq_len: int, heads: int, **sizes: int) -> Task:
    from transformers import LlamaConfig, LlamaForCausalLM

    corpus = open_corpus(TextConfig(seq_len=seq_len))
    config = LlamaConfig(
        vocab_size=8192,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=seq_len,
        use_cache=False,
        **sizes,
    )
    return Task(LlamaForCausalLM(config), next_token_loss, corpus.train, nominal_weight=float(seq_len), unit="tokens")


def resnet(preset: Literal["tiny", "resnet18", "resnet50"] = "resnet50", size: int = 224, batch: int = 32) -> Task:
    """A ResNet on one batch of random images, made once and kept on the device.

    Args:
        preset: depth
        size: height and width of an image in pixels
        batch: number of images
    """
    torch.backends.cudnn.benchmark = True  # as the protocol has it
    task = image(ResNetConfig(preset), ImageConfig("synthetic", size))
    data = task.train_data
    kept = [part.to(device()) for part in default_collate([data[i % len(data)] for i in range(batch)])]
    return replace(task, train_data=range(1000 * batch), collate=lambda indices: kept)


def device() -> torch.device:
    """The CUDA device of this rank, where there is one."""
    names = ("OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_LOCAL_RANK", "RANK")
    rank = next((int(os.environ[name]) for name in names if name in os.environ), 0)
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


MODELS = {"default": default, "llama15m": llama15m, "llama60m": llama60m, "resnet": resnet}
