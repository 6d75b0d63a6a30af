"""Communication between tiles, each with its exact adjoint as backward.

Every rank computes the same loss, and the objective is the sum of those copies: the adjoint of a sum
over ranks is a sum over ranks, that of fetching a neighbour's rows is giving their gradient back. So
averaging parameter gradients over the ranks of the grid afterwards gives the gradient of one device,
with no special case for any layer. `fetch` is split in two, so that work can go on between; each half
is a node of its own in autograd, hence backward overlaps as well. Called by the files of operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.parallel.spatial.grid import Span, overlap


@dataclass(frozen=True)
class Route:
    """Along `dim`, each rank of `group` holds `held[rank]` and wants `needed[rank]`."""

    dim: int
    rank: int
    held: tuple[Span, ...]
    needed: tuple[Span, ...]
    group: dist.ProcessGroup

    @property
    def mine(self) -> Span:
        """What this rank needs of what it has."""
        return overlap(self.held[self.rank], self.needed[self.rank])

    def sends(self) -> list[tuple[int, Span]]:
        own = self.held[self.rank]
        spans = [(peer, overlap(own, span)) for peer, span in enumerate(self.needed)]
        return [(p, s) for p, s in spans if p != self.rank and s[0] < s[1]]

    def receives(self) -> list[tuple[int, Span]]:
        want = self.needed[self.rank]
        spans = [(peer, overlap(span, want)) for peer, span in enumerate(self.held)]
        return [(p, s) for p, s in spans if p != self.rank and s[0] < s[1]]

    @property
    def is_silent(self) -> bool:
        """Whether this rank neither sends nor receives."""
        return not self.sends() and not self.receives()


@dataclass
class _Pending:
    """Messages under way. Works and buffers are kept until they are waited for."""

    works: list[Any] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    received: list[Tensor] = field(default_factory=list)

    def begin(
        self,
        group: dist.ProcessGroup,
        out: list[tuple[int, Tensor]],
        into: list[tuple[int, Tensor]],
    ) -> None:
        ops = [_message(dist.isend, tensor, peer, group) for peer, tensor in out]
        ops += [_message(dist.irecv, tensor, peer, group) for peer, tensor in into]
        self.kept = [tensor for _, tensor in out]
        self.received = [tensor for _, tensor in into]
        self.works = dist.batch_isend_irecv(ops) if ops else []

    def end(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        received = self.received
        self.works, self.kept, self.received = [], [], []
        return received


def _message(op: Any, tensor: Tensor, peer: int, group: dist.ProcessGroup) -> dist.P2POp:
    return dist.P2POp(op, tensor, dist.get_global_rank(group, peer), group)


class _Start(torch.autograd.Function):
    """Sends what others need of `parts`, which lie side by side along `beside`, and posts receives.

    Gives a token (so that it is in the graph of a rank that only sends) and the buffers, unfilled.
    The wire has plain contiguous slices: tiles of one row could not agree on a memory format.
    """

    @staticmethod
    def forward(
        ctx: Any, route: Route, pending: _Pending, back: _Pending, beside: int, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.route, ctx.back, ctx.beside = route, back, beside
        ctx.likes = [(part.shape, _format_of(part)) for part in parts]
        origin = route.held[route.rank][0]
        out = []
        for peer, (low, high) in route.sends():
            pieces = [part.narrow(route.dim, low - origin, high - low) for part in parts]
            out.append((peer, _join(pieces, beside).contiguous()))
        shape = _message_shape(parts, beside)
        into = []
        for peer, (low, high) in route.receives():
            shape[route.dim] = high - low
            into.append((peer, parts[0].new_empty(shape)))
        pending.begin(route.group, out, into)
        return (parts[0].new_empty(0), *pending.received)

    @staticmethod
    def backward(ctx: Any, token: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        route, received = ctx.route, ctx.back.end()
        grads = [
            torch.zeros(shape, dtype=token.dtype, device=token.device).contiguous(
                memory_format=memory_format
            )
            for shape, memory_format in ctx.likes
        ]
        origin = route.held[route.rank][0]
        extents = [grad.shape[ctx.beside] for grad in grads]
        for (_, (low, high)), piece in zip(route.sends(), received, strict=True):
            parts = [piece] if len(grads) == 1 else piece.split(extents, ctx.beside)
            for grad, part in zip(grads, parts, strict=True):
                grad.narrow(route.dim, low - origin, high - low).add_(part)
        return None, None, None, None, *grads


class _Finish(torch.autograd.Function):
    """Waits for what `_Start` began. The parts pass through, so backward is reached everywhere."""

    @staticmethod
    def forward(
        ctx: Any,
        route: Route,
        pending: _Pending,
        back: _Pending,
        beside: int,
        num_parts: int,
        token: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.route, ctx.back, ctx.num_parts = route, back, num_parts
        ctx.shape = _message_shape(tensors[:num_parts], beside)
        pending.end()
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        route, shape = ctx.route, ctx.shape
        parts, buffers = grads[: ctx.num_parts], grads[ctx.num_parts :]
        receives = zip(route.receives(), buffers, strict=True)
        out = [(peer, grad.contiguous()) for (peer, _), grad in receives]
        into = []
        for peer, (low, high) in route.sends():
            shape[route.dim] = high - low
            into.append((peer, parts[0].new_empty(shape)))
        ctx.back.begin(route.group, out, into)
        nothing = [None] * len(buffers)
        return None, None, None, None, None, parts[0].new_zeros(0), *parts, *nothing


def _format_of(x: Tensor) -> torch.memory_format:
    """The format a tile is laid out in, to be kept by what is made from it."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return torch.contiguous_format


def _join(pieces: Sequence[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)


def _message_shape(parts: Sequence[Tensor], beside: int) -> list[int]:
    shape = list(parts[0].shape)
    if len(parts) > 1:
        shape[beside] = sum(part.shape[beside] for part in parts)
    return shape


class Exchange:
    """One exchange along a dim: `begin`, any work of one's own, then `finish`."""

    def __init__(self, route: Route, parts: Sequence[Tensor], beside: int = 0) -> None:
        self._route, self._parts, self._beside = route, list(parts), beside
        self._pending, self._back = _Pending(), _Pending()
        self._started: tuple[Tensor, ...] = ()

    def begin(self) -> Exchange:
        if not self._route.is_silent:
            self._started = _Start.apply(
                self._route, self._pending, self._back, self._beside, *self._parts
            )
        return self

    def finish(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The parts again (what has to be used from here on), and what came of lower and of higher
        ranks, in order."""
        if not self._started:
            return self._parts, [], []
        token, *buffers = self._started
        num_parts = len(self._parts)
        tensors = _Finish.apply(
            self._route,
            self._pending,
            self._back,
            self._beside,
            num_parts,
            token,
            *self._parts,
            *buffers,
        )
        parts, buffers = list(tensors[:num_parts]), list(tensors[num_parts:])
        memory_format = _format_of(parts[0])
        if memory_format is not torch.contiguous_format:
            buffers = [b.contiguous(memory_format=memory_format) for b in buffers]
        num_lower = sum(peer < self._route.rank for peer, _ in self._route.receives())
        return parts, buffers[:num_lower], buffers[num_lower:]


def fetch(x: Tensor, route: Route) -> Tensor:
    """`needed[rank]` of a dim of which each rank holds `held[rank]`."""
    (own,), lower, higher = Exchange(route, [x]).begin().finish()
    low, high = route.mine
    start = low - route.held[route.rank][0]
    if high - low != own.shape[route.dim]:
        own = own.narrow(route.dim, start, high - low)
    return _join([*lower, own, *higher], route.dim)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
        ctx.groups = groups
        return reduce_over(x, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_over(grad, ctx.groups), None


class _LargestOverRanks(torch.autograd.Function):
    """The largest element over `dims` of all tiles; the gradient is shared by all that are equal."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dims: list[int], groups: tuple[dist.ProcessGroup, ...]
    ) -> Tensor:
        largest = reduce_over(x.amax(dims, keepdim=True), groups, dist.ReduceOp.MAX)
        ctx.save_for_backward(x, largest)
        ctx.dims, ctx.groups = dims, groups
        return largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, largest = ctx.saved_tensors
        equal = (x == largest).to(grad.dtype)
        count = reduce_over(equal.sum(ctx.dims, keepdim=True), ctx.groups)
        return equal * (reduce_over(grad, ctx.groups) / count), None, None


def reduce_over(
    x: Tensor, groups: Sequence[dist.ProcessGroup], op: Any = dist.ReduceOp.SUM
) -> Tensor:
    """A new tensor, reduced over each group in turn; no autograd."""
    out = x.clone(memory_format=torch.contiguous_format)
    for group in groups:
        dist.all_reduce(out, op=op, group=group)
    return out


def sum_over(x: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    return _SumOverRanks.apply(x, tuple(groups)) if groups else x


def largest_over(x: Tensor, dims: list[int], groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """With the reduced dims kept."""
    if not groups:
        return x.amax(dims, keepdim=True)
    return _LargestOverRanks.apply(x, dims, tuple(groups))
