"""The planner against what others measured: errors by set, the worst rows, and false "fits".

`validate` predicts every row that it can express and says of the others why not; `calibrate` fits a few
physical parameters of the machine on at most 15 rows, inside bounds; `choose_rows` says which rows are
worth measuring for that. The commands are `ridgeline plan validate` and `ridgeline plan choose`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ridgeline.errors import RunError, UsageError
from ridgeline.plan.calibrate import Change, changed, fit
from ridgeline.plan.design import most_telling
from ridgeline.plan.job import Job
from ridgeline.plan.machine import Machine
from ridgeline.plan.memory import GIB, fits, stage_memory
from ridgeline.plan.possible import played_operations
from ridgeline.plan.predict import predict
from ridgeline.plan.rows import (
    ReadRow,
    Row,
    Unreadable,
    name_of,
    read_row,
    require_measured,
    set_of,
)
from ridgeline.plan.words import shown

__all__ = [
    "calibrate", "changed", "check_row", "check_rows", "choose_rows", "fit_rows", "fitted_machine",
    "is_fitted", "measured_s", "summarize",
]  # fmt: skip

MAX_CALIBRATION_ROWS: Final = 15
MOST_FITTED_OPERATIONS: Final = 300_000
"""Of a schedule that a fit plays out again and again."""
IMPOSSIBLE: Final = (
    ArithmeticError,
    ValueError,
    TypeError,
    LookupError,
    AssertionError,
    RecursionError,
)
"""What a prediction of numbers that do not go together may end with."""


@dataclass(frozen=True)
class Checked:
    """One row beside its prediction."""

    id: str
    set: str
    values: dict[str, Any]
    """As written by `--out`."""
    time_error: float | None = None
    """Relative, in the measure that the row states."""
    memory_error: float | None = None
    false_fit: bool = False
    """Said to fit where the run went out of memory."""
    skipped: str = ""


def check_row(row: Row, index: int, change: Change | None = None) -> Checked:
    """Predict one row."""
    name, group = name_of(row, index), set_of(row)
    try:
        require_measured(row)
        read = read_row(row, index)
        return _check(read if change is None else replace(read, job=change(read.job)))
    except Unreadable as error:
        reason = str(error)
    except IMPOSSIBLE as error:
        reason = f"its numbers do not go together ({shown(str(error))[1:-1]})"
    return Checked(name, group, {"id": name, "skipped": reason}, skipped=reason)


def _check(read: ReadRow) -> Checked:
    job, measured = read.job, read.measured
    predicted = predict(job)
    seconds = predicted.seconds
    if not 0 < seconds < math.inf:
        raise Unreadable(f"its numbers do not go together (a step of {seconds:g} s)")
    tokens = job.tokens / seconds / job.devices
    flops = job.model.step_flops(job.tokens, measured.flops_kind)
    tflops = flops / seconds / job.devices / 1e12
    values: dict[str, Any] = {
        "id": read.id,
        "machine": job.machine.name,
        "predicted_s": seconds,
        "predicted_tflops_per_gpu": tflops,
        "predicted_tokens_per_s_per_gpu": tokens,
    }
    time_error: float | None = None
    found: dict[str, float | bool] = {}
    ignored = [measured.ignored] if measured.ignored else []
    for key, was, said in (
        ("iter_s", measured.seconds, seconds),
        ("tokens_per_s_per_gpu", measured.tokens_per_s, tokens),
        ("tflops_per_gpu", measured.tflops, tflops),
    ):
        if was is not None:
            error = _error(said, was)
            if error is None:
                ignored.append(f"{key} is {was:g}")
                continue
            found[key] = was
            if time_error is None:
                time_error = error
    memory_error, false_fit = None, False
    if measured.memory_bytes is not None or measured.out_of_memory:
        last = measured.memory_rank == "last"
        memory = stage_memory(job, job.pp - 1) if last else predicted.memory
        said = float(getattr(memory, measured.memory_kind))
        values["predicted_mem_gib"] = said / GIB
        values["predicted_fits"] = fits(job, predicted.memory)
        if measured.memory_bytes is not None:
            memory_error = _error(said, measured.memory_bytes)
            if memory_error is None:
                ignored.append(f"its memory is {measured.memory_bytes:g} bytes")
            else:
                found["mem_gib"] = measured.memory_bytes / GIB
        if measured.out_of_memory:
            found["oom"] = True
            false_fit = bool(values["predicted_fits"])
    values["measured"] = found
    if read.guessed:
        values["guessed"] = read.guessed
    if read.misspelt:
        values["misspelt"] = read.misspelt
    if ignored:
        values["ignored"] = "; ".join(ignored)
    values["error_pct"] = None if time_error is None else 100.0 * time_error
    if memory_error is not None:
        values["memory_error_pct"] = 100.0 * memory_error
    return Checked(read.id, read.set, values, time_error, memory_error, false_fit)


def _error(said: float, was: float) -> float | None:
    """Relative; None where it is so large that means of it are no numbers."""
    found = said / was - 1.0 if 0 < was < math.inf else math.inf
    return found if abs(found) < 1e295 else None


def check_rows(rows: Sequence[Row], change: Change | None = None) -> list[Checked]:
    return [check_row(row, index, change) for index, row in enumerate(rows)]


@dataclass(frozen=True)
class Summary:
    """Errors of one set in per cent."""

    set: str
    what: str
    """`time` or `memory`."""
    rows: int
    mean: float
    median: float
    p90: float
    bias: float
    worst: tuple[tuple[str, float], ...]


def summarize(checked: Sequence[Checked]) -> list[Summary]:
    found = []
    for name in dict.fromkeys(c.set for c in checked):
        for what in ("time", "memory"):
            pairs = [
                (c.id, 100.0 * error)
                for c in checked
                if c.set == name and (error := getattr(c, f"{what}_error")) is not None
            ]
            if pairs:
                found.append(_summary(name, what, pairs))
    return found


def _summary(name: str, what: str, pairs: list[tuple[str, float]]) -> Summary:
    sizes = sorted(abs(error) for _, error in pairs)
    return Summary(
        name,
        what,
        len(pairs),
        statistics.fmean(sizes),
        statistics.median(sizes),
        sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        statistics.fmean(error for _, error in pairs),
        tuple(sorted(pairs, key=lambda pair: -abs(pair[1]))[:5]),
    )


@dataclass(frozen=True)
class Fitted:
    """What a fit found, and on what."""

    values: dict[str, float]
    """Factors and facts, as `calibrate.fit` returns them."""
    rows: list[Row]
    """Those that were fitted on."""
    skipped: list[tuple[str, str]]
    """Of each of the others its name, and why."""


def calibrate(rows: Sequence[Row]) -> dict[str, float]:
    """What `calibrate.fit` finds for at most 15 rows."""
    return fit_rows(rows).values


def fit_rows(rows: Sequence[Row]) -> Fitted:
    """A fit on those of at most 15 rows that have a time and can be predicted."""
    if len(rows) > MAX_CALIBRATION_ROWS:
        raise UsageError(
            f"{len(rows)} rows in --calibrate are more than the {MAX_CALIBRATION_ROWS} that are allowed; "
            "leave some out"
        )
    jobs, seconds, used, skipped = [], [], [], []
    for index, row in enumerate(rows):
        try:
            job, was = _timed(row, index)
        except Unreadable as error:
            skipped.append((name_of(row, index), str(error)))
        else:
            jobs.append(job)
            seconds.append(was)
            used.append(row)
    if not jobs:
        why = f" ({skipped[0][0]}: {skipped[0][1]})" if skipped else ""
        raise UsageError(
            f"no row in --calibrate has a time that can be predicted{why}; choose others"
        )
    try:
        return Fitted(fit(jobs, seconds), used, skipped)
    except IMPOSSIBLE as error:
        raise RunError(
            f"the {len(jobs)} rows of --calibrate cannot be fitted together ({error}); leave out what is "
            "least like the others"
        ) from error


def _timed(row: Row, index: int) -> tuple[Job, float]:
    """A row's job and its measured time, once it is sure that it can be predicted."""
    checked = check_row(row, index)
    if checked.skipped:
        raise Unreadable(checked.skipped)
    read = read_row(row, index)
    was = measured_s(read)
    if was is None or _error(checked.values["predicted_s"], was) is None:
        why = checked.values.get("ignored")
        raise Unreadable(f"it has no time that counts ({why})" if why else "it has no time")
    if (operations := played_operations(read.job)) > MOST_FITTED_OPERATIONS:
        raise Unreadable(
            f"its schedule is some {operations:.1e} operations to play, more than the "
            f"{MOST_FITTED_OPERATIONS:.0e} that are fitted on"
        )
    return read.job, was


def is_fitted(row: Row, index: int, fitted: Sequence[Row]) -> bool:
    """Whether a row is one of those: the same but for its figures. Ids are not enough: other sets, or
    other runs, may have the same."""
    name = name_of(row, index)
    return any(
        row == other
        or (
            name == name_of(other, -1)
            and (set_of(row) == set_of(other) or None in (row.get("set"), other.get("set")))
            and all(row.get(part) == other.get(part) for part in ("model", "layout", "hardware"))
        )
        for other in fitted
    )


def require_one_machine(rows: Sequence[Row]) -> None:
    """Raises where rows that can be read are of several, which no one profile is of."""
    machines = {}
    for index, row in enumerate(rows):
        try:
            machine = read_row(row, index).job.machine
        except Unreadable:
            continue
        words = f"{machine.name}, {machine.devices_per_node} devices a node"
        machines[machine] = f"{words}, {machine.inter.bandwidth / 1e9:g} GB/s between nodes"
    if len(machines) > 1:
        raise UsageError(
            f"the rows of --calibrate are of {len(machines)} machines ({'; '.join(machines.values())}); "
            "give those of one to write it as a profile"
        )


def fitted_machine(rows: Sequence[Row], values: Mapping[str, float]) -> Machine:
    """The machine that the rows ran on, with the fitted values in it, and beside them what was fitted of
    their programs. Whether what is stated as recomputed was is neither's: it is of these runs."""
    require_one_machine(rows)
    change = changed(values)
    machines = set()
    programs: dict[str, dict[str, float]] = {}
    for index, row in enumerate(rows):
        job = read_row(row, index).job
        after = change(job)
        machines.add(after.machine)
        was, now = asdict(job.software), asdict(after.software)
        found = {name: value for name, value in now.items() if value != was[name]}
        programs.setdefault(job.software.name, {}).update(found)
    (machine,) = machines
    return machine.replace(
        name=f"{machine.name}-fitted",
        programs={name: found for name, found in programs.items() if found},
        source={"fitted": f"on {len(rows)} measured runs, from {machine.name}", **machine.source},
    )


def choose_rows(rows: Sequence[Row], count: int) -> tuple[list[Row], list[str]]:
    """`count` rows to measure, the most telling first, and for each that is left out why: what cannot be
    expressed, and what would not fit (a row with a time has run, and did). Which time that is has no part
    in it."""
    if count > MAX_CALIBRATION_ROWS:
        raise UsageError(
            f"{count} runs are more than the {MAX_CALIBRATION_ROWS} that --calibrate takes; choose fewer"
        )
    jobs, known, skipped = [], [], []
    for index, row in enumerate(rows):
        try:
            read = read_row(row, index)
            memory = predict(read.job).memory
            ran = measured_s(read) is not None or fits(read.job, memory)
            if read.measured.out_of_memory or not ran:
                raise Unreadable("it would not fit in the device's memory")
        except Unreadable as error:
            skipped.append(str(error))
        except IMPOSSIBLE as error:
            skipped.append(f"its numbers do not go together ({shown(str(error))[1:-1]})")
        else:
            jobs.append(read.job)
            known.append(row)
    if not known:
        why = f": {skipped[0]}" if skipped else ""
        raise UsageError(f"none of {len(rows)} rows is a run that could be measured{why}")
    return [known[place] for place in most_telling(jobs, count)], skipped


def measured_s(read: ReadRow) -> float | None:
    """A row's time, from whichever of its measures it states."""
    measured, job = read.measured, read.job
    if measured.seconds is not None:
        return measured.seconds
    if measured.tokens_per_s is not None:
        return job.tokens / measured.tokens_per_s / job.devices
    if measured.tflops is not None:
        flops = job.model.step_flops(job.tokens, measured.flops_kind)
        return flops / measured.tflops / 1e12 / job.devices
    return None
