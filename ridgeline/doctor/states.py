"""A state of a climb in processes of its own, run in turns: of a recipe, or of a user's own script.

Each process (`candidate.py`, `script_candidate.py`), one for each rank of the training, reads lines of JSON
that say how many steps to run and answers each with one line. A state that is done with is closed; one that
hangs is ended. Used by `climb.py`; imports without torch.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.config import RunConfig, dump_config
from ridgeline.doctor.processes import Failure, Processes, merge, start
from ridgeline.doctor.remedies.contract import OPTIMIZER, Parts
from ridgeline.doctor.seen import SeenScript, as_seen
from ridgeline.doctor.spares import Spares
from ridgeline.errors import RunError, UsageError
from ridgeline.launch.env import TUNE
from ridgeline.launch.topology import usable_cpus
from ridgeline.layout import Layout
from ridgeline.train.settings import FIELDS, LoaderSettings, Settings, write_settings

WARM_AGAIN = 5
"""Steps before the timed ones, at least, of a script that was started again."""


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int = 5
    """Turns of each of two states; more make the noise known better."""
    clear: float = 1.25
    """Three turns in which one of the two is so many times as fast: no further one says anything else."""
    steps: int = 10
    """Timed steps a turn, at most."""
    warm_up: int = 2
    """Steps before them in each turn, at most."""
    turn_s: float = 6.0
    """A state whose steps are long takes fewer of them, so that a turn lasts about so long."""
    check_steps: int = 24
    """Steps over which losses are compared."""
    loss_bound: float = 0.005
    least_gain: float = 0.01
    timeout_s: float = 1800.0
    """For one turn, compiling included."""
    budget_s: float = math.inf
    """No further remedy is begun after so long."""
    ahead: int | None = None
    """States that start beside the one whose turn it is, for the turns after it; None: by the cores that
    a rank has."""
    num_ranks: int = 1
    """Processes of a state."""
    without: tuple[str, ...] = ()
    """Remedies that are not to be tried, by name."""

    @property
    def num_ahead(self) -> int:
        """On few cores states that start at the same time only take them from each other."""
        if self.ahead is not None:
            return self.ahead
        cores = len(usable_cpus()) // self.num_ranks
        return 2 if cores >= 8 else 1 if cores >= 4 else 0

    def turn_of(self, step_s: float) -> tuple[int, int]:
        """Steps before, and timed steps, of a turn with steps that take so long (0: not known yet).

        >>> Effort().turn_of(0.1), Effort().turn_of(1.0), Effort().turn_of(5.0)
        ((2, 10), (2, 6), (1, 2))
        """
        timed = max(2, min(self.steps, int(self.turn_s / max(step_s, 1e-9))))
        return min(self.warm_up, timed // 2), min(self.steps, timed)


CANDIDATE = ("-m", "ridgeline.doctor.candidate")
RANKS = "--ranks"
"""Told to a process that is one of several."""


def cache_of(folder: Path, given: Path | None) -> Path:
    """Where compiled code is kept for the states of a folder."""
    return (given or folder / "compiled").resolve()


def compiler_variables(cache: Path) -> list[str]:
    return [f"TORCHINDUCTOR_CACHE_DIR={cache}", "TORCHINDUCTOR_FX_GRAPH_CACHE=1"]


def build_spares(
    config: RunConfig, folder: Path, cache: Path | None, number: int = 1, num_ranks: int = 1
) -> Spares:
    """For states of a recipe in `folder`, of which so many start at the same time."""
    variables = compiler_variables(cache_of(folder, cache))
    arguments = [*CANDIDATE, "--ready", config.device, *_of_several(num_ranks)]
    return Spares(variables, arguments, folder / "spare.log", number, num_ranks)


def _of_several(num_ranks: int) -> list[str]:
    return [RANKS] if num_ranks > 1 else []


class Candidate:
    """A recipe's state in its own processes. Compiled code is kept in `cache`, or beside the states."""

    goes_on = True
    """Whether its losses are of one training, however many steps it takes."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        folder: Path,
        effort: Effort,
        cache: Path | None = None,
        spares: Spares | None = None,
    ) -> None:
        self.config, self.name = config, name
        self._effort, self._folder, self._spares = effort, folder, spares
        folder.mkdir(parents=True, exist_ok=True)
        self._cache = cache_of(folder, cache)
        self.losses: list[float] = []
        self.turns: list[float] = []
        self.waits: list[float] = []
        """Of each turn, the share of a step in which it waited for data."""
        self.peak_bytes = 0.0
        self.step_s = 0.0
        """Of the last steps that were timed; 0 before there were any."""
        self.tenth_step_s: float | None = None
        self.beside = 0
        """Other states that started at the same time."""
        self.nudge = 0.0
        """Share by which its first weights are moved before its first step."""
        self.last: dict[str, Any] = {}
        self._log = folder / f"{name}.log"
        self._log.write_text("")
        self.started = 0.0
        """When its process was; one that was ready before counts as if it had been started for this."""
        self._ranks = self._start()

    def _write_recipe(self) -> Path:
        recipe = self._folder / f"{self.name}.yaml"
        recipe.write_text(dump_config(_to_measure(self.config, self._effort)), encoding="utf-8")
        return recipe

    def _start(self) -> Processes:
        if self._spares is None:
            self.started, num_ranks = time.time(), self._effort.num_ranks
            arguments = [*CANDIDATE, str(self._write_recipe()), *_of_several(num_ranks)]
            return start(compiler_variables(self._cache), arguments, self._log, num_ranks)
        spare = self._spares.take()
        self.started = time.time() - spare.wait()
        spare.give(self._write_recipe(), self._log)
        return spare.ranks

    def run(self, untimed: int, timed: int) -> float:
        """Seconds a step of one turn; a `RunError` with what the process said when it fails."""
        return self._take(self._ask(untimed, timed), timed)

    def _take(self, answer: dict[str, Any], timed: int) -> float:
        self.losses += answer["losses"]
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
        self.last, seconds = answer, float(answer["step_s"])
        self.step_s = seconds if timed else self.step_s
        return seconds

    def turn(self) -> float:
        """Seconds a step of one turn, which is remembered."""
        if not self.step_s:
            # How long a turn will be: not in `check`, where others may be starting beside it.
            self.run(0, 1)
        self.turns.append(self.run(*self._effort.turn_of(self.step_s)))
        parts = self.parts()
        self.waits.append(parts.data_s / parts.step_s if parts.step_s else 0.0)
        return self.turns[-1]

    def _ask(self, untimed: int, timed: int) -> dict[str, Any]:
        asked = {"untimed": untimed, "timed": timed, "nudge": self.nudge}
        return merge(self._ranks.ask(asked, self._effort.timeout_s))

    def check(self, effort: Effort) -> None:
        """The first steps, of which the losses are compared; the tenth is waited for."""
        first = min(10, effort.check_steps)
        self.run(first, 0)
        self.tenth_step_s = self.last["time"] - self.started if first == 10 else None
        if self._spares is not None:
            self._spares.prepare()  # beside steps that are not timed for anybody
        if effort.check_steps > first:
            self.run(effort.check_steps - first, 0)
        if self._spares is not None:
            self._spares.settle()

    def parts(self) -> Parts:
        """The step as its own clock saw it in the last turn."""
        parts, total = self.last["parts"], self.last["step_s"]
        waits = parts.get("data_s", 0.0) + parts.get("h2d_s", 0.0)
        return Parts(
            step_s=total,
            data_s=min(waits, total),
            comm_exposed_s=min(parts.get("comm_s", 0.0), total),
            device_kind=self.last["device"],
            classes={OPTIMIZER: parts.get("optimizer_s", 0.0)},
            free_bytes=max(self.last.get("capacity_bytes", 0.0) - self.peak_bytes, 0.0),
            capacity_bytes=self.last.get("capacity_bytes", 0.0),
            has_bf16=self.last.get("has_bf16", True),
            has_fp8=self.last.get("has_fp8", True),
            bf16_rate=self.last.get("bf16_rate", 0.0),
        )

    def close(self, wait_s: float = 30.0) -> None:
        """Let it end by itself for so long, then end it."""
        self._end(wait_s)

    def _end(self, wait_s: float) -> None:
        self._ranks.end(wait_s)


def raise_as_usage(error: RunError) -> None:
    if getattr(error, "usage", False):
        raise UsageError(str(error)) from error


class ScriptCandidate(Candidate):
    """A script's state. Its settings stand in a configuration, so that the same remedies serve; after the
    first steps it says of the script what a recipe would."""

    goes_on = False  # a script may end, and is started again then

    def __init__(
        self,
        config: RunConfig,
        name: str,
        folder: Path,
        effort: Effort,
        script: Path,
        arguments: Sequence[str] = (),
        plain: bool = False,
    ) -> None:
        self._script, self._arguments, self._plain = script, list(arguments), plain
        super().__init__(config, name, folder, effort)

    def _start(self) -> Processes:
        variables = compiler_variables(self._cache)
        if not self._plain:
            file = self._folder / f"{self.name}.yaml"
            write_settings(script_settings(self.config), file)
            variables.append(f"{TUNE}={file.resolve()}")
        command = ["-m", "ridgeline.doctor.script_candidate", str(self._script), *self._arguments]
        self.started = time.time()
        return start(variables, command, self._log, self._effort.num_ranks)

    def run(self, untimed: int, timed: int) -> float:
        answer = self._ask(untimed, timed)
        effort = self._effort
        if answer.get("ended") and len(self.losses) >= effort.check_steps:
            # It has trained to its end: its losses are known, so a fresh one can go on being timed.
            self._end(30.0)
            self._ranks = self._start()
            answer = self._ask(max(untimed, WARM_AGAIN), timed)
        if answer.get("ended"):
            needed = max(effort.check_steps, max(effort.warm_up, WARM_AGAIN) + effort.steps)
            raise Failure(
                f"{self._script} ended after {answer['ended']} steps of its optimizer, and {needed} are "
                "needed; let it train longer",
                usage=True,
            )
        if self._plain:
            self.config = as_seen(self.config, SeenScript(**answer["seen"]))
        return self._take(answer, timed)


def script_settings(config: RunConfig, changed: Sequence[str] | None = None) -> Settings:
    """The part of a configuration that a script can be given from outside: all of it, or of what the script
    says itself only that which these overrides have changed."""
    layout = Layout.parse(config.layout)
    keys = None if changed is None else {item.partition("=")[0] for item in changed}
    names = [name for name in FIELDS if keys is None or f"layout.{name}" in keys]
    fields = ",".join(f"{name}={_text(getattr(layout, name))}" for name in names)
    loader = LoaderSettings(config.data.workers, config.data.prefetch if config.data.workers else 0)
    # Replicas alone have buckets.
    bucket_mb = config.ddp.bucket_mb if layout.dp > 1 else 0.0
    if keys is not None:
        bucket_mb = bucket_mb if "ddp.bucket_mb" in keys else 0.0
        loader = loader if "data.workers" in keys else LoaderSettings()
    return Settings(fields, config.tune, loader, config.model.channels_last, bucket_mb)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _to_measure(config: RunConfig, effort: Effort) -> RunConfig:
    """The same training without what is no step: evaluations, checkpoints, and an end."""
    turns = 1 + 64 * effort.rounds
    needed = effort.check_steps + turns * (effort.warm_up + effort.steps)
    steps = max(config.train.steps or 0, needed)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(
            config.train, steps=steps, epochs=None, eval_samples=0, eval_every=0, target={}
        ),
        checkpoint=dataclasses.replace(config.checkpoint, keep_best=""),
    )
