"""The options of a run, declared once: YAML keys, flags, help texts and `config.yaml` derive from these classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

LEARNING_RATES: Mapping[str, float] = {"adamw": 2e-3, "sgd": 0.1, "muon": 8e-3, "adafactor": 3e-2}
"""Default of `OptimizerConfig.lr` by `name`."""

"""Value of the micro-batch: find it."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning rate; unused if the task brings its own optimizer.

    Attributes:
        name: update rule: adamw; sgd, with momentum; muon for the matrices of the model's blocks, with AdamW for all
            other parameters; adafactor
        lr: peak learning rate; never scaled by the number of ranks (default: 0.002 for adamw, 0.1 for sgd, 0.008 for
            muon, 0.03 for adafactor)
        weight_decay: weight decay (decoupled, except for SGD); norms, biases and other one-dimensional parameters, and
            those with sparse gradients, get none
        beta1: decay rate of AdamW's first moment
        beta2: decay rate of AdamW's second moment
        eps: number added to AdamW's denominator
        momentum: momentum of SGD, and of Muon's matrices
        schedule: learning rate after the warm-up: cosine and linear fall to min_lr; wsd (warmup, stable, decay) is
            constant, then falls linearly to min_lr; constant does not change
        warmup_steps: number of steps in which the learning rate rises linearly from near zero
        min_lr: final learning rate of cosine, linear and wsd, as a fraction of lr
        decay: fraction of all steps in which wsd decays
    """

    name: Literal["adamw", "sgd", "muon", "adafactor"] = "adamw"
    lr: float | None = None
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.9
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: int = 10
    min_lr: float = 0.1
    decay: float = 0.2

    @property
    def peak_lr(self) -> float:
        """`lr`, or the default of the optimizer."""
        return LEARNING_RATES[self.name] if self.lr is None else self.lr


@dataclass(frozen=True)
class ParallelConfig:
    """Exchange of gradients between ranks.

    Attributes:
        engine: what exchanges gradients: horovod, ddp for torch's DistributedDataParallel, or fsdp for torch's FSDP2,
            which divides the parameters, too; torchrun can start ddp and fsdp without Horovod
        compression: compression of the exchanged gradients, and of the parameters that engine fsdp gathers: none, fp16,
            bf16, int8, int8-stochastic, topk:FRACTION, powersgd:RANK, or auto (measure in the first steps, then choose
            the fastest)
        bucket_mib: largest bucket of gradients to exchange at once, in MiB (default: 32 on one host; between hosts 8,
            or 2 for fp16 and bf16); at least a 256th of all
        shard: what is divided among the ranks instead of copied: optimizer for the state of the optimizer (ZeRO-1),
            gradients for the sums of each micro-batch's gradients, too (ZeRO-2), parameters for the parameters, too
            (ZeRO-3; only with engine fsdp, which implies it)
        tp: number of ranks that divide each matrix of a block (tensor parallelism). They have the same samples, and
            exchange activations in each pass: keep them on one host. For models of transformers with a plan
        ep: number of ranks that divide the experts of each layer (expert parallelism), each with samples of its own:
            tokens go to the ranks that have their experts, and none is dropped. With tp, a multiple of it
        cp: number of ranks that divide each sequence (context parallelism), for texts that are too long for one. They
            have the same samples, and exchange heads of attention in each pass. With any engine, tp, ep and pp
        pp: number of ranks that divide the layers, as stages of a pipeline (pipeline parallelism). They have the same
            samples, and send activations to the next stage, with low traffic. Use at least four times as many
            micro-batches a step. The ranks of a stage follow each other; tp, ep and cp divide its layers
        virtual_stages: number of groups of layers on each rank of a pipeline (interleaved 1F1B): stages wait less by
            this factor, and send as many times more. Needs a multiple of pp micro-batches in each pipeline.
            Not with engine fsdp
        dp_shard: number of ranks that divide the model with engine fsdp, usually those of a host. Each group of that
            size has a copy, and groups exchange gradients, with any compression but powersgd (default: one group)
        sync: when workers exchange: every_step, in each step; local:N, the mean of their parameters every N steps;
            diloco:N, their changes, to which an outer optimizer applies Nesterov momentum; streaming:N, the same in
            parts that are exchanged during later steps; sparseloco:N, only the largest changes. Set workers, too
        workers: number of workers that train apart between exchanges. Ranks share them out: several workers a rank, or
            several ranks a worker. The loss curve depends on this number, and not on the number of ranks
            (default: none)
        balance: how micro-batches are divided among ranks: equal, or by their measured speed, which does not change the
            loss curve
        buffers: persistent buffers that differ between ranks, such as running statistics: mean averages them after
            every step, broadcast copies those of rank 0, check ends the run with an error that names them
        device: device of a rank: cuda is the GPU numbered by its local rank; auto is cuda if available, otherwise cpu;
            shared lets several ranks use one GPU, which is slow and meant for tests
        bind: cores of a rank, its loaders and its pinned memory: gpu for those near its GPU, none for those that
            the launcher allows; auto is gpu with CUDA, otherwise none
    """

    engine: Literal["horovod", "ddp", "fsdp"] = "horovod"
    compression: str = "none"
    bucket_mib: float | None = None
    shard: Literal["none", "optimizer", "gradients", "parameters"] = "none"
    tp: int = 1
    ep: int = 1
    cp: int = 1
    pp: int = 1
    virtual_stages: int = 1
    dp_shard: int | None = None
    sync: str = "every_step"
    workers: int | None = None
    balance: Literal["equal", "speed"] = "equal"
    buffers: Literal["mean", "broadcast", "check"] = "mean"
    device: Literal["auto", "cpu", "cuda", "shared"] = "auto"
    bind: Literal["auto", "gpu", "none"] = "auto"


@dataclass(frozen=True)
class OuterConfig:
    """Exchange of workers that train apart (--parallel.sync); unused if ranks exchange in every step.

    Attributes:
        lr: learning rate of the outer optimizer (default: 1 for local and sparseloco, otherwise 0.7)
        momentum: Nesterov momentum of the outer optimizer (default: 0 for local and sparseloco, otherwise 0.9)
        compression: compression of the exchanged changes: none, bf16, int8, int4, int2, or topk:FRACTION with 2 bits
            (default: topk:0.03 for sparseloco, otherwise int8)
        feedback: fraction of what compression has lost that a worker adds to its next change (default: 0.95 for
            sparseloco, otherwise 1)
        start_steps: steps at the beginning in which all ranks exchange gradients
        fragments: parts of the parameters that are exchanged one after the other; a divisor of the steps between
            exchanges (default: up to 4 for streaming, otherwise 1)
        delay: steps until the result of an exchange is used, which hide its time (default: half of the steps between
            two exchanges for streaming, otherwise 0)
        mix: fraction of its own parameters that a worker keeps when it uses a delayed result (default: 0.5; 0 without
            delay)
        shares: how many of a step's micro-batches each worker gets, in proportion, such as 2,1 where worker 0 is twice
            as fast (default: equal ones)
    """

    lr: float | None = None
    momentum: float | None = None
    compression: str | None = None
    feedback: float | None = None
    start_steps: int = 0
    fragments: int | None = None
    delay: int | None = None
    mix: float | None = None
    shares: str | None = None


@dataclass(frozen=True)
class MemoryConfig:
    """Memory of the device.

    Attributes:
        offload: keep this in the memory of the host: optimizer for the state and the update of a divided
            optimizer, and with engine fsdp for parameters and gradients, too. Saves memory of a GPU, and takes longer
        checkpointing: activations that backward computes again instead of keeping them: full for all inside the blocks
            of the model, selective for all but the results of most matrix products, convolutions and attention
    """

    offload: Literal["none", "optimizer"] = "none"
    checkpointing: Literal["none", "full", "selective"] = "none"


@dataclass(frozen=True)
class TrainConfig:
    """Length of training and batch sizes.

    Attributes:
        steps: number of optimizer steps; the learning rate schedule spans them
        epochs: passes over the training data, also fractions (default: train.steps instead)
        stop_at: stop after this step without changing the schedule (default: the last step)
        global_batch: samples per optimizer step over all ranks; independent of the number of ranks
        micro_batch: samples per forward pass; each rank gets whole micro-batches of the global batch. hvdtrain fit
            --largest predicts how many fit
        clip: largest L2 norm of the gradient; 0 disables clipping
        eval_every: evaluate every N steps, and at the start and the end; the best evaluation is saved at once
            (default: at each periodic checkpoint)
        eval_samples: number of held-out samples per evaluation; 0 means all
        check_every: compare a hash of the parameters across ranks every N steps, and at each checkpoint; 0 means at
            checkpoints only
        patience: end training after N evaluations in a row that are not better than the best one, by checkpoint.best
            (default: never)
        ema: keep an exponential moving average of the parameters: the fraction that stays at each step, such as 0.999.
            Evaluations have its loss as ema_loss (default: none)
        router_bias: how much the bias of a mixture's router changes in a step for each expert: up for those with fewer
            tokens than the mean, down for the others (DeepSeek-V3's balance without an auxiliary loss); 0 for never.
            Models without such a bias have no use for it
        balance_loss: factor of an auxiliary loss that balances the experts of each sequence (DeepSeek-V3: 0.0001); 0
            for none. The losses that are shown are without it
        max_skipped: end the run after N steps in a row with a loss or gradient that is not finite
        tf32: whether fp32 operations on GPUs may round their inputs to 10 bits (TF32), which is faster: on for matrix
            products and convolutions, off for neither, auto for the choice of torch, usually convolutions only
        deterministic: use deterministic torch kernels, and refuse operations without one; slower on CUDA, no change on
            CPUs
        reproducible: bits for the same bits of parameters and optimizer on any number of ranks, also where it changes:
            sums are taken in one order, and each rank has the number of threads of the first start (OMP_NUM_THREADS,
            or 1). Implies deterministic
        verify_every: in one step of N, each rank repeats a micro-batch of the next rank, and both compare all bits of
            its gradient; 0 for never. It needs reproducible
        compile: compile each block of the model with torch.compile; the exchange still overlaps backward. The first
            evaluation and first step take longer. CPUs need a C++ compiler
    """

    steps: int = 200
    epochs: float | None = None
    stop_at: int | None = None
    global_batch: int = 16
    micro_batch: int = 2
    clip: float = 1.0
    eval_every: int | None = None
    eval_samples: int = 64
    check_every: int = 25
    patience: int | None = None
    ema: float | None = None
    router_bias: float = 0.001
    balance_loss: float = 0.0
    max_skipped: int = 10
    tf32: Literal["auto", "on", "off"] = "auto"
    deterministic: bool = False
    reproducible: Literal["none", "bits"] = "none"
    verify_every: int = 0
    compile: bool = False


@dataclass(frozen=True)
class LoaderConfig:
    """Loading of samples.

    Attributes:
        workers: loader processes per rank, and as many again for evaluation; 0 loads in the rank itself, which is best
            for samples that are cheap to make
        prefetch: micro-batches that each loader process keeps ready
        pin_memory: use page-locked host memory, so that copies to the device do not block; auto: on if CUDA is used
    """

    workers: int = 0
    prefetch: int = 2
    pin_memory: Literal["auto", "on", "off"] = "auto"


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints.

    Attributes:
        every: save and evaluate every N steps; 0 saves only at the end and on signals
        keep: number of newest checkpoints to keep; the best one is kept as well
        best: what makes a checkpoint the best: the lowest held-out loss, or a metric of the task, as accuracy:max
        to: URL of a folder that gets a copy of each checkpoint and of the journal, such as s3://bucket/run. A resume
            uses the newest checkpoint of RUN and of this folder (default: none)
        lease: keep other jobs out of checkpoint.to. false is for stores without conditional writes: then two jobs may
            spoil each other's copies
    """

    every: int = 50
    keep: int = 3
    best: str = "loss"
    to: str | None = None
    lease: bool = True


@dataclass(frozen=True)
class ElasticConfig:
    """Recovery from lost ranks and bad steps.

    Attributes:
        loss_s: commit the state to memory at least this often, in seconds; this bounds the training lost when it
            rolls back. Used with roll_back, and in elastic jobs with int8, topk, powersgd or a divided optimizer
        roll_back: roll back to the last commit, and skip the samples of the bad step, on: spikes (the loss jumps),
            non_finite (instead of ending the run), both, or never
    """

    loss_s: float = 60.0
    roll_back: Literal["never", "spikes", "non_finite", "both"] = "never"


@dataclass(frozen=True)
class ObserveConfig:
    """Output and recording.

    Attributes:
        line_every_s: seconds between progress lines if the output is not a terminal (a file, or under mpirun)
        sinks: extra receivers of each step and event: wandb, trackio, mlflow; functions of one record, or classes with
            write(record) and close(), as file.py:name or module:name
        prometheus: metrics for Prometheus, by rank 0: a port of its host, on 127.0.0.1 only, or FILE.prom, a file for
            the textfile collector of node_exporter (default: none)
        otlp: URL of a collector of OpenTelemetry, which gets these metrics every 10 s by http/protobuf (default: none)
        timeline: steps that Horovod's Timeline records into RUN/timeline: FIRST:LAST, all, off, or auto (steps 10 to 20
            if recording is free on this machine, otherwise none)
        profile: steps that torch.profiler records, one file per rank: FIRST:LAST, all or off
        nvtx: mark the parts of each step for Nsight Systems
        tensorboard: write TensorBoard files to RUN/tensorboard
        peak_tflops: peak TFLOP/s of the device, from which utilization is computed (default: from a table of known
            devices)
        stall_timeout_s: end the run and name the responsible rank if no rank makes progress for this many seconds; 0
            means never. Set it above the longest single operation, such as a batch or a compilation
        watch_every_s: look every N seconds for what slows the run, and say what changes; less often where looks would
            take more than 1% of a core; 0 means never. Needs traces (timeline is not off)
        price_per_hour: price of one device for one hour, in any currency; a device is a GPU, or a rank on CPUs. The
            cost of the run is shown at its end (default: none)
    """

    line_every_s: float = 5.0
    sinks: list[str] | str = field(default_factory=list)
    prometheus: int | str | None = None
    otlp: str | None = None
    timeline: str = "auto"
    profile: str = "off"
    nvtx: bool = False
    tensorboard: bool = True
    peak_tflops: float | None = None
    stall_timeout_s: float = 600.0
    watch_every_s: float = 300.0
    price_per_hour: float | None = None


@dataclass(frozen=True)
class Config:
    """Options of every run; the parameters of the task are added to them.

    Attributes:
        task: what to train: image, language_model, file.py:function or module:function
        precision: number format of forward and backward; bf16 and fp16 use autocast over fp32 weights, bf16-weights
            computes with bf16 copies of weights that the optimizer keeps in fp32
        seed: seed of initial weights, sample order and dropout
        run_dir: folder for everything that the run writes (called RUN below) (default: the newest unfinished run of the
            same config under runs/, otherwise a new one)
        resume: checkpoint to resume from: auto (newest complete one in run_dir), never, or the path of a checkpoint or
            of another run
        callbacks: classes of hvdtrain.Callback that are called during training, as file.py:name or module:name
        log_level: lowest level of messages on stderr
        optimizer: update rule and learning rate; unused if the task brings its own
        parallel: exchange of gradients between ranks
        outer: exchange of workers that train apart
        memory: memory of the device
        train: length of training and batch sizes
        loader: loading of samples
        checkpoint: when to save and what to keep
        elastic: recovery from lost ranks and bad steps
        observe: output and recording
    """

    task: str = "language_model"
    precision: Literal["fp32", "bf16", "fp16", "bf16-weights"] = "fp32"
    seed: int = 0
    run_dir: str | None = None
    resume: str = "auto"
    callbacks: list[str] | str = field(default_factory=list)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
