"""The report's section on ranks that held the others up, from the events a run left of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from ridgeline.report.page import paragraph, seconds_text, table
from ridgeline.report.svg import RankBar, rank_chart
from ridgeline.rundir import Event

_ROWS = 20


def stragglers(events: Sequence[Event]) -> str:
    """A row each time a rank, or the network, was found slow; a bar for each rank at its worst."""
    found = [event for event in events if event.event == "straggler"]
    if not found:
        return ""
    worst: dict[str, dict[str, float]] = {}
    rows = []
    for event in found:
        details = event.details
        rank = details.get("rank")
        name = "all ranks" if rank is None else f"rank {rank}"
        times = {key: _seconds(details.get(key)) for key in ("own_s", "others_s", "step_s")}
        if times["own_s"] >= worst.get(name, times)["own_s"]:
            worst[name] = times
        when = datetime.fromtimestamp(event.time).strftime("%H:%M:%S")
        rows.append(
            [name, str(details.get("part")), when, str(details.get("step")),
             seconds_text(times["own_s"]), seconds_text(times["others_s"]),
             f"{100 * _seconds(details.get('excess')):.0f} %"]
        )  # fmt: skip
    bars = [
        RankBar(
            name,
            times["own_s"],
            max(0.0, times["step_s"] - times["own_s"]),
            times["others_s"],
            f"{seconds_text(times['own_s'])} of its own in a step of {seconds_text(times['step_s'])}",
            True,
        )
        for name, times in worst.items()
    ]
    chart = rank_chart(bars[:_ROWS], title="own time of slow ranks, at its worst")
    said = (
        "Found while it ran: own time a step, without waiting for others (bar), against that of the "
        "median of the others (dot), and what that cost of a step."
    )
    headers = ["who", "what", "when", "step", "own time", "others", "cost"]
    shown = table(headers, rows[-_ROWS:], num_text=3)
    return paragraph(said) + (f"<figure>{chart}</figure>" if chart else "") + shown


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
