"""The planner against what others measured: errors by set, the worst rows, and false "fits".

`validate` predicts every row that it can express and says of the others why not; `calibrate` fits a few
physical parameters of the machine on at most 15 rows, inside bounds; `choose_rows` says which rows are
worth measuring for that. The commands are `ridgeline plan validate` and `ridgeline plan choose`.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ridgeline.errors import UsageError
from ridgeline.plan.calibrate import Change, changed, fit
from ridgeline.plan.design import most_telling
from ridgeline.plan.machine import Machine
from ridgeline.plan.memory import GIB, fits, stage_memory
from ridgeline.plan.predict import predict
from ridgeline.plan.rows import ReadRow, Row, Unreadable, read_row

__all__ = [
    "calibrate", "changed", "check_row", "check_rows", "choose_rows", "fitted_machine", "measured_s",
    "summarize",
]  # fmt: skip

MAX_CALIBRATION_ROWS: Final = 15


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
    name, group = str(row.get("id", f"row-{index}")), str(row.get("set", ""))
    kind = str(row.get("kind", "measured"))
    try:
        if kind != "measured":
            raise Unreadable(f"the row is {kind}, not measured")
        read = read_row(row, index)
    except Unreadable as error:
        return Checked(name, group, {"id": name, "skipped": str(error)}, skipped=str(error))
    job = read.job if change is None else change(read.job)
    try:
        return _check(replace(read, job=job))
    except (ArithmeticError, ValueError, KeyError, AssertionError) as error:
        reason = f"its numbers do not go together ({error})"
        return Checked(name, group, {"id": name, "skipped": reason}, skipped=reason)


def _check(read: ReadRow) -> Checked:
    job, measured = read.job, read.measured
    predicted = predict(job)
    seconds = predicted.seconds
    tokens = job.tokens / seconds / job.devices
    flops = job.model.step_flops(job.tokens, measured.flops_kind)
    tflops = flops / seconds / job.devices / 1e12
    values: dict[str, Any] = {
        "id": read.id,
        "predicted_s": seconds,
        "predicted_tflops_per_gpu": tflops,
        "predicted_tokens_per_s_per_gpu": tokens,
    }
    time_error: float | None = None
    found: dict[str, float | bool] = {}
    for key, was, said in (
        ("iter_s", measured.seconds, seconds),
        ("tokens_per_s_per_gpu", measured.tokens_per_s, tokens),
        ("tflops_per_gpu", measured.tflops, tflops),
    ):
        if was is not None:
            found[key] = was
            if time_error is None:
                time_error = said / was - 1.0
    memory_error, false_fit = None, False
    if measured.memory_bytes is not None or measured.out_of_memory:
        last = measured.memory_rank == "last"
        memory = stage_memory(job, job.pp - 1) if last else predicted.memory
        said = float(getattr(memory, measured.memory_kind))
        values["predicted_mem_gib"] = said / GIB
        values["predicted_fits"] = fits(job, predicted.memory)
        if measured.memory_bytes is not None:
            found["mem_gib"] = measured.memory_bytes / GIB
            memory_error = said / measured.memory_bytes - 1.0
        if measured.out_of_memory:
            found["oom"] = True
            false_fit = bool(values["predicted_fits"])
    values["measured"] = found
    if read.guessed:
        values["guessed"] = read.guessed
    values["error_pct"] = None if time_error is None else 100.0 * time_error
    if memory_error is not None:
        values["memory_error_pct"] = 100.0 * memory_error
    return Checked(read.id, read.set, values, time_error, memory_error, false_fit)


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


def calibrate(rows: Sequence[Row]) -> dict[str, float]:
    """What `calibrate.fit` finds for at most 15 rows."""
    if len(rows) > MAX_CALIBRATION_ROWS:
        raise UsageError(
            f"{len(rows)} rows in --calibrate are more than the {MAX_CALIBRATION_ROWS} that are allowed; "
            "leave some out"
        )
    jobs, seconds = [], []
    for index, row in enumerate(rows):
        try:
            read = read_row(row, index)
        except Unreadable:
            continue
        if (was := measured_s(read)) is not None:
            jobs.append(read.job)
            seconds.append(was)
    if not jobs:
        raise UsageError("no row in --calibrate has a time that can be predicted; choose others")
    return fit(jobs, seconds)


def fitted_machine(rows: Sequence[Row], values: Mapping[str, float]) -> Machine:
    """The machine that the rows ran on, with the fitted values in it, and beside them what was fitted of
    their programs. Whether what is stated as recomputed was is neither's: it is of these runs."""
    change = changed(values)
    machines = set()
    programs: dict[str, dict[str, float]] = {}
    for index, row in enumerate(rows):
        with contextlib.suppress(Unreadable):
            job = read_row(row, index).job
            after = change(job)
            machines.add(after.machine)
            was, now = asdict(job.software), asdict(after.software)
            found = {name: value for name, value in now.items() if value != was[name]}
            programs.setdefault(job.software.name, {}).update(found)
    if len(machines) != 1:
        names = ", ".join(sorted(machine.name for machine in machines))
        raise UsageError(
            f"the rows of --calibrate are of {len(machines)} machines ({names}; with other links); "
            "give those of one to write it as a profile"
        )
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
        except (ArithmeticError, ValueError, KeyError, AssertionError) as error:
            skipped.append(f"its numbers do not go together ({error})")
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
