"""The spelling of options: ``--run-dir`` and ``--run_dir`` name the same one, in every command."""

from __future__ import annotations

import argparse
from collections.abc import Container, Mapping
from keyword import iskeyword
from typing import Any

ELSEWHERE: Mapping[str, str] = {
    "--optimizer.lr": "lr learning_rate",
    "--optimizer.name": "optim optimizer_type optimizer_name",
    "--optimizer.schedule": "lr_scheduler lr_scheduler_type lr_schedule scheduler",
    "--optimizer.warmup_steps": "warmup_steps num_warmup_steps warmup lr_warmup_steps warmup_ratio",
    "--optimizer.weight_decay": "weight_decay wd",
    "--optimizer.momentum": "momentum",
    "--optimizer.beta1": "beta1 adam_beta1 betas",
    "--optimizer.beta2": "beta2 adam_beta2",
    "--optimizer.eps": "eps adam_epsilon adam_eps",
    "--train.global_batch": "batch_size global_batch_size train_batch_size gradient_accumulation_steps"
    " accumulate_grad_batches grad_accum gradient_accumulation",
    "--train.micro_batch": "micro_batch_size per_device_train_batch_size per_device_batch_size per_gpu_batch_size",
    "--train.epochs": "epochs num_epochs num_train_epochs max_epochs",
    "--train.steps": "steps max_steps num_steps total_steps train_iters",
    "--train.clip": "clip max_grad_norm gradient_clip_val clip_grad grad_clip clip_grad_norm gradient_clipping",
    "--train.eval_every": "eval_steps eval_interval val_check_interval evaluation_strategy eval_strategy",
    "--train.compile": "compile torch_compile",
    "--train.tf32": "tf32",
    "--train.deterministic": "deterministic full_determinism",
    "--precision fp16": "fp16 amp half mixed_precision use_amp",
    "--precision bf16": "bf16 bfloat16 autocast",
    "--memory.checkpointing full": "gradient_checkpointing activation_checkpointing checkpoint_activations"
    " recompute_activations",
    "--memory.offload optimizer": "cpu_offload offload_optimizer",
    "--parallel.engine fsdp": "fsdp",
    "--parallel.engine": "backend strategy",
    "--parallel.compression fp16": "fp16_allreduce",
    "--parallel.compression": "compression compressor",
    "--parallel.shard": "zero zero_stage zero1 zero2 sharding",
    "--parallel.bucket_mib": "bucket_cap_mb fusion_threshold_mb fusion_threshold",
    "--parallel.virtual_stages": "parallel.zero_bubble",
    "--parallel.device": "device no_cuda use_cpu cuda accelerator",
    "--parallel.bind": "bind numa_binding enable_cpu_affinity bind_cores_to_rank",
    "--loader.workers": "num_workers workers dataloader_num_workers data_workers",
    "--loader.pin_memory": "pin_memory dataloader_pin_memory",
    "--checkpoint.every": "save_steps save_interval save_every checkpoint_every checkpoint_interval",
    "--checkpoint.keep": "save_total_limit keep_checkpoints",
    "--run_dir": "output_dir save_dir out_dir log_dir logdir logging_dir checkpoint_dir",
    "--resume": "resume_from_checkpoint resume_from ckpt_path load_checkpoint",
    "--observe.line_every_s": "logging_steps log_interval log_every_n_steps log_every",
    "--observe.sinks": "report_to wandb",
    "--observe.prometheus": "observe.otlp otlp",
    "--callbacks": "observe.histograms_every",
    "--model.from": "model.pretrained pretrained model_name_or_path pretrained_model_name_or_path init_from",
    "--model.attention": "attn_implementation attention flash_attention use_flash_attn",
    "--model.lora": "lora use_lora lora_r lora_rank",
    "--data.seq_len": "seq_len seq_length max_length max_seq_length block_size context_length",
    "--data.weights": "interleave_probs dataset_mixer dataset_weights data_weights",
    "--data.documents": "packing reset_position_ids reset_attention_mask",
    "--data.validation": "validation_file eval_file eval_data eval_dataset",
    "--data.field": "text_column text_field dataset_text_field",
    "--data.tokenizer": "tokenizer tokenizer_name tokenizer_path",
}
"""Options, and what Horovod's examples, Transformers, Lightning, DeepSpeed and Megatron call them."""
_REMARKS: Mapping[str, str] = {
    "--train.global_batch": "samples of a step over all ranks; a rank accumulates the gradients of its micro-batches",
    "--optimizer.warmup_steps": "a number of steps",
    "--observe.line_every_s": "in seconds",
    "--observe.prometheus": "a collector of OpenTelemetry reads its port by the receiver named prometheus",
    "--callbacks": "on_step of one may call add_histogram of torch's SummaryWriter",
}


def option_name(name: str) -> str:
    """Return the name of an option for a field; `from_` is for `from`, which Python reserves."""
    short = name.removesuffix("_")
    return short if iskeyword(short.rpartition(".")[2]) else name


class EitherSpelling(argparse.ArgumentParser):
    """A parser that accepts ``-`` for ``_`` in the name of an option, and the reverse.

    Each option is declared once. Help and messages show the declared spelling. Values, and whatever follows ``--``,
    stay as they are.
    """

    def _parse_optional(self, arg_string: str) -> Any:
        # argparse asks this method, on every version, which option a word is.
        return super()._parse_optional(declared_spelling(arg_string, self._option_string_actions))


def declared_spelling(word: str, options: Container[str]) -> str:
    """Return a word of a command line with the name of its option as declared; any other word as it is."""
    name, equals, value = word.partition("=")
    if not word.startswith("--") or name in options:
        return word
    for one, other in ("_-", "-_"):
        spelled = f"--{name[2:].replace(one, other)}"
        if spelled in options:
            return f"{spelled}{equals}{value}"
    return word


def known_elsewhere(option: str) -> tuple[str, str] | None:
    """Return our option, perhaps with a value, and a remark or "", for an option of another trainer; else None."""
    name = option.lstrip("-").replace("-", "_")
    ours = next((ours for ours, theirs in ELSEWHERE.items() if name in theirs.split()), None)
    return None if ours is None else (ours, _REMARKS.get(ours, ""))
