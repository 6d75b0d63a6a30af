"""Reports: one run as a page in its directory, or several runs side by side in one page.

Reads run directories and nothing of a live trainer, so a report can be made while a job runs, after
it was killed, and on another machine. Called by `ridgeline report` and at the end of `train`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from ridgeline.errors import UsageError
from ridgeline.report.page import (
    Figure,
    badge,
    bytes_text,
    count_text,
    flops_text,
    page,
    paragraph,
    preformatted,
    rate_text,
    seconds_text,
    section,
    table,
    tiles,
    value_text,
)
from ridgeline.report.pipeline import pipeline
from ridgeline.report.predicted import predicted
from ridgeline.report.resources import resources
from ridgeline.report.stragglers import stragglers
from ridgeline.report.summary import (
    OTHER,
    RunSummary,
    differing_keys,
    flatten_config,
    number,
    own_work_s,
    percentages,
    read_run,
)
from ridgeline.report.svg import (
    POINT_LIMIT,
    Part,
    RankBar,
    Series,
    legend,
    line_chart,
    rank_chart,
    stacked_bar,
)
from ridgeline.rundir import REPORT, RunDir

PART_NAMES = {
    "data_s": "waiting for data",
    "h2d_s": "copy to device",
    "forward_s": "forward",
    "backward_s": "backward",
    "bubble_s": "waiting for other stages",
    "comm_s": "exposed communication",
    "optimizer_s": "optimizer",
    OTHER: "other",
}
_PART_COLOURS = dict(zip(PART_NAMES, (3, 5, 0, 2, 6, 1, 4, 7), strict=True))
_RANK_ROWS = 32
_EVENT_ROWS = 200
_EVEN = 0.03
"""Ranks that differ by less than this are called even: timing noise is about as large."""


def build_report(run: RunDir) -> Path:
    """Write `report.html` into a run's directory."""
    summary = read_run(run)
    body = "".join(
        (
            _head(summary),
            _warnings(summary),
            tiles(_headline(summary)),
            section("Loss and metrics", _curves(summary)),
            section("Speed", _speed(summary)),
            section("Where a step's time goes", _split(summary)),
            section("Pipeline", pipeline(run, summary)),
            section("Predicted and measured", predicted(run, summary)),
            section("Ranks", _ranks(summary)),
            section("Stragglers", stragglers(summary.events)),
            section("Resources", resources(run.resources())),
            section("Events", _events(summary)),
            section("Configuration", _config(summary)),
            section("Environment", _environment(summary)),
            _foot(),
        )
    )
    return run.write_text(REPORT, page(f"{summary.name} · Ridgeline", body))


def compare_runs(runs: Sequence[RunDir], target: Path) -> Path:
    """Write one page about several runs: their figures, curves over one another, and what differs
    between their configurations."""
    if not runs:
        raise UsageError("no run directories to compare; name two or more")
    summaries = [read_run(run) for run in runs]
    names = _distinct_names(runs)
    body = "".join(
        (
            f"<h1>{len(runs)} runs compared</h1>",
            section("Results", _results(summaries, names)),
            section("Curves", _overlaid(summaries, names)),
            section("What differs between the configurations", _differences(summaries, names)),
            _foot(),
        )
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    return RunDir(target.parent).write_text(target.name, page("Runs compared · Ridgeline", body))


def _head(run: RunSummary) -> str:
    hosts = len({r.host for r in run.ranks})
    device = run.machine.device_name if run.machine else "unknown device"
    if run.ranks:
        device = f"{len(run.ranks)} × {device}" + (f" on {hosts} hosts" if hosts > 1 else "")
    model = (
        f"{run.model.name}, {count_text(run.model.num_parameters)} parameters" if run.model else ""
    )
    words = [f"layout {run.layout_text or 'unknown'}", device, model]
    line = "".join(f"<span>{escape(word)}</span>" for word in words if word)
    return f'<h1>{escape(run.name)}</h1><p class="sub">{badge(run.status)}{line}</p>\n'


def _warnings(run: RunSummary) -> str:
    said = []
    if run.first_bad_step is not None:
        said.append(
            f"The loss is not finite at step {run.first_bad_step}"
            + (" and still not at the end" if not _finite(run.final_loss) else "")
            + ". Look at the gradient norm and the learning rate just before it."
        )
    said += [
        "The run failed: " + _shorten(_details(e.details) or "no reason was recorded")
        for e in run.events
        if e.event == "failed"
    ]
    if not run.steps:
        said.append("No step has been recorded yet.")
    return "".join(paragraph(text, "warning") for text in said)


def _finite(value: float | None) -> bool:
    return value is not None and abs(value) < float("inf")


def _headline(run: RunSummary) -> list[Figure]:
    """The figures a reader looks for first."""
    last = f"after step {run.steps[-1].step:,}" if run.steps else ""
    figures = [Figure("final training loss", value_text(run.final_loss), last)]
    for name in run.metric_names[:6]:
        if best := run.best(name):
            note = f"at step {best.step:,}; last {value_text(best.last)}"
            figures.append(Figure(f"best eval {name}", value_text(best.value), note))
    rate = rate_text(run.throughput, run.unit)
    step = f"median; {seconds_text(run.step_s)} a step" if run.step_s else ""
    figures.append(Figure("throughput", rate, step))
    figures.append(Figure("MFU", _share(run.mfu), _peak_note(run)))
    figures.append(Figure("total time", seconds_text(run.total_s), f"{len(run.steps):,} steps"))
    memory = "largest over ranks" if run.ranks else ""
    figures.append(Figure("peak memory", bytes_text(run.peak_memory_bytes), memory))
    return figures


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.3g} %"


def _peak_note(run: RunSummary) -> str:
    if run.mfu is None:
        return "not measured"
    if run.machine is None or run.peak_flops is None:
        return "median; of an unknown peak"
    peak = flops_text(run.peak_flops)
    return f"median; of {peak} a device ({run.precision}, {run.machine.peak_source})"


def _is_loss(name: str) -> bool:
    return name.rpartition("/")[2].rpartition(".")[2] == "loss"


def _curves(run: RunSummary) -> str:
    if not run.steps and not run.evals:
        return ""
    losses = [Series("train", [(s.step, number(s.loss)) for s in run.steps], 0)]
    losses += [
        Series("eval" if name == "loss" else name, run.metric(name), 1 + i)
        for i, name in enumerate(n for n in run.metric_names if _is_loss(n))
    ]
    charts = [
        _metric_chart(name, [Series(name, run.metric(name), 2)])
        for name in run.metric_names
        if not _is_loss(name)
    ]
    charts.append(
        line_chart(
            [Series("learning rate", [(s.step, number(s.lr)) for s in run.steps], 3)],
            title="learning rate",
            from_zero=True,
        )
    )
    norms = [(float(s.step), number(s.grad_norm)) for s in run.steps if s.grad_norm is not None]
    if norms:
        charts.append(
            line_chart(
                [Series("gradient norm", norms, 4)],
                title="gradient norm",
                log=_spread([y for _, y in norms]),
            )
        )
    values = [y for series in losses for _, y in series.points]
    loss = line_chart(losses, title="loss", log=_spread(values), full=True)
    return f'{loss}<div class="grid2">{"".join(charts)}</div>'


def _metric_chart(name: str, series: Sequence[Series], limit: int = POINT_LIMIT) -> str:
    log = _spread([y for s in series for _, y in s.points])
    return line_chart(series, title=f"eval {name}", log=log, limit=limit)


def _spread(values: Sequence[float]) -> bool:
    """Whether a log axis shows more: all positive, and more than a factor of 30 apart."""
    finite = [v for v in values if _finite(v)]
    return bool(finite) and min(finite) > 0 and max(finite) > 30 * min(finite)


def _speed(run: RunSummary) -> str:
    if not run.steps:
        return ""
    rates = [(float(s.step), s.samples_per_s * run.units_per_sample) for s in run.steps]
    body = line_chart(
        [Series(f"{run.unit}/s", rates, 0)],
        title=f"{run.unit} per second",
        from_zero=True,
        full=True,
    )
    skipped = len(run.steps) - run.num_before - len(run.steady)
    many = "step is" if skipped == 1 else f"{skipped} steps are"
    note = f"The first {many} left out of all medians as warm-up." if skipped else ""
    if run.num_before:
        note = (
            f"The first {run.num_before:,} steps ran on other ranks or in another layout: medians are of "
            f"those since, without {skipped} of warm-up."
        )
    return body + (paragraph(note, "note") if note else "")


def _split(run: RunSummary) -> str:
    parts = run.split()
    total = sum(parts.values())
    if total <= 0:
        return ""
    shares = percentages(list(parts.values()))
    bar = stacked_bar(
        [
            Part(PART_NAMES[name], seconds, f"{share:.1f} %", _PART_COLOURS[name])
            for (name, seconds), share in zip(parts.items(), shares, strict=True)
        ],
        title="parts of a step's time",
    )
    names = legend([(PART_NAMES[name], _PART_COLOURS[name]) for name in parts])
    rows = [
        [PART_NAMES[name], seconds_text(seconds), f"{share:.1f} %"]
        for (name, seconds), share in zip(parts.items(), shares, strict=True)
    ]
    figure = f'<figure class="split"><figcaption>median step: {seconds_text(run.step_s)}'
    return (
        f"{figure}</figcaption>{names}{bar}</figure>"
        + table(["part", "median", "share"], rows)
        + paragraph(
            "On rank 0. Shares are of the sum of the medians; communication that is hidden behind "
            "the backward pass counts as backward.",
            "note",
        )
    )


def _ranks(run: RunSummary) -> str:
    slowest = run.slowest()
    if slowest is None:
        return ""
    name = f"rank {slowest.rank.rank} on {slowest.rank.host}"
    more = f"{100 * slowest.excess:.1f} %"
    if len(run.ranks) == 1:
        said = f"One rank, {name}."
    elif slowest.excess < _EVEN:
        said = f"The ranks are even: the slowest is {name}, by {more} over the median rank."
    else:
        said = (
            f"The slowest is {name}: {seconds_text(slowest.work_s)} of work of its own a step, "
            f"{more} more than the median rank, and the others wait for it."
        )
    # The worst first where they do not all fit, in order of rank where they do.
    shown = sorted(run.ranks, key=own_work_s, reverse=True)[:_RANK_ROWS]
    if len(run.ranks) <= _RANK_ROWS:
        shown = run.ranks
    else:
        said += f" Of {len(run.ranks)} ranks the {_RANK_ROWS} with the most work are shown."
    mark = slowest.rank.rank if len(run.ranks) > 1 else None
    bars = [
        RankBar(
            f"rank {r.rank}",
            own_work_s(r),
            r.step_s - own_work_s(r),
            r.step_p95_s,
            f"{seconds_text(own_work_s(r))} work, {seconds_text(r.step_s)} median step, "
            f"{seconds_text(r.step_p95_s)} p95",
            r.rank == mark,
        )
        for r in shown
    ]
    keys = (
        '<ul class="legend"><li><span class="swatch c0"></span>own work (median)</li>'
        '<li><span class="swatch c1"></span>slowest</li>'
        '<li><span class="swatch wait"></span>exposed communication and waiting</li>'
        '<li><span class="swatch p95"></span>95th percentile of the step</li></ul>'
    )
    rows = [
        [f"rank {r.rank}", r.host, r.device, seconds_text(own_work_s(r)), seconds_text(r.step_s),
         seconds_text(r.step_p95_s), seconds_text(r.split_s.get("data_s")),
         bytes_text(r.peak_memory_bytes)]
        for r in shown
    ]  # fmt: skip
    headers = [
        "rank",
        "host",
        "device",
        "own work",
        "median step",
        "p95 step",
        "data wait",
        "memory",
    ]
    marked = next((i for i, r in enumerate(shown) if r.rank == mark), None)
    chart = rank_chart(bars, title="step time by rank")
    return (
        paragraph(said)
        + (f"<figure>{keys}{chart}</figure>" if chart else "")
        + table(headers, rows, num_text=3, marked=marked)
    )


def _details(details: dict[str, Any]) -> str:
    return ", ".join(
        f"{key}: {value if isinstance(value, str) else json.dumps(value, default=str)}"
        for key, value in details.items()
    )


def _events(run: RunSummary) -> str:
    if not run.events:
        return ""
    shown = run.events[-_EVENT_ROWS:]
    rows = [
        [datetime.fromtimestamp(e.time).strftime("%Y-%m-%d %H:%M:%S"), e.event,
         _shorten(_details(e.details))]
        for e in shown
    ]  # fmt: skip
    left = len(run.events) - len(shown)
    note = paragraph(f"{left:,} earlier events are left out.", "note") if left else ""
    return note + table(["time", "event", "details"], rows, num_text=3)


def _shorten(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else text[:limit] + " …"


def _config(run: RunSummary) -> str:
    return preformatted(run.config_text) if run.config_text else ""


def _environment(run: RunSummary) -> str:
    rows = [[key, _shorten(_plain(value))] for key, value in _flat(run.env)]
    if run.machine:
        machine = run.machine
        rows = [
            ["host", machine.host],
            ["cores", str(machine.num_cores)],
            ["host memory", bytes_text(machine.memory_bytes)],
            ["device", f"{machine.num_devices} × {machine.device_name} ({machine.device_kind})"],
            ["device memory", bytes_text(machine.device_memory_bytes)],
            *rows,
        ]
    return table(["", ""], rows[:300], num_text=2) if rows else ""


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat += _flat(value, name + ".") if isinstance(value, dict) else [(name, value)]
    return flat


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _foot() -> str:
    made = datetime.now().strftime("%Y-%m-%d %H:%M")
    return f"<footer>Made by Ridgeline on {made} from the run directory alone.</footer>"


def _distinct_names(runs: Sequence[RunDir]) -> list[str]:
    """Directory names, with as many parents as it takes to tell them apart."""
    paths = [run.path.resolve() for run in runs]
    names = [path.name for path in paths]
    for depth in range(2, 8):
        if len(set(names)) == len(names):
            return names
        names = ["/".join(path.parts[-depth:]) for path in paths]
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]


def _results(runs: Sequence[RunSummary], names: Sequence[str]) -> str:
    """A column a run, because there are more figures than runs."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.metric_names))[:8]
    columns = [
        {
            "status": run.status,
            "layout": run.layout_text or "–",
            "steps": f"{len(run.steps):,}",
            "final training loss": value_text(run.final_loss),
            **{
                f"best eval {metric}": value_text(best.value if best else None)
                for metric, best in ((metric, run.best(metric)) for metric in metrics)
            },
            "throughput (median)": rate_text(run.throughput, run.unit),
            "step (median)": seconds_text(run.step_s),
            "MFU (median)": _share(run.mfu),
            "total time": seconds_text(run.total_s),
            "peak memory": bytes_text(run.peak_memory_bytes),
        }
        for run in runs
    ]
    rows = [[key, *(column[key] for column in columns)] for key in columns[0]]
    return table(["", *names], rows, num_text=1 + len(names))


def _overlaid(runs: Sequence[RunSummary], names: Sequence[str]) -> str:
    limit = max(60, min(POINT_LIMIT, 2000 // len(runs)))

    def series(curves: Sequence[Sequence[tuple[float, float]]]) -> list[Series]:
        pairs = zip(names, curves, strict=True)
        return [Series(name, points, i) for i, (name, points) in enumerate(pairs)]

    by_step = [[(float(s.step), number(s.loss)) for s in run.steps] for run in runs]
    by_time = [
        [(s.time - (run.steps[0].time - run.steps[0].step_s), number(s.loss)) for s in run.steps]
        for run in runs
    ]
    rates = [
        [(float(s.step), s.samples_per_s * run.units_per_sample) for s in run.steps] for run in runs
    ]
    log = _spread([y for curve in by_step for _, y in curve])
    metrics = list(dict.fromkeys(name for run in runs for name in run.metric_names))[:8]
    units = "/".join(dict.fromkeys(run.unit for run in runs))
    charts = [
        line_chart(series(by_step), title="training loss by step", log=log, limit=limit),
        line_chart(
            series(by_time), title="training loss by time", log=log, x_label="seconds", limit=limit
        ),
        *(
            _metric_chart(name, series([run.metric(name) for run in runs]), limit)
            for name in metrics
        ),
        line_chart(series(rates), title=f"{units} per second", from_zero=True, limit=limit),
    ]
    return f'<div class="grid2">{"".join(charts)}</div>'


def _differences(runs: Sequence[RunSummary], names: Sequence[str]) -> str:
    configs = [flatten_config(run.config_text) for run in runs]
    keys = differing_keys(configs)
    if not keys:
        return paragraph("Nothing: the resolved configurations are the same.")
    rows = [[key, *(_shorten(c.get(key, "–"), 200) for c in configs)] for key in keys]
    return table(["field", *names], rows, num_text=1 + len(names))
