"""`apply_spatial`: let a model that was written for whole images work on tiles of them.

Only the instance's `forward` is replaced: it cuts what comes in, and the model's own code then runs on
`TileTensor`s. Called by `parallel/apply.py`, before anything else is put on the model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ridgeline.errors import UsageError
from ridgeline.parallel.batchnorm import SyncBatchNorm
from ridgeline.parallel.spatial.grid import COLUMNS, ROWS, TileGrid, require_fits
from ridgeline.parallel.spatial.tensor import TileTensor, gather, like, tile


def apply_spatial(model: nn.Module, grid: TileGrid, gather_outputs: bool = False) -> nn.Module:
    """`model` itself, whose `forward` takes whole images and works on this rank's tile of them.

    Every rank of the grid calls it with the same whole batch. What comes out is the same on every
    rank: plain tensors such as a loss or logits, and `TileTensor`s for images, or the whole images
    with `gather_outputs`. Average parameter gradients over the grid as over data-parallel ranks.
    """
    for path, module in model.named_modules():
        # A module inside another that was applied already has its norms done.
        if isinstance(module, SyncBatchNorm) and not _is_done(module):
            _require_whole_grid(module, path, grid)
            module.forward = functools.partial(_on_local, module, module.forward, grid)
    tiled = functools.partial(_forward, model.forward, grid, gather_outputs)
    model.forward = tiled  # type: ignore[method-assign]
    return model


def _forward(
    original: Callable[..., Any], grid: TileGrid, gather_outputs: bool, *args: Any, **kwargs: Any
) -> Any:
    args, kwargs = tile_inputs((args, kwargs), grid)
    outputs = original(*args, **kwargs)
    if gather_outputs:
        outputs = tree_map(lambda v: gather(v) if isinstance(v, Tensor) else v, outputs)
    return outputs


def tile_inputs(inputs: Any, grid: TileGrid) -> Any:
    """Cut every image (floating, four dims or more) and all that has the same pixels (its targets)."""
    leaves = [v for v in tree_leaves(inputs) if isinstance(v, Tensor)]
    image = next((v for v in leaves if _is_image(v)), None)
    if image is None or any(isinstance(v, TileTensor) for v in leaves):
        return inputs
    require_fits(grid, image.shape[2], image.shape[3])
    pixels = tuple(image.shape[2:])

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < len(pixels):
            return value
        if tuple(value.shape[value.dim() - len(pixels) :]) == pixels:
            first = value.dim() - len(pixels)
        elif _is_image(value):
            first = 2
        else:
            return value
        axes: list[int | None] = [None] * value.dim()
        axes[first] = ROWS if grid.row_size > 1 else None
        axes[first + 1] = COLUMNS if grid.column_size > 1 else None
        cut = tile(value, axes, grid)
        return _compact(cut, value) if isinstance(cut, TileTensor) else cut

    return tree_map(place, inputs)


def _compact(cut: TileTensor, whole: Tensor) -> Tensor:
    """The tile in memory of its own, so that the image can go, in the format the image had."""
    for dims, last in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        is_last = whole.dim() == dims and whole.is_contiguous(memory_format=last)
        if is_last and not whole.is_contiguous():
            return like(cut.local.contiguous(memory_format=last), cut)
    return like(cut.local.contiguous(), cut)


def _is_image(value: Tensor) -> bool:
    return bool(value.is_floating_point()) and value.dim() >= 4


def _is_done(norm: SyncBatchNorm) -> bool:
    return getattr(norm.forward, "func", None) is _on_local


def _on_local(
    norm: SyncBatchNorm, original: Callable[[Tensor], Tensor], grid: TileGrid, input: Tensor
) -> Tensor:
    """A norm that merges the statistics of all tiles by itself, and counts what each rank has."""
    split = input.split_dims if isinstance(input, TileTensor) else []
    axes = {input.axes[dim] for dim in split} if isinstance(input, TileTensor) else set()
    # What is not in pieces is there several times, which only the unbiased variance notices.
    copies = math.prod(grid.size(axis) for axis in (ROWS, COLUMNS) if axis not in axes)

    def update(mean: Tensor, var: Tensor, total: Tensor) -> None:
        SyncBatchNorm._update_running(norm, mean, var, total / copies)

    norm._update_running = update  # type: ignore[method-assign]
    if isinstance(input, TileTensor):
        return like(original(input.local), input)
    return original(input)


def _require_whole_grid(norm: SyncBatchNorm, path: str, grid: TileGrid) -> None:
    members = set(dist.get_process_group_ranks(norm.group))
    for group in (grid.rows, grid.columns):
        if group is not None and not members.issuperset(dist.get_process_group_ranks(group)):
            raise UsageError(
                f"{path} takes batch statistics over ranks {sorted(members)}, which leaves out some "
                "that hold tiles of the same images; give apply_sync_batch_norm the group of all "
                "data and spatial ranks"
            )
