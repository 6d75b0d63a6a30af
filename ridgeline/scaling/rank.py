"""One rank of a large job in this process: torch's fake process group stands in for all others.

Nothing is sent, so values are wrong; kernels, shapes and memory are the rank's own, because everything is
built and run by the code that `ridgeline train` runs. What would be sent is written down call by call.
`simulate.py` starts a process for each rank, so that no fake group stays in one that does something else;
`benchmarks/gpu_one_rank.py` does the same.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter, defaultdict
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ridgeline.data.batch import Batch
from ridgeline.errors import UsageError
from ridgeline.launch.env import RankEnv
from ridgeline.layout import Layout
from ridgeline.parallel.mesh import GRADIENT_AXES, Mesh, axis_sizes, rank_at_stage, read_order
from ridgeline.scaling.measured import RankMeasured, Traffic
from ridgeline.scaling.request import RankRequest
from ridgeline.scaling.watch import Call, StepWatch
from ridgeline.train.clock import PIECE
from ridgeline.train.setup import Training, build_training

WARM_STEPS = 2
_RECORDED_STEPS = 2
_SMALL = 1024


def measure_rank(request: RankRequest) -> RankMeasured:
    """Join a fake group, build, take some steps, and say what they took."""
    training, build_s = build_rank(request)
    try:
        return _measure(request, training, build_s)
    finally:
        training.close_loaders()


def build_rank(request: RankRequest) -> tuple[Training, float]:
    """The rank as `ridgeline train` would build it, and the seconds that took."""
    config, world = request.config, request.world_size
    layout = Layout.parse_for(config.layout, world, "--layout")
    rank = request.rank
    if request.stage is not None:
        rank = rank_at_stage(rank, request.stage, axis_sizes(layout, read_order(config.axes)))
    # What a fake group leaves in memory may be numbers that a CPU is a hundred times slower with.
    torch.set_flush_denormal(True)
    if world > 1:
        join_fake(rank, world)
    start = time.perf_counter()
    env = RankEnv(rank, world, 0, 1, "", 0, "fake" if world > 1 else "single process")
    # As one that resumes: initial weights of a file have no say in time or memory.
    training = build_training(config, env, True, request.block_costs)
    _settle(training.mesh.device)
    replace_reduction(training)
    training.arranged.train()
    return training, time.perf_counter() - start


def join_fake(rank: int, world_size: int) -> None:
    """Once in a process, for as many simulations of this rank as there are."""
    if dist.is_initialized():
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def replace_reduction(training: Training) -> None:
    """DDP waits for a result that a fake group does not give: it gets back what it sent."""
    objective = training.arranged.objective
    if not isinstance(objective, DistributedDataParallel) or training.mesh.env.source != "fake":
        return
    size = dist.get_world_size(objective.process_group)

    def reduce(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and text is none
        buffer = bucket.buffer().div_(size)
        dist.all_reduce(buffer, group=objective.process_group)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    objective.register_comm_hook(None, reduce)


def _measure(request: RankRequest, training: Training, build_s: float) -> RankMeasured:
    mesh, clock = training.mesh, training.clock
    device, cuda = mesh.device, mesh.device.type == "cuda"
    batch = _first_batch(training)
    seconds, parts = [], []
    held = allocated = reserved = 0
    gradients: dict[str, int] = {}
    for index in range(WARM_STEPS + request.steps):
        here = training.to_device(batch)
        _settle(device)
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        clock.start()
        start = time.perf_counter()
        training.forward_backward(here, clock)
        if index == 0 and training.arranged.staged is not None:
            training.arranged.staged.pipeline.fill_received()
        if index == WARM_STEPS - 1:
            gradients = tensor_bytes(training)
        training.update()
        clock.mark("optimizer_s")
        _settle(device)
        seconds.append(time.perf_counter() - start)
        parts.append(clock.end_step().read())
        if cuda:
            allocated = torch.cuda.max_memory_allocated(device)
            reserved = torch.cuda.max_memory_reserved(device)
            held = torch.cuda.memory_allocated(device)
    state = tensor_bytes(training)
    if not cuda:
        held = state["weights"] + state["optimizer"] + state["gradients"]
    timed = parts[WARM_STEPS:]
    pieces = _pieces(training, batch)
    watch = StepWatch(lambda: clock.last)
    here = training.to_device(batch)
    clock.start()
    clock.last = ""
    with watch:
        training.forward_backward(here, clock)
        training.update()
    staged = training.arranged.staged
    return RankMeasured(
        rank=mesh.env.rank,
        stage=mesh.axis_rank("pp"),
        asked_stage=mesh.stage_of(request.rank),
        device_kind=device.type,
        device_name=training.machine_facts.device_name,
        step_s=statistics.median(seconds[WARM_STEPS:]),
        steps_s=tuple(seconds),
        optimizer_s=statistics.median(p.get("optimizer_s", 0.0) for p in timed),
        backward_s=statistics.median(p.get("backward_s", 0.0) for p in timed) / len(batch.inputs),
        build_s=build_s,
        weights_bytes=state["weights"],
        gradients_bytes=gradients["gradients"],
        optimizer_bytes=state["optimizer"],
        host_bytes=state["host"],
        held_bytes=held,
        step_bytes=watch.peak_bytes,
        allocated_bytes=allocated if cuda else None,
        reserved_bytes=reserved if cuda else None,
        device_memory_bytes=_capacity(device),
        **pieces,
        traffic=_traffic(watch.calls, mesh, request.devices_per_node),
        shapes={t.name: tuple(_local(t.parameter).shape) for t in training.arranged.trainables()},
        stage_kinds=_stage_kinds(training),
        block_costs=training.arranged.block_costs if staged is not None else None,
        notes=tuple(training.arranged.notes),
    )


def _first_batch(training: Training) -> Batch:
    config = training.config
    batch = next(iter(training.loader.epoch(0)), None)
    if batch is None or batch.num_global < config.train.batch:
        raise UsageError(
            f"data.source={config.data.source} has fewer samples than train.batch={config.train.batch}, "
            "so no step is a full one; use data.source=synthetic or a smaller batch"
        )
    return batch


def tensor_bytes(training: Training) -> dict[str, int]:
    """Bytes of this rank in weights, gradients and optimizer state (master weights with it), by the
    memory behind the tensors, each piece once; `host`: what of it `offload` keeps there."""
    arranged = training.arranged
    groups: dict[str, list[Tensor]] = {"weights": [], "gradients": [], "optimizer": []}
    if arranged.flats:
        for flat in arranged.flats:
            for name, tensors in flat.tensors().items():
                groups[name] += tensors
    else:
        parameters = [p for part in arranged.parts for p in part.parameters()]
        groups["weights"] += parameters
        groups["gradients"] += [p.grad for p in parameters if p.grad is not None]
    for state in training.optimizer.state.values():
        groups["optimizer"] += [value for value in state.values() if isinstance(value, Tensor)]
    seen: set[int] = set()
    found = dict.fromkeys([*groups, "host"], 0)
    cuda = training.mesh.device.type == "cuda"
    for name, tensors in groups.items():
        for tensor in map(_local, tensors):
            storage = tensor.untyped_storage()
            if storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            is_away = cuda and tensor.device.type == "cpu" and tensor.dim() > 0
            found["host" if is_away else name] += storage.nbytes()
    return found


def _pieces(training: Training, batch: Batch) -> dict[str, tuple[float, ...]]:
    """In a pipeline: seconds of a microbatch in each piece of the model, by kind."""
    staged = training.arranged.staged
    if staged is None:
        return {}
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for _ in range(_RECORDED_STEPS):
        staged.record_next_step()
        training.forward_backward(training.to_device(batch), training.clock)
        for event in staged.pipeline.own_events():
            found[event.stage, event.kind].append(event.end_s - event.start_s)
        training.update()
    indices = staged.pipeline.indices

    def row(kind: str) -> tuple[float, ...]:
        return tuple(statistics.median(found.get((index, kind), [0.0])) for index in indices)

    forward, backward, weights = row("F"), row("B"), row("W")
    if training.mesh.layout.schedule != "zerobubble":
        return {"forward_s": forward, "backward_chunk_s": backward}
    # The first stage has no input to differentiate: all of its backward is done with the weights.
    pairs = zip(indices, backward, weights, strict=True)
    late = tuple(w or (b if index == 0 else 0.0) for index, b, w in pairs)
    early = tuple(0.0 if index == 0 else b for index, b in zip(indices, backward, strict=True))
    return {"forward_s": forward, "backward_chunk_s": early, "weight_s": late}


def _stage_kinds(training: Training) -> tuple[str, ...]:
    staged = training.arranged.staged
    if staged is None:
        return ()
    num_ranks, plan = training.mesh.layout.pp, staged.plan
    kinds = []
    for place in range(num_ranks):
        held = [plan.stages[index].parameters for index in plan.indices_of(place, num_ranks)]
        names = [sorted(re.sub(r"\d+", "#", name) for name in names) for names in held]
        edge = "first" if place == 0 else "last" if place == num_ranks - 1 else "middle"
        kinds.append(f"{edge}: {names}")
    return tuple(kinds)


def _traffic(calls: Counter[Call], mesh: Mesh, per_node: int) -> tuple[Traffic, ...]:
    found: Counter[tuple[Any, ...]] = Counter()
    for call, count in calls.items():
        if call.kind == "send":
            pair = (mesh.env.rank, call.ranks[0])
            part = _part_of_send(mesh, call.ranks[0])
            shared = 2 if pair[0] // per_node == pair[1] // per_node else 1
            # A ring's next block comes while one is computed with.
            found[part, "send", call.num_bytes, 2, shared, part == "context"] += count
            continue
        if len(call.ranks) == 1:
            continue
        axes = mesh.axes_of(call.ranks)
        part = _part(call, axes)
        nodes = Counter(rank // per_node for rank in call.ranks)
        beside = part in ("gradients", "shards") and _is_beside(call, mesh.layout)
        key = (part, call.kind, call.num_bytes, len(call.ranks), max(nodes.values()), beside)
        found[key] += count
    return tuple(
        Traffic(part, kind, num_bytes, count, size, shared, beside)
        for (part, kind, num_bytes, size, shared, beside), count in found.items()
    )


def _part_of_send(mesh: Mesh, to: int) -> str:
    if mesh.stage_of(to) != mesh.stage_of(mesh.env.rank):
        return "stages"
    return "context" if mesh.layout.cp > 1 else "tiles"


def _part(call: Call, axes: tuple[str, ...]) -> str:
    if axes == ("tp",):
        return "tensor"
    if axes == ("cp",):
        return "context"
    if axes and set(axes) <= {"rows", "columns"}:
        return "tiles"
    if axes and set(axes) <= set(GRADIENT_AXES) and call.kind != "broadcast":
        return "shards" if call.kind == "all_gather" else "gradients"
    return "other"


def _is_beside(call: Call, layout: Layout) -> bool:
    """Gradients that leave while backward goes on, and shards that are fetched ahead of it: in a pipeline
    while a microbatch is computed."""
    if call.num_bytes < _SMALL:
        return False  # somebody waits for the answer
    if layout.pp > 1:
        return call.phase == PIECE
    return call.phase == "forward_s" or (layout.zero == 3 and call.phase != "comm_s")


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _capacity(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
