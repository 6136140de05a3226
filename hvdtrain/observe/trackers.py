"""Sinks by name: Weights & Biases, Trackio and MLflow. Their own environment variables say where the values go."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdtrain.errors import ConfigError
from hvdtrain.observe.scalars import OF_EVENTS, Interval, numbers
from hvdtrain.yaml_file import flatten

EVERY_S = 1.0
"""Least time between two points; steps between them are one point."""

_PROJECT = "hvdtrain"
_IDS = "trackers.json"
"""File in the run folder, with the id of the run by tracker: a resume continues it there."""
_LONGEST_PARAMETER = 500


class Tracker:
    """Sends a run's numbers to a tracker: of steps as in TensorBoard, evaluations, memory, experts, the report."""

    def __init__(self, name: str, folder: Path, variables: Mapping[str, str]) -> None:
        self._name, self._folder, self._variables = name, folder, variables
        self._client: _Wandb | _Mlflow | None = None
        self._interval = Interval()
        self._written_s = -float("inf")
        self._failed = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Send a record of the run."""
        event = record.get("event")
        if event == "started":
            self._interval = Interval(record["unit"])
            self._client = self._client or TRACKERS[self._name](self._folder, record["config"], self._variables)
        elif event is None:
            self._interval.add(record)
            if not 0 <= record["time"] - self._written_s < EVERY_S:
                self._written_s = record["time"]
                self._point()
        elif event in OF_EVENTS:
            if event == "explained":  # at the run's end
                self._point()
            self._log(OF_EVENTS[event](record), record["at_step"])
        elif event == "failed":
            self._failed = True

    def close(self) -> None:
        """Send the last point, and end the run there."""
        self._point()
        if self._client is not None:
            self._client.end(failed=self._failed)

    def _point(self) -> None:
        if (last := self._interval.last) is not None:
            self._log(self._interval.scalars(), last["step"])

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        if self._client is not None:
            self._client.log(numbers(values), step)


class _Wandb:
    """Weights & Biases; also Trackio, which has the same functions."""

    def __init__(self, module: str, folder: Path, config: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self._module: Any = import_module(module)
        own = {"id": _id_of(module, folder), "dir": str(folder)} if module == "wandb" else {}
        project = variables.get(f"{module.upper()}_PROJECT", _PROJECT)
        self._module.init(project=project, name=folder.name, config=dict(flatten(config)), resume="allow", **own)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log(dict(values), step=step)

    def end(self, *, failed: bool) -> None:
        self._module.finish(**({"exit_code": int(failed)} if self._module.__name__ == "wandb" else {}))


class _Mlflow:
    def __init__(self, folder: Path, config: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self._mlflow: Any = import_module("mlflow")
        client = self._mlflow.MlflowClient()
        if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & variables.keys():
            self._mlflow.set_experiment(_PROJECT)
        tags = {"hvdtrain": _id_of("mlflow", folder)}
        known = self._mlflow.search_runs(filter_string=f"tags.hvdtrain = '{tags['hvdtrain']}'", output_format="list")
        run = self._mlflow.start_run(run_id=known[0].info.run_id if known else None, run_name=folder.name, tags=tags)
        self._client, self._run = client, run.info.run_id
        if not known:
            self._mlflow.log_params({name: str(value)[:_LONGEST_PARAMETER] for name, value in flatten(config).items()})

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step, run_id=self._run)

    def end(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


def _id_of(tracker: str, folder: Path) -> str:
    """Return the id of the run at a tracker; make one if it has none."""
    file = folder / _IDS
    known: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    if tracker not in known:
        known[tracker] = uuid.uuid4().hex
        file.write_text(json.dumps(known))
    return known[tracker]


TRACKERS: Mapping[str, Callable[[Path, Mapping[str, Any], Mapping[str, str]], _Wandb | _Mlflow]] = {
    "wandb": partial(_Wandb, "wandb"),
    "trackio": partial(_Wandb, "trackio"),
    "mlflow": _Mlflow,
}


def check_installed(name: str) -> None:
    """Check that the package of a tracker is installed. Errors: ConfigError."""
    if find_spec(name) is None:
        package = "mlflow-skinny" if name == "mlflow" else name
        what = f"--observe.sinks {name} needs the package {package}, which is not installed"
        raise ConfigError(what, next_step=f"pip install {package}")
