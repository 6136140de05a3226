"""Describe the network that NCCL uses, by the log that it wrote with ``NCCL_DEBUG=INFO``. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hvdtrain.timeline.logs import NcclLines

_NAME = re.compile(r"(?:\[\d+\])?([A-Za-z][\w.-]*):[\d.a-fA-F:]+<")
_CARD = re.compile(r"\[\d+\]([\w.-]+):\d+/(?:IB|RoCE|uverbs)")
_CHANNEL = re.compile(r"(P2P|SHM)\b|NET/([^/]+)")


def fabric(lines: Iterable[str], cards: Iterable[str] = ()) -> str:
    """Describe what NCCL uses, such as ``NET/IB mlx5_0``; "" if the log does not show it. `cards`: of this host."""
    log = NcclLines()
    for line in lines:
        log.add_line(line)
    links = [kind for _, _, via in log.facts["link"] if (kind := _CHANNEL.match(via))]
    kinds = dict.fromkeys(kind[1] or f"NET/{kind[2].strip()}" for kind in links)
    addresses = [values[-1] for kind in ("bootstrap", "device") for values in log.facts[kind]]
    used = {
        "NET/IB": dict.fromkeys(card for _, text in log.facts["device"] for card in _CARD.findall(text)),
        "NET/Socket": dict.fromkeys(name for text in addresses for name in _NAME.findall(text)),
    }
    between = [kind for kind in kinds if kind.startswith("NET/")]
    text = ", ".join(" ".join([kind, *used.get(kind, ())]) for kind in between or kinds)
    unused = ", ".join(cards)
    return f"{text} (although there are {unused})" if "NET/Socket" in kinds and unused else text
