"""Whether the loader keeps up: what the step asks for, what the loader gives, where its time goes.

The step is measured with its data on the device, the loader without a step, so that neither hides
behind the other; the parts of the loader's time come from one pass in line. What follows from the
figures is decided by pure functions. Called by `feeding_run.py`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.data.batch import Batch, Change
from ridgeline.data.loader import Loader
from ridgeline.data.source import Source
from ridgeline.data.spent import Spent
from ridgeline.errors import UsageError
from ridgeline.train.setup import Training
from ridgeline.train.step import run_step

HEADROOM = 1.1
"""How much more than the step asks for the loader has to give: it is never as even as its mean."""

_NUM_BATCHES = 4
_MIN_STEPS = 3
# Steps before the measurement: the first compiles, searches for kernels and fills memory.
_MIN_WARMUP, _MAX_WARMUP = 4, 40
_STEADY_RATIO = 1.3
# A measurement ends after whole rounds of the readers, or when it takes so many times too long.
_PATIENCE = 4.0

PARTS = ("open", "read", "decode", "fetch", "collate", "augment", "copy")
"""Of a sample's way from the disk to the device; `fetch` where a source does not say more."""

_REMEDIES = {
    "open": "pack the files, into larger shards if they are (`ridgeline data pack --shard-size`)",
    "read": "pack the files (`ridgeline data pack`) or copy them to the node's disk "
    "(data.stage=auto)",
    "decode": "use more cores, smaller images, data.args.pixels=bytes with data.augment on the "
    "device, or pack decoded arrays",
    "fetch": "use more cores, or pack what the source makes (`ridgeline data pack recipe:NAME`)",
    "collate": "pack arrays of one shape, which are read to their place in the batch",
    "augment": "train on a GPU, which augments batches itself, or ask less of data.augment",
    "copy": "keep samples in a narrower type (data.args.pixels=bytes, float16 arrays)",
}


@dataclass(frozen=True)
class Demand:
    """What one rank's step takes."""

    samples_per_s: float
    step_s: float
    batch: int
    """Samples of one step of this rank."""
    num_steps: int
    warmup_s: float
    """Until steps were steady, compilation included."""


@dataclass(frozen=True)
class Supply:
    """What the loader alone gives in one way of reading."""

    workers: int
    threads: int
    samples_per_s: float
    bytes_per_s: float
    """Of the batches that were handed over."""
    startup_s: float
    """Until the first batch was there; no part of the rates."""
    seconds: float
    num_samples: int

    @property
    def num_readers(self) -> int:
        return self.workers or self.threads

    def __str__(self) -> str:
        number, word = (self.workers, "worker") if self.workers else (self.threads, "thread")
        return f"{number} {word}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Parts:
    """Where the time of a sample goes when one process reads it in line."""

    seconds: dict[str, float]
    """A sample, by the names of `PARTS`; those that do not occur are left out."""
    total_s: float
    num_samples: int

    def share(self, part: str) -> float:
        return self.seconds.get(part, 0.0) / self.total_s

    def largest(self) -> str:
        """The part that slows the loader most; the copy to the device is none of its."""
        parts = [part for part in self.seconds if part != "copy"]
        return max(parts, key=lambda part: self.seconds[part])


def measure_demand(training: Training, seconds: float) -> Demand:
    """Samples/s that the step takes when its data are on the device already."""
    device, clock = training.mesh.device, training.clock
    batches = _batches_on_device(training)
    training.arranged.train()
    clock.start()
    done = 0

    def step() -> None:
        nonlocal done
        training.set_lr(0)
        batch = batches[done % len(batches)]
        run_step(training.forward_backward, training.update, batch, clock)
        clock.end_step()
        done += 1

    warmup_s = _warm_up(step, device)
    done = num_samples = 0
    begin = time.perf_counter()
    while done < _MIN_STEPS or time.perf_counter() - begin < seconds:
        num_samples += sum(batches[done % len(batches)].counts)
        step()
    _wait_for(device)
    spent_s = time.perf_counter() - begin
    return Demand(num_samples / spent_s, spent_s / done, num_samples // done, done, warmup_s)


def _batches_on_device(training: Training) -> list[Batch]:
    """A few batches of one size: a smaller one would be another shape to compile for."""
    loader = training.loader.varied(workers=0, prefetch=0)
    found = list(islice(loader.epoch(0), _NUM_BATCHES))
    full = [batch for batch in found if sum(batch.counts) == sum(found[0].counts)]
    return [training.to_device(batch) for batch in full]


def _warm_up(step: Callable[[], None], device: torch.device) -> float:
    """Steps until the last three took the same time; how long that was."""
    begin = time.perf_counter()
    times: list[float] = []
    while len(times) < _MAX_WARMUP:
        last = time.perf_counter()
        step()
        _wait_for(device)
        times.append(time.perf_counter() - last)
        recent = times[-3:]
        if len(times) >= _MIN_WARMUP and max(recent) < _STEADY_RATIO * min(recent):
            break
    return time.perf_counter() - begin


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_supply(
    loader: Loader, seconds: float, empty_cache: Callable[[], None] | None = None
) -> Supply:
    """The rates of `loader` alone, over as many epochs as `seconds` take.

    With `empty_cache` every epoch begins with a new loader after it was called, because files that a
    process has open may stay in memory.
    """
    if not len(loader):
        raise UsageError(
            f"{len(loader.source)} samples give no whole batch of {loader.batch} with "
            "data.drop_last=true; use a smaller train.batch or data.drop_last=false"
        )
    tally = _Tally(loader, seconds)
    epoch, begin = 0, time.perf_counter()
    try:
        while not tally.is_over:
            # Of a small data set most of the time goes into starting anew.
            if tally.num_batches and time.perf_counter() - begin > _PATIENCE * seconds:
                break
            is_new = epoch == 0 or empty_cache is not None
            if empty_cache is not None:
                loader.close()
                let_go(loader.source)
                empty_cache()
            with warnings.catch_warnings():
                # More workers than cores are what is to be found out about.
                warnings.filterwarnings("ignore", message="This DataLoader will create")
                tally.count(loader.epoch(epoch), is_new, is_cold=empty_cache is not None)
            epoch += 1
    finally:
        loader.close()
    return tally.result()


class _Tally:
    """Batches that are counted, and the time that they took."""

    def __init__(self, loader: Loader, seconds: float) -> None:
        self.is_over = False
        self._loader, self._wanted_s = loader, seconds
        self._readers = max(1, loader.workers or loader.threads)
        self._startup_s: float | None = None
        self._seconds = 0.0
        self.num_batches = self._num_samples = self._num_bytes = 0

    def count(self, batches: Iterator[Batch], is_new: bool, is_cold: bool) -> None:
        """One epoch; of new readers the batches that they were given first, before all had started, are
        not counted: the whole of a short epoch, or half of it where every epoch has new readers."""
        begin = time.perf_counter()
        given, length = self._readers * max(1, self._loader.prefetch), len(self._loader)
        skipped = min(given, length // 2 if is_cold else length) if is_new else 0
        before = self._seconds
        for number, batch in enumerate(batches):
            _wait_for(batch.targets[0].device)
            now = time.perf_counter()
            if self._startup_s is None:
                self._startup_s = now - begin
            if number < skipped:
                if number == skipped - 1:
                    begin = now
                continue
            self.num_batches += 1
            self._num_samples += sum(batch.counts)
            self._num_bytes += sum(part.nbytes for part in batch.tensors())
            self._seconds = before + now - begin
            if self._is_enough():
                self.is_over = True
                break
        close = getattr(batches, "close", None)
        if close is not None:
            close()

    def _is_enough(self) -> bool:
        if self._seconds >= _PATIENCE * self._wanted_s:
            return True
        return self._seconds >= self._wanted_s and self.num_batches % self._readers == 0

    def result(self) -> Supply:
        assert self._startup_s is not None
        return Supply(
            self._loader.workers,
            self._loader.threads,
            self._num_samples / self._seconds,
            self._num_bytes / self._seconds,
            self._startup_s,
            self._seconds,
            self._num_samples,
        )


def let_go(source: Source) -> None:
    """Of files that this process has open."""
    close = getattr(getattr(source, "dataset", None), "close", None)
    if close is not None:
        close()


class _TimedSource:
    """A source whose fetches are timed; whatever else a loader looks for shows through."""

    def __init__(self, source: Any, spent: Spent) -> None:
        self._source, self._spent = source, spent
        self.info = source.info
        if hasattr(source, "device_fetch"):
            self.device_fetch = self._device_fetch

    def __len__(self) -> int:
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def fetch(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, ...]:
        with self._spent.during("fetch"):
            made: tuple[Tensor, ...] = self._source.fetch(indices, epoch)
            return made

    def _device_fetch(self, indices: np.ndarray, device: torch.device) -> tuple[Tensor, ...]:
        with self._spent.during("fetch"):
            made: tuple[Tensor, ...] = self._source.device_fetch(indices, device)
            _wait_for(device)
            return made


def _timed(change: Change | None, spent: Spent, device: torch.device) -> Change | None:
    if change is None:
        return None

    def timed(batch: Batch) -> Batch:
        # What is still on its way is the copy's time.
        _wait_for(device)
        with spent.during("augment"):
            changed = change(batch)
            _wait_for(device)
            return changed

    return timed


def measure_parts(
    training: Training,
    loader: Loader,
    seconds: float,
    empty_cache: Callable[[], None] | None = None,
) -> Parts:
    """Where the time goes, from reading in line for about `seconds`; one epoch with `empty_cache`."""
    device = training.mesh.device
    spent, inner = Spent(), _inner_spent(loader.source)
    next(iter(loader.varied(workers=0, prefetch=0).epoch(0)))  # libraries and memory
    inline = loader.varied(source=_TimedSource(loader.source, spent), workers=0, prefetch=0)
    inline.pin_memory = False
    inline.change = _timed(loader.change, spent, device)
    let_go(loader.source)
    if empty_cache is not None:
        empty_cache()
    num_samples = epoch = 0
    switched = [spent, *([inner] if inner is not None else [])]
    for one in switched:
        one.seconds.clear()
        one.is_on = True
    begin = time.perf_counter()
    try:
        while time.perf_counter() - begin < seconds and not (epoch and empty_cache):
            batches = inline.epoch(epoch)
            while time.perf_counter() - begin < seconds or not num_samples:
                with spent.during("load"):
                    batch = next(batches, None)
                if batch is None:
                    break
                batch.pending = _timed(batch.pending, spent, device)
                with spent.during("copy"):
                    on_host = batch.targets[0].device.type == "cpu"
                    pinned = batch.pin_memory() if loader.pin_memory and on_host else batch
                    training.to_device(pinned)
                    _wait_for(device)
                num_samples += sum(batch.counts)
            epoch += 1
    finally:
        for one in switched:
            one.is_on = False
    return _split(
        spent.seconds, inner.seconds if inner else None, loader.change is not None, num_samples
    )


def _inner_spent(source: Any) -> Spent | None:
    """What a source adds up itself, or the data set that it reads."""
    spent = getattr(source, "spent", None) or getattr(
        getattr(source, "dataset", None), "spent", None
    )
    return spent if isinstance(spent, Spent) else None


def _split(
    outer: dict[str, float], inner: dict[str, float] | None, on_host: bool, num_samples: int
) -> Parts:
    """What was added up, in parts that do not overlap; `on_host`: batches are augmented where read."""
    load, copy, augment = (outer.get(name, 0.0) for name in ("load", "copy", "augment"))
    parts: dict[str, float] = {}
    if inner is None:
        parts["fetch"] = outer.get("fetch", 0.0)
    else:
        parts["open"] = inner.get("open", 0.0)
        parts["read"] = max(0.0, inner.get("read", 0.0) - parts["open"])
        parts["decode"] = inner.get("decode", 0.0)
    rest = load - sum(parts.values()) - (augment if on_host else 0.0)
    parts["collate"] = max(0.0, rest)
    if augment:
        parts["augment"] = augment
    parts["copy"] = copy if on_host else max(0.0, copy - augment)
    count = max(1, num_samples)
    return Parts(
        {name: value / count for name, value in parts.items()}, (load + copy) / count, num_samples
    )


def choose_enough(supplies: Sequence[Supply], samples_per_s: float) -> Supply | None:
    """The fewest readers that give what is asked, with headroom; threads before processes."""
    ordered = sorted(supplies, key=lambda one: (one.num_readers, one.workers))
    return next((one for one in ordered if one.samples_per_s >= HEADROOM * samples_per_s), None)


def best_of(supplies: Sequence[Supply]) -> Supply:
    return max(supplies, key=lambda one: one.samples_per_s)


def conclude(supplies: Sequence[Supply], samples_per_s: float, parts: Parts) -> str:
    """How many workers are enough, or why none are and what to do about it."""
    enough, best = choose_enough(supplies, samples_per_s), best_of(supplies)
    asked = f"{samples_per_s:,.0f} samples/s"
    if enough is not None:
        verb = "is" if enough.num_readers == 1 else "are"
        return (
            f"{enough} {verb} enough: the step asks for {asked} a rank and {enough} "
            f"{'gives' if enough.num_readers == 1 else 'give'} {enough.samples_per_s:,.0f}"
        )
    part = parts.largest()
    share = best.samples_per_s / samples_per_s
    close = f" (it takes {HEADROOM:.0%} to be sure)" if share >= 1 else ""
    return (
        f"no number of workers up to {max(one.workers for one in supplies)} is enough: the best is "
        f"{best} with {best.samples_per_s:,.0f} samples/s, {share:.0%} of the {asked} that the step "
        f"asks for a rank{close}; the time goes into {part} ({parts.share(part):.0%}): "
        f"{_REMEDIES[part]}"
    )
