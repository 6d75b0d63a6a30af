"""Time of a step: layers into stages, stages through the schedule, then gradients and optimizer.

`predict_time` returns parts that sum up to the step, on the rank that is busiest. Called by `search.py`,
`validate.py` and the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Final

from ridgeline.plan.beside import (
    compression_s,
    gradient_bytes,
    loader_s,
    local_sync_s,
    offloaded_s,
)
from ridgeline.plan.job import Job
from ridgeline.plan.kernels import moved_s
from ridgeline.plan.layer import Cost, LayerCost, end_cost, layer_cost
from ridgeline.plan.machine import Machine
from ridgeline.plan.network import (
    Group,
    collective_s,
    exposed_s,
    flat_ring_s,
    group_of,
    point_to_point_s,
)
from ridgeline.plan.own import (
    is_half,
    own_ends,
    own_layer,
    own_recompute,
    own_sharding,
    own_wire,
)
from ridgeline.plan.schedule import play

OWN: Final = "ridgeline"
Times = list[list[float]]
"""Seconds of a microbatch, by rank and chunk."""
Pipeline = Callable[[Job, Times, Times], float]
PIECES: Final = 3.0
"""How much longer copies of a few hundred kilobytes take than their bytes would."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they are spent on."""

    products: float
    attention: float
    elementwise: float
    tensor_parallel: float
    host: float
    """The device waits for the host to issue kernels."""
    gathers: float
    """Weights of ZeRO-3 that could not be hidden."""
    bubble: float
    """Waiting in the pipeline, and what stages send."""
    gradients: float
    """Exposed reduction of gradients over replicas."""
    optimizer: float
    other: float
    pressure: float = 0.0
    """What a device that is nearly full loses."""
    stragglers: float = 0.0
    """Waiting for the slowest of all devices."""
    host_link: float = 0.0
    """State or activations that go to the host and back, and the optimizer there."""
    storage: float = 0.0
    """Waiting for samples."""

    @property
    def seconds(self) -> float:
        return (
            self.products + self.attention + self.elementwise + self.tensor_parallel + self.host
            + self.gathers + self.bubble + self.gradients + self.optimizer + self.other
            + self.pressure + self.stragglers + self.host_link + self.storage
        )  # fmt: skip


@dataclass(frozen=True)
class _Stage:
    """One rank's microbatch, chunk by chunk."""

    forward: list[Cost]
    backward: list[Cost]


def recompute_cost(job: Job, layer: LayerCost) -> Cost:
    """What backward does again of a layer."""
    if job.software.name == OWN:
        return own_recompute(job.recompute, layer, job.software.compiled)
    if job.recompute == "full":
        return layer.forward
    if job.recompute == "selective":
        if job.software.attention != "flash":
            return layer.core_forward
        # Results of most products and of attention are kept; what is cheap is done again.
        return Cost(
            products=job.software.selective_products * layer.forward.products,
            elementwise=layer.forward.elementwise,
            kernels=layer.forward.kernels // 2,
        )
    return Cost()


def stage_costs(job: Job, rank: int) -> _Stage:
    """Forward and backward of one microbatch on one stage."""
    group = job.tp_group()
    if job.software.name == OWN and not job.software.compiled:
        half = is_half(job.zero, job.precision)
        layer = own_layer(job.machine, job.model, job.part, half, job.zero == 3, group)
        ends = own_ends(job.machine, job.model, job.part, half, group)
    else:
        layer = layer_cost(job.machine, job.model.active, job.part, job.software, group)
        layer = _with_dispatch(job, layer)
        ends = end_cost(job.machine, job.model, job.part, job.software, group, job.vocab_multiple)
    again = recompute_cost(job, layer)
    if job.software.name == OWN and job.zero == 3:
        ahead, back = own_sharding(job.pp, job.microbatches)
        layer = replace(layer, forward=layer.forward + ahead, backward=layer.backward + back)
    forward, backward = [], []
    layers = job.layers_of(rank)
    for chunk, count in enumerate(layers):
        f, b = layer.forward.times(count), (layer.backward + again).times(count)
        b = b + _gradient_sum(job, count)
        if rank == 0 and chunk == 0:
            f, b = f + ends.embed_forward, b + ends.embed_backward
        if rank == job.pp - 1 and chunk == job.virtual - 1:
            f, b = f + ends.head_forward, b + ends.head_backward
        forward.append(f)
        backward.append(b)
    return _Stage(forward, backward)


def _with_dispatch(job: Job, layer: LayerCost) -> LayerCost:
    """Tokens go to their experts and come back, forward and backward."""
    if not job.model.experts or job.ep == 1:
        return layer
    here = job.samples * job.model.seq / job.cp / (job.tp if job.sp else 1)
    sent = 2.0 * here * job.model.top_k * job.model.hidden
    ranks = group_of(job.machine, job.ep, job.tp)
    there = 2 * collective_s(job.machine, "all_to_all", sent, ranks)
    trips = Cost(communication=there, kernels=8)
    return replace(layer, forward=layer.forward + trips, backward=layer.backward + trips)


def _stages(job: Job) -> list[_Stage]:
    """All stages; those in the middle with as many layers are alike."""
    known: dict[tuple[int, ...], _Stage] = {}
    stages = []
    for rank in range(job.pp):
        edge = 0 if rank == 0 else 2 if rank == job.pp - 1 else 1
        key = (edge, *job.layers_of(rank))
        if key not in known:
            known[key] = stage_costs(job, rank)
        stages.append(known[key])
    return stages


def _gradient_sum(job: Job, layers: int) -> Cost:
    """Adding a microbatch's weight gradients to those before it."""
    if job.software.fused_gradient_sum or job.model.frozen:
        return Cost()
    count = layers * job.model.layer_parameters(job.tp)
    moved = count * (2.0 + 2.0 * job.software.gradient_bytes)
    kernels = 12 * layers
    return Cost(elementwise=moved_s(job.machine.device, moved, kernels), kernels=kernels)


def parameters_of(job: Job, rank: int) -> int:
    """Of one stage on one tensor-parallel rank."""
    model = job.model
    count = sum(job.layers_of(rank)) * model.layer_parameters(job.tp)
    if rank == 0:
        count += model.embedding_parameters(job.tp, job.vocab_multiple)
    if rank == job.pp - 1:
        count += model.norm_parameters
        if not model.tied or job.pp > 1:
            count += model.head_parameters(job.tp, job.vocab_multiple)
    return count


def predict_time(job: Job, pipeline: Pipeline | None = None) -> StepTime:
    """Seconds of a step; `pipeline`: in place of playing the schedule (see `shortest_s`)."""
    machine = job.machine
    host_s = machine.device.host_kernel_s * job.software.host_share
    stages = _stages(job)
    sharp = job.sharpness
    forward = [[c.seconds(host_s, sharp) for c in stage.forward] for stage in stages]
    backward = [[c.seconds(host_s, sharp) for c in stage.backward] for stage in stages]
    gathers = [0.0] * job.pp
    for rank in range(job.pp) if _reduces_each(job) else ():
        for chunk, layers in enumerate(job.layers_of(rank)):
            count = layers * job.model.layer_parameters(job.tp)
            if chunk == 0 and rank in (0, job.pp - 1):
                count += parameters_of(job, rank) - sum(job.layers_of(rank)) * (
                    job.model.layer_parameters(job.tp)
                )
            f, b = _sharded_extra(job, count, forward[rank][chunk], backward[rank][chunk])
            forward[rank][chunk] += f
            backward[rank][chunk] += b
            gathers[rank] += (f + b) * job.microbatches
    piped = (pipeline or pipeline_s)(job, forward, backward)
    sums = [sum(f) + sum(b) for f, b in zip(forward, backward, strict=True)]
    busiest = max(range(job.pp), key=sums.__getitem__)
    stage = stages[busiest]
    total = Cost()
    for cost in (*stage.forward, *stage.backward):
        total = total + cost
    total = total.times(job.microbatches)
    busy = sums[busiest] * job.microbatches
    reduction = max(
        _gradients_s(job, rank, sum(backward[rank])) for rank in {0, busiest, job.pp - 1}
    )
    away = max(
        offloaded_s(
            job,
            parameters_of(job, rank),
            sum(job.layers_of(rank)),
            sum(forward[rank]),
            sum(backward[rank]),
        )
        for rank in {0, busiest, job.pp - 1}
    )
    time = StepTime(
        products=total.products,
        attention=total.attention,
        elementwise=total.elementwise,
        tensor_parallel=total.communication,
        host=busy - gathers[busiest] - total.device_s,
        gathers=gathers[busiest],
        bubble=piped - busy,
        gradients=reduction,
        optimizer=max(_optimizer_s(job, rank) for rank in {0, job.pp - 1}),
        other=machine.step_s,
        stragglers=slowest_of(job.devices) * machine.skew * total.computing_s,
        host_link=away,
    )
    return replace(time, storage=max(0.0, loader_s(job) - time.seconds))


@lru_cache(maxsize=1024)
def slowest_of(count: int) -> float:
    """By how many standard deviations the slowest of so many devices is expected to be slower than the
    mean: the largest of as many normal values (Blom's formula)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def lower_bound_s(job: Job) -> float:
    """What no schedule can beat: a stage's own work, the way there and back through the stages before
    it, the exposed reduction of gradients and the optimizer."""
    host_s = job.machine.device.host_kernel_s * job.software.host_share
    sharp, blocking = job.sharpness, not job.software.overlap_pp
    best = before = 0.0
    known: dict[tuple[int, ...], tuple[float, float, float]] = {}
    sends: dict[bool, float] = {}
    crossings = job.crossings()
    for rank in range(job.pp):
        edge = 0 if rank == 0 else 2 if rank == job.pp - 1 else 1
        key = (edge, *job.layers_of(rank))
        if key not in known:
            stage = stage_costs(job, rank)
            forward = [c.seconds(host_s, sharp) for c in stage.forward]
            backward = [c.seconds(host_s, sharp) for c in stage.backward]
            if _reduces_each(job):
                count = min(job.layers_of(rank)) * job.model.layer_parameters(job.tp)
                for chunk in range(job.virtual):
                    f, b = _sharded_extra(job, count, forward[chunk], backward[chunk])
                    forward[chunk] += f
                    backward[chunk] += b
            known[key] = (sum(forward), sum(backward), forward[0] + backward[0])
        ahead, back, first = known[key]
        crosses = crossings[rank]
        if job.pp > 1 and crosses not in sends:
            sends[crosses] = send_s(job, rank)
        send = sends.get(crosses, 0.0)
        sent = (rank < job.pp - 1) + (rank > 0)
        work = ahead + back + (sent * min(sends.values()) if blocking and job.pp > 1 else 0.0)
        # The last gradient sent is in both terms.
        twice = min(sends.values()) if blocking and rank > 0 else 0.0
        best = max(best, job.microbatches * work + before - twice)
        before += 0.0 if job.schedule == "zerobubble" else first + (2 * send if job.pp > 1 else 0.0)
    reduction = _gradients_s(job, 0, float("inf"))
    return best + reduction + _optimizer_s(job, 0) + job.machine.step_s


def pipeline_s(job: Job, forward: Times, backward: Times) -> float:
    """All microbatches through all stages, event by event."""
    if job.pp == 1:
        return job.microbatches * (sum(forward[0]) + sum(backward[0]))
    send = [send_s(job, rank) for rank in range(job.pp)]
    blocking = not job.software.overlap_pp
    if job.schedule == "zerobubble":
        # Half of backward is for weights that are trained, and can wait.
        waits = 0.0 if job.model.frozen else 0.5
        weights = [[waits * s for s in row] for row in backward]
        inputs = [[(1.0 - waits) * s for s in row] for row in backward]
        return play(
            "zerobubble", job.microbatches, forward, inputs, send, weights, blocking, job.group
        ).seconds
    return play(
        job.schedule, job.microbatches, forward, backward, send, None, blocking, job.group
    ).seconds


def shortest_s(job: Job, forward: Times, backward: Times) -> float:
    """The busiest stage's work and the way through the others once: quick, and near enough to tell how
    a small change of the stages' times changes what `pipeline_s` says."""
    if job.pp == 1:
        return pipeline_s(job, forward, backward)
    sends = [0.0 if job.software.overlap_pp else send_s(job, rank) for rank in range(job.pp)]
    work = [sum(f) + sum(b) for f, b in zip(forward, backward, strict=True)]
    longest = max(range(job.pp), key=work.__getitem__)
    through = sum((work[r] / job.virtual + 2 * sends[r]) for r in range(job.pp) if r != longest)
    return job.microbatches * (work[longest] + 2 * sends[longest] * job.virtual) + through


def send_s(job: Job, rank: int) -> float:
    """An activation from one stage to the next."""
    size = 4.0 if job.precision in ("fp32", "tf32") else 2.0
    num_bytes = size * job.samples * job.model.seq / job.cp * job.model.hidden
    crosses = job.crosses_nodes(rank)
    if job.tp > 1 and (job.sp or job.software.scatter_pp):
        sent = point_to_point_s(job.machine, num_bytes / job.tp, crosses)
        if not job.sp:
            sent += collective_s(job.machine, "all_gather", num_bytes, job.tp_group())
        return sent
    return point_to_point_s(job.machine, num_bytes, crosses)


def _reduces_each(job: Job) -> bool:
    """Whether every microbatch gathers weights or reduces gradients."""
    if job.dp * job.cp == 1:
        return False
    return job.zero == 3 or (job.zero == 2 and job.software.name == OWN)


def _sharded_extra(
    job: Job, count: float, forward_s: float, backward_s: float
) -> tuple[float, float]:
    """Time that gathering weights and scattering gradients adds to a microbatch of some layers."""
    group = job.dp_group()
    if job.shard:
        group = group_of(job.machine, job.shard, job.tp)
    ring = flat_ring_s if job.software.flat_zero else collective_s
    kind = "all_reduce" if job.software.zero_sums_whole else "reduce_scatter"
    weight, gradient = 2.0, float(job.software.reduce_bytes)
    if job.software.name == OWN:
        weight, gradient = own_wire(job.zero, job.precision)
    reduce = 0.0 if job.model.frozen else ring(job.machine, kind, gradient * count, group)
    gather = 0.0
    if job.zero == 3:
        gather = ring(job.machine, "all_gather", weight * count, group)
        if job.software.name == OWN and job.pp > 1:
            # A stage is gathered in the first forward and reduced in the last backward of a step.
            once = (
                exposed_s(job.machine, gather, forward_s),
                exposed_s(job.machine, reduce, backward_s),
            )
            return once[0] / job.microbatches, once[1] / job.microbatches
    return (
        exposed_s(job.machine, gather, forward_s),
        exposed_s(job.machine, gather + reduce, backward_s),
    )


def _gradients_s(job: Job, rank: int, backward_s: float) -> float:
    """Reduction of gradients over replicas, as far as it is not hidden behind the last backward."""
    group: Group = job.dp_group()
    if group.size == 1:
        return 0.0
    if job.model.frozen:
        return 0.0
    machine, count = job.machine, parameters_of(job, rank)
    late = 0.0
    averaged = local_sync_s(job, count)
    if averaged is not None:
        return averaged
    wire = float(job.software.reduce_bytes * count)
    if job.software.name == OWN:
        wire = gradient_bytes(job, count)
    if job.zero == 3:
        if not job.shard or job.shard == job.dp:
            return 0.0
        across = Group(job.dp // job.shard, 1)
        seconds = collective_s(machine, "all_reduce", wire / job.shard, across)
    elif job.zero:
        # Every rank gets the sum of its part, and sends its new weights to the others.
        weight = own_wire(job.zero, job.precision)[0] if job.software.name == OWN else 2.0
        gather = collective_s(machine, "all_gather", weight * count, group)
        # This library waits for them before the next step begins; nothing is left to hide that.
        late, seconds = (gather, 0.0) if job.software.name == OWN else (0.0, gather)
        if not _reduces_each(job):
            seconds += collective_s(machine, "reduce_scatter", wire, group)
    else:
        seconds = collective_s(machine, "all_reduce", wire, group)
    seconds += _experts_s(job, rank)
    if job.model.tied and job.pp > 1 and rank in (0, job.pp - 1):
        tied = 2.0 * job.model.head_parameters(job.tp, job.vocab_multiple)
        seconds += point_to_point_s(machine, tied, job.crosses_nodes(0))
    # With the optimizer on the host, gradients are added up in one buffer and reduced at the end.
    overlaps = job.software.overlap_dp and job.offload != "optimizer"
    exposed = exposed_s(job.machine, seconds, backward_s) if overlaps else seconds
    return exposed + late + compression_s(job, count)


def _experts_s(job: Job, rank: int) -> float:
    """Gradients of experts are summed over the ranks that hold the same ones."""
    if not job.model.experts or job.expert_copies == 1:
        return 0.0
    split = job.expert_tp or job.tp
    held = sum(job.layers_of(rank)) * job.model.expert_parameters(job.ep, split)
    group = group_of(job.machine, job.expert_copies, job.ep * split)
    wire = float(job.software.reduce_bytes) * held
    if not job.zero:
        return collective_s(job.machine, "all_reduce", wire, group)
    reduce = collective_s(job.machine, "reduce_scatter", wire, group)
    return reduce + collective_s(job.machine, "all_gather", 2.0 * held, group)


def rank_alone_s(job: Job, rank: int = 0) -> float:
    """A step of one rank that waits for nobody and sends nothing: what a fake process group shows."""
    host_s = job.machine.device.host_kernel_s * job.software.host_share
    stage = stage_costs(job, rank)
    gathered = parameters_of(job, rank) if job.zero == 3 else 0.0
    costs = unsent(job.machine, (*stage.forward, *stage.backward), gathered)
    work = sum(cost.seconds(host_s, job.sharpness) for cost in costs)
    return job.microbatches * work + _optimizer_s(job, rank) + job.machine.step_s


def unsent(machine: Machine, costs: Sequence[Cost], gathered: float) -> list[Cost]:
    """The chunks of a microbatch, forward and backward, with nothing sent: in place of gathering weights
    (so many parameters) they are copied in small pieces, twice."""
    each = moved_s(machine.device, 2 * 4.0 * gathered * PIECES / len(costs), 0)
    return [replace(cost, communication=0.0, elementwise=cost.elementwise + each) for cost in costs]


def _optimizer_s(job: Job, rank: int) -> float:
    if job.offload in ("optimizer", "params") or job.model.frozen:
        return 0.0
    count = parameters_of(job, rank) / (job.sharers if job.zero else 1)
    if job.model.experts:
        held = job.model.expert_parameters(job.ep, job.expert_tp or job.tp)
        count += sum(job.layers_of(rank)) * held / (job.expert_copies if job.zero else 1)
    moved = job.software.optimizer_bytes_moved - 8.0 * (2 - job.model.optimizer_slots)
    return moved_s(job.machine.device, moved * count, 20)
