"""Batches on a GPU: copied ahead of the step on a stream of their own, and never written over in use."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline.data.batch import Batch
from ridgeline.data.feed import build_feed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def batches(num: int, size: int = 1 << 20):
    for number in range(num):
        inputs = torch.full((size,), float(number)).pin_memory()
        yield Batch([inputs], [inputs[:1]], (1,), 1, number, 0, (np.array([number]),))


def to_device(batch: Batch) -> Batch:
    moved = batch.to("cuda")
    moved.inputs = [part * 1.0 for part in moved.inputs]  # work on the side stream too
    return moved


@pytest.mark.parametrize("ahead", [1, 2])
def test_what_is_taken_is_what_was_sent(ahead):
    feed = build_feed(to_device, torch.device("cuda"), ahead)
    sums = []
    for moving in feed(batches(50)):
        batch = moving.take()
        # A step that takes a while, so that the copies run beside it.
        torch.cuda._sleep(2_000_000)
        sums.append((batch.inputs[0].min(), batch.inputs[0].max()))
    assert [(low.item(), high.item()) for low, high in sums] == [(i, i) for i in range(50)]


def test_copies_run_beside_the_step():
    """A step as long as a copy: one after the other would take the sum of both."""
    device = torch.device("cuda")
    size = 64 << 20
    host = torch.empty(size).pin_memory()

    def many():
        for number in range(10):
            yield Batch([host], [host[:1]], (1,), 1, number, 0, (np.array([number]),))

    def elapsed(feed):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for moving in feed(many()):
            moving.take()
            torch.cuda._sleep(20_000_000)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    class Now:
        def __init__(self, batch):
            self.batch = batch

        def take(self):
            return self.batch.to(device)

    ahead = build_feed(lambda batch: batch.to(device), device)
    in_turn = lambda made: (Now(batch) for batch in made)  # noqa: E731
    for warm in (ahead, in_turn):
        elapsed(warm)
    assert elapsed(ahead) < 0.85 * elapsed(in_turn)


def test_an_error_reaches_the_loop_as_it_is():
    def broken():
        yield from batches(2)
        raise ValueError("the disk is gone")

    feed = build_feed(to_device, torch.device("cuda"))
    with pytest.raises(ValueError, match="the disk is gone"):
        list(feed(broken()))


@pytest.mark.parametrize("way", [{"prefetch": 0}, {"threads": 2}])
def test_large_batches_are_read_into_pinned_memory_and_reused_safely(tmp_path, way):
    """Straight from the file, without a copy; what is used again was copied to the device before."""
    h5py = pytest.importorskip("h5py")
    from ridgeline.data.build import build_sources
    from ridgeline.data.loader import Loader

    with h5py.File(tmp_path / "fields.h5", "w") as file:
        values = np.arange(12, dtype=np.float32).reshape(12, 1, 1) * np.ones(
            (1, 512, 512), np.float32
        )
        file["input"], file["target"] = values, values
    source = build_sources("packed", {"path": str(tmp_path), "holdout": 0}, 0)[0]
    loader = Loader(source, batch=3, shuffle=False, pin_memory=True, **way)
    feed = build_feed(lambda batch: batch.to("cuda"), torch.device("cuda"))
    count, found = 5 * len(loader), []
    for moving in feed(_pinned_only(loader.onward(0, 0, count))):
        batch = moving.take()
        torch.cuda._sleep(2_000_000)
        found.append(
            (batch.indices[0], batch.inputs[0].amax((1, 2)), batch.targets[0].amin((1, 2)))
        )
    assert len(found) == count
    for indices, high, low in found:
        assert high.tolist() == low.tolist() == indices.tolist()


def _pinned_only(made):
    for batch in made:
        assert all(part.is_pinned() for part in batch.tensors())
        yield batch
