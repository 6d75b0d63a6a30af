"""What replicas do with what they all have: share it out, reduce its gradients, or average it now and then.

The last two entries of the order in `apply.py`, on modules that everything else was applied to. Which
torch or hand-written piece does which stage stands here; the pieces are in files of their own.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ridgeline.parallel.arranged import Arranged
from ridgeline.parallel.ddp import apply_ddp
from ridgeline.parallel.precision import AUTOCAST


def apply_sharding(built: Arranged) -> None:
    """Stages 1 to 3 of ZeRO, and the optimizer on the host."""
    layout, mesh = built.layout, built.mesh
    if layout.zero == 3 and mesh.axis_size("shard") > 1:
        from ridgeline.parallel.fsdp import apply_fsdp

        copies = "copies+cp+rows+columns"
        alone = mesh.axis_size(*copies.split("+")) == 1
        device_mesh = mesh.device_mesh("shard") if alone else mesh.device_mesh(copies, "shard")
        for module in built.parts:
            mine = _experts_in(built, module)
            if mine:  # first: with the types that the rest is gathered in
                _flatten_experts(built, module, mine, AUTOCAST.get(layout.precision))
            apply_fsdp(
                module,
                built.blocks_of(module).values(),
                device_mesh,
                AUTOCAST.get(layout.precision),
                reshard=layout.pp == 1,
                offload_params=layout.offload == "params",
                wide_outputs=built.staged is None,
                spared=mine,
            )
        built.is_fully_sharded = True
        return
    stage = min(layout.zero, 2) if mesh.axis_size("shard") > 1 else 0
    if not stage and layout.offload != "optimizer":
        return
    dtype = AUTOCAST.get(layout.precision) if stage else None
    copies = mesh.group("copies", "cp", "rows", "columns")
    for module in built.parts:
        held = built.tied_in(module)
        if stage == 2 and held:
            # Their gradients are summed with another stage's before they are reduced.
            built.notes.append(
                f"{', '.join(sorted(held))} is in two stages of the pipeline, so the stage keeps whole "
                "gradients, as zero=1 does"
            )
        _flatten(built, module, 1 if held else stage or 1, mesh.group("shard"), copies, dtype)


def _flatten(
    built: Arranged,
    module: nn.Module,
    stage: int,
    shard: ProcessGroup | None,
    copies: ProcessGroup | None,
    dtype: torch.dtype | None,
) -> None:
    """A part's weights in flat memory; experts, which other ranks have copies of, in their own."""
    from ridgeline.parallel.zero import FlatZero

    mine = _experts_in(built, module)
    built.flats.append(
        FlatZero(
            module,
            stage,
            shard,
            copies,
            dtype,
            built.ddp.bucket_mb,
            offload_optimizer=built.layout.offload == "optimizer",
            spared=built.spared_in(module) | mine,
        )
    )
    if mine:
        _flatten_experts(built, module, mine, dtype)


def _experts_in(built: Arranged, module: nn.Module) -> frozenset[str]:
    spread = built.experts.names if built.experts is not None else frozenset()
    return frozenset(name for name, _ in module.named_parameters() if name in spread)


def _flatten_experts(
    built: Arranged, module: nn.Module, mine: frozenset[str], dtype: torch.dtype | None
) -> None:
    """Ranks with the same experts share out the optimizer's work on them, and no more in any stage: they
    are reduced when backward is over, since ranks whose experts had no tokens would send theirs at another
    time during it."""
    from ridgeline.parallel.zero import FlatZero

    assert built.experts is not None
    groups = built.experts.groups
    built.flats.append(
        FlatZero(
            module,
            1,
            groups.shard,
            groups.copies,
            dtype,
            built.ddp.bucket_mb,
            offload_optimizer=built.layout.offload in ("optimizer", "params"),
            spared=frozenset(n for n, _ in module.named_parameters() if n not in mine),
            # Tokens have brought the gradients of a whole block of ranks together.
            summed=groups.size,
        )
    )


def apply_replication(built: Arranged) -> None:
    """What keeps replicas the same where they do not share out anything, or what they do now and then."""
    layout, group = built.layout, built.mesh.gradient_group
    if layout.sync != "every" and built.mesh.data_group is not None:
        from ridgeline.parallel.localsync import LocalSync

        every = int(layout.sync.partition(":")[2])
        built.local_sync = [LocalSync(m, built.mesh.data_group, every) for m in built.parts]
        group = built.mesh.group("cp", "rows", "columns")
    if group is None or built.is_fully_sharded or built.flats:
        return
    if layout.pp > 1 or built.local_sync or built.experts is not None:
        # Gradients come a stage and a microbatch at a time, or are of other ranks' samples too: add them
        # up, reduce them once at the end.
        for module in built.parts:
            _flatten(built, module, 1, None, group, None)
        return
    built.objective = apply_ddp(
        built.objective, built.mesh, built.share, built.ddp.bucket_mb, built.ddp.find_unused
    )
    if layout.compress != "none":
        from ridgeline.parallel.compress import apply_compression

        built.compression = apply_compression(built.objective, layout.compress, group)
