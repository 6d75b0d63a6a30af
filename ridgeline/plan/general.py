"""A job of a module that was traced: its blocks as kernels on a device, and blocks into stages.

The kernels are the module's own (`module.py`), their times those of `kernels.py` with what `own.py` found
of slower kinds. Tensor-parallel ranks divide what the trace found to be divided, tiles of an image divide
what grows with the samples. `general_time.py` and `general_memory.py` make a step of it; `kinds.py` names
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Final

from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.plan.experts import travel_cost
from ridgeline.plan.job import Placed
from ridgeline.plan.kernels import element_bytes, flash_s, gemm_s, moved_s
from ridgeline.plan.layer import Cost, LayerCost
from ridgeline.plan.machine import Device, Machine
from ridgeline.plan.module import Amount, Block, Bytes, ModuleFacts, Product, Work
from ridgeline.plan.network import Group, collective_s, group_of, point_to_point_s
from ridgeline.plan.own import MIXED, STRIDED, UPCAST, is_half, own_recompute
from ridgeline.plan.software import RIDGELINE, Software

NORM_BACK: Final = 2.3
"""How much longer a norm's gradients take than their bytes would, as in `own.py`."""
SLOWER: Final = {"plain": 1.0, "upcast": UPCAST, "mixed": MIXED, "norm_back": NORM_BACK}
BESIDES: Final = 1.5
"""Calls of the host for a product in backward besides itself: clearing and adding up its pieces."""
DISPATCHED: Final = 1.95
"""Host time of a call under tensor parallelism: what `own.py` has for a layer, over the layer's calls."""
SPREAD: Final = 0.16
"""How much more it is with sequence parallelism."""
HEADS: Final = (32, 64, 96, 128, 192, 256)
"""Widths of a head that fused attention has kernels for; others are filled up to the next."""
FLASH_BACK: Final = 2
"""Kernels of fused attention's backward besides the largest."""


@dataclass(frozen=True)
class ModuleJob(Placed):
    """One training step of one arrangement of a traced module."""

    model: ModuleFacts
    machine: Machine
    software: Software = RIDGELINE
    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    """Ranks that share the experts of a layer, taken from the replicas."""
    virtual: int = 1
    zero: int = 0
    shard: int = 0
    sp: bool = False
    spatial: tuple[int, int] = (1, 1)
    schedule: str = "1f1b"
    samples: int = 1
    microbatches: int = 1
    recompute: str = "none"
    precision: str = "bf16"
    group: int = 0
    sample_bytes: float = 0.0
    """Of one sample in storage; 0: nothing is read."""

    @property
    def unit(self) -> str:
        return self.model.unit

    @property
    def tokens(self) -> int:
        """Of a step, on all devices, in the module's unit."""
        return self.global_batch * self.model.units_per_sample

    @cached_property
    def parts(self) -> float:
        """What a rank has of what is split is that share of: 3 heads are 2 on the larger of two ranks."""
        return self.model.splits / math.ceil(self.model.splits / self.tp)

    @cached_property
    def mode(self) -> str:
        if element_bytes(self.precision) == 4:
            return "wide"
        return "half" if is_half(self.zero, self.precision) else "cast"

    @cached_property
    def part(self) -> Share:
        return Share(
            self.samples, self.tp, self.parts, self.sp, self.spatial, self.mode, self.precision,
            self.software.compiled, self.zero == 3, self.ep,
        )  # fmt: skip

    def ep_group(self) -> Group:
        return group_of(self.machine, self.ep, self.tp)

    def copies_group(self) -> Group:
        """Ranks with the same experts."""
        return group_of(self.machine, self.dp // self.ep, self.tp * self.ep)

    @property
    def expert_sharers(self) -> int:
        """Of those, the ones that share one copy of sharded state."""
        return max(1, self.sharers // self.ep)

    @cached_property
    def stages(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Blocks of every chunk of the pipeline, in order: index in the module, and how many."""
        return _stages(self.model, self.pp * self.virtual)

    def chunks_of(self, rank: int) -> list[tuple[tuple[int, int], ...]]:
        stages = self.stages
        return [stages[chunk * self.pp + rank] for chunk in range(self.virtual)]

    def blocks_of(self, rank: int) -> list[tuple[Block, int]]:
        """What a rank holds."""
        blocks = self.model.blocks
        return [(blocks[i], count) for chunk in self.chunks_of(rank) for i, count in chunk]

    def bytes(self, amount: Bytes) -> float:
        """On one rank, for one microbatch."""
        return self.part.bytes(amount)

    def replace(self, **changes: Any) -> ModuleJob:
        return replace(self, **changes)


@dataclass(frozen=True)
class Share:
    """What of a block one rank computes for one microbatch, and how."""

    samples: int
    tp: int = 1
    parts: float = 1.0
    """What a rank has of what is split is that share of: `tp`, or less where that does not divide it."""
    sp: bool = False
    spatial: tuple[int, int] = (1, 1)
    mode: str = "cast"
    precision: str = "bf16"
    compiled: bool = False
    sharded: bool = False
    """Weights are gathered before use."""
    ep: int = 1

    @property
    def tiles(self) -> int:
        return self.spatial[0] * self.spatial[1]

    def bytes(self, amount: Bytes) -> float:
        samples = self.samples / self.tiles
        whole = amount.whole.at(samples) / (self.tp if self.sp else 1)
        apart = amount.experts.at(samples) / self.ep
        return whole + apart + amount.gathered.at(samples) + amount.split.at(samples) / self.parts


def module_job(
    model: ModuleFacts, machine: Machine, layout: Layout, batch: int, software: Software = RIDGELINE
) -> ModuleJob:
    """What this library does with a layout and a global batch of a traced module."""
    check_module(model, layout)
    parts = layout.microbatches if layout.pp > 1 else layout.accumulate
    return ModuleJob(
        model=model,
        machine=machine,
        software=replace(software, compiled=True) if layout.compile else software,
        dp=layout.dp,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        virtual=layout.virtual,
        zero=layout.zero if layout.dp > 1 else 0,
        shard=layout.shard or 0,
        sp=layout.sp,
        spatial=layout.spatial,
        schedule=layout.schedule,
        samples=max(1, -(-batch // (layout.dp * parts))),
        microbatches=parts,
        recompute=layout.recompute,
        precision=layout.precision,
    )


def check_module(model: ModuleFacts, layout: Layout) -> None:
    """What a layout asks of a module that it has not."""
    if layout.tp > 1 and model.splits == 1:
        why = model.whole or "what it divides comes in one part"
        raise UsageError(f"tp={layout.tp} of {layout} is not for {model.name}: {why}; use tp=1")
    if layout.cp > 1:
        raise UsageError(
            f"cp={layout.cp} of {layout}: a traced module is planned at the length it was traced with; "
            "use cp=1"
        )
    for name, usual in (("offload", "none"), ("compress", "none"), ("sync", "every")):
        if (said := getattr(layout, name)) != usual:
            raise UsageError(
                f"{name}={said} of {layout} is planned for models by their sizes only; leave it out"
            )
    if layout.spatial != (1, 1) and not any(block.halos for block in model.blocks):
        raise UsageError(
            f"spatial of {layout} is not for {model.name}: it has no convolutions over an image; leave "
            "spatial out"
        )
    _check_experts(model, layout)
    most = model.most_stages
    if layout.pp * layout.virtual > most:
        raise UsageError(
            f"{layout.pp * layout.virtual} stages of {layout} are more than the {most} parts that "
            f"{model.name} can be cut into; use pp={most} or less"
        )


def tell_parts(job: ModuleJob) -> list[str]:
    """What becomes of parts that do not divide, in a sentence."""
    if job.tp == 1 or job.model.splits % job.tp == 0:
        return []
    each = math.ceil(job.model.splits / job.tp)
    return [
        f"the {job.model.splits} parts (heads) that {job.model.name} divides into do not divide over "
        f"tp={job.tp}: planned as {each} of them on a rank. Training fills them up to as many, or leaves "
        "the attention whole where the model counts its heads itself, and says so as it starts"
    ]


def _check_experts(model: ModuleFacts, layout: Layout) -> None:
    if layout.ep == 1:
        return
    found = [one for block in model.blocks for one in block.experts]
    if not found:
        raise UsageError(
            f"ep={layout.ep} of {layout} is not for {model.name}: the trace found no module with stacked "
            "weights that is called with tokens, the numbers of their experts and their weights; leave ep "
            "out"
        )
    odd = next((one.number for one in found if one.number % layout.ep), None)
    if odd is not None:
        raise UsageError(
            f"ep={layout.ep} of {layout} does not divide the {odd} experts of a layer of {model.name}; use "
            "a divisor of it"
        )


# Blocks as kernels


@lru_cache(maxsize=1024)
def _endless(device: Device) -> Device:
    """The same with memory that nothing waits for."""
    return replace(device, memory_bandwidth=1e18)


def product_s(device: Device, product: Product, part: Share) -> float:
    """Seconds of all of them."""
    sizes = {
        "m": product.m.at(part.samples), "n": product.n.at(part.samples),
        "k": product.k.at(part.samples), "batch": product.batch.at(part.samples),
    }  # fmt: skip
    if product.split:
        sizes[product.split] /= part.parts
    if product.kind == "grouped" and part.ep > 1:
        # As many rows come from the others as go there, for fewer experts.
        sizes["batch"] /= part.ep
        sizes["m" if product.m.per_sample else "k"] *= part.ep
    precision = part.precision
    if product.kind != "convolution":
        m, n, k, batch = (max(1, round(sizes[name])) for name in ("m", "n", "k", "batch"))
        return product.count * gemm_s(device, m, n, k, batch, precision)
    precision = "bf16" if precision == "fp8" else precision
    grows = "m" if product.m.per_sample else "k"
    sizes[grows] /= part.tiles
    m, n, k, batch = (max(1, round(sizes[name])) for name in ("m", "n", "k", "batch"))
    moved = element_bytes(precision) * product.moved.at(part.samples) / part.tiles
    compute = gemm_s(_endless(device), m, n, k, batch, precision)
    return product.count * max(compute, moved_s(device, moved))


def _direction(device: Device, work: Work, part: Share, backward: bool) -> Cost:
    products = sum(product_s(device, product, part) for product in work.products)
    num_products = sum(product.count for product in work.products)
    low = part.precision if part.precision in ("bf16", "fp16") else "fp32"
    low = "bf16" if part.precision == "fp8" else low
    attention, num_fused = 0.0, 0
    for one in work.attention:
        if one.kind != "fused":
            continue
        heads = one.heads / (part.parts if one.split else 1)
        num_fused += one.count
        width = next((w for w in HEADS if w >= one.width), one.width)
        attention += one.count * flash_s(
            device, round(one.batch.at(part.samples)), heads, one.seq, one.keys, width,
            one.causal, low, backward,
        )  # fmt: skip
    if part.compiled:
        moved, kernels = part.bytes(work.fused_moved), float(work.fused_kernels)
    else:
        slower = {**SLOWER, "strided": STRIDED[element_bytes(low)]}
        moved = sum(slower[kind] * part.bytes(amount) for kind, amount in work.moved.items())
        kernels = float(work.kernels)
    moving = max(0, round(kernels) - num_products - num_fused)
    if backward:
        kernels += FLASH_BACK * num_fused + (0.0 if part.compiled else BESIDES * num_products)
    if part.tp > 1 and not part.compiled:
        # Every function dispatches on global shapes, those that make views as well.
        kernels = (kernels + work.views) * DISPATCHED * (1.0 + (SPREAD if part.sp else 0.0))
    return Cost(products, attention, moved_s(device, moved, moving), 0.0, round(kernels))


@lru_cache(maxsize=65536)
def block_cost(
    machine: Machine, block: _Key, part: Share, tp_group: Group, ep_group: Group
) -> LayerCost:
    """Forward and backward of one block on one rank."""
    it = block.block
    costs = it.costs[part.mode]
    forward = _direction(machine.device, costs.forward, part, False)
    backward = _direction(machine.device, costs.backward, part, True)
    if part.sharded and not part.compiled:
        # Gathered pieces are copied into weights, twice; gradients into pieces of float32.
        count, trained = it.parameters_of(part.parts, part.ep), it.trainable_of(part.parts, part.ep)
        forward += Cost(elementwise=moved_s(machine.device, 4.0 * count, 0))
        copied = 4.0 * count + 6.0 * UPCAST * trained
        backward += Cost(elementwise=moved_s(machine.device, copied, 0))
    if part.tp > 1:
        forward += _summed(machine, it.reduced_forward, it.reductions_forward, part, tp_group)
        backward += _summed(machine, it.reduced_backward, it.reductions_backward, part, tp_group)
    for experts in it.experts if part.ep > 1 else ():
        there, back = travel_cost(machine, experts, part.samples, part.mode, ep_group)
        forward, backward = forward + there, backward + back
    if part.tiles > 1:
        halo = _halos(machine, it, part)
        forward, backward = forward + halo, backward + halo
    return LayerCost(forward, backward, Cost(), _last(machine, it, costs.last, part, tp_group))


def _last(machine: Machine, block: Block, work: Work, part: Share, group: Group) -> Cost:
    """What full recompute of a block leaves out."""
    if block.recompute != "block":
        return Cost()
    sums = bool(work.products) and block.reductions_forward > 0 and part.tp > 1
    if part.precision == "fp8" and not part.compiled:
        # A product in 8 bits keeps its inputs after it has computed, and is done again.
        work = replace(work, products=())
    found = replace(_direction(machine.device, work, part, False), kernels=0)
    if not sums:
        return found
    each = block.reduced_forward.at(part.samples) / block.reductions_forward
    kind = "reduce_scatter" if part.sp else "all_reduce"
    seconds = collective_s(machine, kind, element_bytes(part.precision) * each, group)
    return found + Cost(communication=seconds)


@dataclass(frozen=True)
class _Key:
    """A block as a key: its facts hold dictionaries, and its place in the module says the same."""

    model: ModuleFacts
    index: int

    @property
    def block(self) -> Block:
        return self.model.blocks[self.index]


def cost_of(job: ModuleJob, index: int) -> LayerCost:
    """Of one of the module's blocks in a job, without recompute."""
    key = _Key(job.model, index)
    return block_cost(job.machine, key, job.part, job.tp_group(), job.ep_group())


def again_of(job: ModuleJob, index: int) -> Cost:
    """What backward does again of a block."""
    if not recomputes(job, job.model.blocks[index]):
        return Cost()
    return own_recompute(job.recompute, cost_of(job, index), job.software.compiled)


def recomputes(job: ModuleJob, block: Block) -> bool:
    """Layers of a `Sequential` are recomputed where there is no pipeline."""
    if job.recompute == "none":
        return False
    return block.recompute == "block" or (block.recompute == "stretch" and job.pp == 1)


def _summed(machine: Machine, elements: Amount, count: int, part: Share, group: Group) -> Cost:
    """Tensor-parallel ranks sum so many tensors, or scatter and gather them along the sequence."""
    if not count:
        return Cost()
    each = element_bytes(part.precision) * elements.at(part.samples) / count
    if part.sp:
        seconds = collective_s(machine, "all_gather", each, group)
        seconds += collective_s(machine, "reduce_scatter", each, group)
    else:
        seconds = collective_s(machine, "all_reduce", each, group)
    return Cost(communication=count * seconds, kernels=count)


def _halos(machine: Machine, block: Block, part: Share) -> Cost:
    """Edges of tiles, which go to the neighbours of either side."""
    high, broad = part.spatial
    size = element_bytes(part.precision)
    crosses = part.tiles > machine.reach
    total, count = 0.0, 0
    for halo in block.halos:
        for tiles, others, amount in ((high, broad, halo.rows), (broad, high, halo.columns)):
            if tiles > 1 and amount.at(part.samples) > 0:
                num_bytes = size * amount.at(part.samples) / others
                total += 2 * halo.count * point_to_point_s(machine, num_bytes, crosses)
                count += 2 * halo.count
    return Cost(communication=total, kernels=2 * count)


# Blocks into stages


@lru_cache(maxsize=4096)
def _stages(model: ModuleFacts, count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Contiguous pieces as the pipeline cuts them: see `parallel/pipeline/balance.py`."""
    if count == 1:
        return (tuple((index, block.count) for index, block in enumerate(model.blocks)),)
    units = [index for index, block in enumerate(model.blocks) for _ in range(block.count)]
    cuts = _cuts(model, count)[len(units)][3]
    stages = []
    for first, last in pairwise((0, *cuts, len(units))):
        runs: list[tuple[int, int]] = []
        for index in units[first:last]:
            if runs and runs[-1][0] == index:
                runs[-1] = (index, runs[-1][1] + 1)
            else:
                runs.append((index, 1))
        stages.append(tuple(runs))
    return tuple(stages)


Cuts = dict[int, tuple[float, float, float, tuple[int, ...]]]
"""By the number of units before the last cut: the largest piece, squares, what is sent, and the cuts."""
WEIGHT: Final = 0.1
"""A stage's cost is its share of the FLOPs and, with this weight, of the parameters."""


@lru_cache(maxsize=4096)
def _cuts(model: ModuleFacts, count: int) -> Cuts:
    """The best ways to make `count` pieces of the first so many units: the largest piece smallest, then
    the most even, then what sends least, then the earliest cuts. None is without parameters."""
    weights, sizes, sent = _weights(model)
    if count == 1:
        return {
            b: (weights[b], weights[b] ** 2, 0.0, ())
            for b in range(1, len(weights))
            if sizes[b] > 0
        }
    found: Cuts = {}
    for a, (largest, squares, size, cuts) in _cuts(model, count - 1).items():
        for b in range(a + 1, len(weights)):
            if sizes[b] <= sizes[a]:
                continue
            cost = weights[b] - weights[a]
            new = (max(largest, cost), round(squares + cost**2, 12), size + sent[a], (*cuts, a))
            if b not in found or new < found[b]:
                found[b] = new
    return found


@lru_cache(maxsize=64)
def _weights(model: ModuleFacts) -> tuple[list[float], list[float], list[float]]:
    """Sums up to each unit: cost, parameters; and what crosses behind it."""
    flops = max(model.flops()[0], 1.0)
    parameters = max(model.num_parameters, 1)
    weights, sizes, sent = [0.0], [0.0], [0.0]
    for block in model.blocks:
        cost = block.costs["wide"]
        share = (1 - WEIGHT) * cost.forward.flops.at(
            1
        ) / flops + WEIGHT * block.parameters / parameters
        for _ in range(block.count):
            weights.append(weights[-1] + share)
            sizes.append(sizes[-1] + block.parameters)
            sent.append(cost.output.total.at(1))
    return weights, sizes, sent
