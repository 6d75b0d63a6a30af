"""What a run's nodes did, as charts: for the report, and for the live page.

From the records that a run left in `resources/`; nothing where there are none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from ridgeline.report.page import bytes_text, paragraph, table
from ridgeline.report.summary import median_of
from ridgeline.report.svg import NUM_COLOURS, Point, Series, line_chart
from ridgeline.rundir import GpuUse, ResourceRecord

Nodes = Mapping[str, Sequence[ResourceRecord]]
_Join = Callable[[Sequence[float]], float]
_BUCKETS = 250
_TABLE_ROWS = 64


def resources(nodes: Nodes) -> str:
    """The report's section: charts over time, and a row a node."""
    charts = resource_charts(nodes)
    if not charts:
        return ""
    return charts + _table(nodes) + paragraph(_tell(nodes), "note")


def resource_charts(nodes: Nodes) -> str:
    """Cores, memory, disks and links over all nodes; GPUs one by one, where they are few enough."""
    nodes = {host: records for host, records in nodes.items() if records}
    if not nodes:
        return ""
    many = f", mean of {len(nodes)} nodes" if len(nodes) > 1 else ""
    summed = f", sum of {len(nodes)} nodes" if len(nodes) > 1 else ""
    charts = [
        _chart(
            f"CPU busy, %{many}",
            [Series("CPU", _over_nodes(nodes, lambda r: r.cpu_percent), 0)],
        ),
        _chart(
            f"memory, GiB{many}",
            [
                Series("used", _over_nodes(nodes, _scaled("memory_used_bytes", 2**30)), 2),
                Series("of the ranks", _over_nodes(nodes, _scaled("rss_bytes", 2**30)), 3),
            ],
        ),
        _gpu_chart("GPU busy, %", nodes, lambda gpu: gpu.utilization_percent),
        _gpu_chart("GPU power, W", nodes, lambda gpu: gpu.watts),
        _gpu_chart("GPU memory, GiB", nodes, _gpu_gib),
        *(
            _chart(
                f"{title}, MB/s{summed}",
                [
                    Series(
                        words,
                        _over_nodes(nodes, _scaled(f"{name}_bytes_per_s", 1e6), total=True),
                        i,
                    )
                    for i, (words, name) in enumerate(names.items())
                ],
            )
            for title, names in _RATES.items()
        ),
    ]
    return f'<div class="grid2">{"".join(charts)}</div>'


_RATES = {
    "disks": {"read": "disk_read", "written": "disk_write"},
    "network": {"sent": "net_sent", "received": "net_received"},
    "fabric": {"sent": "fabric_sent", "received": "fabric_received"},
}


def _chart(title: str, series: Sequence[Series]) -> str:
    """Nothing where nothing is known."""
    known = [s for s in series if s.points]
    return line_chart(known, title=title, x_label="minutes", from_zero=True) if known else ""


def _scaled(name: str, size: float) -> Callable[[ResourceRecord], float | None]:
    def read(record: ResourceRecord) -> float | None:
        value = getattr(record, name)
        return None if value is None else value / size

    return read


def _gpu_gib(gpu: GpuUse) -> float | None:
    return None if gpu.memory_used_bytes is None else gpu.memory_used_bytes / 2**30


def _start(nodes: Nodes) -> float:
    return min(records[0].time for records in nodes.values())


def _over_nodes(
    nodes: Nodes, read: Callable[[ResourceRecord], float | None], total: bool = False
) -> list[Point]:
    """One curve of all nodes, their mean or their total: as it was recorded where there is one, else node
    by node in stretches of time, by those that recorded then."""
    start = _start(nodes)
    curves = [
        [((r.time - start) / 60, value) for r in records if (value := read(r)) is not None]
        for records in nodes.values()
    ]
    curves = [curve for curve in curves if curve]
    if len(curves) == 1:
        return curves[0]
    return [(x, y * (len(curves) if total else 1)) for x, y in _joined(curves, fmean)]


def _joined(curves: Sequence[Sequence[Point]], join: _Join) -> list[Point]:
    gaps = [median_of(b - a for (a, _), (b, _) in pairwise(c)) for c in curves]
    end = max((c[-1][0] for c in curves), default=0.0)
    width = max(2 * max((gap or 0.0 for gap in gaps), default=0.0), end / _BUCKETS, 1e-6)
    places: dict[int, list[float]] = {}
    for curve in curves:
        own: dict[int, list[float]] = {}
        for x, y in curve:
            own.setdefault(math.floor(x / width), []).append(y)
        for place, values in own.items():
            places.setdefault(place, []).append(fmean(values))
    return [((place + 0.5) * width, join(places[place])) for place in sorted(places)]


def gpu_curves(
    nodes: Nodes, read: Callable[[GpuUse], float | None]
) -> dict[tuple[str, int], list[Point]]:
    """One curve a GPU, by host and index."""
    start = _start(nodes)
    found: dict[tuple[str, int], list[Point]] = {}
    for host, records in sorted(nodes.items()):
        for record in records:
            for gpu in record.gpus:
                if (value := read(gpu)) is not None:
                    points = found.setdefault((host, gpu.index), [])
                    points.append(((record.time - start) / 60, value))
    return found


def _gpu_chart(title: str, nodes: Nodes, read: Callable[[GpuUse], float | None]) -> str:
    """Each GPU where colours suffice; else their mean, and the ends."""
    curves = gpu_curves(nodes, read)
    if len(curves) <= NUM_COLOURS:
        several = len(nodes) > 1
        series = [
            Series(f"{host} gpu {index}" if several else f"gpu {index}", points, colour)
            for colour, ((host, index), points) in enumerate(curves.items())
        ]
        return _chart(title, series)
    lines = list(curves.values())
    ends: dict[str, _Join] = {"mean": fmean, "lowest": min, "highest": max}
    series = [Series(name, _joined(lines, join), i) for i, (name, join) in enumerate(ends.items())]
    return _chart(f"{title}, of {len(lines)} GPUs", series)


def _table(nodes: Nodes) -> str:
    rows = []
    for host, records in sorted(nodes.items()):
        gpus = [gpu for record in records for gpu in record.gpus]
        rows.append(
            [
                host,
                str(records[-1].cpu_count),
                _mean([r.cpu_percent for r in records], " %"),
                _most([r.memory_used_bytes for r in records]),
                _most([r.rss_bytes for r in records]),
                str(len(records[-1].gpus) or "–"),
                _mean([gpu.utilization_percent for gpu in gpus], " %"),
                _most([gpu.memory_used_bytes for gpu in gpus]),
                _mean([gpu.watts for gpu in gpus], " W"),
            ]
        )
    heads = ["node", "cores", "CPU, mean", "memory, most", "of the ranks, most", "GPUs"]
    heads += ["GPU busy, mean", "GPU memory, most", "GPU power, mean"]
    left = len(rows) - _TABLE_ROWS
    note = paragraph(f"{left} more nodes are left out.", "note") if left > 0 else ""
    return table(heads, rows[:_TABLE_ROWS]) + note


def _mean(values: Sequence[float | None], unit: str) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.3g}{unit}" if known else "–"


def _most(values: Sequence[int | None]) -> str:
    return bytes_text(max((value for value in values if value is not None), default=None))


def _tell(nodes: Nodes) -> str:
    gap = median_of(
        b.time - a.time for records in nodes.values() for a, b in pairwise(records[-100:])
    )
    often = f"Recorded about every {gap:.2g} s by each node. " if gap else ""
    return (
        f"{often}Cores, disks and links are the node's, with whatever else ran there; a GPU is busy while "
        "any kernel runs on it, however small."
    )
