"""The data of a run, brought to the disk of each node before the source is built.

Takes `data.args.path`, one or several, and gives back the same arguments with paths on this node. All
ranks wait for each other afterwards, so that a node that was done long before does not take the others
for dead. Called by `setup.py`; released by `run.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ridgeline.config import DataConfig
from ridgeline.data.stage.meet import NodePlace
from ridgeline.data.stage.run import LIMIT_S, Staged, stage
from ridgeline.data.stage.where import human_bytes
from ridgeline.errors import UsageError
from ridgeline.parallel.mesh import Mesh, NodeGroups

_LONGEST = timedelta(hours=24)
"""That a node may wait for another to be done; what makes no progress ends sooner."""


@dataclass
class Staging:
    """Copies that this rank uses, and what there is to say of them."""

    copies: list[Staged] = field(default_factory=list)
    args: dict[str, Any] = field(default_factory=dict)
    """`data.args` with paths on this node."""
    notes: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def release(self) -> None:
        """Copies that nobody else on this node uses go."""
        while self.copies:
            self.copies.pop().release()


def stage_data(data: DataConfig, mesh: Mesh) -> Staging:
    """Every rank calls this."""
    given = data.args.get("path")
    paths = given if isinstance(given, list | tuple) else [given]
    if not paths or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise UsageError(
            f"data.stage={data.stage} copies what data.args.path names, and path={given!r} is no "
            f"file or folder; give source {data.source!r} a path, or leave data.stage out"
        )
    groups = mesh.node_groups("stage", _LONGEST) if mesh.env.world_size > 1 else None
    place = _place(mesh, groups)
    staging = Staging()
    try:
        for path in paths:
            staging.copies.append(
                stage(
                    Path(path),
                    data.stage,
                    place=place,
                    share=data.stage_share,
                    group=groups.leaders if groups is not None else None,
                    limit_s=LIMIT_S,
                )
            )
            _tell(staging, staging.copies[-1], groups)
    except BaseException:
        staging.release()
        raise
    local = [str(staged.path) for staged in staging.copies]
    staging.args = {**data.args, "path": local if isinstance(given, list | tuple) else local[0]}
    return staging


def _place(mesh: Mesh, groups: NodeGroups | None) -> NodePlace:
    env = mesh.env
    return NodePlace(
        node=groups.node if groups is not None else 0,
        num_nodes=groups.num_nodes if groups is not None else 1,
        local_rank=env.local_rank,
        local_world_size=env.local_world_size,
        job=f"{env.master_addr}:{env.master_port}:{env.attempt}",
    )


def _tell(staging: Staging, staged: Staged, groups: NodeGroups | None) -> None:
    """Wait for the other ranks; what they did, as a line and an event."""
    mine = (groups.node if groups else 0, staged.is_local, staged.read_bytes, staged.reason)
    said: list[Any] = [mine]
    if groups is not None:
        said = [None] * dist.get_world_size(groups.world)
        dist.all_gather_object(said, mine, group=groups.world)
    read = sum(read_bytes for _, _, read_bytes, _ in said)
    without = {node: reason for node, is_local, _, reason in said if not is_local}
    staging.notes.append(staged.describe())
    if staged.is_local and read:
        staging.notes[-1] += f" ({human_bytes(read)} read from {staged.source} by all ranks)"
    elsewhere = {node: reason for node, reason in without.items() if staged.is_local}
    staging.notes += [f"node {n} reads {staged.source}: {why}" for n, why in elsewhere.items()]
    staging.events.append(
        {
            "source": str(staged.source),
            "path": str(staged.path),
            "bytes": staged.total_bytes,
            "read_bytes": read,
            "seconds": round(staged.seconds, 3),
            "reason": staged.reason,
            "not_staged": {str(node): reason for node, reason in without.items()},
        }
    )
