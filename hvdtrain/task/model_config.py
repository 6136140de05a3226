"""Options of the language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
            model.config: dcp:FOLDER, deepspeed:FOLDER, lightning:FILE, torch:FILE (default: new weights of
            model.preset)
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
