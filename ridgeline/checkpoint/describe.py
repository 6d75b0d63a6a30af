"""What `ridgeline checkpoint ls` and `show` say, as plain values that are also their JSON. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ridgeline.checkpoint.manifest import (
    AVERAGE,
    MODEL,
    OPTIMIZER,
    RANK,
    REPLICA,
    Damaged,
    Manifest,
    check_sizes,
    read_manifest,
)
from ridgeline.checkpoint.retain import Keep, find_best
from ridgeline.errors import UsageError

KINDS = {
    MODEL: "weights",
    AVERAGE: "averaged weights",
    OPTIMIZER: "optimizer",
    REPLICA: "other replicas",
    RANK: "per rank",
}


def tell_weights(path: Path, manifest: Manifest, live: bool) -> str:
    """Which weights an export of the checkpoint at `path` is of, in the words of its last line: where there
    are two kinds of them it says which; `live` asks for those beside an average."""
    if manifest.has_average:
        which = "the weights themselves, not their" if live else "the"
        return f"{which} moving average (optim.ema), of {path}"
    if live:
        raise UsageError(
            f"--live is for checkpoints with a moving average of the weights (optim.ema), and {path} has "
            "none; leave it out, and it is the weights themselves"
        )
    return f"of {path}"


def list_rows(paths: list[Path]) -> list[dict[str, Any]]:
    """One row a checkpoint; of a damaged one as much as can be said."""
    rows: list[dict[str, Any]] = []
    best: Path | None = None
    for path in paths:
        row: dict[str, Any] = {"path": str(path), "name": path.name, "problems": []}
        try:
            manifest = read_manifest(path)
        except Damaged as error:
            rows.append({**row, "problems": [str(error)]})
            continue
        row |= {
            "step": manifest.step,
            "time": manifest.time,
            "num_bytes": manifest.num_bytes,
            "layout": manifest.layout,
            "num_ranks": manifest.num_ranks,
            "metrics": manifest.metrics,
            "problems": list(check_sizes(path, manifest)),
        }
        rows.append(row)
        policy = manifest.state.get("best")
        if policy and path == paths[-1]:
            best = find_best(paths, Keep(best=policy["metric"], higher_is_better=policy["higher"]))
    for path, row in zip(paths, rows, strict=True):
        row["is_newest"], row["is_best"] = path == paths[-1], path == best
    return rows


def describe(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Everything about one checkpoint but its values."""
    return {
        "path": str(path),
        "step": manifest.step,
        "epoch": manifest.state.get("epoch"),
        "batch": manifest.state.get("batch"),
        "time": manifest.time,
        "num_bytes": manifest.num_bytes,
        "layout": manifest.layout,
        "num_ranks": manifest.num_ranks,
        "num_files": len(manifest.files),
        "metrics": manifest.metrics,
        "state": manifest.state,
        "versions": manifest.versions,
        "config": yaml.safe_load(manifest.config) or {},
        "totals": _totals(manifest),
        "problems": list(check_sizes(path, manifest)),
    }


def _totals(manifest: Manifest) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = {}
    for name, stored in manifest.tensors.items():
        kind = next(word for start, word in KINDS.items() if name.startswith(start))
        total = totals.setdefault(kind, {"tensors": 0, "boxes": 0, "bytes": 0})
        total["tensors"] += 1
        total["boxes"] += len(stored.chunks)
        total["bytes"] += stored.num_bytes
    return totals


def tensor_rows(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "boxes": len(stored.chunks),
            "bytes": stored.num_bytes,
        }
        for name, stored in manifest.tensors.items()
    ]


SHORT = (
    "name", "model.name", "model.args", "model.dtype", "data.source", "train.batch", "train.seed",
    "train.lr", "optim.name",
)  # fmt: skip
"""The settings that tell one run from another at a glance."""


def short_config(config: dict[str, Any]) -> str:
    """The most telling settings as the overrides that would set them."""
    parts = []
    for key in SHORT:
        value: Any = config
        for word in key.split("."):
            value = value.get(word) if isinstance(value, dict) else None
        if value not in (None, {}, ""):
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
            parts.append(f"{key}={text.removesuffix('...').strip()}")
    return "\n  ".join(parts)
