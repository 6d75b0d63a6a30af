"""Runs in a terminal: one run with its figures and its nodes, or a line for each of several.

Draws what `live.py` knows with rich; `as_text` is the same without colours, for scripts and logs. Called by
`cli_watch.py`.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ridgeline.report.live import LiveRun, State, span_text, sparkline, tell_event
from ridgeline.report.page import bytes_text, rate_text, value_text
from ridgeline.report.summary import number
from ridgeline.rundir import GpuUse, ResourceRecord

WIDTH = 200
"""Of plain text: nothing is cut off in a log."""
_COLOURS = {
    "running": "green",
    "finished": "blue",
    "waiting": "cyan",
    "silent": "yellow",
    "stopped": "yellow",
    "interrupted": "yellow",
    "failed": "red",
}
_NUM_EVENTS = 5
_NUM_NODES = 16
_STALE_S = 60.0
_NARROW = 104
"""Columns of a terminal below which nodes have no bars."""


def draw(
    runs: Sequence[LiveRun], now: float | None = None, rows: int = 200, width: int = WIDTH
) -> RenderableType:
    """One run in full, several in a table of at most `rows`."""
    now = time.time() if now is None else now
    if len(runs) == 1:
        return draw_run(runs[0], now, is_narrow=width < _NARROW)
    return draw_table(runs, now, rows)


def as_text(runs: Sequence[LiveRun], now: float | None = None, width: int = WIDTH) -> str:
    """The same as plain text."""
    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
    )
    console.print(draw(runs, now, width=width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def draw_run(live: LiveRun, now: float, is_narrow: bool) -> RenderableType:
    """The most important first: a small screen shows what fits."""
    state = live.state(now)
    parts: list[RenderableType] = [_title(live, state)]
    if state.sentence:
        parts.append(Text(state.sentence, style=_COLOURS.get(state.word, "")))
    parts += [Text(), _progress(live, state), _figures(live)]
    if live.events:
        parts += [Text(), _events(live)]
    if live.nodes:
        parts += [Text(), _nodes(live, now, is_narrow)]
        if gpus := _gpus(live):
            parts += [Text(), gpus]
    return Group(*parts)


def _title(live: LiveRun, state: State) -> Text:
    title = Text.assemble(
        (live.name, "bold"), "  ", (state.word, f"bold {_COLOURS.get(state.word, '')}")
    )
    ranks = f"{live.num_ranks} x {live.device_name}" if live.num_ranks else ""
    for words in (live.model_name, ranks, live.layout):
        title.append(f"  {words}" if words else "", style="dim")
    return title


def _eta_text(live: LiveRun, state: State) -> str:
    """Nobody knows when a run that has ended, or is silent, goes on."""
    return span_text(live.eta_s) if state.word == "running" and live.eta_s is not None else ""


def progress_text(live: LiveRun, state: State) -> str:
    """How far it is: step of how many, epoch, time left."""
    of = live.num_steps
    text = f"step {live.step:,}" + (f" of {of:,} ({min(1, live.step / of):.0%})" if of else "")
    if live.steps:
        text += f"  epoch {live.steps[-1].epoch}"
    eta = _eta_text(live, state)
    return text + (f"  ETA {eta}" if eta else "")


def _progress(live: LiveRun, state: State) -> Text:
    of = live.num_steps
    shown = f"{bar(100 * live.step / of, 30)}  " if of else ""
    return Text(shown + progress_text(live, state), style="bold")


def figures(live: LiveRun) -> list[tuple[str, str]]:
    """Names and values of what is known, also for the page."""
    found = [("loss", value_text(live.loss))]
    found.append(("learning rate", value_text(live.steps[-1].lr if live.steps else None)))
    found.append(("throughput", rate_text(live.rate, live.unit)))
    if live.mfu is not None:
        found.append(("MFU", percent_text(100 * live.mfu)))
    if live.steps:
        found.append(("waiting for data", _share_text(live.share("data_s"))))
        found.append(("exposed communication", _share_text(live.share("comm_s"))))
        if bubble := live.share("bubble_s"):
            found.append(("waiting for other stages", _share_text(bubble)))
    found.append(("peak memory of rank 0", bytes_text(live.memory_bytes)))
    for record in live.evals[-1:]:
        metrics = "  ".join(f"{n} {value_text(number(v))}" for n, v in record.metrics.items())
        found.append(("last evaluation", f"{metrics}  (step {record.step:,})"))
    if live.troubles:
        found.append(("troubles", live.troubles))
    return found


def _share_text(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} % of a step"


def percent_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} %"


def _figures(live: LiveRun) -> Table:
    table = _plain_table()
    table.add_column(style="dim")
    table.add_column()
    for name, value in figures(live):
        shape = ""
        if name == "loss":
            shape = "  " + sparkline([number(s.loss) for s in live.steps])
        table.add_row(name, value + shape)
    return table


def _plain_table(heads: Sequence[str] = ()) -> Table:
    table = Table(box=None, show_header=bool(heads), padding=(0, 2, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(head, no_wrap=True)
    return table


def bar(percent: float | None, width: int = 6) -> str:
    """A bar of so many characters."""
    if percent is None:
        return "-" * width
    # Full is for what is full.
    full = min(round(max(percent, 0.0) / 100 * width), width - (percent < 99.5))
    return "█" * full + "░" * (width - full)


def used_text(used: int | None, total: int | None) -> str:
    """How much of how much, in one unit."""
    if used is None or not total:
        return "–"
    unit, size = ("GiB", 2**30) if total >= 2**30 else ("MiB", 2**20)
    return f"{used / size:.3g} of {total / size:.3g} {unit}"


def _barred(percent: float | None, text: str, is_narrow: bool = False) -> str:
    return text if is_narrow else f"{bar(percent)} {text}"


def _percent_of(used: int | None, total: int | None) -> float | None:
    return 100 * used / total if used is not None and total else None


def pair_text(first: float | None, second: float | None) -> str:
    """Two rates, under a heading that says that they are bytes a second."""
    if first is None and second is None:
        return "–"
    return " / ".join(_short(value) for value in (first, second))


def _short(value: float | None) -> str:
    """Bytes a second in as little room as can be: 4.8M."""
    if value is None:
        return "–"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def _nodes(live: LiveRun, now: float, is_narrow: bool) -> Table:
    newest = [records[-1] for _, records in sorted(live.nodes.items())]
    has_fabric = any(record.fabric_sent_bytes_per_s is not None for record in newest)
    table = _plain_table(
        ["node", "CPU", "memory", *([] if is_narrow else ["ranks"]), "disk r/w, B/s", "net out/in"]
        + ["fabric out/in"] * has_fabric
    )
    for record in newest[:_NUM_NODES]:
        used, total = record.memory_used_bytes, record.memory_total_bytes
        cells = [
            _node_name(record, now, live),
            _barred(record.cpu_percent, cores_text(record), is_narrow),
            _barred(_percent_of(used, total), used_text(used, total), is_narrow),
            *([] if is_narrow else [bytes_text(record.rss_bytes)]),
            pair_text(record.disk_read_bytes_per_s, record.disk_write_bytes_per_s),
            pair_text(record.net_sent_bytes_per_s, record.net_received_bytes_per_s),
        ]
        sent, received = record.fabric_sent_bytes_per_s, record.fabric_received_bytes_per_s
        table.add_row(*cells, *([pair_text(sent, received)] if has_fabric else []))
    if len(newest) > _NUM_NODES:
        table.add_row(f"and {len(newest) - _NUM_NODES} more")
    return table


def _node_name(record: ResourceRecord, now: float, live: LiveRun) -> str:
    """Also for how long a node has been silent, while the run is not over."""
    old_s = now - record.time
    late = old_s > _STALE_S and live.status == "running"
    return record.host + (f" ({span_text(old_s)} ago)" if late else "")


def cores_text(record: ResourceRecord) -> str:
    """How busy, of how many."""
    percent = "–" if record.cpu_percent is None else f"{record.cpu_percent:.0f} %"
    return f"{percent} of {record.cpu_count}"


def newest_gpus(live: LiveRun) -> list[tuple[str, GpuUse]]:
    """The newest reading of each GPU, with its name; that of its host where there are several."""
    nodes = sorted(live.nodes.items())
    several = len(nodes) > 1
    return [
        (f"{host} gpu {gpu.index}" if several else f"gpu {gpu.index}", gpu)
        for host, records in nodes
        for gpu in records[-1].gpus
    ]


GPU_HEADS = ("GPU", "busy", "memory", "power", "temp.", "clock")


def gpu_row(name: str, gpu: GpuUse) -> list[str]:
    """Under `GPU_HEADS`; also for the page."""
    rest = ((gpu.watts, "W"), (gpu.temperature_c, "°C"), (gpu.sm_clock_mhz, "MHz"))
    return [
        name,
        percent_text(gpu.utilization_percent),
        used_text(gpu.memory_used_bytes, gpu.memory_total_bytes),
        *("–" if value is None else f"{value:.0f} {unit}" for value, unit in rest),
    ]


def _gpus(live: LiveRun) -> Table | None:
    found = newest_gpus(live)
    if not found:
        return None
    table = _plain_table(GPU_HEADS)
    for name, gpu in found[:_NUM_NODES]:
        row = gpu_row(name, gpu)
        row[1] = _barred(gpu.utilization_percent, row[1])
        row[2] = _barred(_percent_of(gpu.memory_used_bytes, gpu.memory_total_bytes), row[2])
        table.add_row(*row)
    if len(found) > _NUM_NODES:
        table.add_row(f"and {len(found) - _NUM_NODES} more")
    return table


def _events(live: LiveRun) -> Table:
    table = _plain_table()
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for event in live.events[-_NUM_EVENTS:]:
        when = datetime.fromtimestamp(event.time).strftime("%H:%M:%S")
        table.add_row(when, tell_event(event))
    return table


HEADS = ("run", "status", "step", "loss", "throughput", "last evaluation", "ETA", "written")


def row_of(live: LiveRun, now: float) -> list[str]:
    """A run in one line, under `HEADS`; also for the page."""
    of, state = live.num_steps, live.state(now)
    metrics = live.evals[-1].metrics if live.evals else {}
    return [
        live.name,
        state.word,
        f"{live.step:,}" + (f" of {of:,}" if of else ""),
        value_text(live.loss),
        rate_text(live.rate, live.unit),
        "  ".join(f"{n} {value_text(number(v))}" for n, v in list(metrics.items())[:2]) or "–",
        _eta_text(live, state) or "–",
        f"{span_text(now - live.last_seen)} ago",
    ]


def draw_table(runs: Sequence[LiveRun], now: float, rows: int) -> RenderableType:
    table = _plain_table(HEADS)
    for live in runs[:rows]:
        cells = [Text(cell) for cell in row_of(live, now)]
        cells[1].stylize(_COLOURS.get(cells[1].plain, ""))
        table.add_row(*cells)
    words: dict[str, int] = {}
    for live in runs:
        word = live.state(now).word
        words[word] = words.get(word, 0) + 1
    left = f", {len(runs) - rows} not shown" if len(runs) > rows else ""
    said = ", ".join(f"{count} {word}" for word, count in words.items())
    return Group(table, Text(f"\n{len(runs)} runs: {said}{left}", style="dim"))
