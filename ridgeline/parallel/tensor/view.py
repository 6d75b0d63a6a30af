"""The model's own forward with global shapes, while every rank holds a part: `GlobalView`.

Inside the view activations are DTensors, so `x.shape`, `view(B, T, heads, width)`, masks and slices in
code that has never heard of this mean what they mean on one device. Each torch function that meets a
DTensor runs by a rule on plain local tensors (`rules.py`, `views.py`, `attention.py`, `loss.py`); one
without a rule gets its arguments whole, computes on every rank, and is named in `fallbacks`: that is
always right, and only costs. Parameters and constants stay plain and count as whole on every rank.
Their gradients are complete over the tensor axis, and partial over the context axis, to be summed
there by whoever reduces gradients. Made by `parallel/apply.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ridgeline.errors import UsageError
from ridgeline.parallel.fallbacks import Fallbacks
from ridgeline.parallel.tensor import table, watch
from ridgeline.parallel.tensor.attention import attend
from ridgeline.parallel.tensor.move import (
    Placements,
    enter,
    local_shape,
    own_of,
    plain_gradient,
)
from ridgeline.parallel.tensor.runs import Runs, local_runs, part_indices

_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Part:
    """Which part of a tensor a rank has: the global shape, and where the part begins and ends."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    length: tuple[int, ...]


def draw_dropout(local: Tensor, p: float, part: Part) -> Tensor:
    """Dropout that is the same however the tensor is cut: every rank draws for all of it.

    For that the ranks have to hold the same generator state, and then it is what one process draws.
    """
    keep = torch.empty(part.shape, dtype=local.dtype, device=local.device).bernoulli_(1 - p)
    for dim, (start, length) in enumerate(zip(part.start, part.length, strict=True)):
        keep = keep.narrow(dim, start, length)
    return local * (keep.div_(1 - p) if p < 1 else keep)


def is_sequence(value: Any) -> bool:
    """Whether an input of the model counts as samples of (positions, ...): tokens, or their features."""
    if not isinstance(value, Tensor):
        return False
    return value.dim() == 3 or (value.dim() == 2 and not value.is_floating_point())


class _Memory:
    """Stands for memory that several tensors share, or for one of them: tensors that have weak
    references themselves could not be changed in place."""

    def __init__(self) -> None:
        self.holders: list[weakref.ref[_Memory]] = []


def _quietly(method: _Method) -> _Method:
    """A method that is its own affair, also where the view is switched on."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return run  # type: ignore[return-value]


class GlobalView(TorchFunctionMode):
    """Enter it, by `active()` or through a patched module, to compute with global shapes."""

    def __init__(self, mesh: DeviceMesh, sp: bool) -> None:
        super().__init__()
        names = mesh.mesh_dim_names or ()
        axes = tuple(n for n in names if mesh[n].size() > 1) or ("tp",)
        self.mesh = mesh if axes == names else mesh[axes[0] if len(axes) == 1 else axes]
        self.tp: int | None = axes.index("tp") if "tp" in axes else None
        self.cp: int | None = axes.index("cp") if "cp" in axes else None
        self.technique = " and ".join(axes)
        """What it is entered for, in a message."""
        self.sp = sp and self.tp is not None
        self.attention: Callable[..., Tensor] = attend
        """On plain local tensors, as `F.scaled_dot_product_attention`. With a context axis, a
        function of one's own gets queries, keys and values cut along the sequence, a mask whole, and
        `lengths` and `kv_lengths`: how many queries and keys each rank has."""
        self.dropout: Callable[[Tensor, float, Part], Tensor] = draw_dropout
        self.fallbacks = Fallbacks()
        """Functions that got cut arguments whole."""
        self.watched: deque[str] = deque(maxlen=1)
        """How the model's code has looked at gradients, the last time it did."""
        self.splits: dict[str, Any] = {}
        self.report: str = ""
        self._depth = 0
        self._cut: list[Tensor] = []

    def was_cut(self, parameter: Tensor) -> bool:
        return any(parameter is known for known in self._cut)

    def note_cut(self, parameter: Tensor) -> None:
        self._cut.append(parameter)

    # Placements

    def placements(self, cp: Placement | None = None, tp: Placement | None = None) -> Placements:
        """One placement a mesh axis; whole where nothing is said."""
        found: list[Placement] = [Replicate()] * self.mesh.ndim
        if self.cp is not None and cp is not None:
            found[self.cp] = cp
        if self.tp is not None and tp is not None:
            found[self.tp] = tp
        return tuple(found)

    @property
    def replicated(self) -> Placements:
        return self.placements()

    def is_cut(self, x: Any, dim: int) -> bool:
        return isinstance(x, DTensor) and Shard(dim) in x.placements

    def runs(self, x: Any) -> Runs:
        """Of how many runs the dim consists that is cut over each axis: see `runs.py`."""
        return getattr(x, "_runs", None) or (1,) * self.mesh.ndim

    def mark_runs(self, x: DTensor, runs: Runs) -> DTensor:
        if max(runs) > 1:
            x._runs = runs  # type: ignore[attr-defined]
        return x

    def note_view(self, base: DTensor, x: DTensor) -> DTensor:
        """Remember that torch would have let `x` share memory with `base`."""
        token = base.__dict__.setdefault("_memory", _Memory())
        x.__dict__["_memory"] = token
        token.holders.append(weakref.ref(x.__dict__.setdefault("_self", _Memory())))
        token.holders.append(weakref.ref(base.__dict__.setdefault("_self", _Memory())))
        return x

    def _shares_memory(self, x: DTensor) -> bool:
        token, own = x.__dict__.get("_memory"), x.__dict__.get("_self")
        if token is None:
            return False
        return any(ref() is not None and ref() is not own for ref in token.holders)

    # Between plain and cut

    @_quietly
    def wrap(self, tensor: Tensor) -> DTensor:
        """A plain tensor that every rank has whole: a parameter, a buffer, a constant."""
        if isinstance(tensor, DTensor):
            return tensor
        grads = self.placements(cp=Partial())
        return enter(tensor, self.mesh, self.replicated, tensor.shape, grads)

    @_quietly
    def local(
        self, x: Tensor, placements: Placements, grads: Placements, runs: Runs | None = None
    ) -> Tensor:
        """The local part of `x` in `placements`; several uses share one, and its gradient."""
        runs = runs or (1,) * self.mesh.ndim
        if not isinstance(x, DTensor):
            if placements == grads == self.replicated and self.cp is None:
                return x
            return local_runs(self.wrap(x), self.runs(x), placements, grads, runs)
        own = own_of(x)
        if (
            own is not None
            and placements == x.placements
            and grads == plain_gradient(placements)
            and runs == self.runs(x)
        ):
            return own
        kept = x.__dict__.setdefault("_locals", {})
        key = (placements, grads, runs, torch.is_grad_enabled())
        if key not in kept:
            kept[key] = local_runs(x, self.runs(x), placements, grads, runs)
        return kept[key]  # type: ignore[no-any-return]

    def own(self, x: DTensor) -> Tensor:
        """The local part of `x` as it is."""
        return self.local(x, x.placements, plain_gradient(x.placements), self.runs(x))

    @_quietly
    def move(self, x: DTensor, placements: Placements, runs: Runs | None = None) -> DTensor:
        """`x` in other placements, differentiably."""
        runs = runs or (1,) * self.mesh.ndim
        if x.placements == placements and self.runs(x) == runs:
            return x
        local = self.local(x, placements, placements, runs)
        return self.mark_runs(enter(local, self.mesh, placements, x.shape), runs)

    @_quietly
    def settle(self, x: DTensor) -> DTensor:
        """`x` without pending sums."""
        if not any(p.is_partial() for p in x.placements):
            return x
        return self.move(x, plain_gradient(x.placements), self.runs(x))

    @_quietly
    def stream(self, x: DTensor) -> DTensor:
        """What a split layer's partial output becomes between blocks: whole, or cut by sequence."""
        places, runs = list(plain_gradient(x.placements)), list(self.runs(x))
        if self.tp is not None:
            places[self.tp] = Shard(1) if self.sp and x.dim() >= 3 else Replicate()
            runs[self.tp] = 1
        return self.move(x, tuple(places), tuple(runs))

    @_quietly
    def whole(self, x: DTensor) -> DTensor:
        """`x` whole on every rank."""
        return self.move(x, self.replicated)

    @_quietly
    def in_order(self, x: Any) -> Any:
        """A DTensor without cuts in runs; anything else as it is."""
        if not isinstance(x, DTensor) or max(self.runs(x)) == 1:
            return x
        pairs = zip(x.placements, self.runs(x), strict=True)
        return self.move(x, tuple(Replicate() if num > 1 else place for place, num in pairs))

    @_quietly
    def plain(self, x: Any) -> Any:
        """A whole plain tensor of a DTensor; anything else as it is."""
        if not isinstance(x, DTensor):
            return x
        return self.local(self.settle(x), self.replicated, self.replicated)

    def part(self, x: DTensor) -> Part:
        """Where this rank's part of `x` lies, which has to be in order."""
        found = part_indices(x.shape, self.mesh, x.placements, self.runs(x))
        start, length = zip(*((min(i, default=0), len(i)) for i in found), strict=True)
        return Part(tuple(x.shape), start, length)

    # Entering a model, and the border between pipeline stages

    @contextmanager
    def active(self) -> Iterator[GlobalView]:
        """The view switched on; inside itself it changes nothing. Recompute enters it again."""
        if self._depth:
            yield self
            return
        self._depth = 1
        try:
            with self:
                yield self
        finally:
            self._depth = 0

    @property
    def is_active(self) -> bool:
        return self._depth > 0

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`forward` inside the view: plain inputs are whole ones, and so are the results.

        Inside the view already, inputs and results are as they are.
        """
        if self._depth:
            return forward(*args, **kwargs)
        args, kwargs = tree_map(self.enter_input, (args, kwargs))
        with self.active():
            outputs = forward(*args, **kwargs)
        return self._plain_outputs(outputs)

    @_quietly
    def enter_input(self, value: Any) -> Any:
        """A plain input that every rank has whole; tokens and sequences are cut on the context axis."""
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            return value
        places = self.placements(cp=Shard(1) if is_sequence(value) else None)
        return self.move(enter(value, self.mesh, self.replicated, value.shape), places)

    def _plain_outputs(self, outputs: Any) -> Any:
        def one(value: Any) -> Any:
            if dataclasses.is_dataclass(value) and not isinstance(value, (type, Tensor)):
                fields = [f.name for f in dataclasses.fields(value) if f.init]
                new = {name: tree_map(one, getattr(value, name)) for name in fields}
                return dataclasses.replace(value, **new)
            return self.plain(value)

        return tree_map(one, outputs)

    def boundary(self, shape: tuple[int, ...]) -> Placements:
        """How an activation of the global `shape` is cut between two pipeline stages."""
        if len(shape) < 3:
            return self.replicated
        return self.placements(cp=Shard(1), tp=Shard(1) if self.sp else None)

    @_quietly
    def leave(self, x: Tensor) -> Tensor:
        """The plain local part of an activation at a pipeline boundary."""
        places = self.boundary(tuple(x.shape))
        return self.local(self.settle(self.wrap(x)), places, places)

    @_quietly
    def enter(self, local: Tensor, global_shape: tuple[int, ...]) -> DTensor:
        """The inverse of `leave`, on the next stage."""
        places = self.boundary(tuple(global_shape))
        wanted = local_shape(global_shape, self.mesh, places)
        if list(local.shape) != wanted:
            raise ValueError(f"a part of shape {list(local.shape)} came in place of {wanted}")
        return enter(local, self.mesh, places, global_shape)

    # Functions

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not _has_dtensor(args) and not _has_dtensor(kwargs.values()):
            return func(*args, **kwargs)
        name = table.name_of(func)
        if name in watch.NAMES and isinstance(args[0], DTensor):
            self.watched.append(name)
            with torch._C.DisableTorchFunction():
                return watch.watch(self, name, func, *args, **kwargs)
        if func is torch.autograd.grad:
            self.watched.append("autograd.grad")
            return watch.gradients(self, *args, **kwargs)
        if name in table.NATIVE:
            return func(*args, **kwargs)
        if name in table.CREATE:
            local = tree_map(lambda v: v.to_local() if isinstance(v, DTensor) else v, args)
            return func(*local, **kwargs)
        target = table.in_place_target(name, args, kwargs)
        if target is not None:
            return self._in_place(target, name, func, args, kwargs)
        return self._call(name, func, args, kwargs)

    def _call(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        rule = table.RULES.get(name)
        if rule is not None:
            if name not in table.KNOWS_RUNS:
                args, kwargs = tree_map(self.in_order, (args, kwargs))
            result = rule(self, func, args, kwargs)
            if result is not NotImplemented:
                return result
        return self._whole_call(name, func, args, kwargs)

    def _whole_call(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """The function on whole arguments, on every rank."""
        gathered: list[Tensor] = []

        def gather(value: Any) -> Any:
            if isinstance(value, Tensor):
                value = self.wrap(value)
                if value.placements != self.replicated:
                    gathered.append(value)
                return self.plain(value)
            return value

        args, kwargs = tree_map(gather, (args, kwargs))
        if gathered:
            largest = max(gathered, key=Tensor.numel)
            self.fallbacks.note(name, largest.shape, sum(t.nbytes for t in gathered))
        result = func(*args, **kwargs)
        if name in table.TO_PYTHON:
            return result
        return tree_map(self._wrap_result, result)

    def _wrap_result(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return enter(value, self.mesh, self.replicated, value.shape)
        return value

    def _in_place(self, x: Any, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Computed out of place, then `x` becomes the result; what was saved of it stays valid."""
        if not isinstance(x, DTensor) or self._shares_memory(x):
            raise UsageError(
                f"{name} changes in place a tensor "
                + (
                    "that others are views of, or a view"
                    if isinstance(x, DTensor)
                    else "of its own"
                )
                + f", which a model under {self.technique} cannot do; use the form that returns a new "
                "tensor"
            )
        args, kwargs, other = table.out_of_place(name, args, kwargs)
        if other is not None:
            new = self._call(table.name_of(other), other, args, kwargs)
        else:
            whole = tree_map(lambda v: self.plain(v).clone() if v is x else v, (args, kwargs))
            whole = tree_map(self.plain, whole)
            func(*whole[0], **whole[1])
            new = self._wrap_result(whole[0][0])
        if new.dtype != x.dtype:
            new = self._call("to", Tensor.to, (new, x.dtype), {})
        torch.utils.swap_tensors(x, new)
        return x


def _has_dtensor(values: Any) -> bool:
    for value in values:
        if isinstance(value, DTensor):
            return True
        if isinstance(value, (tuple, list)) and _has_dtensor(value):
            return True
    return False
