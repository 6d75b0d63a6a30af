"""What a job has to say: the failure on top, then what was printed, rank by rank where asked.

Reads a job's folder and nothing else, so that it works from any node that sees the folder, also when the
scheduler has forgotten the job. Called by `ridgeline launch logs`.
"""

from __future__ import annotations

import re
from pathlib import Path

from ridgeline.errors import RunError, UsageError
from ridgeline.launch.job import LOGS

FAILED = "failed.txt"
"""Below `logs/`: why the last attempt failed, as one text."""
_RANK = re.compile(r"rank-?(\d+)\.")


def note_failure(folder: Path, error: RunError | UsageError) -> None:
    """Leave the failure where `ridgeline launch logs` finds it first."""
    traces = sorted((folder / LOGS).glob("traceback-*.txt"))
    text = str(error)
    named = [path for path in traces if path.name in text]
    for path in named:
        text += "\n" + path.read_text(encoding="utf-8", errors="replace").rstrip()
    (folder / LOGS).mkdir(parents=True, exist_ok=True)
    (folder / LOGS / FAILED).write_text(text + "\n", encoding="utf-8")


def clear_failure(folder: Path) -> None:
    (folder / LOGS / FAILED).unlink(missing_ok=True)


def show_logs(folder: Path, rank: int | None, lines: int) -> str:
    """The text of `ridgeline launch logs`."""
    logs = folder / LOGS
    parts = []
    if (logs / FAILED).is_file():
        parts.append("failed: " + tail_of(logs / FAILED, lines))
    for index, path in failures_of_array(folder):
        parts.append(f"failed, array index {index}: {tail_of(path, lines)}")
    if rank is not None:
        found = [path for path in files_of_ranks(logs) if rank_of(path) == rank]
        if rank == 0 and not found:
            found = sorted(folder.glob("job*.out"))
        if not found:
            known = sorted({rank_of(path) for path in files_of_ranks(logs)})
            shown = ", ".join(map(str, known)) or "none yet"
            raise UsageError(
                f"rank {rank} has written nothing to {logs} (ranks with logs: {shown})"
            )
        parts += [f"--- {path.name}\n{tail_of(path, lines)}" for path in found]
        return "\n".join(parts)
    for path in sorted(folder.glob("job*.out")):
        parts.append(f"--- {path.name}\n{tail_of(path, lines)}")
    others = [path.name for path in files_of_ranks(logs)]
    if others:
        parts.append(
            f"--- a file a rank in {logs}: {', '.join(others[:8])}{' ...' if len(others) > 8 else ''}"
        )
    return "\n".join(parts) or f"nothing was written to {folder} yet"


def failures_of_array(folder: Path) -> list[tuple[int, Path]]:
    """The jobs of an array have folders of their own, named by their indices."""
    found = [path for path in folder.glob(f"*/{LOGS}/{FAILED}") if path.parts[-3].isdigit()]
    return sorted((int(path.parts[-3]), path) for path in found)


def files_of_ranks(logs: Path) -> list[Path]:
    """What single ranks wrote, by rank."""
    found = [path for path in logs.glob("rank*") if path.is_file() and _RANK.match(path.name)]
    return sorted(found, key=lambda path: (rank_of(path), path.name))


def rank_of(path: Path) -> int:
    match = _RANK.match(path.name)
    return int(match.group(1)) if match else -1


def tail_of(path: Path, lines: int) -> str:
    """The last lines, without reading the rest of a file that may be large."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - lines * 1000))
        text = file.read().decode("utf-8", "replace")
    return "\n".join(text.splitlines()[-lines:])
