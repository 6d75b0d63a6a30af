"""A search in words: its trials as a table, the best of them, and how to train it again.

Imports without torch; called by `cli_search.py`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from ridgeline.launch.lock import NAME as LOCK
from ridgeline.layout import Layout
from ridgeline.rundir import LAYOUT, RunDir
from ridgeline.search.run import RECIPE
from ridgeline.search.space import near_end, overrides_of, read_space, value_text
from ridgeline.search.trials import Journal, Request, Trial, lineage, winner

BEST = "best.yaml"
AGAIN = "again.sh"


def share_text(share: float) -> str:
    """
    >>> share_text(1 / 9), share_text(1.0)
    ('11.1 %', '100 %')
    """
    return f"{100 * share:.3g} %"


def state_text(journal: Journal, request: Request, trial: Trial) -> str:
    if trial.failed:
        return f"failed: {trial.failed}"
    if (journal.path(trial) / LOCK).exists():
        return "is being trained"
    if trial.share == 1.0:
        return "trained"
    if not trial.scores:
        return "begun"
    if request.schedule == "population":
        return "replaced" if any(t.share > trial.share for t in journal.trials) else "waits"
    is_over = len(journal.trials) >= request.trials and any(t.share == 1.0 for t in journal.trials)
    return "went no further" if is_over else "waits"


def ordered(trials: Sequence[Trial], higher: bool) -> list[Trial]:
    """The furthest first, and of those the best."""

    def rank(trial: Trial) -> tuple[bool, float, float, int]:
        score = trial.last_score
        value = 0.0 if score is None else (-score if higher else score)
        return (bool(trial.failed), -trial.share if trial.scores else 1.0, value, trial.number)

    return sorted(trials, key=rank)


def table_of(journal: Journal, request: Request) -> tuple[list[str], list[list[str]]]:
    """Headers and rows."""
    keys = [text.partition("=")[0] for text in request.space]
    headers = ["trial", *keys, request.metric, "of the run", "seconds", ""]
    rows = []
    for one in ordered(journal.trials, bool(journal.higher)):
        name = one.name if one.parent is None else f"{one.name} from {one.parent:03d}"
        score = "" if one.last_score is None else f"{one.last_score:.5g}"
        share = share_text(one.share) if one.scores else ""
        values = [value_text(one.settings[key]) for key in keys]
        rows.append(
            [name, *values, score, share, f"{one.seconds:.0f}", state_text(journal, request, one)]
        )
    return headers, rows


def show_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
    lines = [headers, ["-" * width for width in widths], *rows]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def way_of(trials: Sequence[Trial], trial: Trial) -> list[tuple[float, float]]:
    """The share of the run and the metric there, from where its parent handed over."""
    found = dict(trial.scores)
    if trial.parent is not None and trial.begins in trials[trial.parent].scores:
        found[trial.begins] = trials[trial.parent].scores[trial.begins]
    return [(share, score) for share, score in sorted(found.items()) if math.isfinite(score)]


def commands_of(journal: Journal, request: Request, trial: Trial) -> list[str]:
    """What trains it again from nothing, in the run directory `$run`: one command where its settings never
    changed, else one for each stretch of them."""
    found = []
    line = lineage(journal.trials, trial)
    layout = journal.path(trial) / LAYOUT
    # Under a scheduler -n counts those of a node; the run has written how many there were.
    ranks = request.ranks
    if layout.is_file():
        ranks = Layout.parse(layout.read_text().strip(), LAYOUT).world_size
    for one, after in zip(line, [*line[1:], None], strict=True):
        share = trial.share if after is None else after.begins
        words = [str(journal.folder.resolve() / RECIPE), *overrides_of(one.settings)]
        stop = [] if share == 1.0 else [f"train.stop_after={share!r}"]
        told = shlex.join(["ridgeline", "train", *words, *stop, "-n", str(ranks)])
        found.append(f'{told} --run "$run"')
    return found


def write_best(journal: Journal, request: Request) -> Trial | None:
    """The recipe of the best trial, and the commands that train it again."""
    from ridgeline.config import dump_config, load_config

    best = winner(journal.trials, bool(journal.higher))
    if best is None:
        return None
    config = load_config(journal.folder / RECIPE, overrides_of(best.settings)).config
    folder = RunDir(journal.folder)  # for its way of writing
    folder.write_text(BEST, dump_config(config))
    lines = [
        "#!/bin/sh",
        "# Train the best trial again: sh again.sh RUN_DIRECTORY",
        "set -e",
        'test -n "$1" || { echo "sh again.sh RUN_DIRECTORY" >&2; exit 2; }',
        'case "$1" in /*) run=$1;; *) run=$PWD/$1;; esac',
        f"cd {shlex.quote(request.workdir)}",
    ]
    text = "\n".join([*lines, *commands_of(journal, request, best)]) + "\n"
    folder.write_text(AGAIN, text)
    return best


def tell_best(journal: Journal, request: Request, best: Trial) -> list[str]:
    folder = journal.folder
    score, share = best.last_score, share_text(best.share)
    line = lineage(journal.trials, best)
    lines = [
        f"best: trial {best.name}, {request.metric} {score:.5g} after {share} of the run, with "
        f"{' '.join(overrides_of(best.settings))}"
    ]
    if len(line) > 1:
        steps = [f"{one.name} from {share_text(one.begins)}" for one in line[1:]]
        lines.append(f"its settings changed on the way: {line[0].name}, {', '.join(steps)}")
    space = read_space(request.space)
    ends = [one.text() for one in space if near_end(one, best.settings[one.key])]
    if ends:
        lines.append(f"it lies near an end of {', '.join(ends)}: better ones may be beyond it")
    lines.append(
        f"settings: {_shown(folder / BEST)}; trains it again: sh {_shown(folder / AGAIN)} RUN"
    )
    return lines


def _shown(path: Path) -> str:
    return shlex.quote(str(path))
