"""`ridgeline data stage`: bring a data set to this node before a run, list what is here, clean up.

A copy made by hand is kept until it is cleaned, since the process that made it ends at once. Needs no
torch. Called by the command line.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from ridgeline.data.stage.held import Held, base_folder, copies, remove_leftovers
from ridgeline.data.stage.meet import NodePlace
from ridgeline.data.stage.run import Staged, stage
from ridgeline.data.stage.where import AUTO, candidates, human_bytes, read_mounts, user_name
from ridgeline.errors import RunError, UsageError


def stage_command(
    source: Path, to: str = AUTO, keep: bool = True, as_json: bool = False, verify: bool = False
) -> None:
    """Stage on this node and say where; without `keep` the copy stays only until room is needed."""
    staged = _stage_with_bar(source, to, keep, show=not as_json and sys.stderr.isatty())
    problems = staged.verify() if verify else []
    read = f"; {human_bytes(staged.total_bytes)} read again, as it was copied"
    if as_json:
        print(json.dumps({**_facts(staged), "problems": problems}, indent=2))
    else:
        print(staged.describe() + (read if verify and staged.is_local and not problems else ""))
        if staged.reason:
            print(f"chosen: {staged.reason}")
    if problems:
        raise RunError(f"the copy is damaged: {problems[0]}")


def list_command(where: str = AUTO, as_json: bool = False) -> None:
    """What is staged on this node."""
    rows = [_row(held) for base in _bases(where) for held in copies(base)]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        kept = ", kept" if row["keep"] else ""
        state = f"{row['num_users']} users{kept}" if row["whole"] else "not whole"
        print(f"{human_bytes(row['bytes']):>8}  {state:<16}  {row['source']} -> {row['path']}")
    if not rows:
        print("nothing is staged on this node")


def clean_command(where: str = AUTO, everything: bool = False, as_json: bool = False) -> None:
    """Remove copies that no process uses; those to be kept only with `everything`."""
    removed = []
    for base in _bases(where):
        rows = {held.key: _row(held) for held in copies(base)}
        removed += [rows[key] for key in remove_leftovers(base, kept=everything)]
    if as_json:
        print(json.dumps(removed, indent=2))
        return
    size = human_bytes(sum(row["bytes"] for row in removed))
    copies_word = "copy" if len(removed) == 1 else "copies"
    print(f"removed {len(removed)} {copies_word}, {size}")


def _stage_with_bar(source: Path, to: str, keep: bool, show: bool) -> Staged:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(f"staging {source.name}", total=None)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return stage(source, to, place=NodePlace(), keep=keep, required=True, progress=tell)


def _facts(staged: Staged) -> dict[str, Any]:
    return {
        "source": str(staged.source),
        "path": str(staged.path),
        "bytes": staged.total_bytes,
        "copied_bytes": staged.copied_bytes,
        "read_bytes": staged.read_bytes,
        "seconds": round(staged.seconds, 3),
        "reason": staged.reason,
    }


def _bases(where: str) -> list[Path]:
    """Folders of this user's copies: below the one named, or below every one that `auto` looks at."""
    if where != AUTO:
        if not Path(where).is_dir():
            raise UsageError(f"{where} is not a folder")
        return [base_folder(Path(where))]
    found = []
    for _, path in candidates(read_mounts()):
        found += [base_folder(path), base_folder(path / user_name())]
    return [base for base in dict.fromkeys(found) if base.is_dir()]


def _row(held: Held) -> dict[str, Any]:
    """A copy that somebody is removing, or has not begun, has little to say."""
    record = held.record() or {}
    try:
        source = record.get("source") or held.listing().root
    except (OSError, ValueError):
        source = "?"
    return {
        "key": held.key,
        "source": source,
        "path": record.get("path", str(held.folder)),
        "bytes": record.get("num_bytes", held.disk_bytes()),
        "whole": bool(record),
        "age_s": round(time.time() - record["time"]) if record else None,
        "num_users": len(held.users()),
        "keep": held.is_kept(),
    }
