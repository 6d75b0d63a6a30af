"""Out of memory, told as a budget: what the device held, and which layouts would hold it.

Called by `run.py` when the device (or the host) has none left. The estimates follow the formulas of
`docs/parallel.md`; they say what to try first, not what a byte count will be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor

from ridgeline.config import RunConfig
from ridgeline.layout import Layout, check_available, check_layout
from ridgeline.plan.recipe import optimizer_slots
from ridgeline.train.setup import Training

_ROOM = 0.92
"""Share of the device's memory that a suggestion may fill."""
_SUGGESTIONS = 3


@dataclass(frozen=True)
class Budget:
    """Bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """And everything else that came and went: temporaries, buffers of communication."""
    fragmentation: float
    """Held by the allocator and given to nobody."""
    capacity: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    signs = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def tell_no_start(config: RunConfig, rank: int, error: BaseException) -> str:
    """For a model that does not even fit before its first step."""
    return (
        f"rank {rank} is out of memory before the first step of {config.model.name} in layout "
        f"{config.layout or 'dp=1'}: {_first_line(error)}; shard the weights (zero=3), split them "
        "(tp=2), or use more devices"
    )


def tell_budget(training: Training, error: BaseException) -> str:
    """One sentence on what was asked for, the budget, and what would fit."""
    budget = measure(training, _requested(error))
    layout = training.mesh.layout
    batch = training.config.train.batch // layout.dp
    lines = [
        f"rank {training.mesh.env.rank} is out of memory on {training.mesh.device} in layout {layout}: "
        f"{_first_line(error)}"
    ]
    rows = {
        "weights": budget.weights,
        "gradients": budget.gradients,
        "optimizer state": budget.optimizer,
        "activations and temporaries": budget.activations,
        "fragmentation": budget.fragmentation,
        "the device has": budget.capacity,
    }
    lines += [f"  {name:<28}{size / 1e9:9.3f} GB" for name, size in rows.items()]
    for other, need in suggest(layout, budget, batch):
        fits = "" if need <= _ROOM * budget.capacity else ", still too much by itself"
        lines.append(f"  try layout={other}  (about {need / 1e9:.3g} GB{fits})")
    return "\n".join(lines)


def measure(training: Training, requested: float = 0.0) -> Budget:
    """What this rank held and the bytes it was refused; state that a first step would have made is
    counted as made."""
    arranged, device = training.arranged, training.mesh.device
    trainables = [t.parameter for t in arranged.trainables()]
    weights = _bytes(p for part in arranged.parts for p in part.parameters())
    trained = _bytes(p for part in arranged.parts for p in part.parameters() if p.requires_grad)
    if arranged.flats:
        held = [flat.held_bytes(training.optimizer) for flat in arranged.flats]
        gradients = sum(h["gradients"] for h in held)
        state = sum(h["optimizer"] for h in held)
    else:
        gradients = _bytes(p.grad for p in trainables if p.grad is not None)
        found = (v for s in training.optimizer.state.values() for v in s.values())
        state = _bytes(v for v in found if isinstance(v, Tensor))
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        fragmentation = torch.cuda.max_memory_reserved(device) - peak
        capacity = torch.cuda.get_device_properties(device).total_memory * _fraction(device)
    else:
        peak, fragmentation = psutil.Process().memory_info().rss, 0
        capacity = psutil.virtual_memory().total
    if arranged.average is not None:
        state += _bytes(arranged.average.values)
    rest = max(peak - weights - gradients - state, 0) + requested
    copies = optimizer_slots(training.config)
    return Budget(
        weights=weights,
        gradients=max(gradients, trained),
        optimizer=max(state, copies * _bytes(trainables)),
        activations=rest,
        fragmentation=max(fragmentation, 0),
        capacity=capacity,
    )


def _fraction(device: torch.device) -> float:
    """The share of the device that this process may use."""
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return float(read(device)) if read is not None else 1.0


_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _requested(error: BaseException) -> float:
    """What the allocator refused, as its message says."""
    found = re.search(r"ried to allocate ([\d.]+) (bytes|[KMGT]iB)", str(error))
    return float(found[1]) * _UNITS[found[2]] if found else 0.0


def suggest(layout: Layout, budget: Budget, samples: int) -> list[tuple[Layout, float]]:
    """Up to three other layouts on as many ranks, those that fit first, by how little they change."""
    found = []
    for other, need in _changes(layout, budget, samples):
        if not check_layout(other) and not check_available(other):
            found.append((other, need))
    fitting = [pair for pair in found if pair[1] <= _ROOM * budget.capacity]
    rest = sorted((pair for pair in found if pair not in fitting), key=lambda pair: pair[1])
    return (fitting + rest)[:_SUGGESTIONS]


def _changes(layout: Layout, b: Budget, samples: int) -> Iterator[tuple[Layout, float]]:
    """One field at a time, and the estimate; `samples` are those of one replica's batch."""
    parts = layout.microbatches if layout.pp > 1 else layout.accumulate
    if samples >= 2 * parts and samples % (2 * parts) == 0 and layout.pp == 1:
        yield replace(layout, accumulate=2 * parts), b.total - b.activations / 2
    for zero in range(layout.zero + 1, 4) if layout.dp > 1 else ():
        d = layout.shard or layout.dp
        # What the stages before have cut already is not cut again.
        saved = b.optimizer * (1 - 1 / d) * (layout.zero < 1)
        saved += b.gradients * (1 - 1 / d) * (layout.zero < 2 <= zero)
        saved += b.weights * (1 - 1 / d) * (zero == 3)
        yield replace(layout, zero=zero), b.total - saved
    if layout.recompute != "full":
        yield replace(layout, recompute="full"), b.total - 0.8 * b.activations
    if layout.precision in ("fp32", "tf32"):
        yield replace(layout, precision="bf16"), b.total - 0.5 * b.activations
    if layout.offload == "none":
        yield replace(layout, offload="optimizer"), b.total - b.optimizer
    if layout.dp % 2 == 0:
        half = b.weights + b.gradients + b.optimizer
        yield replace(layout, dp=layout.dp // 2, tp=2 * layout.tp), b.activations + half / 2


def _bytes(tensors: Iterator[Tensor] | list[Tensor]) -> int:
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        seen[storage.data_ptr()] = min(storage.nbytes(), local.numel() * local.element_size())
    return sum(seen.values())


def _first_line(error: BaseException) -> str:
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.split(r"(?<=[a-zB])\. (?=GPU |Of |If )", line)[0]
