"""What a step moves beside the devices' own links: state kept on the host, samples from storage, and fewer
gradients than there are.

`offload` trades device memory for traffic over the host's link and an optimizer that runs at the speed of
the host's memory; a loader may be slower than the devices; `compress` and `sync=local:k` send less. Sizes
follow what `parallel/offload.py`, `zero.py`, `fsdp.py`, `compress.py` and `localsync.py` do. Called by
`time.py` and `memory.py`; a search that finds nothing that fits tries `with_offload`.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from ridgeline.layout import Layout, check_available, check_layout
from ridgeline.plan.activations import kept_activations
from ridgeline.plan.job import Job, Placed
from ridgeline.plan.kernels import element_bytes, moved_s
from ridgeline.plan.machine import Machine
from ridgeline.plan.network import collective_s
from ridgeline.plan.own import is_half, own_activations, own_wire
from ridgeline.plan.software import RIDGELINE
from ridgeline.plan.transformer import Transformer, tell_heads

ASSUMED_LINK: Final = 25e9
"""Bytes a second and direction where the machine does not say: PCIe 4 with 16 lanes, as copies reach it."""
HOST_MEMORY: Final = 20e9
"""Bytes a second of a device's share of its host's memory: some 160 GB/s of a node of eight."""
ADAM_BYTES: Final = 28.0
"""A parameter: gradient, weight and two moments read, all but the gradient written, in float32."""
COPY_COST: Final = 0.2
"""What a copy takes from what computes beside it, of its own time. Megatron-Bridge's runs of a 70B model on
GB200 and GB300, with the activations of 40 and 20 layers on the host, are as far off with it as those that
keep theirs."""
BLOCKS_HERE: Final = 3
"""Blocks whose activations are on the device though they are kept on the host: the one at work, the one on
its way out or in, and one that waits for its copy."""
MIN_GAIN: Final = 2.0
"""A matrix is sent in low rank where that makes it so much smaller."""


def link_bandwidth(machine: Machine) -> float:
    return machine.host_link_bandwidth or ASSUMED_LINK


def assumptions(job: Job) -> list[str]:
    """What was not known of the machine and had to be assumed, and what is not as the layout says, as
    sentences."""
    said = tell_heads(job.model, job.tp)
    if job.offload != "none" and not job.machine.host_link_bandwidth:
        said.append(
            f"the link to the host of {job.machine.name} is not known and is taken as "
            f"{ASSUMED_LINK / 1e9:.0f} GB/s each way; say it with --what-if host_link_bandwidth=64e9"
        )
    if job.sample_bytes and not job.machine.storage_bandwidth:
        said.append(
            f"how fast {job.machine.name} reads from storage is not known, so nothing waits for samples; "
            "say it with --what-if storage_bandwidth=5e9"
        )
    return said


def offloaded_s(job: Job, count: float, layers: int, forward_s: float, backward_s: float) -> float:
    """Seconds that `offload` adds to a step of a stage with `count` parameters, whose microbatch takes
    `forward_s` and `backward_s`; without the optimizer's own work on the device, which it saves."""
    link = link_bandwidth(job.machine)
    own = count / (job.sharers if job.zero else 1)
    if job.offload == "optimizer":
        # After the last gradient is reduced and before the next forward, nothing else can run.
        down, up = (
            4.0 * own,
            element_bytes(job.precision) if is_half(job.zero, job.precision) else 4.0,
        )
        return down / link + ADAM_BYTES * own / HOST_MEMORY + up * own / link
    if job.offload == "params":
        piece = 4.0 * own / link
        gathers = _exposed(piece, forward_s) + _exposed(2 * piece, backward_s)
        return job.microbatches * gathers + ADAM_BYTES * own / HOST_MEMORY
    if job.offload == "activations":
        moved = _kept(job) * offloaded_layers(job, layers) / link
        return job.microbatches * (_exposed(moved, forward_s) + _exposed(moved, backward_s))
    return 0.0


def _exposed(copy_s: float, room_s: float) -> float:
    return max(copy_s - room_s, COPY_COST * copy_s)


def offloaded_layers(job: Job, layers: int) -> int:
    """Of a stage's layers, those whose activations go to the host: never the last, which backward begins
    with."""
    return min(job.offload_layers or layers, max(layers - 1, 0))


def _kept(job: Job) -> float:
    """Activations of one block for one microbatch."""
    if job.software.name != RIDGELINE.name:
        return kept_activations(job)
    return own_activations(job.model, job.part, is_half(job.zero, job.precision))[0]


def host_bytes(job: Job, count: float, layers: int, in_flight: int) -> float:
    """Pinned host memory that one rank of a stage takes."""
    own = count / (job.sharers if job.zero else 1)
    if job.offload in ("optimizer", "params"):
        return 16.0 * own  # weights, their gradients and two moments in float32
    if job.offload == "activations":
        moved = min(job.offload_layers or layers, layers)
        return _kept(job) * moved / job.virtual * in_flight
    return 0.0


def loader_s(job: Placed) -> float:
    """Seconds that reading a step's samples takes, every node its share; 0 where that is not known."""
    bandwidth = job.machine.storage_bandwidth
    if not job.sample_bytes or not bandwidth:
        return 0.0
    nodes = -(-job.devices // job.machine.devices_per_node)
    return job.global_batch * job.sample_bytes / nodes / bandwidth


def gradient_bytes(job: Job, count: float) -> float:
    """Of one rank's gradients on the wire in this library's own step, before any sharding."""
    if job.zero:
        return own_wire(job.zero, job.precision)[1] * count
    if job.compress in ("bf16", "fp16"):
        return 2.0 * count
    name, _, rank = job.compress.partition(":")
    if name == "powersgd":
        return _low_rank_bytes(job.model, int(rank or 1), count)
    return 4.0 * count


def _low_rank_bytes(model: Transformer, rank: int, count: float) -> float:
    """Two thin matrices for each weight that is worth it, and the rest as it is."""
    h = model.hidden
    shapes = [
        (h, model.query_width),
        (h, model.kv_width),
        (h, model.kv_width),
        (model.query_width, h),
    ]
    shapes += [(h, model.ffn)] * (2 if model.gated else 1) + [(model.ffn, h)]
    saved = 0.0
    for rows, columns in shapes * model.layers + [(model.vocab, h)] * (1 if model.tied else 2):
        whole, thin = rows * columns, rank * (rows + columns)
        if whole >= MIN_GAIN * thin:
            saved += whole - thin
    return 4.0 * max(count - saved, 0.0)


def compression_s(job: Job, count: float) -> float:
    """Device time of making gradients smaller and whole again; bound by memory."""
    if job.compress == "none":
        return 0.0
    # 16 bits: read and written twice. Low rank: gradient and memory of errors, in three passes.
    passes = 12.0 if job.compress in ("bf16", "fp16") else 32.0
    return moved_s(job.machine.device, passes * count, 2 * job.model.layers)


def local_sync_s(job: Job, count: float) -> float | None:
    """Averaging weights every k steps, a step's share; None where gradients are reduced instead."""
    name, _, every = job.sync.partition(":")
    if name != "local":
        return None
    return collective_s(job.machine, "all_reduce", 4.0 * count, job.dp_group()) / max(
        int(every or 1), 1
    )


def with_offload(layout: Layout) -> list[Layout]:
    """The layout with state on the host, as far as the table of techniques allows."""
    words = ("params",) if layout.zero == 3 else ("optimizer",)
    found = [dataclasses.replace(layout, offload=word) for word in words]
    return [other for other in found if not check_layout(other) and not check_available(other)]
