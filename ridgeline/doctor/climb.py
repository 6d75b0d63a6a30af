"""The climb: remedies one at a time, each measured in turns with the last kept state and held to its loss.

Every state runs in a process of its own (`states.py`) from the same seed on the same samples. A remedy
is kept when it is faster by more than the noise of the turns and the loss curve stays where the baseline's
is. Compiled code is kept in the climb's folder, so that a state that was compiled once starts sooner. An
interrupt ends the climb where it is, with what was kept so far. Called by `ridgeline doctor --climb`;
itself imports without torch.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.config import RunConfig, dump_config, load_config
from ridgeline.doctor.ladder import Ladder, Rung, show_ladder
from ridgeline.doctor.model_look import SCRIPT
from ridgeline.doctor.remedies.contract import (
    ATTENTION,
    CONVOLUTION,
    ELEMENTWISE,
    LOSS,
    MATRIX,
    OPTIMIZER,
    Parts,
    Remedy,
    Step,
    seconds,
)
from ridgeline.doctor.remedies.table import REMEDIES, SCRIPT_REMEDIES
from ridgeline.doctor.states import (
    Candidate,
    Effort,
    ScriptCandidate,
    build_spares,
    raise_as_usage,
    script_settings,
)
from ridgeline.errors import RunError, UsageError
from ridgeline.layout import Layout, check_available, check_layout
from ridgeline.train.settings import write_settings

LEAST_PREDICTED = 1.001
"""A remedy that does not promise this much is not worth a process."""
FIRST_LOSS = 4.0
"""The first loss is of the same weights and samples: it may be off by so many times the bound."""
RECIPE, CLIMBED = "recipe.yaml", "climbed.yaml"
"""The winning settings, of a recipe and of a script."""

Start = Callable[[RunConfig, str, Path, Effort], Candidate]


@dataclass
class _Ascent:
    """How far a climb has come."""

    kept: Candidate
    effort: Effort
    start: Start
    work: Path
    unit: str = ""
    per_step: float = 0.0
    baseline_losses: list[float] = field(default_factory=list)
    rungs: list[Rung] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    interrupted: bool = False

    def ladder(self) -> Ladder:
        return Ladder(
            self.unit,
            self.effort.check_steps,
            self.effort.loss_bound,
            tuple(self.rungs),
            tuple(self.overrides),
            tuple(self.advice),
            self.interrupted,
        )


def climb(
    config: RunConfig,
    out: Path,
    *,
    measured: Step | None = None,
    remedies: Mapping[str, Remedy] = REMEDIES,
    effort: Effort = Effort(),  # noqa: B008
    say: Callable[[str], None] = print,
    cache: Path | None = None,
) -> Ladder:
    """Try remedies on a recipe, the most promising first; keeps what helps and keeps the loss.

    `measured` says what a step consists of; without it the run's own clock does. Leaves `recipe.yaml` (the
    winning settings), `ladder.json` and `ladder.svg` in `out`, also when it is interrupted. `cache` is
    where compiled code is kept, for climbs that are to find it again.
    """
    if Layout.parse_for(config.layout or "dp=1", 1).world_size != 1:
        raise UsageError(f"a climb is on one device, and the layout is {config.layout!r}; use dp=1")

    spares = build_spares(config, out / "states", cache)

    def start(config: RunConfig, name: str, folder: Path, effort: Effort) -> Candidate:
        return Candidate(config, name, folder, effort, cache, spares)

    def write(config: RunConfig, ladder: Ladder) -> None:
        (out / RECIPE).write_text(dump_config(config), encoding="utf-8")

    try:
        return _climb(config, out, start, write, "recipe", measured, remedies, effort, say)
    finally:
        spares.close()


def climb_script(
    script: Path,
    arguments: Sequence[str],
    out: Path,
    *,
    measured: Step | None = None,
    remedies: Mapping[str, Remedy] = SCRIPT_REMEDIES,
    effort: Effort = Effort(),  # noqa: B008
    say: Callable[[str], None] = print,
) -> Ladder:
    """The same for a script of the user's own, which runs as it is in every state.

    Leaves `climbed.yaml`, for `ridgeline.start(tune=...)` or RIDGELINE_TUNE, instead of a recipe.
    """
    empty = RunConfig(name=script.stem or "script")
    config = dataclasses.replace(
        empty,
        model=dataclasses.replace(empty.model, name=SCRIPT),
        data=dataclasses.replace(empty.data, source=SCRIPT),
        train=dataclasses.replace(empty.train, steps=1),
        tune=dataclasses.replace(empty.tune, search_convolutions=False),
    )

    def start(config: RunConfig, name: str, folder: Path, effort: Effort) -> Candidate:
        plain = name == BASELINE
        return ScriptCandidate(config, name, folder, effort, script, arguments, plain)

    def write(config: RunConfig, ladder: Ladder) -> None:
        times = ladder.best.times or 1.0
        comment = f"ridgeline doctor {script.name} --climb: {times:.2f} times the script as it is"
        write_settings(script_settings(config), out / CLIMBED, comment)

    return _climb(config, out, start, write, "script", measured, remedies, effort, say)


BASELINE = "baseline"


def _climb(
    config: RunConfig,
    out: Path,
    start: Start,
    write: Callable[[RunConfig, Ladder], None],
    what: str,
    measured: Step | None,
    remedies: Mapping[str, Remedy],
    effort: Effort,
    say: Callable[[str], None],
) -> Ladder:
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    kept = start(config, BASELINE, out / "states", effort)
    ascent = _Ascent(kept, effort, start, out / "states")
    try:
        _begin(ascent, what)
        say(_line(ascent.rungs[-1], ascent.unit))
        _go(ascent, measured, remedies, begun, say)
    except KeyboardInterrupt:
        ascent.interrupted = True
        if not ascent.rungs:
            raise RunError(
                "interrupted before the baseline was measured; nothing is kept"
            ) from None
        say("interrupted; what was kept so far is written")
    finally:
        ascent.kept.close(0.5 if ascent.interrupted else 30.0)
    ladder = ascent.ladder()
    ladder.write(out)
    write(ascent.kept.config, ladder)
    say("")
    say(show_ladder(ladder))
    return ladder


def _begin(ascent: _Ascent, what: str) -> None:
    """The state that everything is compared with."""
    kept, effort = ascent.kept, ascent.effort
    try:
        kept.check(effort)
        kept.turns.append(kept.run(effort.warm_up, effort.steps))
    except RunError as error:
        raise_as_usage(error)
        raise RunError(f"the {what} does not run as it is: {error}") from error
    ascent.baseline_losses = kept.losses[: effort.check_steps]
    if len(ascent.baseline_losses) < effort.check_steps:
        raise UsageError(
            f"the {what} called backward on {len(ascent.baseline_losses)} losses in {effort.check_steps} "
            "steps, so that loss curves cannot be compared; call loss.backward() on one number a step"
        )
    ascent.unit = kept.last["unit"]
    ascent.per_step = kept.last["samples"] * kept.last["units_per_sample"]
    first = _rung(
        kept, BASELINE, (), ascent.per_step, kept=True, why=f"the {what} as it is", times=1.0
    )
    ascent.rungs.append(first)


def _go(
    ascent: _Ascent,
    measured: Step | None,
    remedies: Mapping[str, Remedy],
    begun: float,
    say: Callable[[str], None],
) -> None:
    times = 1.0
    step: Step = ascent.kept.parts()
    seen: Step = measured if measured is not None else step
    if measured is not None:
        step = carry(measured, ascent.kept.parts())
    waiting = {}
    for remedy in remedies.values():
        reason = remedy.applies(seen, ascent.kept.config) if remedy.advice else None
        if reason is not None:
            ascent.advice.append(f"{remedy.name}: {reason}; {remedy.advice}")
            say(f"by hand: {ascent.advice[-1]}")
        elif not remedy.advice:
            waiting[remedy.name] = remedy
    while True:
        if time.monotonic() - begun > ascent.effort.budget_s:
            say("no time is left for further remedies")
            return
        found = _next(waiting, step, ascent.kept.config)
        if found is None:
            return
        remedy, predicted, _ = found
        del waiting[remedy.name]
        changes = tuple(remedy.change(ascent.kept.config))
        rung, candidate = _try(remedy.name, changes, ascent, predicted)
        if rung.gain is not None:
            rate = ascent.per_step / (rung.step_s or math.inf)
            rung = dataclasses.replace(rung, times=times * rung.gain, rate=rate)
        ascent.rungs.append(rung)
        say(_line(rung, ascent.unit))
        if candidate is None:
            continue
        before, ascent.kept = ascent.kept, candidate
        before.close()
        times = rung.times or times
        ascent.overrides += changes
        step = carry(step, candidate.parts())
        if remedy.repeats:
            waiting[remedy.name] = remedy


def carry(step: Step, parts: Parts) -> Parts:
    """A changed step's parts: its own clock's, and for the kernels the proportions that were measured."""
    before, now = step.step_s - step.data_s, parts.step_s - parts.data_s
    shrunk = now / before if before > 0 else 1.0
    measured = {
        name: shrunk * seconds(step, name)
        for name in (MATRIX, ATTENTION, CONVOLUTION, ELEMENTWISE, LOSS)
    }
    classes = {name: value for name, value in measured.items() if value}
    return dataclasses.replace(
        parts,
        launch_s=shrunk * step.launch_s,
        classes={**classes, OPTIMIZER: seconds(parts, OPTIMIZER)},
    )


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
    name: str, changes: tuple[str, ...], ascent: _Ascent, predicted: float
) -> tuple[Rung, Candidate | None]:
    """The rung, and the candidate where it is kept."""
    effort, kept = ascent.effort, ascent.kept
    dropped = Rung(name, changes, False, "", predicted)
    try:
        config = change_config(kept.config, changes)
    except UsageError as error:
        return dataclasses.replace(dropped, why=str(error)), None
    place = f"{len(ascent.rungs):02}-{name.replace(' ', '-')}"
    candidate = ascent.start(config, place, ascent.work, effort)
    keep, wait_s = False, 30.0
    try:
        candidate.check(effort)
        losses, baseline = candidate.losses, ascent.baseline_losses
        apart = difference(losses[: effort.check_steps], baseline)
        problem = judge_losses(losses, baseline, effort)
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
    except KeyboardInterrupt:
        keep, wait_s = False, 0.5
        raise
    finally:
        if not keep:
            candidate.close(wait_s)


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
