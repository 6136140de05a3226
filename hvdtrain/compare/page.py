"""A comparison as one self-contained HTML page, by the machinery of the report's page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.compare.comparison import Comparison
from hvdtrain.compare.curves import SAMPLES, SECONDS
from hvdtrain.compare.read import RunRecord
from hvdtrain.compare.view import Line, heads, letter, tables
from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.timeline.columns import Floats
from hvdtrain.timeline.report.page import render

_HUES = ("forward", "transfer", "optimizer", "data", "gc", "aside")
"""Colours of the style sheet, by column; they repeat."""
_WIDTH, _HEIGHT, _POINTS = 1000, 260, 250


def to_html(comparison: Comparison, runs: Sequence[RunRecord]) -> str:
    """Return the page of a comparison; `runs` are those that it compares."""
    by_path = {str(run.path): run for run in runs}
    columns = [[by_path[path] for path in paths] for paths in comparison.columns]
    view = {
        "comparison": comparison,
        "heads": heads(comparison),
        "letters": [letter(n) for n in range(len(columns))],
        "hues": [_HUES[n % len(_HUES)] for n in range(len(columns))],
        "tables": [(title, [_line(line) for line in lines]) for title, lines in tables(comparison).items()],
        "plots": [_plot(columns, axis) for axis in (SAMPLES, SECONDS)],
    }
    return render("compare.html", view, ["report.js"])


def _line(line: Line) -> dict[str, Any]:
    """Return the label, the cells, and for each cell its whisker: positions in percent, 50 is no difference."""
    known = [each for each in line.differences if each is not None and np.isfinite(each.low + each.high + each.value)]
    most = max([abs(end) for each in known for end in (each.low, each.high)] + [1e-12])
    bars = [_bar(each, most) if each in known else None for each in line.differences] or [None] * len(line.cells)
    return {
        "label": line.label.strip(),
        "inner": line.label.startswith(" "),
        "cells": list(zip(line.cells, bars, strict=True)),
    }


def _bar(difference: Estimate | None, most: float) -> dict[str, float] | None:
    if difference is None:
        return None
    value, low, high = (50 + 50 * end / most for end in (difference.value, difference.low, difference.high))
    return {"x": min(50.0, value), "width": abs(value - 50), "low": low, "high": high}


def _plot(columns: Sequence[Sequence[RunRecord]], axis: str) -> dict[str, Any]:
    """Return the training losses as lines of a picture, with the ends of its axes. Losses of other tasks are left out.

    Each point is the mean over a 250th of the axis.
    """
    task = columns[0][0].task
    curves = [(n, run.losses[axis]) for n, runs in enumerate(columns) for run in runs if run.task == task]
    end = max(float(curve.ends[-1]) for _, curve in curves)
    edges = np.linspace(0, end or 1.0, _POINTS + 1)
    series = [(number, curve.means(edges)) for number, curve in curves]
    known = np.concatenate([values[np.isfinite(values)] for _, values in series])
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    lines = [(_HUES[number % len(_HUES)], _points(values, low, high)) for number, values in series]
    return {"axis": axis, "end": f"{end:,.0f}" if axis == SAMPLES else f"{end:,.1f} s", "low": low, "high": high,
            "lines": lines}  # fmt: skip


def _points(values: Floats, low: float, high: float) -> str:
    """Return the points of a polyline."""
    x = (np.arange(len(values)) + 0.5) * _WIDTH / len(values)
    y = _HEIGHT * (1 - (values - low) / ((high - low) or 1.0))
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True) if np.isfinite(b))
