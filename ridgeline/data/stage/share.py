"""Blocks from node to node, so that a job reads each byte of a data set once.

Every node's first rank is in the group. Each reads a part of what is missing and sends it to all others
in messages of some MiB, reading the next while the last ones are under way. All see the same messages
in the same order, so all notice at the same message that a sender could not read. Called by `run.py`;
the group is gloo's, over the CPU's network.
"""

from __future__ import annotations

import json
import queue
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ridgeline.data.stage.plan import Listing, Sending, plan_sendings
from ridgeline.data.stage.problem import StageProblem, sentence
from ridgeline.errors import UsageError

_IN_FLIGHT = 4
_HEADER = struct.Struct("<II")
"""Whether the sender could read, and the CRC32 of what follows."""
_GOOD, _BAD = 1, 2


def agree_on_listing(make: Callable[[], Listing], group: dist.ProcessGroup) -> Listing:
    """The listing that the first node makes; its problem is everybody's."""
    said: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            said = [("listing", make().to_json())]
        except UsageError as error:
            said = [("usage", str(error))]
        except (StageProblem, OSError) as error:
            said = [("problem", sentence(error))]
    dist.broadcast_object_list(said, src=dist.get_global_rank(group, 0), group=group)
    kind, text = said[0]
    if kind == "usage":
        raise UsageError(text)
    if kind == "problem":
        raise StageProblem(text)
    return Listing.from_json(text)


def exchange(
    listing: Listing,
    wants: set[int],
    has: set[int],
    read: Callable[[int], bytes],
    store: Callable[[int, memoryview], None],
    group: dist.ProcessGroup,
    progress: Callable[[int], None],
) -> str:
    """Every node's wanted blocks, stored. Returns why this node's could not be; a block that nobody
    could read is a problem on all nodes, and raised."""
    size = dist.get_rank(group), dist.get_world_size(group)
    states: list[Any] = [None] * size[1]
    dist.all_gather_object(states, (_packed(listing, wants), _packed(listing, has)), group=group)
    sendings = plan_sendings(
        listing,
        [_unpacked(state[0]) for state in states],
        [_unpacked(state[1]) for state in states],
    )
    mine = [sending for sending in sendings if sending.node == size[0]]
    with _Ahead(mine, read) as ahead:
        receiver = _Receiver(listing, wants, store, progress)
        _send_all(sendings, size[0], ahead, receiver, group)
        said: list[Any] = [None] * size[1]
        dist.all_gather_object(said, ahead.problem, group=group)
    for problem in said:
        if problem:
            raise StageProblem(problem)
    return receiver.problem


def _send_all(
    sendings: list[Sending], rank: int, ahead: _Ahead, receiver: _Receiver, group: dist.ProcessGroup
) -> None:
    """Some messages are always under way; stops, on all nodes alike, after one that is bad."""
    under_way: deque[tuple[Sending, torch.Tensor, Any]] = deque()
    going = True
    for sending in sendings:
        if sending.node == rank:
            message = torch.frombuffer(ahead.next(), dtype=torch.uint8)
        else:
            message = torch.empty(_HEADER.size + sending.size, dtype=torch.uint8)
        source = dist.get_global_rank(group, sending.node)
        work = dist.broadcast(message, src=source, group=group, async_op=True)
        under_way.append((sending, message, work))
        if len(under_way) == _IN_FLIGHT:
            going = _take(under_way, receiver)
            if not going:
                break
    while under_way:
        going = _take(under_way, receiver, going) and going


def _take(
    under_way: deque[tuple[Sending, torch.Tensor, Any]], receiver: _Receiver, keep: bool = True
) -> bool:
    """The oldest message; whether it was good."""
    sending, message, work = under_way.popleft()
    work.wait()
    return receiver.take(sending, memoryview(message.numpy()), keep)


class _Receiver:
    """Stores what this node wants, until its disk refuses; then it only passes messages on."""

    def __init__(
        self,
        listing: Listing,
        wants: set[int],
        store: Callable[[int, memoryview], None],
        progress: Callable[[int], None],
    ) -> None:
        self._listing, self._wants, self._store = listing, wants, store
        self._progress = progress
        self.problem = ""

    def take(self, sending: Sending, message: memoryview, keep: bool) -> bool:
        status, crc = _HEADER.unpack_from(message)
        if status != _GOOD:
            return False
        if keep and not self.problem:
            try:
                self._keep(sending, message[_HEADER.size :], crc)
            except (StageProblem, OSError) as error:
                self.problem = sentence(error)
        self._progress(sending.size)
        return True

    def _keep(self, sending: Sending, data: memoryview, crc: int) -> None:
        if not self._wants.intersection(sending.blocks):
            return
        if zlib.crc32(data) != crc:
            raise StageProblem(f"what node {sending.node} sent did not arrive as it was")
        start = 0
        for block in sending.blocks:
            size = self._listing.locate(block)[2]
            if block in self._wants:
                self._store(block, data[start : start + size])
            start += size


class _Ahead:
    """A thread that reads this node's messages before they are due."""

    def __init__(self, sendings: list[Sending], read: Callable[[int], bytes]) -> None:
        self._sendings, self._read = sendings, read
        self._ready: queue.Queue[bytearray] = queue.Queue(maxsize=2)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.problem = ""

    def __enter__(self) -> _Ahead:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def next(self) -> bytearray:
        return self._ready.get()

    def _run(self) -> None:
        for sending in self._sendings:
            message = bytearray(_HEADER.size + sending.size)
            try:
                if self.problem:
                    raise StageProblem(self.problem)
                message[_HEADER.size :] = b"".join(self._read(block) for block in sending.blocks)
                crc = zlib.crc32(memoryview(message)[_HEADER.size :])
                _HEADER.pack_into(message, 0, _GOOD, crc)
            except Exception as error:
                # Whatever it is: the others wait for this message.
                self.problem = self.problem or sentence(error)
                _HEADER.pack_into(message, 0, _BAD, 0)
            while not self._ended.is_set():
                try:
                    self._ready.put(message, timeout=0.1)
                    break
                except queue.Full:
                    continue


def _packed(listing: Listing, blocks: set[int]) -> bytes:
    """A set of blocks as few bytes: runs, as first and stop."""
    runs: list[list[int]] = []
    for block in sorted(blocks):
        if runs and runs[-1][1] == block:
            runs[-1][1] = block + 1
        else:
            runs.append([block, block + 1])
    return zlib.compress(json.dumps(runs).encode())


def _unpacked(packed: bytes) -> set[int]:
    runs = json.loads(zlib.decompress(packed))
    return {block for first, stop in runs for block in range(first, stop)}
