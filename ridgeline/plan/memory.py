"""Memory of one rank, by part, in bytes: what is held between steps, and the peak of a step.

Weights, gradients and optimizer state follow from the parameters of the stage and what the replicas shard;
activations follow Korthikanti et al. 2022, product by product, times the microbatches that the schedule
has in flight on the stage. `allocated` is what tensors take, `reserved` what the allocator holds for them,
`device` what a monitor of the device shows. Called by `search.py`, `validate.py` and the commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ridgeline.plan.activations import kept_activations, layer_activations
from ridgeline.plan.beside import BLOCKS_HERE, host_bytes, offloaded_layers
from ridgeline.plan.job import Job, Placed
from ridgeline.plan.machine import Machine
from ridgeline.plan.own import is_half, own_activations, own_logits
from ridgeline.plan.schedule import play
from ridgeline.plan.time import OWN, parameters_of

GIB = float(2**30)


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Kept between forward and backward."""
    logits: float
    """The loss and its gradient."""
    working: float
    """The largest of what one layer needs while it runs: recomputed activations, gradients of
    activations, gathered weights."""
    buffers: float
    """Of communication and of the product library."""
    rounding: float
    """Held by the allocator and given to nobody."""
    context: float
    """The driver's, and the communication library's."""
    host: float = 0.0
    """Not on the device: what `offload` keeps on its host."""

    @property
    def held(self) -> float:
        """All but what a step's own work needs."""
        return self.weights + self.gradients + self.optimizer + self.buffers

    @property
    def allocated(self) -> float:
        return self.held + self.activations + self.logits + self.working

    @property
    def reserved(self) -> float:
        return self.allocated + self.rounding

    @property
    def device(self) -> float:
        return self.reserved + self.context


@lru_cache(maxsize=4096)
def in_flight(
    schedule: str, stages: int, microbatches: int, chunks: int, group: int = 0
) -> tuple[int, ...]:
    """Activations of how many (microbatch, chunk) pairs each rank holds at most."""
    if stages == 1:
        return (1,)
    even = [[1.0] * chunks for _ in range(stages)]
    back = [[2.0] * chunks for _ in range(stages)]
    count = min(microbatches, 3 * max(stages, group) + microbatches % stages)
    if schedule == "gpipe":
        return (microbatches,) * stages
    weights = even if schedule == "zerobubble" else None
    played = play(schedule, count, even, back, [0.0] * stages, weights, group=group)
    return played.in_flight


def gradient_bytes(zero: int, half: bool, shards: int, own: float = 4.0) -> float:
    """Of a parameter, that backward leaves behind in this library: `own` bytes has the parameter itself.

    Shards of ZeRO-3 are as wide as the parameter; with ZeRO-1 and 2 weights and gradients have 16 bits
    where they are computed with in 16 bits.
    """
    wide = 2.0 if half and zero < 3 else own
    return wide / shards if zero >= 2 else wide


def _own_memory(job: Job, rank: int) -> StepMemory:
    """What this library holds: the largest of five moments, the loss (where autocast still has its casts
    of all weights) and its backward, the first layer that goes back, with all activations still there,
    the end of backward, where all gradients are there, or the update, where ZeRO-2 widens its own."""
    model, part = job.model, job.part
    count, shards = float(parameters_of(job, rank)), job.sharers
    half = is_half(job.zero, job.precision)
    casts = job.precision in ("bf16", "fp16", "fp8") and not half
    wide = 2.0 if half or casts else 4.0
    layers = sum(job.layers_of(rank))
    head = model.head_parameters(job.tp) if rank == job.pp - 1 else 0
    products = float(layers * model.layer_matrices(job.tp) + head)
    accumulates = job.microbatches > 1
    state = 4.0 * model.optimizer_slots * count
    if job.zero == 3:
        weights, optimizer = 4.0 * count / shards, state / shards
    elif half:
        weights, optimizer = 2.0 * count, (4.0 * count + state) / shards
    else:
        weights, optimizer = 4.0 * count, state / (shards if job.zero else 1)
    # What backward leaves behind, which is held through the step where it adds up or has its own place.
    left = gradient_bytes(job.zero, half, shards) * count
    buffered = accumulates or job.zero == 1
    at_update = left
    if job.offload in ("optimizer", "params"):
        optimizer = 0.0
        if job.offload == "params":  # gradients of shards go to the host as they come
            weights = left = at_update = 0.0
        elif job.zero < 2:
            buffered = True
    elif job.zero == 2 and half:
        at_update = 3.0 * left  # in 16 bits and, for a moment beside it, in 32
    gradients = left if buffered else 0.0
    everything, selective, full = own_activations(model, part, half)
    kept = {"none": everything, "selective": selective, "full": full}[job.recompute]
    flight = in_flight(job.schedule, job.pp, job.microbatches, job.virtual, job.group)[rank]
    activations = kept * layers / job.virtual * flight
    if job.offload == "activations":
        activations = min(activations, kept * BLOCKS_HERE)
    whole = part.samples * model.seq / part.cp * model.hidden
    n = whole / (job.tp if job.sp else 1)
    loss, loss_back = own_logits(model, part, job.zero) if rank == job.pp - 1 else (0.0, 0.0)
    # The last norm's input, and what the head reads, which is all of the sequence.
    end = 4.0 * n + 2.0 * whole if rank == job.pp - 1 else 0.0
    cached = 2.0 * products if casts and job.recompute != "selective" else 0.0
    saved = 2.0 * (products if job.recompute == "none" else head) if casts else 0.0
    in_graph = saved
    if job.pp > 1:
        saved = cached
    if job.zero == 3:
        # The root's own weights stay gathered: embedding and head.
        saved = wide * (model.embedding_parameters(job.tp) * (rank == 0) + head)
        if model.tied and job.pp == 1:
            saved /= 2.0
        if job.pp > 1:
            # A stage's weights stay gathered through the step, and its gradients add up in float32 before
            # they are scattered at its end.
            saved = cached = in_graph = (wide + 4.0) * count
    received = 0.0
    if job.pp > 1:
        # A place for what each microbatch receives, and what was sent until it is used.
        # They have the type of before weights became 16 bits wide.
        received = 4.0 * n * job.microbatches
        activations += 4.0 * n * flight
    again = everything if job.recompute != "none" else 0.0
    last = left - gradients
    # ZeRO-2 makes the place for its shard when the first bucket is there.
    early = last if job.zero == 2 else 0.0
    moving = 3 * wide * model.layer_matrices(job.tp)
    if job.zero == 2 and rank == 0:
        # The embedding's gradient on its way, and the part of it that comes back.
        moving = max(moving, wide * model.embedding_parameters(job.tp) * (1 + 1 / shards))
    moments = (
        (activations, loss + end, cached),
        (activations, loss_back + end, saved),
        (activations, 0.0, in_graph + early + again + everything / 2),
        (kept, 0.0, last + again + everything / 2 + moving),
        (0.0, 0.0, at_update - gradients),
    )
    kept_then, logits, working = max(moments, key=sum)
    temporary = kept_then + logits + working
    return StepMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=kept_then,
        logits=logits,
        working=working,
        buffers=job.machine.device.workspace_bytes + 12e6 + received,
        rounding=0.5 * loss_back + 0.05 * (temporary - logits),
        context=job.machine.device.context_bytes + (1.5e9 if job.devices > 1 else 0.0),
        host=host_bytes(job, count, layers, flight),
    )


def stage_memory(job: Job, rank: int) -> StepMemory:
    """Memory of one stage's rank."""
    if job.software.name == OWN:
        return _own_memory(job, rank)
    model, software = job.model, job.software
    count = float(parameters_of(job, rank))
    shards = job.sharers
    weights = count * software.weight_bytes
    gradients = count * software.gradient_bytes
    optimizer = count * (8.0 + software.master_bytes)
    if job.zero >= 1:
        optimizer /= shards
    if model.experts:
        split = job.expert_tp or job.tp
        held = float(sum(job.layers_of(rank)) * model.expert_parameters(job.ep, split))
        weights += held * software.weight_bytes
        gradients += held * software.gradient_bytes
        copies = job.expert_copies if job.zero else 1
        optimizer += held * (8.0 + software.master_bytes) / copies
    if job.zero >= 2:
        gradients /= shards
    if job.zero == 3:
        weights /= shards
    if model.frozen:
        gradients = optimizer = 0.0
    layers = sum(job.layers_of(rank))
    per_chunk = layers / job.virtual
    flight = in_flight(job.schedule, job.pp, job.microbatches, job.virtual, job.group)[rank]
    kept = kept_activations(job) * per_chunk * flight
    if job.offload == "activations":
        here = max(layers - offloaded_layers(job, layers), BLOCKS_HERE) / layers
        kept *= min(here, 1.0)
    working = layer_activations(job) - kept_activations(job) if job.recompute != "none" else 0.0
    tokens = job.samples * model.seq / job.cp
    stream = 2.0 * tokens * model.hidden / (job.tp if job.sp else 1)
    logits = 0.0
    if rank == job.pp - 1:
        vocab = model.padded_vocab(job.vocab_multiple * job.tp) / job.tp
        logits = software.logit_bytes * tokens * vocab + 2 * stream
    if rank == 0 and model.dropout:
        kept += 0.5 * stream * flight
    if job.zero == 3:
        gathered = 2.0 * model.layer_parameters(job.tp)
        # The layer at work and the one that is fetched, and the gradient before it is scattered.
        working += 2 * gathered
        if not model.frozen:
            working += max(software.reduce_bytes, 2) * model.layer_parameters(job.tp)
        if rank == job.pp - 1:
            working += 2.0 * model.head_parameters(job.tp, job.vocab_multiple)
    buffers = software.buffer_bytes + job.machine.device.workspace_bytes
    if software.dummy_gradients and not model.frozen:
        # One empty weight gradient of each shape, handed to autograd in place of the real one.
        shapes = model.layer_matrices(job.tp)
        if model.experts:
            shapes += round(model.one_expert / (job.expert_tp or job.tp))
        if rank == job.pp - 1 or (rank == 0 and model.tied and job.pp == 1):
            shapes += model.head_parameters(job.tp, job.vocab_multiple)
        buffers += 2.0 * shapes
    allocated = weights + gradients + optimizer + buffers + kept + logits + working
    return StepMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=kept,
        logits=logits,
        working=working,
        buffers=buffers,
        rounding=software.fragmentation * (allocated - weights - gradients - optimizer),
        context=job.machine.device.context_bytes + (1.5e9 if job.devices > 1 else 0.0),
        host=host_bytes(job, count, layers, flight),
    )


def predict_memory(job: Job) -> StepMemory:
    """Of the stage that needs most."""
    ranks = range(job.pp) if job.pp <= 4 else (0, 1, job.pp // 2, job.pp - 1)
    return max((stage_memory(job, rank) for rank in ranks), key=lambda m: m.allocated)


def fits(job: Placed, memory: StepMemory, margin: float = 0.04) -> bool:
    """Whether a step runs, with a share of the device kept free for what is not foreseen."""
    if memory.host > host_room(job.machine):
        return False
    return memory.device <= (1.0 - margin) * job.machine.device.memory_bytes


def host_room(machine: Machine) -> float:
    """A device's share of what its host has, of which the system and the loader keep some."""
    whole = machine.host_memory_bytes or machine.devices_per_node * machine.device.memory_bytes
    return 0.9 * whole / machine.devices_per_node
