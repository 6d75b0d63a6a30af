"""One training step on the meta device, kernel by kernel: what each reads, writes, computes and keeps.

A dispatch mode sees every kernel, forward and backward; hooks on modules say whose it is, and in backward
the sequence number of the autograd node does. Storages are followed from their first kernel to their end:
so a tensor that is kept twice, or as a view, counts once, and the most that is alive at a time is known.
`trace.py` runs it; `trace_facts.py` turns two recordings into facts.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ridgeline.models.experts import argument, is_stack, read_call, why_whole
from ridgeline.models.grouped import grouped_flops, grouped_sizes
from ridgeline.models.trace_kernels import (
    BATCH_NORMS,
    EMPTY,
    FUSABLE,
    NORMS,
    Kernel,
    Sizes,
    Storage,
    find_tensors,
    halo_of,
    is_kept,
    is_linear,
    is_of_experts,
    is_pointwise,
    is_result_split,
    kind_of,
    num_bytes,
    size_convolution,
    size_convolution_backward,
    size_matrix,
    stored_attention,
)

_Moment = tuple[int, ...]
"""Bytes that are alive: whole, split, gathered, and of experts' weights."""
NONE: Final = (0, 0, 0, 0)
RANKS: Final = (
    (1.0, 1.0, 1.0, 1.0),
    (1.0, 1 / 8, 1.0, 1.0),
    (1 / 8, 1 / 8, 1.0, 1.0),
    (1.0, 1.0, 1.0, 1 / 8),
)
"""What of those a rank has: alone, one of eight that split layers, the same with the sequence cut, one of
eight that share experts. The worst moment of a block is not the same one for all."""


@dataclass
class Unit:
    """A stretch of the forward pass: a block, or what stands between two."""

    name: str
    module: nn.Module | None
    inputs: set[int] = field(default_factory=set)
    """Storages that the block was called with."""
    modules: list[str] = field(default_factory=list)
    peak_forward: tuple[int, ...] = NONE
    peaks_backward: list[_Moment] = field(default_factory=lambda: [NONE] * len(RANKS))
    """By `RANKS`."""
    peaks_gradients: list[_Moment] = field(default_factory=lambda: [NONE] * len(RANKS))
    at_loss: _Moment = NONE
    """Alive when a loss of split classes begins, the logits too."""
    logits: int = 0
    """Elements of those."""
    before: tuple[int, ...] = NONE
    """Kept by the units before it."""
    gradients: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    """Of its parameters, so far."""
    views: list[int] = field(default_factory=lambda: [0, 0])
    stops_at: int = 0
    """The first kernel after the last tensor that forward keeps: what follows is not recomputed."""


@dataclass
class Routed:
    """One call of experts that lie side by side."""

    unit: int
    module: str
    tokens: int
    chosen: int
    """Experts for each token."""
    row_bytes: int
    """Of a token as it goes in."""
    back_bytes: int = 0
    """Of what comes out for it."""


def _weigh(moment: _Moment, shares: tuple[float, ...]) -> float:
    return sum(size * share for size, share in zip(moment, shares, strict=True))


class Recorder(TorchDispatchMode):
    """Watches one step of `model`; `blocks` are where it can be cut, `roles` how its linear layers split
    (None: to be found out), `starts` those that no pair ends with."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        roles: Mapping[str, str] | None,
        starts: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.model, self.roles, self._starts = model, dict(roles or {}), starts
        self.names = {id(module): name for name, module in model.named_modules()}
        self.classes = {name: type(module).__name__ for name, module in model.named_modules()}
        self.block_names = {id(module): name for name, module in blocks.items()}
        self.units = [Unit("start", None)]
        self.kernels: list[Kernel] = []
        self.storages: list[Storage] = []
        self.known: dict[int, Storage] = {}
        self.stack: list[str] = []
        self.events: list[tuple[int, int, str]] = [(0, 0, "")]
        self.backward = self.muted = False
        self.live = [0, 0, 0, 0]
        self.kept = [0, 0, 0, 0]
        self.pairs: dict[str, set[str]] = {}
        """Found row-split layers and the column-split ones before them."""
        self.broken: set[str] = set()
        self.reduced: list[tuple[int, str, bool, int]] = []
        """Unit, module, whether in backward, elements."""
        self._column_inputs: set[int] = set()
        self.routed: list[Routed] = []
        self._stacks = frozenset(
            id(module) for module in model.modules() if is_stack(module) and not why_whole(module)
        )
        self.numbers: dict[str, int] = {}
        """Storages of parameters."""
        for name, parameter in model.named_parameters():
            split = name.rpartition(".")[0] in self.roles
            storage = self._storage(parameter, "parameter", split and parameter.dim() > 1)
            self.numbers[name] = storage.number
        for buffer in model.buffers():
            self._storage(buffer, "buffer", False)

    # Modules

    @contextmanager
    def watching(self, inputs: Sequence[Any]) -> Iterator[None]:
        """Hooks on every module and parameter, and on what autograd keeps."""
        handles: list[Any] = []
        for tensor in find_tensors(inputs):
            self._storage(tensor, "input", False)
        for module in self.model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
        handles += [
            parameter.register_post_accumulate_grad_hook(self._has_gradient)
            for parameter in self.model.parameters()
            if parameter.requires_grad
        ]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor), self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def start_backward(self) -> None:
        self._last = self._where()
        self.backward = True
        self.stack.clear()

    @property
    def place(self) -> str:
        """The module at work, for messages."""
        if not self.backward:
            return self.stack[-1] if self.stack else ""
        return self._where()[1]

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.backward:
            return
        name = self._name(module)
        if id(module) in self.block_names:
            self._begin_unit(name, module)
            found = (self._known(t) for t in find_tensors((args, kwargs)))
            self.units[-1].inputs |= {s.number for s in found if s and s.kind == "made"}
        self.stack.append(name)
        if name not in self.units[-1].modules:
            self.units[-1].modules.append(name)
        self._mark(name)
        if self.roles.get(name) in ("column", "head"):
            self._note_column_input(name, find_tensors((args, kwargs)))
        if id(module) in self._stacks:
            self._note_routed(name, args, kwargs)

    def _note_routed(self, name: str, args: Any, kwargs: Any) -> None:
        call = read_call(args, kwargs)
        if isinstance(call, str):
            return
        rows = argument(args, kwargs, call.rows)
        tokens, chosen = argument(args, kwargs, call.index).shape
        size = rows.shape[-1] * rows.element_size()
        for _, parameter in self.model.get_submodule(name).named_parameters():
            self._storage(parameter, "parameter").of_experts = True
        self.routed.append(Routed(len(self.units) - 1, name, tokens, chosen, size))

    def _name(self, module: nn.Module) -> str:
        """Of a module that several others share, the name that the one at work has for it."""
        first = self.names.get(id(module), "")
        parent = self.stack[-1] if self.stack else ""
        if not parent or first.rpartition(".")[0] == parent:
            return first
        for name, child in self.model.get_submodule(parent).named_children():
            if child is module:
                return f"{parent}.{name}"
        return first

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.backward:
            return
        name = self.stack.pop()
        self._follow(module, name, args, output)
        last = self.routed[-1] if self.routed else None
        if last is not None and last.module == name and isinstance(output, Tensor):
            last.back_bytes = output.shape[-1] * output.element_size()
        if id(module) in self.block_names:
            self._begin_unit(f"after {name}", None)
        self._mark(self.stack[-1] if self.stack else "")

    def _begin_unit(self, name: str, module: nn.Module | None) -> None:
        self.units.append(Unit(name, module, before=tuple(self.kept)))
        self._mark(self.stack[-1] if self.stack else "")

    def _mark(self, module: str) -> None:
        number = torch.autograd._get_sequence_nr()
        self.events.append((number, len(self.units) - 1, module))

    def _where(self) -> tuple[int, str]:
        """Unit and module of the kernel at hand."""
        if not self.backward:
            return len(self.units) - 1, self.stack[-1] if self.stack else ""
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else None
        if number is None or number > 1 << 62:
            return self._last
        place = bisect_right(self.events, number, key=lambda event: event[0]) - 1
        self._last = self.events[place][1], self.events[place][2]
        return self._last

    _last: tuple[int, str] = (0, "")

    # Tensor parallelism

    def _note_column_input(self, name: str, tensors: list[Tensor]) -> None:
        """Its gradient is summed over ranks, once for all layers that read the same tensor."""
        for tensor in tensors:
            storage = self._known(tensor)
            if storage is not None and storage.number not in self._column_inputs:
                self._column_inputs.add(storage.number)
                is_input = any(storage.number in unit.inputs for unit in self.units)
                if storage.kind == "made" and not storage.split and not is_input:
                    self._set_place(storage, False, storage.gathered, lent=True)
                self.reduced.append((len(self.units) - 1, name, True, tensor.numel()))

    def _follow(self, module: nn.Module, name: str, args: Any, output: Any) -> None:
        """Whether a linear layer can be split, or what its role makes of the result."""
        out = next(iter(find_tensors((output,))), None)
        storage = self._known(out) if out is not None else None
        if storage is None or out is None or not is_linear(module, name, self.roles):
            return
        role = self.roles.get(name)
        if role in ("row", "embedding"):
            self.reduced.append((len(self.units) - 1, name, False, out.numel()))
        storage.split = role in ("column", "head")
        read = [self._known(t) for t in find_tensors((args,))]
        before = frozenset[str]().union(*(s.sources for s in read if s is not None))
        if before and name not in self._starts:
            self.pairs.setdefault(name, set()).update(before)
            storage.sources = frozenset()
        else:
            storage.sources = frozenset({name})

    # Storages

    def _known(self, tensor: Tensor) -> Storage | None:
        return self.known.get(tensor.untyped_storage()._cdata)

    def _storage(self, tensor: Tensor, kind: str = "made", split: bool = False) -> Storage:
        piece = tensor.untyped_storage()
        found = self.known.get(piece._cdata)
        if found is None:
            unit = self._where()[0]
            found = Storage(len(self.storages), piece.nbytes(), unit, split, kind=kind)
            self.storages.append(found)
            self.known[piece._cdata] = found
            weakref.finalize(piece, self._gone, piece._cdata, found)
            if kind in ("made", "weight"):
                self.live[found.place] += found.num_bytes
        return found

    def _gone(self, key: int, storage: Storage) -> None:
        if self.known.get(key) is storage:
            del self.known[key]
        if storage.kind in ("made", "weight") and not storage.is_gradient:
            self.live[storage.place] -= storage.num_bytes

    def _pack(self, tensor: Tensor) -> Tensor:
        if not self.backward:
            self.units[self._where()[0]].stops_at = len(self.kernels)
        storage = self._known(tensor)
        if storage is None:
            storage = self._storage(tensor)
        if storage.saved_by is None and storage.kind in ("made", "weight", "input"):
            unit, module = self._where()
            storage.saved_by = (unit, module)
            self.kept[storage.place] += storage.num_bytes
            if storage.kind == "input":
                self.live[storage.place] += storage.num_bytes
        if not tensor.requires_grad:
            return tensor
        # Not the tensor itself, which would hold the graph that holds it.
        self.muted = True
        try:
            return tensor.detach()
        finally:
            self.muted = False

    def _has_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        storage = self._known(parameter.grad)
        if storage is not None and not storage.is_gradient:
            storage.is_gradient = True
            self.live[storage.place] -= storage.num_bytes
            self.units[self._last[0]].gradients[storage.place] += storage.num_bytes

    def note_weight(self, copy: Tensor, of: Tensor) -> None:
        storage, parameter = self._storage(copy), self._known(of)
        storage.kind = "weight"
        if parameter is not None and parameter.split:
            self._set_place(storage, True, False)

    def _peak(self) -> None:
        unit = self.units[self._where()[0]]
        now = tuple(live - before for live, before in zip(self.live, unit.before, strict=True))
        if not self.backward:
            unit.peak_forward = max(unit.peak_forward, now, key=sum)
            return
        with_own = tuple(a + b for a, b in zip(now, unit.gradients, strict=True))
        for place, shares in enumerate(RANKS):
            for peaks, moment in (
                (unit.peaks_backward, now),
                (unit.peaks_gradients, with_own),
            ):
                if _weigh(moment, shares) > _weigh(peaks[place], shares):
                    peaks[place] = moment

    # Kernels

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.muted:
            return out
        name = func._schema.name.partition("::")[2]
        written, read = find_tensors((out,)), find_tensors((args, kwargs))
        changes = func._schema.is_mutable
        if not changes and written and all(self._known(t) is not None for t in written):
            self.units[self._where()[0]].views[self.backward] += 1
            return out
        count = flop_registry.get(func._overloadpacket)
        flops = int(count(*args, **(kwargs or {}), out_val=out)) if count is not None else 0
        self._note(name, read, written, flops, func, args)
        return out

    def note_kernel(
        self, name: str, reads: list[Tensor], writes: list[Tensor], **facts: Any
    ) -> None:
        """Of a kernel that `trace_device.py` put in the place of several."""
        attention, product, flops = None, None, 0
        if name == "_grouped_mm":
            shapes = [t.shape for t in reads]
            flops = grouped_flops(*shapes)
            product = ("grouped", grouped_sizes(*shapes, facts["groups"]), "", 0)
        if name == "attention":
            query, key, value = reads[:3]
            attention = {
                "batch": query.shape[0], "heads": query.shape[1], "seq": query.shape[2],
                "keys": key.shape[2], "width": query.shape[3], "causal": facts["causal"],
                "scores": math.prod(query.shape[:3]) * key.shape[2],
            }  # fmt: skip
            whole = (query.shape[0], query.shape[1])
            shapes = [(*whole, *t.shape[2:]) for t in (query, key, value)]
            if facts["backward"]:
                flops = sdpa_backward_flop_count(shapes[0], *shapes)
            else:
                flops = sdpa_flop_count(*shapes)
        self._note(name, reads, writes, flops, None, (), attention, product)

    def _note(
        self,
        name: str,
        read: list[Tensor],
        written: list[Tensor],
        flops: int,
        func: Any,
        args: tuple[Any, ...],
        attention: dict[str, Any] | None = None,
        product: Sizes | None = None,
    ) -> None:
        unit, module = self._where()
        sources = [self._storage(t) for t in read]
        activations = [s for s in sources if s.kind in ("made", "input")]
        role = self.roles.get(module, "")
        split = any(s.split for s in activations)
        is_matrix = name in ("mm", "addmm", "bmm", "baddbmm")
        more = None
        if is_matrix:
            product = size_matrix(
                name, read, role, self.backward, [s.split for s in sources], sources
            )
            split = split if name in ("bmm", "baddbmm") else bool(product[2])
            for storage in activations:
                if storage.kind != "made" or storage.split:
                    continue
                if role in ("column", "head") and not self.backward:
                    self._set_place(storage, False, True)
                elif role == "row" and self.backward and storage.unit == unit:
                    self._set_place(storage, False, storage.gathered, lent=True)
        made = [self._storage(t) for t in written]
        reads_weight = any(s.kind in ("parameter", "weight") for s in sources)
        result_split = is_result_split(name, role, self.backward, split, reads_weight)
        # Gradients of what was gathered are whole until ranks have summed them, their casts and sums too.
        pending = self.backward and not result_split
        if is_matrix:
            pending = pending and role in ("column", "head")
        else:
            pending = pending and bool(activations) and all(s.gathered for s in activations)
        index = len(self.kernels)
        for tensor, storage in zip(written, made, strict=True):
            if storage.producer < 0 and storage.kind == "made":
                storage.producer = index
                self._set_place(storage, result_split, pending)
                storage.is_product |= is_kept(name, read, tensor)
                if is_of_experts(name, tensor, read, sources):
                    self._set_of_experts(storage)
                storage.is_mask = name == "native_dropout" and tensor.dtype == torch.bool
        if name == "_log_softmax" and split and not self.backward:
            self._note_loss(made, written[0].numel())
        if name in EMPTY:
            for storage in made:
                storage.producer = -1
            self._peak()
            return
        if name == "convolution":
            product = size_convolution(read[0], read[1], written[0], args)
        elif name == "convolution_backward":
            product, more = size_convolution_backward(written, args)
        if self.roles == {} and not self.backward:
            self._trail(name, read, sources, made, is_matrix)
        if name in ("bmm", "baddbmm") and product is not None and not self.backward:
            made[0].scores_width = product[1][2]
        elif name in ("_softmax", "softmax") or is_pointwise(func):
            widths = [s.scores_width for s in sources if s.scores_width]
            if widths and made:
                made[0].scores_width = widths[0]
        if name == "_softmax" and sources and sources[0].scores_width and not self.backward:
            attention = stored_attention(read[0], sources[0].scores_width)
        self.kernels.append(
            Kernel(
                name,
                unit,
                module,
                self.backward,
                [(s.number, num_bytes(t)) for s, t in zip(sources, read, strict=True)],
                [(s.number, num_bytes(t)) for s, t in zip(made, written, strict=True)],
                split,
                kind_of(name, read, written, func),
                flops,
                product,
                more,
                attention,
                halo_of(name, read, args) if not self.backward else None,
                name in FUSABLE or is_pointwise(func),
            )
        )
        self._peak()

    def _note_loss(self, made: list[Storage], logits: int) -> None:
        unit = self.units[self._where()[0]]
        now = [live - before for live, before in zip(self.live, unit.before, strict=True)]
        for storage in made:
            now[storage.place] -= storage.num_bytes
        unit.at_loss, unit.logits = tuple(now), logits

    def _set_of_experts(self, storage: Storage) -> None:
        before = storage.place
        storage.of_experts = True
        self._moved(storage, before)

    def _set_place(self, storage: Storage, split: bool, gathered: bool, lent: bool = False) -> None:
        before = storage.place
        storage.split, storage.gathered, storage.lent = split, gathered, lent
        self._moved(storage, before)

    def _moved(self, storage: Storage, before: int) -> None:
        if storage.place != before and storage.kind in ("made", "weight"):
            self.live[before] -= storage.num_bytes
            self.live[storage.place] += storage.num_bytes
            if storage.saved_by is not None:
                self.kept[before] -= storage.num_bytes
                self.kept[storage.place] += storage.num_bytes

    def _trail(
        self,
        name: str,
        read: list[Tensor],
        sources: list[Storage],
        made: list[Storage],
        is_matrix: bool,
    ) -> None:
        """Which linear layers a result follows from; what needs all columns at once ends the trail."""
        trail = frozenset[str]().union(*(s.sources for s in sources))
        if not trail:
            return
        if name in NORMS or name in BATCH_NORMS or name == "convolution":
            self.broken |= trail
            return
        largest = max(t.numel() for t in read)
        whole = [
            s
            for s, t in zip(sources, read, strict=True)
            if not s.sources and s.kind == "made" and t.numel() == largest
        ]
        if whole and not is_matrix and name != "embedding":
            self.broken |= trail
            return
        for storage in made:
            storage.sources |= trail
