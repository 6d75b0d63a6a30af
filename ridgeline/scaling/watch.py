"""Watches one step from below: every collective that the rank starts, and the bytes its tensors take.

Torch shows each operation to a dispatch mode, those of communication too, whoever starts them: DDP, FSDP2,
DTensor or our own. So nothing here knows a technique. Memory is counted by storages, as the caching
allocator of a GPU would, but without what a kernel takes inside itself. Called by `rank.py`, for a step
that is not timed.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_KINDS: Final = {
    # c10d's own operations: which argument has the bytes that the planner counts.
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "reduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    # The functional ones, which DTensor uses; their gathers return what has the bytes.
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
    "all_gather_into_tensor": ("all_gather", -1),
}
_SPACES: Final = ("c10d", "_c10d_functional")


@dataclass(frozen=True)
class Call:
    """One communication that a rank started."""

    kind: str
    num_bytes: int
    ranks: tuple[int, ...]
    """Members of the group; of a send the receiver alone."""
    phase: str
    """The part of the step that was over last."""


class StepWatch(TorchDispatchMode):  # type: ignore[misc,unused-ignore]
    """`with watch:` around a step; `calls` and `peak_bytes` afterwards."""

    def __init__(self, phase: Callable[[], str]) -> None:
        """`phase` says what the step did last."""
        super().__init__()
        self.calls: Counter[Call] = Counter()
        self._phase = phase
        self.peak_bytes = 0
        """Most bytes at a time that were not there before the step."""
        self._live = 0
        self._sizes: dict[int, int] = {}
        """By storage: the bytes it has more than when it was first seen."""
        self._before: dict[int, int] = {}
        self._storages: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __enter__(self) -> StepWatch:
        # FSDP2 keeps tensors whose memory it has taken away: what is there when one of them is first
        # used was made by the step.
        for value in gc.get_objects():
            if issubclass(type(value), Tensor):
                for storage in _storages(value):
                    self._see(storage, storage.nbytes())
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # its own rules turn it into operations on plain tensors
        for storage in _storages((args, kwargs)):
            self._see(storage, storage.nbytes())
        out = func(*args, **(kwargs or {}))
        if func.namespace in _SPACES:
            self._note(func, args, kwargs or {}, out)
        for storage in _storages(out):
            self._see(storage, 0)
        if self._live > self.peak_bytes:
            self._look_again()
            self.peak_bytes = max(self.peak_bytes, self._live)
        return out

    def _see(self, storage: Any, before: int) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._before[key], self._sizes[key] = before, 0
            self._storages[key] = storage
            weakref.finalize(storage, self._forget, key).atexit = False
        self._resize(key, storage.nbytes())

    def _resize(self, key: int, num_bytes: int) -> None:
        more = num_bytes - self._before[key]
        self._live += more - self._sizes[key]
        self._sizes[key] = more

    def _forget(self, key: int) -> None:
        self._live -= self._sizes.pop(key, 0)
        self._before.pop(key, None)

    def _look_again(self) -> None:
        """FSDP2 takes storages' memory away and gives it back without an operation."""
        for key, storage in list(self._storages.items()):
            if key in self._sizes:
                self._resize(key, storage.nbytes())

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        known = _KINDS.get(func._schema.name.partition("::")[2])
        if known is None:
            return
        kind, place = known
        tensors = tree_leaves(out if place < 0 else args[place])
        num_bytes = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
        ranks = tuple(dist.get_process_group_ranks(_group(args, kwargs)))
        if kind == "send":
            ranks = (ranks[args[2]],)
        self.calls[Call(kind, num_bytes, ranks, self._phase())] += 1


def _storages(value: Any) -> Iterator[Any]:
    for leaf in tree_leaves(value):
        if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
            continue
        if is_traceable_wrapper_subclass(leaf):
            # A result that is still on its way says that it has bytes: those of what it stands for.
            yield from _storages([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif leaf.layout is torch.strided:
            storage = leaf.untyped_storage()
            # Tensors that compiling left behind say that they are on a device; their storages do not,
            # and a size of theirs may be a symbol.
            if storage.device.type != "meta":
                yield storage


def _group(args: Any, kwargs: dict[str, Any]) -> dist.ProcessGroup:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except (RuntimeError, TypeError):
                continue  # the operation of a reduction is one too
    name = next(v for v in reversed((*args, *kwargs.values())) if isinstance(v, str))
    return _resolve_process_group(name)
