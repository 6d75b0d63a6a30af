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
    mates: tuple[np.ndarray, ...] = ()
    """For each part, the sample that each of its samples is paired with; empty unless asked for."""


@dataclass(frozen=True)
class Blocks:
    """A shuffle for files that are read in order: samples come in blocks as they lie, the blocks in
    random order, and within a window of several blocks the samples in random order."""

    block: int
    """Samples that are read in one go."""
    window: int
    """Samples that are mixed; what has to be in memory at a time."""

    def blocks_a_window(self) -> int:
        return max(1, self.window // self.block)


@dataclass(frozen=True)
class ShuffleQuality:
    """How far a shuffle by blocks is from a full one."""

    neighbours_ratio: float
    """How many times as often as in a full shuffle two neighbours of a block meet in one batch."""
    blocks_a_batch: float
    """Different blocks that the samples of a batch come from, on average."""
    best_blocks_a_batch: float
    """The same for a full shuffle."""


def shuffle_quality(num_samples: int, batch: int, blocks: Blocks) -> ShuffleQuality:
    """Within a window every order is as likely as any other, so that two samples of one window meet in
    a batch with probability (batch - 1) / (window - 1), where a full shuffle has the data set for its
    window. The number of blocks is that of drawing without putting back."""
    window = min(num_samples, blocks.blocks_a_window() * blocks.block)
    inside = min(1.0, (batch - 1) / max(1, window - 1))
    overall = min(1.0, (batch - 1) / max(1, num_samples - 1))
    ratio = inside / overall if overall else 1.0
    return ShuffleQuality(
        ratio,
        _distinct(window, blocks.block, batch),
        _distinct(num_samples, blocks.block, batch),
    )


def _distinct(num: int, block: int, batch: int) -> float:
    """Blocks of `block` of `num` samples that `batch` of them, drawn at random, touch on average."""
    taken = min(batch, num)
    num_blocks = num / block
    missed = 1.0
    for step in range(min(block, num)):
        missed *= max(0.0, (num - taken - step) / (num - step))
    return num_blocks * (1.0 - missed)


def epoch_order(
    num_samples: int, seed: int, epoch: int, shuffle: bool = True, blocks: Blocks | None = None
) -> np.ndarray:
    """All sample indices in the order of this epoch: a function of (seed, epoch) alone."""
    if not shuffle:
        return np.arange(num_samples, dtype=np.int64)
    generator = _generator(seed, epoch)
    if blocks is None:
        return generator.permutation(num_samples).astype(np.int64, copy=False)
    mixed = []
    for window in _windows(num_samples, blocks, generator):
        samples = np.concatenate([np.arange(first, last) for first, last in window])
        mixed.append(generator.permutation(samples))
    return np.concatenate(mixed)


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed % 2**64, epoch])))


def plan_windows(
    num_samples: int, seed: int, epoch: int, blocks: Blocks
) -> list[list[tuple[int, int]]]:
    """The blocks (first and end) of each window, in the order that `epoch_order` takes them."""
    return _windows(num_samples, blocks, _generator(seed, epoch))


def _windows(
    num_samples: int, blocks: Blocks, generator: np.random.Generator
) -> list[list[tuple[int, int]]]:
    starts = np.arange(0, num_samples, blocks.block)
    bounds = [
        (int(first), min(int(first) + blocks.block, num_samples))
        for first in generator.permutation(starts)
    ]
    size = blocks.blocks_a_window()
    return [bounds[first : first + size] for first in range(0, len(bounds), size)]


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
    blocks: Blocks | None = None,
    pairs: bool = False,
    count_targets: CountTargets | None = None,
) -> Iterator[BatchPlan]:
    """The plans of rank `rank` of `world` for one epoch, from batch `start` on.

    Global batch b is `order[b*batch : (b+1)*batch]`; its pieces run over microbatches first, then
    ranks, so that microbatch m of all ranks together is one contiguous stretch of the batch.
    Resuming with `start` reads no data and builds no plan of a skipped batch. With `pairs` every
    sample gets a mate, its neighbour in the global batch, whatever rank that one is on. Where
    samples have different numbers of targets, `count_targets` says how many each of the indices has.
    """
    check_sizes(num_samples, batch, rank, world, accumulate)
    if start < 0 or epoch < 0:
        raise UsageError(f"start={start} and epoch={epoch} of a data order must not be negative")
    order = epoch_order(num_samples, seed, epoch, shuffle, blocks)
    steps = range(start, num_batches(num_samples, batch, drop_last))
    return _plans(order, steps, batch, rank, world, epoch, accumulate, pairs, count_targets)


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
    order: np.ndarray,
    steps: range,
    batch: int,
    rank: int,
    world: int,
    epoch: int,
    accumulate: int,
    pairs: bool,
    count_targets: CountTargets | None,
) -> Iterator[BatchPlan]:
    for step in steps:
        members = order[step * batch : (step + 1) * batch]
        parts, weights, mates = [], [], []
        for micro in range(accumulate):
            # Microbatches first, then ranks: what is in a microbatch depends on no other field, so
            # that statistics over a microbatch (batch norm) do not either.
            first, last = piece_bounds(len(members), micro, accumulate)
            low, high = (first + bound for bound in piece_bounds(last - first, rank, world))
            # A copy: a view would keep the whole epoch's order alive, and pickle with it.
            parts.append(members[low:high].copy() if high > low else members[:1].copy())
            weights.append(float(high - low))
            if pairs:
                places = np.arange(low, high) if high > low else np.arange(1)
                # An odd one out is its own mate.
                mates.append(members[np.minimum(places ^ 1, len(members) - 1)])
        counted, num_counted = None, 0
        if count_targets is not None:
            # Every rank knows the whole batch, so nobody has to ask the others for their numbers.
            num_counted = int(np.sum(count_targets(members)))
            counted = tuple(
                int(np.sum(count_targets(part))) if weight else 0
                for part, weight in zip(parts, weights, strict=True)
            )
        yield BatchPlan(
            step,
            epoch,
            len(members),
            tuple(parts),
            tuple(weights),
            counted,
            num_counted,
            tuple(mates),
        )
