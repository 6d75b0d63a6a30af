"""Time of a step of a traced module: blocks into stages, stages through the schedule, gradients, optimizer.

The same parts as `time.py` has for transformers, and the same rules of what hides behind what; the sizes
come from the module's facts. Called through `kinds.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ridgeline.plan.beside import loader_s
from ridgeline.plan.general import ModuleJob, again_of, cost_of
from ridgeline.plan.kernels import moved_s
from ridgeline.plan.layer import Cost
from ridgeline.plan.module import ModuleFacts
from ridgeline.plan.network import Group, collective_s, exposed_s, group_of, point_to_point_s
from ridgeline.plan.own import own_sharding, own_wire
from ridgeline.plan.schedule import play
from ridgeline.plan.time import StepTime, slowest_of, unsent

Stage = tuple[list[Cost], list[Cost]]
"""Forward and backward of a microbatch, chunk by chunk."""


def _stage(job: ModuleJob, rank: int) -> Stage:
    forward, backward = [], []
    for chunk in job.chunks_of(rank):
        ahead, back = Cost(), Cost()
        for index, count in chunk:
            cost = cost_of(job, index)
            ahead += cost.forward.times(count)
            back += (cost.backward + again_of(job, index)).times(count)
            if job.zero == 3 and job.model.blocks[index].recompute == "block":
                gather, gather_back = own_sharding(job.pp, job.microbatches)
                ahead, back = ahead + gather.times(count), back + gather_back.times(count)
        forward.append(ahead)
        backward.append(back)
    return forward, backward


def _stages(job: ModuleJob) -> list[Stage]:
    known: dict[object, Stage] = {}
    stages = []
    for rank in range(job.pp):
        key = tuple(job.chunks_of(rank))
        if key not in known:
            known[key] = _stage(job, rank)
        stages.append(known[key])
    return stages


def parameters_of(job: ModuleJob, rank: int) -> float:
    """Of one stage on one tensor-parallel rank, but for experts that it shares with others."""
    own = sum(
        count * block.parameters_of(job.parts, job.ep) for block, count in job.blocks_of(rank)
    )
    return own + _tied(job, rank)


def experts_of(job: ModuleJob, rank: int) -> tuple[float, float]:
    """Parameters of those, and the ones that have gradients; none without `ep`."""
    found = [(count, *block.experts_of(job.ep)) for block, count in job.blocks_of(rank)]
    return sum(n * a for n, a, _ in found), sum(n * b for n, _, b in found)


def _tied(job: ModuleJob, rank: int) -> float:
    """What the last stage holds of another's parameters, divided as that has them."""
    if job.pp == 1 or rank < job.pp - 1:
        return 0.0
    first = job.model.blocks[0]
    share = first.parameters_of(job.parts) / first.parameters if first.parameters else 1.0
    return job.model.tied_parameters * share


def trainable_of(job: ModuleJob, rank: int) -> float:
    """Of those, the ones that have gradients."""
    own = sum(count * block.trainable_of(job.parts, job.ep) for block, count in job.blocks_of(rank))
    return own + _tied(job, rank)


def _timed(job: ModuleJob) -> tuple[list[Stage], list[list[float]], list[list[float]], list[float]]:
    """Stages, seconds forward and backward by chunk, and what sharding adds of them a step."""
    host_s = job.machine.device.host_kernel_s * job.software.host_share
    sharp = job.sharpness
    stages = _stages(job)
    forward = [[c.seconds(host_s, sharp) for c in ahead] for ahead, _ in stages]
    backward = [[c.seconds(host_s, sharp) for c in back] for _, back in stages]
    gathers = [0.0] * job.pp
    for rank in range(job.pp) if _reduces_each(job) else ():
        for place, chunk in enumerate(job.chunks_of(rank)):
            blocks = job.model.blocks
            counts = (
                sum(n * blocks[i].parameters_of(job.parts, job.ep) for i, n in chunk),
                sum(n * blocks[i].trainable_of(job.parts, job.ep) for i, n in chunk),
            )
            f, b = _sharded_extra(job, *counts, forward[rank][place], backward[rank][place])
            forward[rank][place] += f
            backward[rank][place] += b
            gathers[rank] += (f + b) * job.microbatches
    return stages, forward, backward, gathers


def module_time(job: ModuleJob) -> StepTime:
    """Seconds of a step."""
    stages, forward, backward, gathers = _timed(job)
    sums = [sum(f) + sum(b) for f, b in zip(forward, backward, strict=True)]
    busiest = max(range(job.pp), key=sums.__getitem__)
    # A long run is played in part; what it comes to is never less than the busiest stage's own work.
    pipeline = max(_pipeline_s(job, forward, backward), job.microbatches * sums[busiest])
    total = Cost()
    for cost in (*stages[busiest][0], *stages[busiest][1]):
        total += cost
    total = total.times(job.microbatches)
    busy = sums[busiest] * job.microbatches
    time = StepTime(
        products=total.products,
        attention=total.attention,
        elementwise=total.elementwise,
        tensor_parallel=total.communication,
        host=busy - gathers[busiest] - total.device_s,
        gathers=gathers[busiest],
        bubble=pipeline - busy,
        gradients=max(_gradients_s(job, rank, sum(backward[rank])) for rank in range(job.pp)),
        optimizer=max(_optimizer_s(job, rank) for rank in range(job.pp)),
        other=job.machine.step_s,
        stragglers=slowest_of(job.devices) * job.machine.skew * total.computing_s,
    )
    return replace(time, storage=max(0.0, loader_s(job) - time.seconds))


def module_alone_s(job: ModuleJob, rank: int) -> float:
    """A step of one rank that waits for nobody and sends nothing."""
    host_s = job.machine.device.host_kernel_s * job.software.host_share
    forward, backward = _stage(job, rank)
    gathered = parameters_of(job, rank) if job.zero == 3 else 0.0
    costs = unsent(job.machine, (*forward, *backward), gathered)
    work = sum(cost.seconds(host_s, job.sharpness) for cost in costs)
    return job.microbatches * work + _optimizer_s(job, rank) + job.machine.step_s


def module_bound_s(job: ModuleJob) -> float:
    """What no schedule can beat: the busiest stage's own work, the reduction of gradients as far as
    nothing hides it, and the optimizer."""
    _, forward, backward, _ = _timed(job)
    work = max(sum(f) + sum(b) for f, b in zip(forward, backward, strict=True))
    rest = max(_gradients_s(job, rank, float("inf")) for rank in range(job.pp))
    rest += max(_optimizer_s(job, rank) for rank in range(job.pp))
    return job.microbatches * work + rest + job.machine.step_s


def module_least_bytes(job: ModuleJob) -> float:
    """Weights and optimizer state as sharded, of the stage that has least."""
    return min(_least_of(job, rank) for rank in range(job.pp))


def _least_of(job: ModuleJob, rank: int) -> float:
    count, experts = trainable_of(job, rank), experts_of(job, rank)[1]
    slots = 4.0 * job.model.optimizer_slots
    own = job.model.parameter_bytes / max(job.model.num_parameters, 1)
    if not job.zero:
        return (own + slots) * (count + experts)
    low = min(2.0, own)
    apart = (low + slots / job.expert_sharers) * experts
    if job.zero == 3:
        return (own + slots) * count / job.sharers + apart
    return low * count + slots * count / job.sharers + apart


def module_flops(job: ModuleJob) -> float:
    """The module's own FLOPs of a step, without recompute, attention counted causally."""
    return _flops(job.model, job.samples) * job.dp * job.microbatches


@lru_cache(maxsize=4096)
def _flops(model: ModuleFacts, samples: int) -> float:
    total = 0.0
    for block in model.blocks:
        costs = block.costs["wide"]
        for work in (costs.forward, costs.backward):
            total += block.count * sum(p.flops(samples) for p in work.products)
        for a in costs.forward.attention:
            if a.kind == "fused":
                once = 4.0 * a.scores.at(samples) * a.width * (0.5 if a.causal else 1.0)
                total += 3.0 * block.count * a.count * once
    return total


def _pipeline_s(job: ModuleJob, forward: list[list[float]], backward: list[list[float]]) -> float:
    if job.pp == 1:
        return job.microbatches * (sum(forward[0]) + sum(backward[0]))
    send = [send_s(job, rank) for rank in range(job.pp)]
    blocking, count = not job.software.overlap_pp, job.microbatches
    if job.schedule == "zerobubble":
        # Half of backward is for weights, and can wait.
        halves = [[0.5 * s for s in row] for row in backward]
        done = play("zerobubble", count, forward, halves, send, halves, blocking, job.group)
        return done.seconds
    return play(job.schedule, count, forward, backward, send, None, blocking, job.group).seconds


def sent_bytes(job: ModuleJob, rank: int) -> float:
    """From a rank's first chunk to the next rank's, a microbatch: of the type that it had when the stages
    were planned, which is before weights become 16 bits wide."""
    last = job.chunks_of(rank)[0][-1][0]
    mode = "cast" if job.mode == "half" else job.mode
    return job.bytes(job.model.blocks[last].costs[mode].output)


def send_s(job: ModuleJob, rank: int) -> float:
    return point_to_point_s(job.machine, sent_bytes(job, rank), job.crosses_nodes(rank))


def _reduces_each(job: ModuleJob) -> bool:
    """Whether every microbatch gathers weights or reduces gradients."""
    return job.dp > 1 and job.zero >= 2


def _sharded_extra(
    job: ModuleJob, count: float, trained: float, forward_s: float, backward_s: float
) -> tuple[float, float]:
    """Time that gathering weights and scattering gradients adds to a microbatch of some blocks."""
    group = group_of(job.machine, job.shard, job.tp) if job.shard else job.dp_group()
    weight, gradient = own_wire(job.zero, job.precision)
    reduce = collective_s(job.machine, "reduce_scatter", gradient * trained, group)
    gather = 0.0
    if job.zero == 3:
        gather = collective_s(job.machine, "all_gather", weight * count, group)
        if job.pp > 1:
            # A stage is gathered in the first forward and reduced in the last backward of a step.
            once = (
                exposed_s(job.machine, gather, forward_s),
                exposed_s(job.machine, reduce, backward_s),
            )
            return once[0] / job.microbatches, once[1] / job.microbatches
    return exposed_s(job.machine, gather, forward_s), exposed_s(
        job.machine, gather + reduce, backward_s
    )


def _gradients_s(job: ModuleJob, rank: int, backward_s: float) -> float:
    """Reduction of gradients over replicas and tiles, as far as the last backward does not hide it."""
    group = job.dp_group()
    if group.size == 1:
        return 0.0
    machine, count, late = job.machine, trainable_of(job, rank), 0.0
    own = job.model.parameter_bytes / max(job.model.num_parameters, 1)
    weight, gradient = own_wire(job.zero, job.precision)
    wire = (gradient if job.zero else own) * count
    apart = _experts_reduced_s(job, rank)
    if job.zero == 3:
        if not job.shard or job.shard == job.dp:
            return apart
        across = Group(job.dp // job.shard, 1)
        seconds = collective_s(machine, "all_reduce", wire / job.shard, across)
    elif job.zero:
        # New weights are waited for before the next step begins; nothing is left to hide that.
        late, seconds = collective_s(machine, "all_gather", weight * count, group), 0.0
        if not _reduces_each(job):
            seconds = collective_s(machine, "reduce_scatter", wire, group)
    else:
        seconds = collective_s(machine, "all_reduce", wire, group)
    if job.pp > 1 and rank in (0, job.pp - 1) and job.model.tied_parameters:
        tied = 2.0 * _tied(job, job.pp - 1)
        seconds += point_to_point_s(machine, tied, job.crosses_nodes(0))
    if not job.software.overlap_dp or (job.ep > 1 and not job.zero):
        return late + seconds + apart
    return late + exposed_s(job.machine, seconds, backward_s) + apart


def _experts_reduced_s(job: ModuleJob, rank: int) -> float:
    """Of experts that not all ranks have: when backward is over, which nothing hides."""
    trained = experts_of(job, rank)[1]
    own = job.model.parameter_bytes / max(job.model.num_parameters, 1)
    low = own_wire(1, job.precision)[0]
    wire = (min(low, own) if job.zero else own) * trained
    return collective_s(job.machine, "all_reduce", wire, job.copies_group())


def _optimizer_s(job: ModuleJob, rank: int) -> float:
    count = trainable_of(job, rank) / (job.sharers if job.zero else 1)
    count += experts_of(job, rank)[1] / (job.expert_sharers if job.zero else 1)
    moved = job.software.optimizer_bytes_moved - 8.0 * (2 - job.model.optimizer_slots)
    return moved_s(job.machine.device, moved * count, 20)
