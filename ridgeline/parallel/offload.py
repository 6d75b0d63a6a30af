"""What lives on the host instead of the device: activations between forward and backward, and buffers
for an optimizer that works there.

`apply_activation_offload` copies what the blocks of a model save for backward to pinned host memory
while forward goes on, and fetches it one block ahead of backward; on a CPU it is a plain copy. Values
are not changed. Called by `apply.py`; `build_host_buffer` by `zero.py`, which keeps optimizer state.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

DEFAULT_MIN_BYTES = 2**20
"""Smaller tensors stay: a transfer has a cost of its own, and they hold little memory."""


def build_host_buffer(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the host, in memory that `device` can copy to and from beside its own work."""
    return torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")


def apply_activation_offload(
    model: nn.Module, blocks: Iterable[nn.Module], min_bytes: int = DEFAULT_MIN_BYTES
) -> nn.Module:
    """Keep what each of `blocks` saves for backward, from `min_bytes` a tensor, on the host.

    Parameters, views of them and what autocast makes of them, and the block's buffers stay where they
    are: something else holds them anyway.
    """
    road = _Road(min_bytes)
    for block in blocks:
        _patch(block, road)
    return model


def _patch(block: nn.Module, road: _Road) -> None:
    forward = block.forward

    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = _Call(road, block)
        with torch.autograd.graph.saved_tensors_hooks(call.pack, _unpack):
            return forward(*args, **kwargs)

    block.forward = offloaded


class _Road:
    """What the blocks of one model share: the stream of the copies, and who ran last."""

    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.last: weakref.ref[_Call] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _Call:
    """One forward of one block. Lives as long as something that it saved."""

    def __init__(self, road: _Road, block: nn.Module) -> None:
        self.road = road
        # Asked in every call: sharded weights have another place in each.
        self._staying = {
            tensor.untyped_storage()._cdata
            for tensor in (*block.parameters(), *block.buffers())
            if type(tensor) in (Tensor, nn.Parameter)
        }
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[_Saved]]] = {}
        self.saved: list[weakref.ref[_Saved]] = []
        self.before, road.last = road.last, weakref.ref(self)
        self.fetched = False

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        if not self._goes(tensor):
            return tensor
        # Several operations may save the same tensor; it travels once.
        storage = tensor.untyped_storage()
        place = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (storage._cdata, tensor._version, place)
        if key in self._known:
            owner, known = self._known[key]
            found = known()
            if not owner.expired() and found is not None:
                return found
        saved = _Saved(self, tensor)
        self._known[key] = (StorageWeakRef(storage), weakref.ref(saved))
        self.saved.append(weakref.ref(saved))
        return saved

    def _goes(self, tensor: Tensor) -> bool:
        return (
            type(tensor) in (Tensor, nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.device.type in ("cpu", "cuda")
            and tensor.nbytes >= max(self.road.min_bytes, 1)
            and tensor.untyped_storage()._cdata not in self._staying
            and not _is_weight(tensor)
        )

    def fetch(self) -> None:
        if not self.fetched:
            self.fetched = True
            for reference in reversed(self.saved):  # backward wants the last first
                saved = reference()
                if saved is not None:
                    saved.fetch()


class _Saved:
    """A tensor on the host. Autograd holds it, and with it the copy that came back."""

    def __init__(self, call: _Call, tensor: Tensor) -> None:
        self.call, self.device = call, tensor.device
        self._back: Tensor | None = None
        self._ready: torch.cuda.Event | None = None
        source = tensor.detach()
        if tensor.device.type == "cpu":
            self._host = source.clone()
            return
        # Strides are kept where the tensor is dense; a view with holes gets its own dense copy.
        self._host = torch.empty_like(source, device="cpu", pin_memory=True)
        stream = call.road.stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host.copy_(source, non_blocking=True)
        source.record_stream(stream)  # not to be overwritten before the copy is done

    def fetch(self) -> None:
        """Start the way back."""
        if self.device.type == "cpu" or self._back is not None:
            return
        stream = self.call.road.stream(self.device)
        with torch.cuda.stream(stream):  # in order after the copy that went out
            self._back = torch.empty_like(self._host, device=self.device)
            self._back.copy_(self._host, non_blocking=True)
            self._ready = stream.record_event()

    def take(self) -> Tensor:
        if self.device.type == "cpu":
            return self._host
        self.fetch()
        assert self._back is not None
        assert self._ready is not None
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self._ready)
        self._back.record_stream(current)
        return self._back


# What a parameter goes through on its way into a product.
_VIEWS = {
    "TBackward0",
    "TransposeBackward0",
    "ViewBackward0",
    "PermuteBackward0",
    "ToCopyBackward0",
}


def _is_weight(tensor: Tensor) -> bool:
    """Whether it is a leaf of the graph, or a view or cast of one."""
    node = tensor.grad_fn
    if node is None:
        return tensor.requires_grad
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def _unpack(packed: Tensor | _Saved) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    call = packed.call
    call.fetch()
    before = call.before() if call.before is not None else None
    if before is not None:
        before.fetch()  # while this block computes
    return packed.take()
