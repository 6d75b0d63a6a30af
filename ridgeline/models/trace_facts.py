"""From recordings of one step at two batch sizes to a module's facts, block by block.

Both recordings have the same kernels and storages in the same order, so each number of one has its partner
in the other, and two points make the line: a fixed part and a part per sample. Called by `trace.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from ridgeline.errors import UsageError
from ridgeline.models.trace_kernels import Kernel, Sizes, Storage
from ridgeline.models.trace_record import Recorder, Unit
from ridgeline.plan.module import Amount, Attention, Block, Bytes, Costs, Halo, Leaf, Product, Work


@dataclass(frozen=True)
class Pair:
    """The same step of two batches."""

    small: Recorder
    large: Recorder
    sizes: tuple[int, int]

    def amount(self, small: float, large: float) -> Amount:
        low, high = self.sizes
        per_sample = (large - small) / (high - low)
        return Amount(per_sample, small - per_sample * low)

    def kernels(self) -> list[tuple[Kernel, Kernel]]:
        return list(zip(self.small.kernels, self.large.kernels, strict=True))

    def storages(self) -> list[tuple[Storage, Storage]]:
        return list(zip(self.small.storages, self.large.storages, strict=True))

    def check(self, name: str) -> None:
        """A module that does other work for another batch has no line through two points."""
        first, second = (
            [(k.name, k.unit, k.backward) for k in r.kernels] for r in (self.small, self.large)
        )
        if first == second and len(self.small.storages) == len(self.large.storages):
            return
        place = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), -1)
        kernel = self.small.kernels[place]
        raise UsageError(
            f"{name} does other work for {self.sizes[1]} samples than for {self.sizes[0]} (module "
            f"{kernel.module or 'the model itself'!r}, {kernel.name}); it cannot be planned from a trace"
        )


def unit_costs(pair: Pair) -> list[Costs]:
    """Of every unit."""
    sums = _Sums(pair)
    costs = []
    for index, (small, large) in enumerate(zip(pair.small.units, pair.large.units, strict=True)):
        costs.append(
            Costs(
                forward=_work(pair, index, False, sums),
                backward=_work(pair, index, True, sums),
                last=_work(pair, index, False, sums, small.stops_at),
                saved=sums.bytes(partial(_saved, unit=index)),
                saved_selective=sums.bytes(partial(_is_result, pair=pair, unit=index))
                + sums.inputs(small, large),
                saved_full=sums.inputs(small, large),
                saved_compiled=sums.of(sums.compiled.get(index, ())),
                casts=sums.bytes(partial(_is_copy, unit=index)),
                peak_forward=_both(pair, small.peak_forward, large.peak_forward),
                peak_backward=_both(pair, small.peaks_backward[0], large.peaks_backward[0]),
                peak_gradients=_both(pair, small.peaks_gradients[0], large.peaks_gradients[0]),
                output=sums.output(index),
                split_backward=_each(pair, small.peaks_backward[1:3], large.peaks_backward[1:3]),
                split_gradients=_each(pair, small.peaks_gradients[1:3], large.peaks_gradients[1:3]),
                spread_backward=_both(pair, small.peaks_backward[3], large.peaks_backward[3]),
                at_loss=_both(pair, small.at_loss, large.at_loss),
            )
        )
    return costs


def _saved(storage: Storage, unit: int) -> bool:
    return storage.saved_by is not None and storage.saved_by[0] == unit


def _is_copy(storage: Storage, unit: int) -> bool:
    return storage.kind == "weight" and _saved(storage, unit)


def _is_result(storage: Storage, pair: Pair, unit: int) -> bool:
    """Of a product or of attention, in this unit's forward."""
    if not storage.is_product:
        return False
    if storage.producer < 0:
        return storage.unit == unit
    kernel = pair.small.kernels[storage.producer]
    return kernel.unit == unit and not kernel.backward


def _both(pair: Pair, small: Sequence[int], large: Sequence[int]) -> Bytes:
    """Bytes of both batches, in all their places."""
    return Bytes(*(pair.amount(a, b) for a, b in zip(small, large, strict=True)))


def _each(
    pair: Pair, small: Sequence[Sequence[int]], large: Sequence[Sequence[int]]
) -> tuple[Bytes, ...]:
    return tuple(_both(pair, a, b) for a, b in zip(small, large, strict=True))


class _Totals:
    """Bytes of both batches, added up place by place."""

    def __init__(self) -> None:
        self.small, self.large = [0, 0, 0, 0], [0, 0, 0, 0]

    def add(self, place: int, small: int, large: int) -> None:
        self.small[place] += small
        self.large[place] += large

    def bytes(self, pair: Pair) -> Bytes:
        return _both(pair, self.small, self.large)


class _Sums:
    """Sums over storages, and who reads and writes which."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.all = pair.storages()
        self.readers: dict[int, list[int]] = {}
        for index, kernel in enumerate(pair.small.kernels):
            for number, _ in kernel.reads:
                self.readers.setdefault(number, []).append(index)
        self.compiled = self._compiled()
        self.crossing = self._crossing()

    def of(self, numbers: Iterable[int]) -> Bytes:
        totals = _Totals()
        for number in numbers:
            small, large = self.all[number]
            totals.add(small.place, small.num_bytes, large.num_bytes)
        return totals.bytes(self.pair)

    def bytes(self, wanted: Callable[[Storage], bool]) -> Bytes:
        return self.of(small.number for small, _ in self.all if wanted(small))

    def inputs(self, small: Unit, large: Unit) -> Bytes:
        return self.of(small.inputs)

    def output(self, unit: int) -> Bytes:
        totals = _Totals()
        for number, (first, last, low, high) in self.crossing.items():
            if first <= unit < last:
                totals.add(int(self.all[number][0].split), low, high)
        return totals.bytes(self.pair)

    def _crossing(self) -> dict[int, tuple[int, int, int, int]]:
        """Storages that a later unit's forward reads: from which unit to which, and bytes."""
        found: dict[int, tuple[int, int, int, int]] = {}
        for small, large in self.pair.kernels():
            if small.backward:
                continue
            for (number, low), (_, high) in zip(small.reads, large.reads, strict=True):
                storage = self.all[number][0]
                if storage.kind != "made" or storage.unit >= small.unit:
                    continue
                before = found.get(number, (storage.unit, 0, 0, 0))
                found[number] = (
                    storage.unit, max(before[1], small.unit), max(before[2], low),
                    max(before[3], high),
                )  # fmt: skip
        return found

    def _compiled(self) -> dict[int, list[int]]:
        """Storages that stay kept when results of cheap kernels on kept ones are computed again."""
        kernels = self.pair.small.kernels
        kept: set[int] = set()
        by_unit: dict[int, list[int]] = {}
        for small, _ in self.all:
            if small.saved_by is None:
                continue
            cheap = False
            if small.producer >= 0 and kernels[small.producer].fusable:
                reads = {number for number, _ in kernels[small.producer].reads}
                fixed = ("parameter", "buffer", "input")
                cheap = all(n in kept or self.all[n][0].kind in fixed for n in reads)
            if not cheap:
                kept.add(small.number)
                by_unit.setdefault(small.saved_by[0], []).append(small.number)
        return by_unit


def _work(pair: Pair, unit: int, backward: bool, sums: _Sums, begin: int = 0) -> Work:
    """From kernel `begin` on."""
    kernels = [
        (i, small, large)
        for i, (small, large) in enumerate(pair.kernels())
        if small.unit == unit and small.backward == backward and i >= begin
    ]
    products: Counter[Product] = Counter()
    attentions: Counter[Attention] = Counter()
    moved: dict[str, _Totals] = {}
    for _, small, large in kernels:
        for one, other in ((small.product, large.product), (small.more, large.more)):
            if one is not None and other is not None:
                products[_product(pair, one, other)] += 1
        if small.attention is not None and large.attention is not None:
            attentions[_attention(pair, small, large)] += 1
        if _only_moves(small):
            place = _place_of(small, sums)
            moved.setdefault(small.kind, _Totals()).add(place, _moves(small), _moves(large))
    fused_moved, fused_kernels = _fused(pair, [i for i, _, _ in kernels], sums)
    units = (pair.small.units[unit], pair.large.units[unit])
    return Work(
        flops=pair.amount(sum(k.flops for _, k, _ in kernels), sum(k.flops for _, _, k in kernels)),
        products=tuple(replace(p, count=count) for p, count in products.items()),
        attention=tuple(replace(a, count=count) for a, count in attentions.items()),
        moved={kind: totals.bytes(pair) for kind, totals in moved.items()},
        kernels=len(kernels) + sum(small.more is not None for _, small, _ in kernels),
        views=0 if begin else units[0].views[backward],
        fused_moved=fused_moved,
        fused_kernels=fused_kernels,
    )


def _place_of(kernel: Kernel, sums: _Sums) -> int:
    """Where what it moves is: split, gathered where it makes what a split layer reads, of which every rank
    has all, of experts where it makes their cast or gradient."""
    written = [sums.all[number][0] for number, _ in kernel.writes]
    if any(storage.of_experts for storage in written):
        return 3
    return 1 if kernel.split else 2 if any(storage.gathered for storage in written) else 0


def _only_moves(kernel: Kernel) -> bool:
    return kernel.product is None and not (
        kernel.attention is not None and "stored" not in kernel.attention
    )


def _moves(kernel: Kernel) -> int:
    total = sum(size for _, size in (*kernel.reads, *kernel.writes))
    if "batch_norm" in kernel.name:
        # Its statistics are known only when all of its input has been read.
        largest = max((size for _, size in kernel.reads), default=0)
        total += largest * (2 if kernel.backward else 1)
    return total


def _product(pair: Pair, one: Sizes, other: Sizes) -> Product:
    m, n, k, batch = (pair.amount(a, b) for a, b in zip(one[1], other[1], strict=True))
    return Product(one[0], m, n, k, batch, one[2], pair.amount(one[3], other[3]))


def _attention(pair: Pair, small: Kernel, large: Kernel) -> Attention:
    a, b = small.attention or {}, large.attention or {}
    return Attention(
        "stored" if "stored" in a else "fused", pair.amount(a["batch"], b["batch"]), a["heads"],
        a["seq"], a["keys"], a["width"], a["causal"], pair.amount(a["scores"], b["scores"]),
        small.split,
    )  # fmt: skip


def _fused(pair: Pair, indices: list[int], sums: _Sums) -> tuple[Bytes, int]:
    """Bytes and kernels once neighbours that a compiler can fuse are one kernel: what only they see is
    never written."""
    small, large = pair.small.kernels, pair.large.kernels
    group = {i: i for i in indices if small[i].fusable and _only_moves(small[i])}

    def root(i: int) -> int:
        while group[i] != i:
            group[i] = group[group[i]]
            i = group[i]
        return i

    for i in group:
        for number, _ in small[i].reads:
            producer = sums.all[number][0].producer
            if producer in group:
                group[root(i)] = root(producer)
    totals = _Totals()
    read: set[tuple[int, int]] = set()
    num_kernels = 0
    for i in indices:
        first, second = small[i], large[i]
        if not _only_moves(first):
            num_kernels += 1 + (first.more is not None)
            continue
        if i not in group:
            totals.add(int(first.split), _moves(first), _moves(second))
            num_kernels += 1
            continue
        own = root(i)
        num_kernels += own == i
        if "batch_norm" in first.name:
            num_kernels += 1
            times = 2 if first.backward else 1
            low, high = (max(size for _, size in k.reads) for k in (first, second))
            totals.add(int(first.split), times * low, times * high)
        for (number, low), (_, high) in zip(first.reads, second.reads, strict=True):
            storage = sums.all[number][0]
            producer = storage.producer
            if (producer in group and root(producer) == own) or (own, number) in read:
                continue
            read.add((own, number))
            totals.add(storage.place, low, high)
        for (number, low), (_, high) in zip(first.writes, second.writes, strict=True):
            storage = sums.all[number][0]
            outside = any(r not in group or root(r) != own for r in sums.readers.get(number, ()))
            if outside or storage.is_gradient or storage.saved_by is not None:
                totals.add(storage.place, low, high)
    return totals.bytes(pair), num_kernels


def unit_halos(pair: Pair, unit: int) -> tuple[Halo, ...]:
    found: Counter[Halo] = Counter()
    for small, large in pair.kernels():
        if small.unit == unit and small.halo is not None and large.halo is not None:
            rows, columns = (pair.amount(a, b) for a, b in zip(small.halo, large.halo, strict=True))
            found[Halo(rows, columns)] += 1
    return tuple(replace(halo, count=count) for halo, count in found.items())


def unit_leaves(
    pair: Pair,
    unit: int,
    model: nn.Module,
    owned: Mapping[str, list[str]],
    sizes: Mapping[str, tuple[int, int]],
) -> tuple[Leaf, ...]:
    """Every module that does something itself, or has parameters, in the order of its first call;
    `owned` are the parameters of this unit by module, `sizes` their elements and bytes of one."""
    recorder = pair.small
    names = list(recorder.units[unit].modules)
    kernels = [(a, b) for a, b in pair.kernels() if a.unit == unit]
    names += [a.module for a, _ in kernels if a.module not in names]
    names += [name for name in owned if name not in names]
    prefix = recorder.units[unit].name + "." if recorder.units[unit].module is not None else ""
    leaves = []
    for name in dict.fromkeys(names):
        mine = [(a, b) for a, b in kernels if a.module == name]
        if not mine and name not in owned:
            continue
        module = model.get_submodule(name)
        parameters = [model.get_parameter(p) for p in owned.get(name, ())]
        saved = [(a, b) for a, b in pair.storages() if a.saved_by == (unit, name)]
        masks = [(a, b) for a, b in saved if a.is_mask]
        attention = [_attention(pair, a, b) for a, b in mine if a.attention and not a.backward]
        flops, moved = (
            [
                pair.amount(*(sum(get(k) for k in side if k.backward == back) for side in sides))
                for back in (False, True)
            ]
            for get, sides in (
                (_flops, ([a for a, _ in mine], [b for _, b in mine])),
                (_moves, ([a for a, _ in mine], [b for _, b in mine])),
            )
        )
        own_buffers = module.buffers(recurse=False)
        leaves.append(
            Leaf(
                name=name.removeprefix(prefix) if name + "." != prefix else "",
                kind=type(module).__name__ if name else "",
                parameters=sum(p.numel() for p in parameters),
                trainable=sum(p.numel() for p in parameters if p.requires_grad),
                parameter_bytes=sum(math.prod(sizes[p]) for p in owned.get(name, ())),
                buffer_bytes=sum(b.numel() * b.element_size() for b in own_buffers),
                role=recorder.roles.get(name, ""),
                flops_forward=flops[0],
                flops_backward=flops[1],
                moved_forward=moved[0],
                moved_backward=moved[1],
                kernels_forward=sum(not a.backward for a, _ in mine),
                kernels_backward=sum(a.backward for a, _ in mine),
                saved=_total(pair, saved),
                dropout_mask=_total(pair, masks),
                attention=tuple(replace(a, count=count) for a, count in Counter(attention).items()),
            )
        )
    return tuple(leaves)


def _flops(kernel: Kernel) -> int:
    return kernel.flops


def _total(pair: Pair, storages: Sequence[tuple[Storage, Storage]]) -> Amount:
    small = sum(a.num_bytes for a, _ in storages)
    return pair.amount(small, sum(b.num_bytes for _, b in storages))


def merge_equal(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Neighbours that differ in their names alone become one; of their peaks the largest stays."""
    merged: list[Block] = []
    for block in blocks:
        if merged and block.recompute and _alike(merged[-1], block):
            last = merged[-1]
            costs = {
                mode: replace(
                    cost,
                    saved_compiled=_larger(cost.saved_compiled, block.costs[mode].saved_compiled),
                    peak_forward=_larger(cost.peak_forward, block.costs[mode].peak_forward),
                    peak_backward=_larger(cost.peak_backward, block.costs[mode].peak_backward),
                    peak_gradients=_larger(cost.peak_gradients, block.costs[mode].peak_gradients),
                    split_backward=_largest(cost.split_backward, block.costs[mode].split_backward),
                    split_gradients=_largest(
                        cost.split_gradients, block.costs[mode].split_gradients
                    ),
                    spread_backward=_larger(
                        cost.spread_backward, block.costs[mode].spread_backward
                    ),
                )
                for mode, cost in last.costs.items()
            }
            merged[-1] = replace(last, names=(*last.names, *block.names), costs=costs)
        else:
            merged.append(block)
    return tuple(merged)


def _larger(a: Bytes, b: Bytes) -> Bytes:
    return a if a.total.at(1) >= b.total.at(1) else b


def _largest(a: Sequence[Bytes], b: Sequence[Bytes]) -> tuple[Bytes, ...]:
    return tuple(_larger(one, other) for one, other in zip(a, b, strict=True))


def _alike(a: Block, b: Block) -> bool:
    nothing = Bytes()

    def bare(block: Block) -> Block:
        costs = {
            mode: replace(
                cost,
                peak_forward=nothing,
                peak_backward=nothing,
                peak_gradients=nothing,
                split_backward=(),
                split_gradients=(),
                spread_backward=nothing,
                saved_compiled=nothing,
            )
            for mode, cost in block.costs.items()
        }
        return replace(block, names=(), costs=costs)

    return bare(a) == bare(b)
