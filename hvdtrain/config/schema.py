"""The options of a run, declared once: YAML keys, flags, help and `config.yaml` all derive from these classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters follow gradients; unused where the task brings its own optimizer.

    Attributes:
        name: The update rule: adamw, or sgd with momentum.
        lr: Peak learning rate. Never scaled by the number of ranks.
        weight_decay: Decoupled for adamw. Norms, biases and other one-dimensional parameters are left out.
        beta1: Decay of AdamW's first moment.
        beta2: Decay of AdamW's second moment.
        eps: Added to AdamW's denominator.
        momentum: SGD's momentum.
        schedule: After the warm-up, follow a cosine down to min_lr; stay constant; or stay constant and fall linearly
            to min_lr at the end (wsd: warmup, stable, decay).
        warmup_steps: Steps over which the learning rate rises linearly from near zero.
        min_lr: Where cosine and wsd end, as a share of lr.
        decay: The part of all steps over which wsd falls.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 2e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.9
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    warmup_steps: int = 10
    min_lr: float = 0.1
    decay: float = 0.2


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks exchange gradients.

    Attributes:
        compression: What travels: none for gradients as they are, fp16, bf16, int8, topk:SHARE, powersgd:RANK, or auto
            for the one that pays, found out in the first steps.
        bucket_mib: Gradients are exchanged in buckets of at most so many MiB; without it, by where the ranks are.
        buffers: Persistent buffers that differ between ranks, such as running statistics: mean averages them after
            every step, broadcast takes those of rank 0, check ends the run with an error that names them.
        device: cuda takes the device of the rank's local_rank; auto takes it where there is one.
    """

    compression: str = "none"
    bucket_mib: float | None = None
    buffers: Literal["mean", "broadcast", "check"] = "mean"
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True)
class TrainConfig:
    """How long to train, on how much at a time.

    Attributes:
        steps: Optimizer steps in all, which is the schedule's horizon.
        epochs: Passes over the training data, instead of steps. May be a fraction.
        stop_at: Stop after this step; the schedule's horizon stays where it is.
        global_batch: Samples an optimizer step, over all ranks. The number of ranks does not change it.
        micro_batch: Samples a forward pass. Ranks share out whole micro-batches.
        clip: Largest L2 norm of the gradient; 0 turns clipping off.
        eval_every: Evaluate every this many steps, at the start and at the end; without it, at each checkpoint that
            is due. Of the checkpoints, one saved at a step with an evaluation can be kept as the best.
        eval_samples: Held-out samples looked at in an evaluation; 0 for all of them.
        check_every: See by a hash that parameters are equal on all ranks, every this many steps and at each checkpoint;
            0 for checkpoints only.
        max_skipped: End the run after this many steps in a row with a loss or gradient that is not finite.
        deterministic: Ask torch for deterministic kernels (slower on CUDA; the CPU's are deterministic anyway).
        compile: Compile the model's blocks with torch.compile, each by itself, so that gradients still travel while
            backward runs. The first evaluation and the first step take long, in later runs less; a C++ compiler is
            needed on CPUs. There the default model then takes about 0.9 of the time; a very small one can take more.
    """

    steps: int = 200
    epochs: float | None = None
    stop_at: int | None = None
    global_batch: int = 16
    micro_batch: int = 4
    clip: float = 1.0
    eval_every: int | None = None
    eval_samples: int = 64
    check_every: int = 25
    max_skipped: int = 10
    deterministic: bool = False
    compile: bool = False


@dataclass(frozen=True)
class LoaderConfig:
    """How samples reach the device.

    Attributes:
        workers: Loader processes a rank, and as many for evaluation; 0 loads in the training process, best where
            samples are cheap to make.
        prefetch: Micro-batches that each worker keeps ready.
        pin_memory: Page-locked host memory, so that copies to the device do not block; auto means with CUDA.
    """

    workers: int = 0
    prefetch: int = 2
    pin_memory: Literal["auto", "on", "off"] = "auto"


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, what to keep.

    Attributes:
        every: Save (and evaluate) every this many steps; 0 saves at the end and on signals only.
        keep: The newest so many checkpoints are kept, and the one with the lowest held-out loss beside them.
    """

    every: int = 50
    keep: int = 3


@dataclass(frozen=True)
class ElasticConfig:
    """What becomes of a run whose ranks come and go.

    Attributes:
        loss_s: At most so many seconds of training are lost where the state has to be taken back to the last commit:
            a copy of it in memory.
        roll_back: Take the state back to the last commit, and go on past the samples that did it, when the loss
            jumps (spikes), when the run would end for steps that are not finite (non_finite), or both.
    """

    loss_s: float = 60.0
    roll_back: Literal["never", "spikes", "non_finite", "both"] = "never"


@dataclass(frozen=True)
class ObserveConfig:
    """What is shown and recorded of a run.

    Attributes:
        line_every_s: Seconds between lines where output is no terminal (a file, mpirun).
        sinks: Where each step and event goes beside the journal: functions of one record, or classes with
            write(record) and close(), named file.py:name or module:name.
        timeline: Steps that Horovod's own Timeline records into timeline/ of the run: FIRST:LAST, all or off. auto
            takes some early steps where that costs next to nothing, and leaves it elsewhere.
        profile: Steps that torch.profiler records, a file a rank: FIRST:LAST, all or off.
        nvtx: Name each part of a step to Nsight Systems.
        tensorboard: Write what TensorBoard shows into tensorboard/ of the run.
        histograms_every: Give TensorBoard histograms of parameters and gradients every this many steps; 0 for none.
        peak_tflops: What a device can do at most, for the share of it that is used; without it, a table of known
            devices says.
        stall_timeout_s: End the run, and say which rank is to blame, when no rank has made progress for so many
            seconds; 0 for never. Above the longest that a single thing may take: a batch of data, a compilation.
    """

    line_every_s: float = 5.0
    sinks: list[str] = field(default_factory=list)
    timeline: str = "auto"
    profile: str = "off"
    nvtx: bool = False
    tensorboard: bool = True
    histograms_every: int = 0
    peak_tflops: float | None = None
    stall_timeout_s: float = 600.0


@dataclass(frozen=True)
class Config:
    """The options that every run has; the parameters of the task come beside them.

    Attributes:
        task: What to train: a name, file.py:function or module:function.
        precision: Number format of forward and backward. bf16 and fp16 are autocast over fp32 weights.
        seed: Of initial weights, sample order and dropout.
        run_dir: Where everything the run writes goes. Without it: the newest unfinished run of the same
            config under runs/, or a new one.
        resume: auto goes on from the newest whole checkpoint of run_dir, never starts anew, a path names a
            checkpoint or another run.
        log_level: How much is said on stderr.
        optimizer: How parameters follow gradients.
        parallel: How the ranks exchange gradients.
        train: How long to train, on how much at a time.
        loader: How samples reach the device.
        checkpoint: When to save, what to keep.
        elastic: What becomes of a run whose ranks come and go.
        observe: What is shown and recorded of a run.
    """

    task: str = "language_model"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    seed: int = 0
    run_dir: str | None = None
    resume: str = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
