"""The climb: remedies one at a time, each measured in turns with the last kept state and held to its loss.

Every state runs in a process of its own (`candidate.py`) from the same seed on the same samples. A remedy
is kept when it is faster by more than the noise of the turns and the loss curve stays where the baseline's
is. Compiled code is kept in the climb's folder, so that a state that was compiled once starts sooner.
Called by `ridgeline doctor --climb`; itself imports without torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from ridgeline.config import RunConfig, dump_config, load_config
from ridgeline.doctor.ladder import Ladder, Rung, show_ladder
from ridgeline.doctor.remedies.contract import OPTIMIZER, Parts, Remedy, Step
from ridgeline.doctor.remedies.table import REMEDIES
from ridgeline.errors import RunError, UsageError
from ridgeline.layout import Layout, check_available, check_layout

LEAST_PREDICTED = 1.001
"""A remedy that does not promise this much is not worth a process."""
FIRST_LOSS = 4.0
"""The first loss is of the same weights and samples: it may be off by so many times the bound."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int = 5
    """Turns of each of two states; more make the noise known better."""
    steps: int = 10
    """Timed steps a turn."""
    warm_up: int = 2
    """Steps before them in each turn."""
    check_steps: int = 24
    """Steps over which losses are compared."""
    loss_bound: float = 0.005
    least_gain: float = 0.01
    timeout_s: float = 1800.0
    """For one turn, compiling included."""
    budget_s: float = math.inf
    """No further remedy is begun after so long."""


class Candidate:
    """A state in its own process."""

    def __init__(self, config: RunConfig, name: str, folder: Path, effort: Effort) -> None:
        self.config, self.name = config, name
        self._timeout_s = effort.timeout_s
        folder.mkdir(parents=True, exist_ok=True)
        recipe = folder / f"{name}.yaml"
        recipe.write_text(dump_config(_to_measure(config, effort)), encoding="utf-8")
        self._log: IO[str] = (folder / f"{name}.log").open("w")
        self.started = time.time()
        self._process = subprocess.Popen(
            [
                "env",
                f"TORCHINDUCTOR_CACHE_DIR={folder.resolve() / 'compiled'}",
                "TORCHINDUCTOR_FX_GRAPH_CACHE=1",
                sys.executable,
                "-m",
                "ridgeline.doctor.candidate",
                str(recipe),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.losses: list[float] = []
        self.turns: list[float] = []
        self.peak_bytes = 0.0
        self.tenth_step_s: float | None = None
        self.last: dict[str, Any] = {}

    def run(self, untimed: int, timed: int) -> float:
        """Seconds a step of one turn; a `RunError` with what the process said when it fails."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps({"untimed": untimed, "timed": timed}), file=process.stdin, flush=True)
            answers = bool(select.select([process.stdout], [], [], self._timeout_s)[0])
            line = process.stdout.readline() if answers else ""
        except BrokenPipeError:
            answers, line = True, ""
        if not answers:
            raise RunError(f"no answer within {self._timeout_s:.0f} s")
        if not line:
            raise RunError(f"its process ended ({process.wait()}); see {self._log.name}")
        answer = json.loads(line)
        if "failed" in answer:
            raise RunError(answer["failed"])
        self.losses += answer["losses"]
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
        self.last = answer
        return float(answer["step_s"])

    def check(self, effort: Effort) -> None:
        """The first steps, of which the losses are compared; the tenth is waited for."""
        first = min(10, effort.check_steps)
        self.run(first, 0)
        self.tenth_step_s = self.last["time"] - self.started if first == 10 else None
        if effort.check_steps > first:
            self.run(effort.check_steps - first, 0)

    def parts(self) -> Parts:
        """The step as its own clock saw it in the last turn."""
        parts, total = self.last["parts"], self.last["step_s"]
        waits = parts.get("data_s", 0.0) + parts.get("h2d_s", 0.0)
        return Parts(
            step_s=total,
            data_s=min(waits, total),
            device_kind=self.last["device"],
            classes={OPTIMIZER: parts.get("optimizer_s", 0.0)},
        )

    def close(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def climb(
    config: RunConfig,
    out: Path,
    *,
    measured: Step | None = None,
    remedies: Mapping[str, Remedy] = REMEDIES,
    effort: Effort = Effort(),  # noqa: B008
    say: Callable[[str], None] = print,
) -> Ladder:
    """Try remedies on a recipe, the most promising first; keeps what helps and keeps the loss.

    `measured` orders them at the start; without it the run's own clock does. Leaves `recipe.yaml` (the
    winning settings), `ladder.json` and `ladder.svg` in `out`.
    """
    if Layout.parse_for(config.layout or "dp=1", 1).world_size != 1:
        raise UsageError(f"a climb is on one device, and the layout is {config.layout!r}; use dp=1")
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    work = out / "states"
    kept = Candidate(config, "baseline", work, effort)
    try:
        try:
            kept.check(effort)
            kept.turns.append(kept.run(effort.warm_up, effort.steps))
        except RunError as error:
            raise RunError(f"the recipe does not run as it is: {error}") from error
        baseline_losses = kept.losses[: effort.check_steps]
        unit = kept.last["unit"]
        per_step = kept.last["samples"] * kept.last["units_per_sample"]
        first = _rung(
            kept, "baseline", (), per_step, kept=True, why="the recipe as it is", times=1.0
        )
        rungs, times = [first], 1.0
        overrides: list[str] = []
        say(_line(rungs[-1], unit))
        waiting = dict(remedies)
        step: Step = measured if measured is not None else kept.parts()
        while True:
            if time.monotonic() - begun > effort.budget_s:
                say("no time is left for further remedies")
                break
            found = _next(waiting, step, kept.config)
            if found is None:
                break
            remedy, predicted, reason = found
            del waiting[remedy.name]
            if remedy.advice:
                say(f"by hand: {remedy.name}: {reason}; {remedy.advice}")
                continue
            changes = tuple(remedy.change(kept.config))
            rung, candidate = _try(
                remedy.name, changes, kept, baseline_losses, predicted, work, len(rungs), effort
            )
            if rung.gain is not None:
                rung = dataclasses.replace(
                    rung, times=times * rung.gain, rate=per_step / (rung.step_s or math.inf)
                )
            rungs.append(rung)
            say(_line(rung, unit))
            if candidate is None:
                continue
            kept.close()
            kept, times = candidate, rung.times or times
            overrides += changes
            step = kept.parts()
            if remedy.repeats:
                waiting[remedy.name] = remedy
    finally:
        kept.close()
    ladder = Ladder(unit, effort.check_steps, effort.loss_bound, tuple(rungs), tuple(overrides))
    ladder.write(out)
    (out / "recipe.yaml").write_text(dump_config(kept.config), encoding="utf-8")
    say("")
    say(show_ladder(ladder))
    return ladder


def _next(
    remedies: Mapping[str, Remedy], step: Step, config: RunConfig
) -> tuple[Remedy, float, str] | None:
    """The one that promises most of those that apply."""
    found = []
    for remedy in remedies.values():
        reason = remedy.applies(step, config)
        if reason is None:
            continue
        gain = remedy.predicted_gain(step, config)
        if gain >= LEAST_PREDICTED:
            found.append((gain, remedy, reason))
    if not found:
        return None
    gain, remedy, reason = max(found, key=lambda entry: entry[0])
    return remedy, gain, reason


def _try(
    name: str,
    changes: tuple[str, ...],
    kept: Candidate,
    baseline_losses: list[float],
    predicted: float,
    work: Path,
    number: int,
    effort: Effort,
) -> tuple[Rung, Candidate | None]:
    """The rung, and the candidate where it is kept."""
    dropped = Rung(name, changes, False, "", predicted)
    try:
        config = change_config(kept.config, changes)
    except UsageError as error:
        return dataclasses.replace(dropped, why=str(error)), None
    candidate = Candidate(config, f"{number:02}-{name.replace(' ', '-')}", work, effort)
    keep = False
    try:
        candidate.check(effort)
        apart = difference(candidate.losses[: effort.check_steps], baseline_losses)
        problem = judge_losses(candidate.losses, baseline_losses, effort)
        if problem:
            rung = _rung(candidate, name, changes, 0, False, problem, predicted, apart)
            return rung, None
        gain, noise = _compare(kept, candidate, effort)
        keep = gain > 1 + noise
        why = (
            f"{gain - 1:+.1%}, noise {noise:.1%}"
            if keep
            else f"{gain - 1:+.1%} is not above the noise of {noise:.1%}"
        )
        rung = _rung(candidate, name, changes, 0, keep, why, predicted, apart)
        rung = dataclasses.replace(rung, gain=gain, noise=noise)
        return rung, candidate if keep else None
    except RunError as error:
        return dataclasses.replace(dropped, why=f"it failed: {error}"[:200]), None
    finally:
        if not keep:
            candidate.close()


def _compare(kept: Candidate, candidate: Candidate, effort: Effort) -> tuple[float, float]:
    """Gain and the noise it has to exceed, from turns one after the other, in changing order."""
    pairs: list[tuple[float, float]] = []
    for number in range(effort.rounds):
        spent = {}
        for state in (kept, candidate) if number % 2 else (candidate, kept):
            spent[state.name] = state.run(effort.warm_up, effort.steps)
            state.turns.append(spent[state.name])
        pairs.append((spent[kept.name], spent[candidate.name]))
    ratios = [before / after for before, after in pairs]
    gain = statistics.median(ratios)
    # Only how far it falls counts: a gain that is sometimes larger is no less sure.
    low = statistics.quantiles(ratios, n=4)[0] if len(ratios) > 2 else min(ratios)
    return gain, max(gain - low, effort.least_gain)


def difference(losses: list[float], baseline: list[float]) -> float:
    """Of the means of the last quarters, relative."""
    last = max(1, len(baseline) // 4)
    mine, theirs = statistics.fmean(losses[-last:]), statistics.fmean(baseline[-last:])
    return (mine - theirs) / abs(theirs) if theirs else math.copysign(math.inf, mine - theirs)


def judge_losses(losses: list[float], baseline: list[float], effort: Effort) -> str:
    """What is wrong with a loss curve beside the baseline's; empty when nothing is."""
    losses = losses[: len(baseline)]
    for step, loss in enumerate(losses):
        if not math.isfinite(loss) and math.isfinite(baseline[step]):
            return f"the loss is {loss} at step {step + 1}"
    first = abs(losses[0] - baseline[0]) / max(abs(baseline[0]), 1e-12)
    if first > FIRST_LOSS * effort.loss_bound:
        return f"the first loss is {first:.2%} off, so it computes something else"
    apart = difference(losses, baseline)
    if abs(apart) > effort.loss_bound:
        return f"the loss is {apart:+.2%} off after {len(baseline)} steps"
    return ""


def change_config(config: RunConfig, overrides: tuple[str, ...]) -> RunConfig:
    """A configuration with overrides, checked as a recipe is."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(dump_config(config))
        file.flush()
        changed = load_config(Path(file.name), overrides).config
    layout = Layout.parse(changed.layout)
    for finding in [*check_layout(layout), *check_available(layout)]:
        raise UsageError(finding.reason)
    return changed


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
    )


def _rung(
    state: Candidate,
    name: str,
    overrides: tuple[str, ...],
    per_step: float,
    kept: bool,
    why: str,
    predicted: float | None = None,
    loss_difference: float | None = None,
    times: float | None = None,
) -> Rung:
    step_s = statistics.median(state.turns) if state.turns else None
    return Rung(
        name,
        overrides,
        kept,
        why,
        predicted,
        step_s=step_s,
        rate=per_step / step_s if step_s and per_step else None,
        times=times,
        peak_bytes=state.peak_bytes or None,
        loss_difference=loss_difference,
        tenth_step_s=state.tenth_step_s,
    )


def _line(rung: Rung, unit: str) -> str:
    rate = f"{rung.rate:,.0f} {unit}/s, " if rung.rate else ""
    return f"{rung.name}: {rate}{'kept' if rung.kept else 'dropped'}: {rung.why}"
