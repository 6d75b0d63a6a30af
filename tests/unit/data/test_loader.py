"""The loader: the same batches however they are read, and a clean end however it comes."""

import gc
import multiprocessing.forkserver
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

from ridgeline.data.build import build_sources
from ridgeline.data.loader import Loader
from ridgeline.data.order import Blocks, epoch_order
from ridgeline.data.source import DatasetSource
from ridgeline.errors import RunError, UsageError


def digits(**args):
    return build_sources("digits", {"augment": True, **args}, 3)[0]


def data_threads():
    return [t for t in threading.enumerate() if t.name.startswith("ridgeline-data")]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert (a.step, a.epoch, a.num_global, a.counts) == (
            b.step,
            b.epoch,
            b.num_global,
            b.counts,
        )
        assert all(map(np.array_equal, a.indices, b.indices))
        assert all(map(torch.equal, a.inputs, b.inputs))
        assert all(map(torch.equal, a.targets, b.targets))


class Failing:
    """Good until sample 7 is asked for."""

    info = None

    def __init__(self, delay_s=0.0):
        self.fetched = 0
        self.delay_s = delay_s

    def __len__(self):
        return 20

    def fetch(self, indices, epoch):
        time.sleep(self.delay_s)
        self.fetched += 1
        if 7 in indices:
            raise ValueError("the disk is on fire")
        return torch.from_numpy(indices), torch.from_numpy(indices)


def test_same_batches_for_any_prefetch_and_workers():
    source = digits()
    kwargs = {"batch": 200, "rank": 1, "world": 3, "seed": 4, "accumulate": 2}
    expected = [list(Loader(source, prefetch=0, **kwargs).epoch(epoch)) for epoch in (0, 1)]
    for prefetch in (1, 2, 50):
        loader = Loader(source, prefetch=prefetch, **kwargs)
        assert_same(list(loader.epoch(1)), expected[1])
    torch.manual_seed(0)
    state = torch.get_rng_state()
    loader = Loader(source, workers=2, **kwargs)
    try:
        assert_same(list(loader.epoch(0)), expected[0])
        # An epoch given up half-way leaves nothing behind for the next.
        next(half := loader.epoch(0))
        assert_same(list(loader.epoch(1, start=2)), expected[1][2:])
        with pytest.raises(RunError, match="one epoch at a time"):
            next(half)
        assert torch.equal(state, torch.get_rng_state())
    finally:
        loader.close()


@pytest.mark.parametrize("way", [{"prefetch": 0}, {"threads": 3}, {"workers": 2}])
def test_going_on_over_epochs_gives_what_they_give(way):
    kwargs = {"batch": 500, "rank": 1, "world": 2, "seed": 4, "drop_last": True}
    plain = Loader(digits(), prefetch=0, **kwargs)
    expected = [*plain.epoch(1, 1), *plain.epoch(2), *plain.epoch(3)][: 2 * len(plain)]
    loader = Loader(digits(), **kwargs, **way)
    try:
        assert_same(list(loader.onward(1, 1, 2 * len(plain))), expected)
        with pytest.raises(RunError, match="none from batch 99 on"):
            loader.onward(0, 99, 1)
    finally:
        loader.close()


class Counting:
    """Remembers what was asked for."""

    info = None

    def __init__(self):
        self.fetched = []

    def __len__(self):
        return 8

    def fetch(self, indices, epoch):
        self.fetched.append((epoch, *indices.tolist()))
        return torch.from_numpy(indices), torch.from_numpy(indices)


def test_the_next_epoch_is_read_while_the_last_batches_are_used_and_no_more_than_asked():
    source = Counting()
    batches = Loader(source, batch=4, threads=2, prefetch=2).onward(0, 0, 5)
    for _ in range(2):
        last = next(batches)
    assert (last.epoch, last.step) == (0, 1)  # nothing of the next one was asked for
    until = time.monotonic() + 10
    while len(source.fetched) < 5 and time.monotonic() < until:
        time.sleep(0.01)
    assert sorted(epoch for epoch, *_ in source.fetched) == [0, 0, 1, 1, 2]
    assert [batch.epoch for batch in batches] == [1, 1, 2]
    assert len(source.fetched) == 5


def test_batches_for_a_gpu_are_read_to_where_it_copies_from(monkeypatch, tmp_path):
    from ridgeline.data import batch as reading
    from ridgeline.data.order import plan_epoch

    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "fields.h5", "w") as file:
        for name in ("input", "target"):
            file[name] = np.zeros((4, 512, 512), dtype=np.float32)
    source = build_sources("packed", {"path": str(tmp_path), "holdout": 0}, 0)[0]
    (plan,) = plan_epoch(4, 4, 0, 1, 0, 0)
    asked, empty = [], torch.empty

    def noting(*args, pin_memory=False, **kwargs):
        asked.append(pin_memory)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", noting)
    monkeypatch.setattr(reading.Batch, "pin_memory", lambda batch: batch)
    reading.read_pinned(source, plan, None, pin=False)
    assert not any(asked)
    reading.read_pinned(source, plan, None, pin=True)
    assert sum(asked) == 2
    reading.read_pinned(source, plan, None, pin=False)
    assert sum(asked) == 2


def test_workers_report_what_went_wrong(tmp_path):
    (tmp_path / "c").mkdir()
    for number in range(4):
        Image.new("RGB", (4, 4)).save(tmp_path / "c" / f"{number}.png")
    args = {"path": str(tmp_path), "size": 4, "holdout": 0.25}
    source = build_sources("images", args, 0)[0]
    (tmp_path / "c" / "1.png").write_bytes(b"broken")
    loader = Loader(source, batch=1, shuffle=False, workers=1)
    try:
        batches = loader.epoch(0)
        next(batches)
        with pytest.raises(UsageError, match=r"1\.png.*samples \[1\] of epoch 0, batch 1"):
            next(batches)
        # The workers live on.
        assert next(loader.epoch(0)).indices[0].tolist() == [0]
    finally:
        loader.close()


def test_workers_outlive_the_trainers_signals_and_are_replaced_when_killed():
    loader = Loader(digits(), batch=100, workers=2)
    try:
        next(loader.epoch(0))
        workers = loader._processes._data_loader._iterator._workers
        server = multiprocessing.forkserver._forkserver._forkserver_pid
        # The second worker may be starting still, which is when it is most easily hurt.
        for pid in (*(worker.pid for worker in workers), server):
            for name in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(pid, name)
        assert len(list(loader.epoch(1))) == len(loader)
        batches = loader.epoch(2)
        next(batches)
        os.kill(workers[0].pid, signal.SIGKILL)
        with pytest.raises(RunError, match="worker"):
            list(batches)
        assert len(list(loader.epoch(2))) == len(loader)
    finally:
        loader.close()


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_source_that_does_not_pickle_is_refused():
    source = digits()
    source.secret = lambda: None
    loader = Loader(source, batch=10, workers=1)
    with pytest.raises(UsageError, match="cannot be sent to worker processes"):
        next(loader.epoch(0))
    loader.close()


def test_length_order_and_start():
    source = digits()
    loader = Loader(source, batch=100, seed=8)
    assert len(loader) == len(list(loader.epoch(0))) == -(-len(source) // 100)
    batches = list(loader.epoch(2, start=10))
    order = epoch_order(len(source), 8, 2)
    assert np.array_equal(np.concatenate([b.indices[0] for b in batches]), order[1000:])
    assert len(Loader(source, batch=100, drop_last=True)) == len(source) // 100


def test_ranks_together_give_the_batch_of_one():
    source = digits()
    alone = next(Loader(source, batch=50).epoch(0))
    for world, accumulate in ((2, 1), (3, 2), (4, 3)):
        ranks = [
            next(Loader(source, batch=50, rank=r, world=world, accumulate=accumulate).epoch(0))
            for r in range(world)
        ]
        parts = [ranks[r].inputs[m] for m in range(accumulate) for r in range(world)]
        assert torch.equal(torch.cat(parts), alone.inputs[0])


class Asked:
    """Remembers what it is asked for ahead, and what is read."""

    info = None

    def __init__(self):
        self.asked, self.read = set(), set()

    def __len__(self):
        return 203

    def ahead(self, first, last):
        self.asked |= set(range(first, last))

    def fetch(self, indices, epoch):
        assert self.asked >= set(indices.tolist())
        self.read |= set(indices.tolist())
        return torch.from_numpy(indices), torch.from_numpy(indices)


@pytest.mark.parametrize("batch", [5, 24, 100])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("start", [0, 1])
def test_a_rank_asks_ahead_for_what_it_reads_and_no_more(batch, pairs, start):
    blocks = Blocks(block=8, window=32)
    loaders = [
        Loader(Asked(), batch=batch, rank=rank, world=3, blocks=blocks, pairs=pairs, prefetch=0)
        for rank in range(3)
    ]
    order = epoch_order(203, 0, 2, True, blocks)[start * batch :]
    parts = []
    for loader in loaders:
        parts.append([made.inputs[0][: made.counts[0]] for made in loader.epoch(2, start)])
        assert loader.source.asked == loader.source.read
        assert pairs or len(loader.source.read) < 100
    if not pairs:  # else mates lie among them
        read = torch.cat([part for dealt in zip(*parts, strict=True) for part in dealt])
        assert read.tolist() == order.tolist()


def test_windows_are_asked_for_one_ahead():
    source = Asked()
    batches = Loader(
        source, batch=8, rank=1, world=2, blocks=Blocks(block=8, window=32), prefetch=0
    ).epoch(0)
    next(batches)
    assert len(source.asked) == 32  # half of two windows
    for _ in range(4):
        next(batches)
    assert len(source.asked) == 48


def test_ranks_of_one_node_ask_for_whole_blocks():
    source = Asked()
    loader = Loader(
        source, batch=8, world=2, blocks=Blocks(block=8, window=32), one_node=True, prefetch=0
    )
    list(loader.epoch(0))
    assert source.asked == set(range(203))


def test_filler_counts_nothing():
    loader = Loader(digits(), batch=2, rank=3, world=4)
    batch = next(loader.epoch(0))
    assert batch.counts == (0,)
    assert batch.num_global == 2
    assert len(batch.inputs[0]) == 1


@pytest.mark.parametrize("end", ["close", "drop", "exhaust", "error"])
def test_no_thread_is_left(end):
    assert not data_threads()
    source = Failing() if end == "error" else digits()
    batches = Loader(source, batch=2, shuffle=False).epoch(0)
    next(batches)
    assert len(data_threads()) == 1 or end == "error"
    if end == "close":
        batches.close()
    elif end == "drop":
        del batches
        gc.collect()
    elif end == "exhaust":
        for _ in batches:
            pass
    else:
        with pytest.raises(RunError):
            list(batches)
    assert not data_threads()


def test_an_unstarted_epoch_starts_no_thread():
    batches = Loader(digits(), batch=2).epoch(0)
    assert not data_threads()
    del batches


def test_prefetch_reads_no_further_than_asked():
    source = Failing()
    batches = Loader(source, batch=1, shuffle=False, prefetch=2).epoch(0)
    next(batches)
    time.sleep(0.2)
    assert source.fetched == 3
    batches.close()


def test_thread_reads_while_the_step_runs():
    source = Failing(delay_s=0.2)
    batches = Loader(source, batch=1, shuffle=False, prefetch=3).epoch(0)
    next(batches)
    time.sleep(1.2)
    start_s = time.perf_counter()
    for _ in range(3):
        next(batches)
    assert time.perf_counter() - start_s < 0.3  # three reads take 0.6
    batches.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_names_the_samples(prefetch):
    loader = Loader(Failing(), batch=4, shuffle=False, prefetch=prefetch)
    batches = loader.epoch(3)
    next(batches)
    pattern = r"ValueError: the disk is on fire .*samples \[4, 5, 6, 7\] of epoch 3, batch 1"
    with pytest.raises(RunError, match=pattern) as caught:
        next(batches)
    assert isinstance(caught.value.__cause__, ValueError)


def test_global_generators_are_not_shared_with_a_thread():
    items = [(torch.zeros(1), 0)] * 8
    batches = Loader(DatasetSource(items), batch=2).epoch(0)
    next(batches)
    assert not data_threads()


def test_batch_moves_and_device_fetch():
    source = build_sources("synthetic", {"samples": 20, "shape": [2]}, 0)[0]
    expected = list(Loader(source, batch=8, accumulate=2).epoch(0))
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    for device in devices:
        made = list(Loader(source, batch=8, accumulate=2, device=device, workers=4).epoch(0))
        assert not data_threads()
        assert all(part.device.type == device for batch in made for part in batch.inputs)
        assert_same([batch.to("cpu") for batch in made], expected)
        pinned = list(Loader(source, batch=8, accumulate=2, pin_memory=True).epoch(0))
        assert all(b.inputs[0].is_pinned() == torch.cuda.is_available() for b in pinned)
        assert_same([batch.to(device).to("cpu") for batch in pinned], expected)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"batch": 2, "workers": -1}, "workers=-1"),
        ({"batch": 5000, "drop_last": True}, "no whole batch of 5000"),
        ({"batch": 2, "rank": 1}, "rank 1"),
    ],
)
def test_wrong_arguments(kwargs, message):
    with pytest.raises(UsageError, match=message):
        Loader(digits(), **kwargs)


def test_memory_of_batches_is_used_again_when_nobody_holds_it():
    from ridgeline.data.memory import empty_batch

    first = empty_batch((300, 1024), torch.float32)
    address = first.data_ptr()
    part = first[10:20].numpy()[2:]
    part[...] = 7.0
    del first
    gc.collect()
    # A view of a view is enough to keep it.
    second = empty_batch((300, 1024), torch.float32)
    assert second.data_ptr() != address
    second.fill_(1.0)
    assert (part == 7.0).all()
    del part
    gc.collect()
    assert empty_batch((300, 1024), torch.float32).data_ptr() == address


def test_memory_may_come_back_at_any_moment():
    """The garbage collector can run in the thread that is asking for memory."""
    from ridgeline.data import memory

    held = [memory.empty_batch((300, 1024), torch.float32)]

    def drop():
        with memory._pool._lock:
            held.clear()

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
