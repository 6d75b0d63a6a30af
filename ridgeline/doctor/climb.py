"""The climb: remedies one at a time, each measured in turns with the last kept state and held to its loss.

Every state runs in a process of its own (`states.py`) from the same seed on the same samples. A remedy is
kept when it is faster by more than the noise of the turns and the loss curve stays where the baseline's
is; one that costs no digits is held to the last kept state that does, since it is not to answer for what
that did, and one that costs digits and begins behind is looked at for longer. At the end the baseline and
the last state run side by side once more: a product of gains that were each chosen for being large tends to
be too large. Compiled code is kept in the climb's folder, so that a state that was compiled once starts
sooner, and states start ahead of their turn (`ahead.py`). An interrupt ends the climb where it is, with
what was kept so far. Called by `ridgeline doctor --climb`; itself imports without torch.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.config import RunConfig, dump_config
from ridgeline.doctor.ahead import AT_ONCE_S, ENDS_S, Ahead, num_beside
from ridgeline.doctor.choice import (
    LEAST_PREDICTED,
    SLOW_TIMES,
    Foreseen,
    Promise,
    Waiting,
    carry,
    check_names,
    foresee,
    split_advice,
)
from ridgeline.doctor.combined import change_config
from ridgeline.doctor.ending import told_interrupts
from ridgeline.doctor.ladder import (
    LEFT_OUT,
    NO_TIME,
    Ladder,
    Raced,
    Rung,
    Untried,
    show_ladder,
    show_rate,
)
from ridgeline.doctor.longer import Longer, Look
from ridgeline.doctor.losses import (
    NUDGE,
    difference,
    is_near,
    judge_losses,
    judge_whole,
    may_be_behind,
    tell_losses,
    wobble_of,
)
from ridgeline.doctor.model_look import MANY_CONVOLUTIONS, look_at
from ridgeline.doctor.race import QUIET, BeforeFailed, build_rung, race, tell_gain
from ridgeline.doctor.remedies.contract import Remedy, Step
from ridgeline.doctor.remedies.table import REMEDIES, SCRIPT_REMEDIES
from ridgeline.doctor.seen import of_script
from ridgeline.doctor.states import (
    Candidate,
    Effort,
    ScriptCandidate,
    build_spares,
    raise_as_usage,
    script_settings,
)
from ridgeline.errors import RunError, UsageError
from ridgeline.layout import Layout, read_auto
from ridgeline.train.settings import write_settings

RECIPE, CLIMBED = "recipe.yaml", "climbed.yaml"
"""The winning settings, of a recipe and of a script."""

Start = Callable[[RunConfig, str, Path, Effort], Candidate]


@dataclass
class _Ascent:
    """How far a climb has come."""

    baseline: RunConfig
    kept: Candidate
    effort: Effort
    say: Callable[[str], None]
    begun: float
    ahead: Ahead
    unit: str = ""
    per_step: float = 0.0
    device: str = ""
    baseline_losses: list[float] = field(default_factory=list)
    reordered_losses: list[float] = field(default_factory=list)
    """The baseline's, moved as far as kept states that cost no digits have moved theirs."""
    rounded_losses: list[float] = field(default_factory=list)
    """Of the last kept state that costs digits, the baseline's before there is one."""
    rounded: str = ""
    """That state's remedy."""
    longer: Longer = field(default_factory=Longer)
    """What longer looks have found."""
    wobble: float | None = None
    """How far the baseline is from itself after a nudge; None where that is not known."""
    is_wobble_asked: bool = False
    wobble_cost_s: float = 0.0
    """What asking took, which is no remedy's."""
    baseline_cost_s: float = 0.0
    """What a remedy takes if it starts and steps as the baseline does."""
    costs_s: list[float] = field(default_factory=list)
    """What each remedy took that was raced."""
    rungs: list[Rung] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    untried: list[Untried] = field(default_factory=list)
    raced: Raced | None = None
    not_raced: str = ""
    interrupted: bool = False

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self.begun

    @property
    def is_late(self) -> bool:
        return self.left_s < 0

    @property
    def left_s(self) -> float:
        return self.effort.budget_s - self.spent_s

    @property
    def times(self) -> float:
        """Of the last kept state over the baseline."""
        return [rung.times or 1.0 for rung in self.rungs if rung.kept][-1]

    @property
    def next_cost_s(self) -> float:
        return statistics.median(self.costs_s) if self.costs_s else self.baseline_cost_s

    def has_time_for(self, remedy: Remedy) -> bool:
        """One that takes minutes to start needs them left; others are begun until the budget is over."""
        return self.left_s >= (SLOW_TIMES * self.next_cost_s if remedy.slow else 0.0)

    def note_losses(self, remedy: Remedy, losses: list[float]) -> None:
        """Of a state that is kept, while the one before it still is."""
        num = self.effort.check_steps
        if remedy.costs_digits:
            self.rounded, self.rounded_losses = remedy.name, losses[:num]
            self.longer.note_kept(losses[:num], self.baseline_losses)
            return
        moved = zip(self.reordered_losses, losses[:num], self.kept.losses[:num], strict=True)
        self.reordered_losses = [loss * new / old if old else loss for loss, new, old in moved]

    def add(self, rung: Rung) -> None:
        """With the figures over the baseline where it was raced."""
        if rung.gain is not None:
            times, rate = self.times * rung.gain, self.rungs[0].rate
            rung = dataclasses.replace(rung, times=times, rate=rate and rate * times)
        self.rungs.append(rung)
        self.say(_line(rung, self.unit))

    def ladder(self) -> Ladder:
        effort = self.effort
        return Ladder(
            self.unit,
            effort.check_steps,
            effort.loss_bound,
            tuple(self.rungs),
            tuple(self.overrides),
            tuple(self.advice),
            self.interrupted,
            units_per_step=self.per_step,
            rounds=effort.rounds,
            steps=effort.steps,
            raced=self.raced,
            not_raced="it was interrupted" if self.interrupted else self.not_raced,
            untried=(*self.untried, *(Untried(name, LEFT_OUT) for name in effort.without)),
            budget_s=effort.budget_s if math.isfinite(effort.budget_s) else None,
            spent_s=self.spent_s,
            wobble=self.wobble,
            device=self.device,
            num_ranks=effort.num_ranks,
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
    check_names(effort.without, remedies)
    effort = dataclasses.replace(effort, num_ranks=count_ranks(config))
    spares = build_spares(config, out / "states", cache, 1 + effort.num_ahead, effort.num_ranks)

    def start(config: RunConfig, name: str, folder: Path, effort: Effort) -> Candidate:
        return Candidate(config, name, folder, effort, cache, spares)

    def write(config: RunConfig, ladder: Ladder) -> None:
        (out / RECIPE).write_text(dump_config(config), encoding="utf-8")

    try:
        return _climb(config, out, start, write, "recipe", measured, remedies, effort, say)
    finally:
        spares.close()


def count_ranks(config: RunConfig) -> int:
    """Processes that a recipe's layout has, all on this machine; one where it is left to be chosen."""
    if read_auto(config.layout) is not None:
        return 1
    return Layout.parse(config.layout or "dp=1").world_size


def climb_script(
    script: Path,
    arguments: Sequence[str],
    out: Path,
    *,
    measured: Step | None = None,
    remedies: Mapping[str, Remedy] = SCRIPT_REMEDIES,
    effort: Effort = Effort(),  # noqa: B008
    say: Callable[[str], None] = print,
    num_ranks: int = 1,
) -> Ladder:
    """The same for a script of the user's own, which runs as it is in every state, on so many ranks.

    Leaves `climbed.yaml`, for `ridgeline.start(tune=...)` or RIDGELINE_TUNE, instead of a recipe.
    """
    check_names(effort.without, remedies)

    def start(config: RunConfig, name: str, folder: Path, effort: Effort) -> Candidate:
        plain = name in (BASELINE, AGAIN, NUDGED)
        return ScriptCandidate(config, name, folder, effort, script, arguments, plain)

    def write(config: RunConfig, ladder: Ladder) -> None:
        comment = (
            f"ridgeline doctor {script.name} --climb: {ladder.times:.2f} times the script as it is"
        )
        write_settings(script_settings(config, ladder.overrides), out / CLIMBED, comment)

    # Two of the same script at once would write the same files.
    alone = dataclasses.replace(effort, ahead=0, num_ranks=num_ranks)
    plain = of_script(script)
    return _climb(plain, out, start, write, "script", measured, remedies, alone, say)


BASELINE, AGAIN, NUDGED = "baseline", "baseline-again", "baseline-nudged"
TOO_SOON = "interrupted before the baseline was measured; nothing is kept"


@told_interrupts()
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

    def start_at(config: RunConfig, name: str) -> Candidate:
        return start(config, name, out / "states", effort)

    try:
        kept = start_at(config, BASELINE)
    except KeyboardInterrupt:
        raise RunError(TOO_SOON) from None
    ahead = Ahead(start_at, effort, lambda: ascent.left_s)
    ascent = _Ascent(config, kept, effort, say, begun, ahead)
    try:
        try:
            _begin(ascent, what)
            _go(ascent, measured, remedies)
            _race_whole(ascent)
        except KeyboardInterrupt:
            ascent.interrupted = True
            if not ascent.rungs:
                raise RunError(TOO_SOON) from None
            say("interrupted; what was kept so far is written")
        ladder = ascent.ladder()
        ladder.write(out)
        write(ascent.kept.config, ladder)
    finally:
        wait_s = AT_ONCE_S if ascent.interrupted else ENDS_S
        ahead.close(wait_s)
        ascent.kept.close(wait_s)
    say("")
    say(show_ladder(ladder))
    return ladder


def _begin(ascent: _Ascent, what: str) -> None:
    """The state that everything is compared with: its losses, and turns enough to know their spread."""
    kept, effort = ascent.kept, ascent.effort
    try:
        kept.check(effort)
        checked_s = ascent.spent_s
        for _ in range(effort.rounds):
            kept.turn()
    except RunError as error:
        raise_as_usage(error)
        raise RunError(f"the {what} does not run as it is: {error}") from error
    ascent.baseline_cost_s = checked_s + 2 * (ascent.spent_s - checked_s)
    losses = kept.losses[: effort.check_steps]
    ascent.baseline_losses = ascent.reordered_losses = ascent.rounded_losses = losses
    if len(ascent.baseline_losses) < effort.check_steps:
        raise UsageError(
            f"the {what} called backward on {len(ascent.baseline_losses)} losses in {effort.check_steps} "
            "steps, so that loss curves cannot be compared; call loss.backward() on one number a step"
        )
    ascent.unit = kept.last["unit"]
    ascent.device = kept.last["device"]
    ascent.per_step = kept.last["samples"] * kept.last["units_per_sample"]
    for step, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise UsageError(
                f"the {what}'s own loss is {loss} at step {step + 1}, so that there is nothing to compare "
                "losses with; let it train first"
            )
    why = f"the {what} as it is"
    first = build_rung(Rung(BASELINE, (), True, ""), kept, True, why, losses=losses)
    rate = ascent.per_step / first.step_s if first.step_s else None
    ascent.add(dataclasses.replace(first, times=1.0, rate=rate))


def _go(ascent: _Ascent, measured: Step | None, remedies: Mapping[str, Remedy]) -> None:
    """One remedy after the other, until none is left that promises anything, or no time."""
    step = ascent.kept.parts()
    seen: Step = measured if measured is not None else step
    if measured is not None:
        step = carry(measured, step)
    without = ascent.effort.without
    remedies = {name: remedy for name, remedy in remedies.items() if name not in without}
    changing, advising = split_advice(remedies)
    for remedy in advising:
        reason = remedy.applies(seen, ascent.kept.config)
        if reason is not None:
            ascent.advice.append(f"{remedy.name}: {reason}; {remedy.advice}")
    waiting = Waiting(changing)
    while True:
        config = ascent.kept.config
        found = waiting.rank(step, config)
        if not found or found[0].gain < LEAST_PREDICTED or not ascent.has_time_for(found[0].remedy):
            ascent.untried = waiting.untried(step, config, ascent.spent_s, ascent.next_cost_s)
            return
        remedy = found[0].remedy
        waiting.take(remedy)
        begun = ascent.spent_s - ascent.wobble_cost_s
        changes = tuple(remedy.change(config))
        try:
            rung, candidate = _try(
                found[0], changes, ascent, foresee(waiting, step, config, found[0])
            )
        except BeforeFailed as error:
            ascent.say(f"{error}; the climb ends with what was kept")
            ascent.not_raced = str(error)[:200]
            return
        if rung.gain is not None and not ascent.ahead.was_early:
            ascent.costs_s.append(ascent.spent_s - ascent.wobble_cost_s - begun)
        if candidate is None and waiting.note_dropped(remedy, rung, step, config) is not None:
            why = f"{rung.why}; {rung.data_share:.0%} of its step waits for data"
            rung = dataclasses.replace(rung, why=why)
        if found[0].shorter:
            again = f"; tried again in a step {found[0].shorter:.2f} times as short"
            rung = dataclasses.replace(rung, why=rung.why + again)
        ascent.add(rung)
        if candidate is None:
            continue
        ascent.note_losses(remedy, candidate.losses)
        before, ascent.kept = ascent.kept, candidate
        ascent.overrides += changes
        before.close()
        step = carry(step, candidate.parts(), remedy.of_ranks)
        waiting.note_kept(remedy)


def _race_whole(ascent: _Ascent) -> None:
    """The baseline against the last kept state, where more than one remedy lies between them: a single
    one's own turns have said it."""
    if len([rung for rung in ascent.rungs if rung.kept]) < 3 or ascent.not_raced:
        return
    if ascent.is_late:
        ascent.not_raced = NO_TIME
        return
    again, wait_s = None, ENDS_S
    try:
        again = ascent.ahead.get(ascent.baseline, AGAIN)
        raced = race(again, ascent.kept, ascent.effort, fewest=3)
    except RunError as error:
        ascent.not_raced = str(error)[:200]
        return
    except KeyboardInterrupt:
        wait_s = AT_ONCE_S
        raise
    finally:
        if again is not None:
            again.close(wait_s)
    ratios = raced.ratios
    ascent.raced = Raced(raced.gain, min(ratios), max(ratios), len(ratios))


def _try(
    tried: Promise, changes: tuple[str, ...], ascent: _Ascent, foreseen: Iterable[Foreseen]
) -> tuple[Rung, Candidate | None]:
    """The rung, and the candidate where it is kept; once more by itself where others may have been the
    reason that it failed."""
    remedy = tried.remedy
    dropped = Rung(remedy.name, changes, False, "", tried.gain, members=remedy.members)
    try:
        config = change_config(ascent.kept.config, changes)
    except UsageError as error:
        return dataclasses.replace(dropped, why=str(error)), None
    # What measures kernels as it starts is not to do so beside others; the next may have no turn any more.
    searches = config.tune.search_convolutions and look_at(config).num_conv2d >= MANY_CONVOLUTIONS
    alone = remedy.slow or searches or ascent.next_cost_s > ascent.left_s
    number = 0 if alone else num_beside(ascent.kept, ascent.effort)
    whose = "" if remedy.costs_digits else ascent.rounded
    while True:
        try:
            rung, candidate = _measure(
                dropped, config, whose, remedy.costs_digits, ascent, foreseen, number
            )
        except BeforeFailed:
            raise
        except RunError as error:
            if ascent.ahead.is_to_blame(error):
                ascent.ahead.close()
                number = 0
                continue
            rung, candidate = dataclasses.replace(dropped, why=f"it failed: {error}"[:200]), None
        ascent.ahead.note(candidate is not None)
        return rung, candidate


def _measure(
    tried: Rung,
    config: RunConfig,
    whose: str,
    is_rounding: bool,
    ascent: _Ascent,
    foreseen: Iterable[Foreseen],
    number: int,
) -> tuple[Rung, Candidate | None]:
    """`whose` losses it is held to: those of the state of that remedy, or the baseline's; `is_rounding`:
    whether it costs digits."""
    effort, kept = ascent.effort, ascent.kept
    held_to = ascent.rounded_losses if whose else ascent.reordered_losses
    place = f"{len(ascent.rungs):02}-{tried.name.replace(' ', '-')}"
    candidate, keep, wait_s = None, False, ENDS_S
    try:
        candidate = ascent.ahead.get(config, place, foreseen, number)
        losses = candidate.losses[: effort.check_steps]
        apart = difference(losses, ascent.baseline_losses)
        problem = judge_losses(losses, held_to, effort, ascent.wobble or 0.0)
        if problem and is_near(losses, held_to, effort) and _find_wobble(ascent):
            problem = judge_losses(losses, held_to, effort, ascent.wobble or 0.0)
        if problem and whose:
            problem += f", of {whose}"
        longer = ascent.longer
        whole = ascent.rounded_losses if longer.is_apart else ascent.baseline_losses
        problem = problem or judge_whole(losses, whole, effort)
        look: Look | None = None
        may_look = is_rounding and kept.goes_on  # a remedy that was begun has its whole turn
        if problem and may_look and may_be_behind(losses, held_to, effort):
            look = longer.look(kept, candidate, effort)
            problem = look.problem and f"{problem}; {look.problem}"
        if problem:
            rung = build_rung(tried, candidate, False, problem, apart, losses=losses)
            return (look.put_on(rung) if look is not None else rung), None
        ascent.ahead.settle()
        ascent.ahead.make_room(kept, candidate)
        raced = race(kept, candidate, effort)
        # Many together that bring next to nothing may have one among them that harms.
        quiet = effort.least_gain if tried.members else QUIET
        gain, noise = raced.gain, raced.noise(effort.least_gain, quiet)
        # Steps that it learns less in are steps that it has to make up for.
        keep = gain > 1 + noise + (look.more if look is not None else 0.0)
        why = tell_gain(gain, noise)
        if look is not None:
            why += look.tell(outweighs=not keep and gain > 1 + noise)
        else:
            why += tell_losses(losses, held_to, effort, ascent.wobble or 0.0, whose)
        rung = build_rung(tried, candidate, keep, why, apart, raced, losses)
        if look is not None:
            rung = look.put_on(rung)
            if keep:
                longer.keep(look, kept, effort)
        return dataclasses.replace(rung, noise=noise), candidate if keep else None
    except KeyboardInterrupt:
        keep, wait_s = False, AT_ONCE_S
        raise
    finally:
        if candidate is not None and not keep:
            candidate.close(wait_s)


def _find_wobble(ascent: _Ascent) -> bool:
    """Once a climb, and while there is time: how far the baseline's losses move when its first weights do,
    by no more than bf16 rounds them. Whether that has become known now."""
    if ascent.is_wobble_asked or ascent.is_late:
        return False
    ascent.is_wobble_asked = True
    ascent.ahead.close()  # the baseline needs more memory than most, and is not to find less for others
    nudged, wait_s, begun = None, ENDS_S, ascent.spent_s
    try:
        nudged = ascent.ahead.start(ascent.baseline, NUDGED)
        nudged.nudge = NUDGE
        nudged.check(ascent.effort)
        ascent.wobble = wobble_of(
            nudged.losses[: ascent.effort.check_steps], ascent.baseline_losses
        )
    except RunError as error:
        ascent.say(f"how far the baseline is from itself is not known: {error}"[:200])
        return False
    except KeyboardInterrupt:
        wait_s = AT_ONCE_S
        raise
    finally:
        if nudged is not None:
            nudged.close(wait_s)
        ascent.wobble_cost_s = ascent.spent_s - begun
    ascent.say(f"the baseline from nudged weights is {ascent.wobble:.2%} off its own losses")
    return True


def _line(rung: Rung, unit: str) -> str:
    rate = f"{show_rate(rung.rate, unit)}, " if rung.rate else ""
    return f"{rung.full_name}: {rate}{'kept' if rung.kept else 'dropped'}: {rung.why}"
