"""Exact attention over a sequence that is split among the ranks of a group: context parallelism.

Keys and values travel around a ring while each rank keeps its queries; the blocks' results are merged
by their running maxima and sums, so that no rank ever holds more than its own part of the sequence and
the answer is the one of a single device. Causal attention is balanced by giving every rank an early and
a late piece of the sequence for the time of the computation. `context.py` calls `ring_attention` in
place of a model's `scaled_dot_product_attention`; `planned_work` is for planners and tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.errors import UsageError

Ranges = tuple[tuple[int, int], ...]
"""Parts [start, stop) of the global sequence that one rank holds, in ascending order."""
Keep = Callable[[Tensor, Tensor], Tensor]
"""Global positions of queries and of keys -> what to multiply their weights by, (.., rows, cols)."""

_PLACE = "scaled_dot_product_attention in a context-parallel model"
_TILE_ELEMENTS = 2**22
"""Scores that exist at one time where no fused kernel applies."""


# Who computes what.


@dataclass(frozen=True)
class Block:
    """Rows of a rank's own queries against columns of the keys that are visiting."""

    rows: tuple[int, int]
    cols: tuple[int, int]
    offset: int | None
    """Key j is seen by query i when j <= i + offset, both counted from the block; None: always."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]

    @property
    def num_visible(self) -> int:
        rows, cols = self.shape
        if self.offset is None:
            return rows * cols
        return sum(min(max(row + self.offset + 1, 0), cols) for row in range(rows))


def _size(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _contiguous(lengths: Sequence[int]) -> list[Ranges]:
    stops = [sum(lengths[: rank + 1]) for rank in range(len(lengths))]
    return [((stop - size, stop),) for size, stop in zip(lengths, stops, strict=True)]


def _head_tail(total: int, num_ranks: int) -> list[Ranges]:
    """Rank r gets pieces r and 2n-1-r of 2n: an early query sees few keys, a late one many."""
    cuts = [index * total // (2 * num_ranks) for index in range(2 * num_ranks + 1)]
    pieces = list(pairwise(cuts))
    return [(pieces[rank], pieces[-1 - rank]) for rank in range(num_ranks)]


def plan_blocks(queries: Ranges, keys: Ranges, is_causal: bool) -> list[Block]:
    """What one rank computes while it is visited by `keys`; what no query may see is left out."""
    rows, cols = (0, _size(queries)), (0, _size(keys))
    if not rows[1] or not cols[1]:
        return []
    if not is_causal:
        return [Block(rows, cols, None)]
    if queries == keys:  # the same order on both sides, so positions compare as indices do
        return [Block(rows, cols, 0)]
    blocks: list[Block] = []
    row = 0
    for first, last in queries:
        col = seen = 0
        partial: list[Block] = []
        span = (row, row + last - first)
        for start, stop in keys:
            end = col + stop - start
            if stop - 1 <= first:
                seen = end  # keys ascend, so those that are seen whole come first
            elif start < last and stop > start:
                partial.append(Block(span, (col, end), first - start))
            col = end
        if seen and last > first:
            before = blocks[-1] if blocks else None
            if before and before.rows[1] == row and before.cols == (0, seen):
                blocks[-1] = replace(before, rows=(before.rows[0], span[1]))
            else:
                blocks.append(Block(span, (0, seen), None))
        blocks += partial if last > first else []
        row = span[1]
    return blocks


def _place(
    lengths: Sequence[int], kv_lengths: Sequence[int], is_causal: bool, balance: bool
) -> tuple[list[Ranges], list[Ranges]]:
    """Where queries and keys lie while attention is computed."""
    if is_causal and balance and list(lengths) == list(kv_lengths):
        placed = _head_tail(sum(lengths), len(lengths))
        return placed, placed
    return _contiguous(lengths), _contiguous(kv_lengths)


def planned_work(
    lengths: Sequence[int],
    *,
    is_causal: bool,
    balance: bool = True,
    kv_lengths: Sequence[int] | None = None,
) -> list[int]:
    """Scores that each rank computes for one head of one sample.

    >>> planned_work([4, 4], is_causal=True), planned_work([4, 4], is_causal=True, balance=False)
    ([18, 18], [10, 26])
    """
    queries, keys = _place(lengths, kv_lengths or lengths, is_causal, balance)
    return [
        sum(b.num_visible for held in keys for b in plan_blocks(own, held, is_causal))
        for own in queries
    ]


# Moving parts of the sequence between ranks.


def _overlaps(mine: Ranges, theirs: Ranges) -> list[tuple[int, int]]:
    """Where in `mine`, in its order, the positions are that `theirs` has too."""
    found = []
    row = 0
    for start, stop in mine:
        for first, last in theirs:
            low, high = max(start, first), min(stop, last)
            if low < high:
                found.append((row + low - start, row + high - start))
        row += stop - start
    return found


def _move(x: Tensor, group: dist.ProcessGroup, old: list[Ranges], new: list[Ranges]) -> Tensor:
    """Rows of `x`, which lie over the ranks as `old` says, as `new` says."""
    rank = dist.get_rank(group)
    gone = [_overlaps(old[rank], other) for other in new]
    come = [_overlaps(new[rank], other) for other in old]
    packed = torch.cat([x[:0], *(x[low:high] for parts in gone for low, high in parts)])
    arrived = x.new_empty(_size(new[rank]), *x.shape[1:])
    dist.all_to_all_single(
        arrived,
        packed,
        [_size(tuple(parts)) for parts in come],
        [_size(tuple(parts)) for parts in gone],
        group=group,
    )
    places = [part for parts in come for part in parts]
    if places == sorted(places):
        return arrived
    result = torch.empty_like(arrived)
    pieces = arrived.split([high - low for low, high in places])
    for (low, high), piece in zip(places, pieces, strict=True):
        result[low:high] = piece
    return result


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, old: list[Ranges], new: list[Ranges]
    ) -> Tensor:
        ctx.way_back = (group, new, old)
        return _move(x, group, old, new)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _move(grad.contiguous(), *ctx.way_back), None, None, None


def _move_heads(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, old: list[Ranges], new: list[Ranges]
) -> list[Tensor]:
    """(batch, heads, sequence, dim) each; all of them in one exchange."""
    rows = [x.permute(2, 0, 1, 3).flatten(1) for x in tensors]
    moved = _Move.apply(torch.cat(rows, 1), group, old, new)
    parts = moved.split([x.shape[1] for x in rows], 1)
    return [
        part.unflatten(1, (x.shape[0], x.shape[1], x.shape[3])).permute(1, 2, 0, 3)
        for part, x in zip(parts, tensors, strict=True)
    ]


@dataclass(frozen=True)
class _Ring:
    """Everything of a call of attention that is no tensor with a gradient."""

    group: dist.ProcessGroup
    queries: list[Ranges]
    keys: list[Ranges]
    is_causal: bool
    scale: float
    keep: Keep | None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def blocks(self, source: int) -> list[Block]:
        return plan_blocks(self.queries[self.rank], self.keys[source], self.is_causal)

    def shift(self, leaving: Tensor, arriving: Tensor) -> Callable[[], None]:
        """Begin to send to the next rank and to receive from the one before; call what it returns
        before `arriving` is used. That also holds `leaving` until it is sent."""
        size = len(self.queries)
        ops = []
        if leaving.numel():
            to = (self.rank + 1) % size
            ops.append(dist.P2POp(dist.isend, leaving, group=self.group, group_peer=to))
        if arriving.numel():
            source = (self.rank - 1) % size
            ops.append(dist.P2POp(dist.irecv, arriving, group=self.group, group_peer=source))
        works = dist.batch_isend_irecv(ops) if ops else []

        def finish() -> None:
            for work in works:
                work.wait()
            ops.clear()

        return finish

    def travel(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Every rank's keys and values, one's own first; the next come while these are used."""
        size = len(self.queries)
        held = torch.cat([k.flatten(), v.flatten()])
        for step in range(size):
            source = (self.rank - step) % size
            if step == size - 1:
                yield source, *self.unpack(held, k, v, source)
                return
            coming = held.new_empty(self._packed(k, v, (source - 1) % size))
            finish = self.shift(held, coming)
            yield source, *self.unpack(held, k, v, source)
            finish()
            held = coming

    def _packed(self, k: Tensor, v: Tensor, source: int) -> int:
        return k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3]) * _size(self.keys[source])

    def unpack(self, flat: Tensor, k: Tensor, v: Tensor, source: int) -> tuple[Tensor, Tensor]:
        batch, heads, _, width = k.shape
        length = _size(self.keys[source])
        first, second = flat.split([batch * heads * length * x.shape[3] for x in (k, v)])
        shape = (batch, heads, length)
        return first.view(*shape, width), second.view(*shape, v.shape[3])

    def positions(self, source: int, block: Block) -> tuple[Tensor, Tensor]:
        def of(ranges: Ranges, part: tuple[int, int]) -> Tensor:
            return torch.cat([torch.arange(*piece) for piece in ranges])[slice(*part)]

        return of(self.queries[self.rank], block.rows), of(self.keys[source], block.cols)


# One block on one device.


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tiles(block: Block, num_heads: int) -> Iterator[Block]:
    """The block cut by rows, so that memory stays linear in the length; unseen keys left out."""
    rows, cols = block.shape
    step = max(16, _TILE_ELEMENTS // (num_heads * cols))
    for low in range(0, rows, step):
        high = min(low + step, rows)
        offset = None if block.offset is None else block.offset + low
        seen = cols if offset is None else min(cols, high - low + offset)
        if seen > 0:
            first = block.cols[0]
            place = (block.rows[0] + low, block.rows[0] + high)
            yield Block(place, (first, first + seen), offset)


def _part(x: Tensor, span: tuple[int, int]) -> Tensor:
    return x[:, :, span[0] : span[1]]


def _mask_part(mask: Tensor, block: Block, first_key: int) -> Tensor:
    rows = slice(*block.rows) if mask.shape[-2] > 1 else slice(None)
    cols = slice(*(first_key + col for col in block.cols)) if mask.shape[-1] > 1 else slice(None)
    return mask[..., rows, cols]


@dataclass(frozen=True)
class _Tile:
    """One tile's tensors, in the precision that is computed in; heads that share keys are stacked."""

    ring: _Ring
    source: int
    block: Block
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None

    def stacked(self, x: Tensor) -> Tensor:
        """(batch, heads, rows, n) -> (batch, key heads, heads per key head * rows, n)."""
        return x.reshape(x.shape[0], self.k.shape[1], -1, x.shape[3])

    def scores(self) -> Tensor:
        scores = self.stacked(self.q) @ self.k.mT
        scores = scores.view(*self.q.shape[:3], self.k.shape[2]) * self.ring.scale
        if self.mask is not None:
            part = _mask_part(self.mask, self.block, self.ring.keys[self.source][0][0])
            is_bool = part.dtype == torch.bool
            scores = scores.masked_fill(~part, -math.inf) if is_bool else scores + part
        if self.block.offset is not None:
            rows, cols = (torch.arange(size, device=scores.device) for size in self.block.shape)
            scores = scores.masked_fill(cols > rows[:, None] + self.block.offset, -math.inf)
        return scores

    def kept(self) -> Tensor | None:
        keep = self.ring.keep
        if keep is None:
            return None
        rows, cols = self.ring.positions(self.source, self.block)
        return keep(rows.to(self.q.device), cols.to(self.q.device)).to(self.q.dtype)


def _cut(
    ring: _Ring, source: int, block: Block, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> Iterator[_Tile]:
    exact = _accurate(q.dtype)
    for tile in _tiles(block, q.shape[0] * q.shape[1]):
        parts = (_part(q, tile.rows), _part(k, tile.cols), _part(v, tile.cols))
        yield _Tile(ring, source, tile, *(x.to(exact) for x in parts), mask)


def _uses_flash(ring: _Ring, block: Block, q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether torch's flash kernel computes this block, with the sums that merging needs."""
    aligned = block.offset is None or (block.offset == 0 and block.shape[0] == block.shape[1])
    width = q.shape[3]
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(q.device)[0] >= 8
        and mask is None
        and ring.keep is None
        and aligned
        and width == v.shape[3]
        and width <= 256
        and width % 8 == 0
    )


@dataclass(frozen=True)
class _Sums:
    """Running results of rows of queries: sum of exp(score - peak) * value, that peak, the sum
    without the value. The two are kept apart, since a row of scores near the smallest number of its
    type has a log-sum-exp in which the number of keys is lost."""

    values: Tensor
    peak: Tensor
    total: Tensor

    def merge(self, rows: tuple[int, int], values: Tensor, peak: Tensor, total: Tensor) -> None:
        mine = [_part(x, rows) for x in (self.values, self.peak, self.total)]
        high = torch.maximum(mine[1], peak)
        base = high.masked_fill(high == -math.inf, 0.0)
        old, new = (mine[1] - base).exp_(), (peak - base).exp_()
        mine[0].mul_(old.unsqueeze(-1)).addcmul_(values, new.unsqueeze(-1))
        mine[1].copy_(high)
        mine[2].mul_(old).addcmul_(total, new)


def _forward_block(sums: _Sums, ring: _Ring, source: int, block: Block, *inputs: Any) -> None:
    q, k, v, mask = inputs
    if _uses_flash(ring, block, q, v, mask):
        parts = (_part(q, block.rows), _part(k, block.cols), _part(v, block.cols))
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = flash(*parts, 0.0, block.offset is not None, scale=ring.scale)
        sums.merge(block.rows, out.float(), lse, torch.ones_like(lse))
        return
    for tile in _cut(ring, source, block, q, k, v, mask):
        scores = tile.scores()
        peak = scores.amax(-1)
        base = peak.masked_fill(peak == -math.inf, 0.0)
        weights = scores.sub_(base.unsqueeze(-1)).exp_()
        total = weights.sum(-1)
        kept = tile.kept()
        if kept is not None:
            weights = weights * kept
        values = (tile.stacked(weights) @ tile.v).view(*weights.shape[:3], v.shape[3])
        sums.merge(tile.block.rows, values, peak, total)


@dataclass(frozen=True)
class _Backward:
    """What backward knows of this rank's queries, and the gradients it adds up."""

    grad: Tensor
    out: Tensor
    peak: Tensor
    total: Tensor
    delta: Tensor
    dq: Tensor
    dmask: Tensor | None


def _backward_block(
    own: _Backward, dk: Tensor, dv: Tensor, ring: _Ring, source: int, block: Block, *inputs: Any
) -> None:
    q, k, v, mask = inputs
    rows, cols = block.rows, block.cols
    if _uses_flash(ring, block, q, v, mask):
        lse = _part(own.peak + own.total.log(), rows).contiguous()
        state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of the dropout, of which none
        parts = (_part(q, rows), _part(k, cols), _part(v, cols), _part(own.out, rows), lse)
        rest = (None, None, *block.shape, 0.0, block.offset is not None, state, state)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
        grads = flash(_part(own.grad, rows), *parts, *rest, scale=ring.scale)
        for total, span, part in zip((own.dq, dk, dv), (rows, cols, cols), grads, strict=True):
            _part(total, span).add_(part)
        return
    for tile in _cut(ring, source, block, q, k, v, mask):
        place = tile.block
        grad = tile.stacked(_part(own.grad, place.rows).to(tile.q.dtype))
        weights = (tile.scores() - _part(own.peak, place.rows).unsqueeze(-1)).exp_()
        weights /= _part(own.total, place.rows).unsqueeze(-1)
        dweights = (grad @ tile.v.mT).view_as(weights)
        kept = tile.kept()
        if kept is not None:
            dweights *= kept
        used = weights if kept is None else weights * kept
        _part(dv, place.cols).add_(tile.stacked(used).mT @ grad)
        dscores = weights * (dweights - _part(own.delta, place.rows).unsqueeze(-1))
        if own.dmask is not None:
            part = _mask_part(own.dmask, place, ring.keys[source][0][0])
            part.add_(dscores.sum_to_size(part.shape))
        stacked = tile.stacked(dscores) * ring.scale
        _part(own.dq, place.rows).add_((stacked @ tile.k).view_as(tile.q))
        _part(dk, place.cols).add_(stacked.mT @ tile.stacked(tile.q))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: _Ring
    ) -> Tensor:
        exact = _accurate(q.dtype)
        values = torch.zeros(*q.shape[:3], v.shape[3], dtype=exact, device=q.device)
        peak = torch.full_like(values[..., 0], -math.inf)
        sums = _Sums(values, peak, torch.zeros_like(peak))
        for source, visiting_k, visiting_v in ring.travel(k, v):
            for block in ring.blocks(source):
                _forward_block(sums, ring, source, block, q, visiting_k, visiting_v, mask)
        # A row that may see nothing has a result of zero, and so have its gradients.
        peak = sums.peak.masked_fill(sums.peak == -math.inf, 0.0)
        total = sums.total.masked_fill(sums.total == 0.0, 1.0)
        out = (sums.values / total.unsqueeze(-1)).to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, mask, out, peak, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, peak, total = ctx.saved_tensors
        ring: _Ring = ctx.ring
        exact = _accurate(q.dtype)
        dmask = torch.zeros_like(mask, dtype=exact) if ctx.needs_input_grad[3] else None
        delta = (grad.to(exact) * out.to(exact)).sum(-1)
        dq = torch.zeros_like(q, dtype=exact)
        own = _Backward(grad, out, peak, total, delta, dq, dmask)
        coming, finish = None, None
        for source, visiting_k, visiting_v in ring.travel(k, v):
            # The gradients of keys and values go around with them, one place behind: each rank adds
            # its part, and after the last step they come home.
            size = visiting_k.numel() + visiting_v.numel()
            part = torch.zeros(size, dtype=exact, device=q.device)
            dk, dv = ring.unpack(part, k, v, source)
            for block in ring.blocks(source):
                inputs = (q, visiting_k, visiting_v, mask)
                _backward_block(own, dk, dv, ring, source, block, *inputs)
            if finish is not None:
                finish()
                part += coming
            coming = part.new_empty(ring._packed(k, v, (source - 1) % len(ring.keys)))
            finish = ring.shift(part, coming)
        assert finish is not None
        finish()
        dk, dv = ring.unpack(coming, k, v, ring.rank)
        dmask = dmask.to(mask.dtype) if dmask is not None else None
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask, None


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    *,
    is_causal: bool,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    enable_gqa: bool = False,
    balance: bool = True,
    lengths: Sequence[int] | None = None,
    kv_lengths: Sequence[int] | None = None,
    keep: Keep | None = None,
) -> Tensor:
    """This rank's part of `scaled_dot_product_attention` over the whole sequence.

    Every rank of `group` calls it with its contiguous chunk of queries (batch, heads, length, dim) and
    of keys and values; `lengths` are all ranks' numbers of queries (None: as many as here), and
    `kv_lengths` those of keys where they differ. A mask has this rank's rows, or one row for all, and a
    column for every key of the whole sequence; it turns balancing off, and the gradient it may get is
    this rank's part of it. `keep(query positions, key positions)` gives factors for the weights after
    the softmax, which is what dropout of attention is.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if {q.dim(), k.dim(), v.dim()} not in ({3}, {4}):
        raise UsageError(
            f"{_PLACE} got queries of shape {tuple(q.shape)}; give (batch, heads, sequence, dim) or "
            "(batch, sequence, dim)"
        )
    has_heads = q.dim() == 4
    if not has_heads:
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(1)
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    lengths = list(lengths or [q.shape[2]] * size)
    if kv_lengths is None:
        kv_lengths = lengths if k.shape[2] == q.shape[2] else [k.shape[2]] * size
    kv_lengths = list(kv_lengths)
    _check(q, k, v, attn_mask, enable_gqa, (lengths, kv_lengths), rank)
    q, k, v, attn_mask = _as_autocast(q, k, v, attn_mask)
    chunks, kv_chunks = _contiguous(lengths), _contiguous(kv_lengths)
    balanced = balance and attn_mask is None
    queries, keys = _place(lengths, kv_lengths, is_causal, balanced)
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    ring = _Ring(group, queries, keys, is_causal, scale, keep)
    with torch.autocast(q.device.type, enabled=False):
        if queries != chunks or keys != kv_chunks:
            q, k, v = _move_heads((q, k, v), group, chunks, queries)
        out = _RingAttention.apply(q, k, v, attn_mask, ring)
        if queries != chunks:
            (out,) = _move_heads((out,), group, queries, chunks)
    return out if has_heads else out.squeeze(1)


def _as_autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """What autocast does to the arguments of attention, which does not see this function."""
    device = next(x.device.type for x in tensors if x is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    casts = (torch.float32, torch.float16, torch.bfloat16)
    return [x.to(dtype) if x is not None and x.dtype in casts else x for x in tensors]


def _check(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool, split: Any, rank: int
) -> None:
    """Raise for what torch's attention would refuse, and for parts that cannot be this rank's."""
    lengths, kv_lengths = split
    heads, kv_heads = q.shape[1], k.shape[1]
    if v.shape[1] != kv_heads or heads % kv_heads or (heads != kv_heads and not gqa):
        raise UsageError(
            f"{_PLACE} got {heads} heads of queries, {kv_heads} of keys and {v.shape[1]} of values; "
            "keys and values need as many as queries, or a divisor of that with enable_gqa=True"
        )
    for name, x, all_lengths in (("queries", q, lengths), ("keys", k, kv_lengths)):
        if all_lengths[rank] != x.shape[2]:
            raise UsageError(
                f"{_PLACE} got {x.shape[2]} {name} on rank {rank} of the group, where the sequence is "
                f"split as {all_lengths}; give the chunk of this rank, or the lengths that are so"
            )
    total = sum(kv_lengths)
    if mask is not None and (
        mask.shape[-1] not in (1, total) or mask.shape[-2] not in (1, lengths[rank])
    ):
        raise UsageError(
            f"{_PLACE} got a mask of shape {tuple(mask.shape)}; it has to end in "
            f"({lengths[rank]} or 1, {total}): this rank's rows and the whole sequence's columns"
        )
