"""`machine.json`: what has been measured on a machine, each kind under a key of its own.

A measurement adds to the file and leaves what others have put there. It is written aside and renamed, so
that a reader never sees half of it. Called by `cli_machine.py`; imports without torch.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ridgeline.errors import UsageError
from ridgeline.facts import StorageFacts
from ridgeline.machine.links import NETWORK, NetworkFacts, network_from_dict
from ridgeline.machine.roofline import COMPUTE, ComputeFacts, compute_from_dict

STORAGE = "storage"


def read_machine(path: Path, of: str = "--out") -> dict[str, Any]:
    """What the file holds, nothing where there is none; a `UsageError` where it is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(
            f"cannot read {path} of {of} ({error.strerror}); name another file"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"{path} of {of} holds no JSON ({error}); name another file, or remove it"
        ) from error
    lists = (STORAGE, COMPUTE, NETWORK)
    if not isinstance(found, dict) or any(not isinstance(found.get(k, []), list) for k in lists):
        raise UsageError(
            f"{path} of {of} holds JSON of another kind than a machine.json; name another file"
        )
    return found


def check_writable(path: Path) -> None:
    """Raise before a minute is spent on measuring what could not be kept."""
    if path.is_dir():
        raise UsageError(f"{path} of --out is a directory; name a file, as {path / 'machine.json'}")
    read_machine(path)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{path} of --out is in {folder}, which does not exist; make it first")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{folder} of --out may not be written to by you; name another file")


def add_storage(path: Path, measured: Iterable[StorageFacts]) -> None:
    """Put the facts under `storage`, in the place of older ones of the same directory and host."""
    rows = [facts.to_dict() for facts in measured]
    whole = read_machine(path)
    fresh = {_place(row) for row in rows}
    kept = [row for row in whole.get(STORAGE, []) if _place(row) not in fresh]
    _write_json(path, {**whole, STORAGE: [*kept, *rows]})


def add_compute(path: Path, facts: ComputeFacts) -> None:
    """Put the facts under `compute`, in the place of older ones of the same device and host."""
    row = facts.to_dict()
    whole = read_machine(path)
    kept = [old for old in whole.get(COMPUTE, []) if _device(old) != _device(row)]
    _write_json(path, {**whole, COMPUTE: [*kept, row]})


def read_compute(path: Path, host: str, device_kind: str, device_name: str) -> ComputeFacts | None:
    """What was measured of this kind of device, on this host where there is a choice."""
    rows = [
        row
        for row in read_machine(path).get(COMPUTE, [])
        if isinstance(row, dict)
        and (row.get("device_kind"), row.get("device_name")) == (device_kind, device_name)
    ]
    if not rows:
        return None
    return compute_from_dict(([row for row in rows if row.get("host") == host] or rows)[-1])


def add_network(path: Path, facts: NetworkFacts) -> None:
    """Put the facts under `network`, in the place of older ones of the same ranks on the same hosts."""
    row = json.loads(json.dumps(facts.to_dict()))
    whole = read_machine(path)
    kept = [old for old in whole.get(NETWORK, []) if _ranks(old) != _ranks(row)]
    _write_json(path, {**whole, NETWORK: [*kept, row]})


def read_network(path: Path) -> list[NetworkFacts]:
    """All that was measured between ranks, oldest first."""
    rows = read_machine(path).get(NETWORK, [])
    return [network_from_dict(row) for row in rows if isinstance(row, dict)]


def _ranks(row: Any) -> tuple[Any, ...]:
    if not isinstance(row, dict):
        return ()
    keys = ("hosts", "ranks_per_node", "backend", "device_name")
    return tuple(str(row.get(key)) for key in keys)


def _device(row: Any) -> tuple[Any, ...]:
    if not isinstance(row, dict):
        return ()
    return tuple(row.get(key) for key in ("host", "device_kind", "device_name", "num_threads"))


def _place(row: Any) -> tuple[Any, Any]:
    """A path means another disk on another node."""
    return (row.get("host"), row.get("path")) if isinstance(row, dict) else (None, None)


def _write_json(path: Path, value: Any) -> None:
    target = path.resolve()
    descriptor, aside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        # A temporary file is its owner's alone; the one it replaces was not.
        os.chmod(aside, target.stat().st_mode & 0o777 if target.exists() else 0o644)
        os.replace(aside, target)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
