"""What the machine gives to the ranks on it."""

from __future__ import annotations

from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.gather import Gathered


def host(facts: Gathered) -> Finding:
    """Describe the machine."""
    system, cores, own = facts.machine.system, facts.machine.host.cores, facts.machine.host.own_cores
    bound = f", {own} of them this process's" if own != cores else ""
    text = f"{facts.info.host}: {system['cpu']}, {cores} cores{bound}, {system['memory']}, {system['kernel']}"
    return Finding("host", "ok", text)
