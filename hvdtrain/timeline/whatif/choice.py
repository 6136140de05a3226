"""Choose the compression that pays, from predictions of a step with each of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdtrain.timeline.whatif.assemble import Costs
from hvdtrain.timeline.whatif.evidence import Change, Evidence
from hvdtrain.timeline.whatif.predict import Outcome, outcomes

WORTH = 0.95
"""A compression must bring the step below this share of the step without it: it costs accuracy and memory."""
_EQUAL = 1.03
"""Of the compressions within this factor of the fastest, the first one is chosen."""


def choose_compression(
    evidence: Evidence, candidates: Sequence[str], costs: Costs
) -> tuple[str, Mapping[str, Outcome]]:
    """Return the compression to train with, and the predicted step with each one, "none" first.

    The evidence is of steps without compression. Of the candidates, those that lose least come first.
    """
    predicted = {"none": outcomes(evidence, Change(), costs)[0]}
    predicted |= {name: outcomes(evidence, Change(compression=name), costs)[1] for name in candidates}
    best_s = min(outcome.step_s for outcome in predicted.values())
    if best_s > WORTH * evidence.step_s:
        return "none", predicted
    return next(name for name in candidates if predicted[name].step_s <= _EQUAL * best_s), predicted
