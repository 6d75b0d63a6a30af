"""Services that keep many runs: what each of them is told, in its own words. Called by `track.py`.

Where their data go, and who may write there, stands in their own variables and files (`WANDB_MODE`,
`MLFLOW_TRACKING_URI`, ...). Their packages are imported when one is asked for.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ridgeline.errors import RunError, UsageError

_PARAMS, _METRICS, _LETTERS = 100, 1000, 500
"""What MLflow takes at a time, and how long a setting may be there."""


@dataclass(frozen=True)
class Told:
    """What is said of a run before its first record."""

    name: str
    folder: Path
    project: str
    began: float
    """Seconds since 1970."""
    settings: Mapping[str, str]
    config: str
    """The same as text."""


class Tracker(Protocol):
    id: str
    """By which the run is found again."""
    where: str
    """Where to look at it; empty where that is not known."""

    def log(self, step: int, at: float, scalars: Mapping[str, float]) -> None: ...

    def flush(self) -> None: ...

    def end(self, status: str) -> None:
        """`status`: as the run's events have it; `running` where it goes on without us."""


class Wandb:
    """Weights & Biases. Steps are a metric, since a run that goes back to a checkpoint does some again."""

    def __init__(self, told: Told, id: str | None) -> None:
        wandb = _load("wandb")
        try:
            self._run = wandb.init(
                project=told.project,
                name=told.name,
                id=id,
                resume="allow",
                dir=str(told.folder),
                config=dict(told.settings),
                reinit="create_new",  # several runs at a time
                # This process is not the training: neither its output nor its host are of interest.
                settings=wandb.Settings(x_disable_stats=True, console="off", silent=True),
            )
        except Exception as error:
            raise RunError(
                f"wandb does not take {told.folder} ({_first_line(error)}); `wandb login` once, or set "
                "WANDB_MODE=offline and `wandb sync` later"
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.id = str(self._run.id)
        self.where = str(self._run.dir if self._run.offline else self._run.url)

    def log(self, step: int, at: float, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, "_timestamp": at, **scalars})

    def flush(self) -> None:
        pass  # its own process sends

    def end(self, status: str) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)


class Mlflow:
    """MLflow, by its client: several runs at a time, and the times that things happened at."""

    def __init__(self, told: Told, id: str | None) -> None:
        mlflow, self._entities = _load("mlflow"), _load("mlflow.entities")
        self._metrics: list[Any] = []
        try:
            self._client = mlflow.MlflowClient()
            self.id = id or self._create(told)
            self._client.update_run(self.id, status="RUNNING")
        except Exception as error:
            raise RunError(
                f"MLflow does not take {told.folder} ({_first_line(error)}); MLFLOW_TRACKING_URI says "
                "where it is"
            ) from error
        self.where = f"{mlflow.get_tracking_uri()}, run {self.id}"

    def _create(self, told: Told) -> str:
        found = self._client.get_experiment_by_name(told.project)
        number = found.experiment_id if found else self._client.create_experiment(told.project)
        made = self._client.create_run(number, run_name=told.name, start_time=_millis(told.began))
        id = str(made.info.run_id)
        params = [
            self._entities.Param(key, value[:_LETTERS]) for key, value in told.settings.items()
        ]
        for first in range(0, len(params), _PARAMS):
            self._client.log_batch(id, params=params[first : first + _PARAMS])
        self._client.log_text(id, told.config, "config.yaml")
        return id

    def log(self, step: int, at: float, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._metrics.append(self._entities.Metric(name, value, _millis(at), step))
        if len(self._metrics) >= _METRICS:
            self.flush()

    def flush(self) -> None:
        while self._metrics:
            try:
                self._client.log_batch(self.id, metrics=self._metrics[:_METRICS])
            except Exception as error:
                raise RunError(
                    f"MLflow takes no more of run {self.id} ({_first_line(error)}); once it answers, the "
                    "same command goes on"
                ) from error
            del self._metrics[:_METRICS]

    def end(self, status: str) -> None:
        self.flush()
        word = {"finished": "FINISHED", "failed": "FAILED", "running": ""}.get(status, "KILLED")
        if word:
            self._client.set_terminated(self.id, word, _millis(time.time()))


TRACKERS: dict[str, Callable[[Told, str | None], Tracker]] = {"mlflow": Mlflow, "wandb": Wandb}


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken installation is as bad as none
        package = name.partition(".")[0]
        raise UsageError(
            f"--to {package} needs the package {package}, which cannot be imported ({_first_line(error)}); "
            "pip install 'ridgeline[track]'"
        ) from error


def _millis(seconds: float) -> int:
    return int(1000 * seconds)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
