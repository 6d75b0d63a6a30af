"""How one parameter is cut over the ranks of the tensor axis, and how the pieces become it again.

A `Split` is a plain value: the planner makes it, `cut_layers` cuts weights by it, and whoever
compares or saves weights (verification, checkpoints) puts the pieces together with `gather_full`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """One parameter, cut along `dim` in pieces as `torch.chunk` makes them.

    With `order` the dim counts as `units` equal runs (heads, say) which are laid out anew before the
    cut: entry i of `order` is the unit that stands at place i, or -1 for one of zeros. That is how a
    rank gets whole heads of each part of a fused projection, and how heads are padded.
    """

    dim: int
    global_shape: tuple[int, ...]
    units: int = 0
    order: tuple[int, ...] | None = None

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape of all pieces together; other than `global_shape` where there is padding."""
        if self.order is None:
            return self.global_shape
        shape = list(self.global_shape)
        shape[self.dim] = shape[self.dim] // self.units * len(self.order)
        return tuple(shape)


def chunk_sizes(length: int, size: int) -> list[int]:
    """Lengths of the `size` pieces that `torch.chunk` (and DTensor) makes; the last may be 0."""
    step = -(-length // size)
    return [max(0, min(step, length - step * i)) for i in range(size)]


def cut_local(full: Tensor, split: Split, rank: int, size: int) -> Tensor:
    """This rank's piece of a full parameter, as a tensor of its own."""
    if tuple(full.shape) != split.global_shape:
        raise ValueError(f"a parameter of shape {split.global_shape} came as {tuple(full.shape)}")
    if split.order is not None:
        full = _arrange(full, split)
    lengths = chunk_sizes(full.shape[split.dim], size)
    piece = full.narrow(split.dim, sum(lengths[:rank]), lengths[rank])
    return piece.clone(memory_format=torch.contiguous_format)


def join_pieces(pieces: list[Tensor], split: Split) -> Tensor:
    """The full parameter from every rank's piece, in order of rank."""
    joined = torch.cat(pieces, split.dim)
    return joined if split.order is None else _restore(joined, split)


def gather_full(name: str, local: Tensor, split: Split, group: dist.ProcessGroup) -> Tensor:
    """The full parameter (or its gradient) on every rank; a collective over `group`."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    lengths = chunk_sizes(split.padded_shape[split.dim], size)
    if local.shape[split.dim] != lengths[rank]:
        raise ValueError(f"{name}: this rank's piece has shape {tuple(local.shape)}, not its share")
    # Pieces of one length, because backends differ in what they do with others.
    shape = list(local.shape)
    shape[split.dim] = lengths[0]
    padded = local.new_zeros(shape)
    padded.narrow(split.dim, 0, lengths[rank]).copy_(local.detach())
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded, group=group)
    parts = zip(gathered, lengths, strict=True)
    return join_pieces([g.narrow(split.dim, 0, n) for g, n in parts], split)


def _arrange(full: Tensor, split: Split) -> Tensor:
    units = full.unflatten(split.dim, (split.units, -1)).unbind(split.dim)
    assert split.order is not None
    laid = [torch.zeros_like(units[0]) if i < 0 else units[i] for i in split.order]
    return torch.stack(laid, split.dim).flatten(split.dim, split.dim + 1)


def _restore(joined: Tensor, split: Split) -> Tensor:
    assert split.order is not None
    units = joined.unflatten(split.dim, (len(split.order), -1)).unbind(split.dim)
    place = {unit: i for i, unit in enumerate(split.order) if unit >= 0}
    back = [units[place[i]] for i in range(split.units)]
    return torch.stack(back, split.dim).flatten(split.dim, split.dim + 1)
