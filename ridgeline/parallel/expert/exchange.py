"""Rows on their way between ranks, forward and back, with gradients that take the same way back.

All ranks of a group run the same layers in the same order, so one exchange meets its counterparts. Three
things would let a rank miss one, and each is taken care of here: tensors that travel together are one node
of the graph (two could be reached in another order on another rank); a node has an anchor, a number whose
gradient is nothing, so that it has a backward and is reached by the node after it where no row was sent, or
where those of this rank need no gradient; and a node keeps a tensor, since recomputation of a block ends
with the last tensor that is missing. Called by `stacked.py` and `listed.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Counts:
    """Rows that go to each rank of a group, and that come from each."""

    sent: list[int]
    received: list[int]

    def back(self) -> Counts:
        return Counts(self.received, self.sent)


def move(rows: Tensor, counts: Counts, group: dist.ProcessGroup | None) -> Tensor:
    """Rows in the order of their ranks; without a group they stay where they are."""
    if group is None:
        return rows
    received = rows.new_empty(sum(counts.received), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), counts.received, counts.sent, group=group)
    return received


class _Exchange(torch.autograd.Function):
    """Tensors of rows to where `counts`, one for each, says; the anchor goes along."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup | None, counts: Sequence[Counts], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        *rows, anchor = tensors
        ctx.group, ctx.counts = group, counts
        moved = [move(x, count, group) for x, count in zip(rows, counts, strict=True)]
        ctx.save_for_backward(anchor)
        # A tensor that stays is another one for the graph.
        moved = [m.view_as(m) if m is x else m for m, x in zip(moved, rows, strict=True)]
        return *moved, anchor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (anchor,) = ctx.saved_tensors
        *rows, _ = gradients
        moved = [
            move(g, count.back(), ctx.group) for g, count in zip(rows, ctx.counts, strict=True)
        ]
        return None, None, *moved, torch.zeros_like(anchor)


def exchange(
    rows: Sequence[Tensor],
    counts: Sequence[Counts],
    group: dist.ProcessGroup | None,
    anchor: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """The rows that came, and the anchor for what comes after."""
    if anchor is None:
        anchor = rows[0].new_zeros((), dtype=torch.float32)
        anchor.requires_grad_(torch.is_grad_enabled())
    *moved, anchor = _Exchange.apply(group, counts, *rows, anchor)  # type: ignore[no-untyped-call]
    return moved, anchor


class _Tie(torch.autograd.Function):
    """A tensor as it is, which depends on an anchor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_zeros((), dtype=torch.float32)


def tie(x: Tensor, anchor: Tensor) -> Tensor:
    """`x`, whose backward goes through the exchange that the anchor is of, whatever became of the rows."""
    tied: Tensor = _Tie.apply(x, anchor)  # type: ignore[no-untyped-call]
    return tied


def send_counts(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Integers for each rank (the first dim) in exchange for its own."""
    if group is None:
        return numbers
    received = torch.empty_like(numbers)
    dist.all_to_all_single(received, numbers.contiguous(), group=group)
    return received
