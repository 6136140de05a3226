"""The model card: README.md of an exported model."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hvdtrain import __version__
from hvdtrain.observe.past_journal import read_events
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.manifest import read_manifest
from hvdtrain.yaml_file import yaml_text


def model_card(checkpoint: Path) -> str:
    """Return what a reader of the model wants to know: training, held-out losses, versions, options."""
    layout = RunLayout(checkpoint.resolve().parent.parent)
    step = read_manifest(checkpoint)["step"]
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "---", ""]
    lines += [f"# {layout.folder.name}, step {step:,}", "", "Trained with hvdtrain.", ""]
    options = layout.read_config() if layout.config.exists() else {}
    if options:
        samples = step * options["train"]["global_batch"]
        data = next(
            (options["data"][name] for name in ("text", "tokens", "dataset") if options["data"].get(name)), None
        )
        lines += [
            f"- Data: {data or 'source code of the standard library of Python'}",
            f"- Steps: {step:,} of {options['train']['global_batch']} samples, {samples:,} samples in all,"
            f" of {options['data']['seq_len']} tokens",
        ]
    lines += [
        f"- Versions: hvdtrain {__version__}, " + ", ".join(f"{n} {_version(n)}" for n in ("torch", "transformers"))
    ]
    lines += ["", *_losses(layout, step)]
    if options:
        lines += [
            "## Options",
            "",
            "`hvdtrain train --config FILE` with:",
            "",
            "```yaml",
            yaml_text(options).strip(),
            "```",
        ]
    return "\n".join(lines) + "\n"


def _losses(layout: RunLayout, step: int) -> list[str]:
    events = read_events(layout.journal, "evaluation") if layout.is_run else []
    losses = {int(event["at_step"]): float(event["loss"]) for event in events if int(event["at_step"]) <= step}
    if not losses:
        return []
    best = min(losses, key=lambda at: losses[at])
    rows = (("first", min(losses)), ("best", best), ("last", max(losses)))
    table = [f"| {name} | {at:,} | {losses[at]:.4f} |" for name, at in rows]
    return ["| held-out loss | step | nats for a token |", "|---|---|---|", *table, ""]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
