"""Memory of one rank of a traced module: what it holds, and the largest moment of a step.

The trace says what every block keeps and the most that is alive while it runs; a step's peak is the worst
block's, forward or backward, with what the blocks before it keep and the gradients that are there by then.
Called through `kinds.py`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

from ridgeline.plan.experts import INDEX_BYTES, travel_bytes
from ridgeline.plan.general import ModuleJob, recomputes
from ridgeline.plan.general_time import experts_of, parameters_of, sent_bytes, trainable_of
from ridgeline.plan.kernels import element_bytes
from ridgeline.plan.memory import StepMemory, gradient_bytes, in_flight
from ridgeline.plan.module import Block, ModuleFacts

LOSS: Final = {"wide": 12.0, "cast": 16.0, "half": 16.0}
"""Bytes that the loss of split classes makes for each logit: float32 logits where they are not that
already, those less their maximum, their exponentials and their shares, all there at the end."""


def _computed(job: ModuleJob) -> str:
    """What numbers weights are gathered in: of products in 8 bits, the 16 they are made of."""
    return "bf16" if job.precision == "fp8" else job.precision


def own_bytes(job: ModuleJob) -> float:
    """Of a parameter as the module has it."""
    return job.model.parameter_bytes / max(job.model.num_parameters, 1)


def kept_bytes(job: ModuleJob, block: Block) -> float:
    """What a block keeps for backward, a microbatch."""
    costs = block.costs[job.mode]
    if not recomputes(job, block):
        kept = job.bytes(costs.saved_compiled if job.software.compiled else costs.saved)
        return kept + _routes(job, block)
    inputs = job.bytes(costs.saved_full) / _stretch(job, block)
    return inputs if job.recompute == "full" else inputs + _results(job, block)


def _results(job: ModuleJob, block: Block) -> float:
    """Of its products and attention, which selective recompute keeps."""
    costs = block.costs[job.mode]
    return job.bytes(costs.saved_selective) - job.bytes(costs.saved_full)


def _routes(job: ModuleJob, block: Block) -> float:
    """What backward needs to know of the way that tokens took to their experts."""
    total = 0.0
    for one in block.experts if job.ep > 1 else ():
        tokens = one.tokens.at(job.samples)
        total += INDEX_BYTES * tokens * (2 * one.visits(job.ep) + 3 * one.chosen)
    return total


def _on_the_way(job: ModuleJob, block: Block) -> float:
    """Tokens that have come, one by one and for each of their experts, and what goes back."""
    most = 0.0
    for one in block.experts if job.ep > 1 else ():
        sent, _, returned = travel_bytes(one, job.samples, job.mode, job.ep)
        pairs = one.tokens.at(job.samples) * one.chosen
        most = max(most, sent + pairs * one.returned[job.mode] + returned)
    return most


def _kept_each(job: ModuleJob, block: Block) -> float:
    """The same without copies of weights, which microbatches share."""
    kept = kept_bytes(job, block)
    if recomputes(job, block) or job.software.compiled:
        return kept
    return kept - job.bytes(block.costs[job.mode].casts)


def module_stage_memory(job: ModuleJob, rank: int) -> StepMemory:
    """Memory of one stage's rank."""
    blocks = job.blocks_of(rank)
    count, trained = parameters_of(job, rank), trainable_of(job, rank)
    shards = job.sharers
    half, slots = job.mode == "half", 4.0 * job.model.optimizer_slots
    accumulates = job.microbatches > 1
    own = own_bytes(job)
    if job.zero == 3:
        weights, optimizer = own * count / shards, slots * trained / shards
    elif half:
        weights = 2.0 * trained + own * (
            count - trained
        )  # what is not trained stays as it was given
        optimizer = (4.0 + slots) * trained / shards
    else:
        weights = own * count
        optimizer = slots * trained / (shards if job.zero else 1)
    each = gradient_bytes(job.zero, half, shards, own)
    # ZeRO-2 widens its shard for the update, beside what it has.
    at_update = (3.0 if job.zero == 2 and half else 1.0) * each * trained
    gradients = 0.0
    if accumulates or job.zero == 1 or (job.ep > 1 and not job.zero):
        gradients, each = each * trained, 0.0
    flight = in_flight(job.schedule, job.pp, job.microbatches, job.virtual, job.group)[rank]
    others = (flight / job.virtual - 1) * sum(n * _kept_each(job, block) for block, n in blocks)
    kept, working = _largest(job, blocks, each)
    if at_update - gradients > kept + working + max(others, 0.0):
        kept, working, others = 0.0, at_update - gradients, 0.0
    # A rank's part of the experts is whole in every stage of ZeRO but for its optimizer state.
    experts, learning = experts_of(job, rank)
    low = 2.0 if half else own
    weights += low * learning + own * (experts - learning)
    optimizer += (
        (slots + (4.0 if half else 0.0)) * learning / (job.expert_sharers if job.zero else 1)
    )
    gradients += low * learning
    gathered = 0.0
    if job.zero == 3:
        # What is in no block stays gathered, and of blocks the one at work and the next; in a pipeline
        # all of a stage does through the step, and its gradients add up in float32 until its end.
        sizes = [
            (n * b.parameters_of(job.parts, job.ep), b.recompute == "block") for b, n in blocks
        ]
        loose = sum(size for size, is_block in sizes if job.pp > 1 or not is_block)
        most = max(
            (
                b.parameters_of(job.parts, job.ep)
                for b, _ in blocks
                if job.pp == 1 and b.recompute == "block"
            ),
            default=0.0,
        )
        wide = element_bytes(_computed(job))
        gathered = wide * (loose + 3.0 * most) + (4.0 * trained if job.pp > 1 else 0.0)
    received = 0.0
    if job.pp > 1:
        sent = sent_bytes(job, rank - 1 if rank else 0)
        received = sent * job.microbatches
        others += sent * flight
    activations = kept + max(others, 0.0)
    loss = 0.0
    if rank == job.pp - 1 and not blocks[-1][0].recompute:
        last = blocks[-1][0]
        most = max(job.bytes(last.costs[job.mode].peak_backward), _split_loss(job, last))
        loss = min(working, most)
    device = job.machine.device
    held = sum(n * block.buffer_bytes for block, n in blocks)
    temporary = activations + working + gathered
    return StepMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=loss,
        working=working - loss + gathered,
        buffers=device.workspace_bytes + 12e6 + received + held,
        rounding=0.5 * loss + 0.05 * (temporary - loss),
        context=device.context_bytes + (1.5e9 if job.devices > 1 else 0.0),
    )


def _largest(job: ModuleJob, blocks: list[tuple[Block, int]], each: float) -> tuple[float, float]:
    """What blocks before the worst one keep, and what that one takes; `each`: bytes of a gradient that
    backward leaves behind."""
    before = 0.0
    starts = []
    for block, n in blocks:
        starts.append(before)
        before += n * kept_bytes(job, block)
    worst = (0.0, 0.0)
    copies, later = 0.0, 0.0
    for (block, n), start in zip(reversed(blocks), reversed(starts), strict=True):
        # The last of equal blocks has most before it, the first has most gradients behind it.
        per_block = kept_bytes(job, block)
        trained = block.trainable_of(job.parts, job.ep)
        gradient = each * trained
        back = _backward(job, block, each > 0 and job.zero == 0)
        if job.zero == 2:
            # Its gradients on their way, and the part of them that comes back.
            wide = min(element_bytes(_computed(job)), own_bytes(job))
            back = max(back, wide * trained * (1 + 1 / job.sharers))
        moments = [
            (start + (n - 1) * per_block, back + later),
            (start, back + later + (n - 1) * gradient),
        ]
        worst = max(worst, *moments, key=sum)
        later += n * gradient
    for (block, n), start in zip(blocks, starts, strict=True):
        if recomputes(job, block) and job.recompute == "full":
            # Not kept, but autocast holds its copies of weights until forward is over.
            copies += n * job.bytes(block.costs[job.mode].casts)
        ahead = job.bytes(block.costs[job.mode].peak_forward)
        ahead = max(ahead + _on_the_way(job, block), _split_loss(job, block)) + copies
        worst = max(worst, (start + (n - 1) * kept_bytes(job, block), ahead), key=sum)
    return worst


def _split_loss(job: ModuleJob, block: Block) -> float:
    """The most while the loss of split classes is computed, which is another program than the whole one:
    see `parallel/tensor/loss.py`."""
    if job.tp == 1 or not block.logits.per_sample:
        return 0.0
    made = LOSS[job.mode] * block.logits.at(job.samples) / job.tp
    return job.bytes(block.costs[job.mode].at_loss) + made


def _backward(job: ModuleJob, block: Block, gradients: bool) -> float:
    costs = block.costs[job.mode]
    peak = job.bytes(costs.peak_gradients if gradients else costs.peak_backward)
    if job.tp > 1:
        split = costs.split_gradients if gradients else costs.split_backward
        peak = max(peak, *map(job.bytes, split), 0.0)
    if job.ep > 1:
        peak = max(peak, job.bytes(costs.spread_backward)) + _on_the_way(job, block)
    if job.software.compiled:
        peak -= job.bytes(costs.saved) - job.bytes(costs.saved_compiled)
    if recomputes(job, block):
        # The second pass is over before backward has let go of anything: it is asked for by the first
        # product, which has the gradient of the block's output by then, gathered if it is cut.
        again = job.bytes(costs.peak_forward) + job.bytes(costs.output)
        if job.sp and block.reductions_forward:
            each = block.reduced_forward.at(job.samples) / block.reductions_forward
            again += element_bytes(job.precision) * each
        peak = max(peak, again) + job.bytes(costs.saved_full)
        if (neighbours := _stretch(job, block) - 1) > 0:
            # The others of the same stretch are there again too, as far as they were not kept.
            alike = [b for b in job.model.blocks if b.recompute]
            again = sum(b.count * job.bytes(b.costs[job.mode].saved) for b in alike)
            if job.recompute == "selective":  # one layer's result is what the next one saves
                again -= sum(b.count * _results(job, b) for b in alike)
            peak += neighbours * max(0.0, again) / sum(b.count for b in alike)
    return peak


def _stretch(job: ModuleJob, block: Block) -> float:
    """Layers that are recomputed together: one block, or some of a `Sequential`'s."""
    if block.recompute == "block":
        return 1.0
    return _stretches(job.model)[block.names[0].rpartition(".")[0]]


@lru_cache(maxsize=256)
def _stretches(model: ModuleFacts) -> dict[str, float]:
    """Layers of a stretch, by the `Sequential` they are in: each is cut by itself, into about as many as
    the root of its layers, from a product on (`parallel/recompute.py`)."""
    layers: dict[str, list[bool]] = {}
    for block in model.blocks:
        multiplies = bool(block.costs["wide"].forward.products)
        for name in block.names if block.recompute == "stretch" else ():
            layers.setdefault(name.rpartition(".")[0], []).append(multiplies)
    found = {}
    for parent, kinds in layers.items():
        count = len(kinds) - kinds.index(True) if any(kinds) else 0
        pieces = min(sum(kinds), round(math.sqrt(count)))
        found[parent] = max(1.0, count / pieces) if pieces else 1.0
    return found


def module_memory(job: ModuleJob) -> StepMemory:
    """Of the stage that needs most. Stages with the same blocks need the less the later they are, since
    fewer microbatches are in flight there."""
    first: dict[object, int] = {}
    for rank in range(job.pp):
        first.setdefault(tuple(map(tuple, job.chunks_of(rank))), rank)
    ranks = {*first.values(), job.pp - 1}
    return max((module_stage_memory(job, rank) for rank in ranks), key=lambda m: m.allocated)
