"""The sampler: which samples form a global batch, and which of them this rank computes.

Pure numpy, no torch and no communication: each rank derives the same order from (seed, epoch) and
takes its pieces. The global batch depends on neither the number of ranks nor on accumulation, and
every sample is seen exactly once an epoch: a batch that does not divide gives pieces whose sizes
differ by one, and the plan carries their true sizes as weights, where torch's DistributedSampler
repeats samples instead. Called by `loader.py` and by loaders for the user's own loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ridgeline.errors import UsageError

CountTargets = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class BatchPlan:
    """This rank's share of one global batch."""

    step: int
    """Index of the batch within the epoch."""
    epoch: int
    num_global: int
    """Samples in the global batch, over all ranks and microbatches."""
    parts: tuple[np.ndarray, ...]
    """Sample indices of each of this rank's microbatches; never empty, see `weights`."""
    weights: tuple[float, ...]
    """Real samples in each part. 0 marks a part that holds one filler sample (the batch's first),
    so that forward, backward and the collectives in them still run on every rank."""
    targets: tuple[int, ...] | None = None
    """Counted targets in each part, where samples have different numbers of them."""
    num_global_targets: int = 0
    """The same over all ranks and microbatches."""


def epoch_order(num_samples: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """All sample indices in the order of this epoch: a function of (seed, epoch) alone."""
    if not shuffle:
        return np.arange(num_samples, dtype=np.int64)
    key = np.random.SeedSequence([seed % 2**64, epoch])
    order = np.random.Generator(np.random.PCG64(key)).permutation(num_samples)
    return order.astype(np.int64, copy=False)


def num_batches(num_samples: int, batch: int, drop_last: bool = False) -> int:
    return num_samples // batch if drop_last else -(-num_samples // batch)


def piece_bounds(size: int, piece: int, num_pieces: int) -> tuple[int, int]:
    """Start and end of one of `num_pieces` contiguous pieces whose sizes differ by at most one."""
    quotient, remainder = divmod(size, num_pieces)
    start = piece * quotient + min(piece, remainder)
    return start, start + quotient + (piece < remainder)


def plan_epoch(
    num_samples: int,
    batch: int,
    rank: int,
    world: int,
    seed: int,
    epoch: int,
    accumulate: int = 1,
    shuffle: bool = True,
    drop_last: bool = False,
    start: int = 0,
    count_targets: CountTargets | None = None,
) -> Iterator[BatchPlan]:
    """The plans of rank `rank` of `world` for one epoch, from batch `start` on.

    Global batch b is `order[b*batch : (b+1)*batch]`; its pieces run over microbatches first, then
    ranks, so that microbatch m of all ranks together is one contiguous stretch of the batch.
    Resuming with `start` reads no data and builds no plan of a skipped batch. Where samples have
    different numbers of targets, `count_targets` says how many each of the indices has.
    """
    check_sizes(num_samples, batch, rank, world, accumulate)
    if start < 0 or epoch < 0:
        raise UsageError(f"start={start} and epoch={epoch} of a data order must not be negative")
    return _plans(
        num_samples,
        batch,
        rank,
        world,
        seed,
        epoch,
        accumulate,
        shuffle,
        drop_last,
        start,
        count_targets,
    )


def check_sizes(num_samples: int, batch: int, rank: int, world: int, accumulate: int) -> None:
    for name, value in (
        ("number of samples", num_samples),
        ("batch", batch),
        ("world", world),
        ("accumulate", accumulate),
    ):
        if value < 1:
            raise UsageError(f"{name} is {value} in a data order; it must be at least 1")
    if not 0 <= rank < world:
        raise UsageError(f"rank {rank} of a data order is not in 0..{world - 1} (world={world})")


def _plans(
    num_samples: int,
    batch: int,
    rank: int,
    world: int,
    seed: int,
    epoch: int,
    accumulate: int,
    shuffle: bool,
    drop_last: bool,
    start: int,
    count_targets: CountTargets | None,
) -> Iterator[BatchPlan]:
    order = epoch_order(num_samples, seed, epoch, shuffle)
    for step in range(start, num_batches(num_samples, batch, drop_last)):
        members = order[step * batch : (step + 1) * batch]
        parts, weights = [], []
        for micro in range(accumulate):
            # Microbatches first, then ranks: what is in a microbatch depends on no other field, so
            # that statistics over a microbatch (batch norm) do not either.
            first, last = piece_bounds(len(members), micro, accumulate)
            low, high = (first + bound for bound in piece_bounds(last - first, rank, world))
            # A copy: a view would keep the whole epoch's order alive, and pickle with it.
            parts.append(members[low:high].copy() if high > low else members[:1].copy())
            weights.append(float(high - low))
        counted, num_counted = None, 0
        if count_targets is not None:
            # Every rank knows the whole batch, so nobody has to ask the others for their numbers.
            num_counted = int(count_targets(members).sum())
            counted = tuple(
                int(count_targets(part).sum()) if weight else 0
                for part, weight in zip(parts, weights, strict=True)
            )
        yield BatchPlan(
            step, epoch, len(members), tuple(parts), tuple(weights), counted, num_counted
        )
