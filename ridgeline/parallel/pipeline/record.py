"""One forward pass watched: which module ran when, what each value was made of and who used it last.

Where a model can be cut follows from that alone: a cut is right when nothing that was computed from
weights before it is used after it, except what the module at the cut is called with. The pass runs on
fake tensors (no memory, no arithmetic; autocast acts as on the real device); a model that looks at its
values is run for real on a copy. Called by `plan.py`.

Every torch function call is one tick of the clock. A value is tainted when it depends on a weight.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ridgeline.errors import UsageError
from ridgeline.models.inputs import call_arguments
from ridgeline.parallel.pipeline.structure import (
    Where,
    batch_size,
    copy_containers,
    is_transparent,
    map_leaves,
    tensors_in,
)

BATCHES = (2, 3)
"""The batch sizes a model is watched at: two, to learn which dims grow with the batch."""

# What these give depends on a tensor's shape, type and place, which a stand-in has too.
_LOOKS = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size"}
    | {"get_device", "is_floating_point", "is_complex", "is_same_size", "is_tensor", "is_inference"}
    | {"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "zeros_like", "ones_like"}
    | {"empty_like", "full_like", "rand_like", "randn_like", "result_type", "storage_offset"}
    | {"requires_grad_", "register_hook", "retain_grad", "__len__", "__hash__", "__repr__"}
)


_HOOKS = frozenset({"register_hook", "retain_grad"})
_READS = frozenset({"item", "tolist", "__float__", "__int__", "__index__", "numpy"})
"""What gives a number, which a stage that stands in with zeros would have otherwise; so is a size that
follows from values, as of the rows that `torch.where` finds."""
_LOOKS_AT_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_MASKS = (torch.bool, torch.uint8)


@dataclass
class Call:
    """One call of one module."""

    path: str
    order: int
    """How many calls of the same module came before it in the pass."""
    parent: int
    start: int
    flops_start: int
    inputs: dict[Where, int]
    """Tensors among the arguments, by the keys that lead to them in `(args, kwargs)`."""
    end: int = -1
    output: Any = None
    is_stand_in_possible: bool = False
    """Whether all it returns is tensors made of weights, so that zeros do where it is not needed."""


@dataclass
class Value:
    """One tensor that was made in the pass."""

    tensor: Tensor  # kept, so that its id stays its own
    defined: int
    call: int
    is_tainted: bool
    last_use: int = -1
    last_call: int = -1
    uses: list[int] = field(default_factory=list)
    """When it was used, if it depends on a weight."""
    changes: list[int] = field(default_factory=list)
    """When its memory was written to, by whatever name."""
    made_by: str = ""
    """The function of torch that it is the result of, and what that was given."""
    made_of: tuple[int, ...] = ()
    root: int = -1
    """The memory that it lies in, which it shares with its views."""
    is_hooked: bool = False
    """Whether the model's own code watches its gradient."""


@dataclass
class Recording:
    """What was seen in one pass."""

    calls: list[Call] = field(default_factory=list)
    values: dict[int, Value] = field(default_factory=dict)
    uses: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """When, and in which call, each parameter and buffer went into arithmetic."""
    looks: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """The same for questions about its shape, type or place."""
    reads: list[tuple[int, int]] = field(default_factory=list)
    """When, and in which call, a number was read from what depends on weights."""
    changes: dict[str, int] = field(default_factory=dict)
    """When each buffer last became something that was computed from weights."""
    flops: int = 0
    end: int = 0

    def path_of(self, call: int) -> str:
        return self.calls[call].path if call >= 0 else ""


class _CountFlops(TorchDispatchMode):
    """FLOPs of everything that runs below it, by torch's own table, and what of it looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.num_looks = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.num_looks += _looks_at_values(func, args)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            try:
                self.total += int(count(*args, **kwargs, out_val=out))
            except AssertionError:
                # Torch 2.11 cannot count attention with grouped heads: by the shapes of q and k.
                query, key = args[0].shape, args[1].shape
                self.total += 4 * math.prod(query) * key[-2]
        return out


class _Watch(TorchFunctionMode):
    """Follows every tensor from the call that made it to the last one that used it."""

    def __init__(self, model: nn.Module, flops: _CountFlops) -> None:
        super().__init__()
        self.recording = Recording()
        self.clock = 0
        self.stack: list[int] = []
        self.num_calls: Counter[str] = Counter()
        self.flops = flops
        self.names: dict[int, str] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self.names[id(tensor)] = name
        self.weights = {id(p) for p in model.parameters()}
        self.memory: defaultdict[int, list[int]] = defaultdict(list)
        """By what tensors lie in: when it was written to."""
        self.tainted: set[int] = set()
        """Memory in which there is something that was computed from weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        taken = [tensor for _, tensor in tensors_in((args, kwargs))]
        versions = [_version(tensor) for tensor in taken]
        looks = self.flops.num_looks
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        made = [tensor for _, tensor in tensors_in(out)]
        if name in _LOOKS or (name == "__get__" and not made):
            for tensor in taken:
                self._note(self.recording.looks, tensor)
                if name in _HOOKS and id(tensor) in self.recording.values:
                    self.recording.values[id(tensor)].is_hooked = True
            return out
        if name == "scaled_dot_product_attention" and taken[0].device.type == "cpu":
            self.flops.total += _attention_flops(*taken[:3])
        self.clock += 1
        tainted = [self.use(tensor) for tensor in taken]
        changed = [t for t, before in zip(taken, versions, strict=True) if _version(t) != before]
        if (name in _READS or self.flops.num_looks > looks) and any(tainted):
            self.recording.reads.append((self.clock, self.call))
        for tensor in changed:
            # Whoever has a view of it, before this or after, has what is written.
            self.memory[_root(tensor)].append(self.clock)
            if any(tainted):
                self.tainted.add(_root(tensor))
        for tensor in made + changed:
            self.define(tensor, any(tainted))
        for tensor in made:
            value = self.recording.values[id(tensor)]
            if value.defined == self.clock and all(tensor is not one for one in taken):
                value.made_by, value.made_of = name, tuple(map(id, taken))
        for tensor in changed if any(tainted) else ():
            if id(tensor) in self.names:
                self.recording.changes[self.names[id(tensor)]] = self.clock
        return out

    def use(self, tensor: Tensor) -> bool:
        """Note that a tensor is used now; whether it depends on weights."""
        self._note(self.recording.uses, tensor)
        if id(tensor) in self.weights:
            return True
        value = self.recording.values.get(id(tensor))
        if value is None and id(tensor) in self.names:
            return False  # a buffer that nothing has written to
        value = self.define(tensor, False)
        value.last_use, value.last_call = self.clock, self.call
        if value.is_tainted:
            value.uses.append(self.clock)
        return value.is_tainted

    def define(self, tensor: Tensor, is_tainted: bool) -> Value:
        known, root = self.recording.values.get(id(tensor)), _root(tensor)
        is_tainted = is_tainted or tensor.requires_grad or root in self.tainted
        if known is None:
            known = Value(tensor, self.clock, self.call, is_tainted, root=root)
            known.changes = self.memory[root]
            self.recording.values[id(tensor)] = known
        known.is_tainted = known.is_tainted or is_tainted
        return known

    def _note(self, table: dict[str, list[tuple[int, int]]], tensor: Tensor) -> None:
        name = self.names.get(id(tensor))
        if name is not None:
            table.setdefault(name, []).append((self.clock, self.call))

    @property
    def call(self) -> int:
        return self.stack[-1] if self.stack else -1

    def enter_module(self, path: str, args: Any, kwargs: Any) -> None:
        inputs = {}
        for where, tensor in tensors_in((args, kwargs)):
            if id(tensor) not in self.recording.values and id(tensor) not in self.names:
                self.define(tensor, False)
            inputs[where] = id(tensor)
        order, self.num_calls[path] = self.num_calls[path], self.num_calls[path] + 1
        call = Call(path, order, self.call, self.clock, self.flops.total, inputs)
        self.recording.calls.append(call)
        self.stack.append(len(self.recording.calls) - 1)

    def leave_module(self, output: Any) -> None:
        call = self.recording.calls[self.stack.pop()]
        call.end, call.output = self.clock, copy_containers(output)
        tainted = [self.define(tensor, False).is_tainted for _, tensor in tensors_in(output)]
        call.is_stand_in_possible = bool(tainted) and all(tainted) and is_transparent(output)


@contextmanager
def without_memory() -> Iterator[None]:
    """Tensors that are made are fake. What fails on them is tried for real, or told in a sentence by
    whoever asked for it, and not by torch's log before that."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = before


def record(
    model: nn.Module,
    example_inputs: Any,
    device: torch.device,
    autocast_dtype: torch.dtype | None = None,
) -> tuple[Recording, Recording]:
    """Watch the model at both of `BATCHES`; the model itself, and torch's random state, are as before."""
    try:
        with without_memory():
            watched = fake_copy(model, device)
            runs = [
                _run(watched, resize(example_inputs, size, device, True), device, autocast_dtype)
                for size in BATCHES
            ]
    except Exception as error:
        if any(t.is_meta for t in [*model.parameters(), *model.buffers()]):
            raise
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                watched = copy.deepcopy(model).to(device)
                runs = [
                    _run(watched, resize(example_inputs, size, device), device, autocast_dtype)
                    for size in BATCHES
                ]
        except Exception as second:
            raise second from error
        _require_one_path(model, runs[0], error)
    return runs[0], runs[1]


def _require_one_path(model: nn.Module, seen: Recording, error: Exception) -> None:
    """A model that looks at values may call other modules for other values, and no cut would hold."""
    called = {call.path for call in seen.calls}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    left = []
    for path, module in model.named_modules():
        own = [names[id(parameter)] for parameter in module.parameters(recurse=False)]
        # A weight that another module uses (a tied embedding's) has run, whoever holds it.
        if path and own and path not in called and not any(name in seen.uses for name in own):
            left.append(path)
    if left:
        raise UsageError(
            f"{type(model).__name__} looks at values in its forward, and {left[0]} did not run in the "
            "example: which modules run depends on the data, so it cannot be cut into pipeline stages; "
            "use pp=1 with dp, zero or recompute"
        ) from error


def resize(inputs: Any, size: int, device: torch.device, is_fake: bool = False) -> Any:
    """Example inputs with `size` samples, on `device`."""
    batch = batch_size(inputs)

    def change(_: Where, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        scales = leaf.dim() > 0 and leaf.shape[0] == batch
        if is_fake:
            shape = (size, *leaf.shape[1:]) if scales else leaf.shape
            return torch.empty(shape, dtype=leaf.dtype, device=device)
        return (leaf[:1].expand(size, *leaf.shape[1:]) if scales else leaf).to(device)

    return map_leaves(inputs, change)


def fake_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """The same structure over tensors without memory, all weights differentiable."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        is_weight = isinstance(tensor, nn.Parameter)
        trains = made.is_floating_point() or made.is_complex()
        memo[id(tensor)] = nn.Parameter(made, trains) if is_weight else made
    return copy.deepcopy(model, memo)


def _run(
    model: nn.Module, inputs: Any, device: torch.device, autocast_dtype: torch.dtype | None
) -> Recording:
    flops = _CountFlops()
    watch = _Watch(model, flops)
    args, kwargs = call_arguments(inputs)
    cast: AbstractContextManager[Any] = nullcontext()
    if autocast_dtype is not None:
        cast = torch.autocast(device.type, dtype=autocast_dtype)
    with ExitStack() as stack:
        for path, module in model.named_modules():
            for hook in _hooks(watch, path, module):
                stack.callback(hook.remove)
        stack.enter_context(cast)
        stack.enter_context(flops)
        stack.enter_context(watch)
        output = model(*args, **kwargs)
    watch.clock += 1
    for _, tensor in tensors_in(output):
        watch.use(tensor)
    for name, buffer in model.named_buffers():
        value = watch.recording.values.get(id(buffer))
        if id(buffer) not in watch.names and value is not None and value.is_tainted:
            watch.recording.changes[name] = value.defined  # another tensor was put in its place
    watch.recording.flops, watch.recording.end = flops.total, watch.clock
    return watch.recording


def _hooks(watch: _Watch, path: str, module: nn.Module) -> list[Any]:
    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        watch.enter_module(path, args, kwargs)

    def after(_: nn.Module, args: Any, output: Any) -> None:
        watch.leave_module(output)

    first: Callable[..., Any] = module.register_forward_pre_hook
    return [first(before, with_kwargs=True, prepend=True), module.register_forward_hook(after)]


def _looks_at_values(func: Any, args: Any) -> bool:
    """Whether what it gives has a size, or is a number, that follows from values."""
    if func is torch.ops.aten.index.Tensor:  # tagged for its masks, and rarely given one
        return any(one is not None and one.dtype in _MASKS for one in args[1])
    return any(tag in func.tags for tag in _LOOKS_AT_VALUES)


def _root(tensor: Tensor) -> int:
    """Also of what `detach` and `data` give, which have no base."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse ones have several
        return -id(tensor)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Two matrix products, which torch's table does not have for the CPU."""
    rows, columns = query.shape[-2], key.shape[-2]
    heads = query.numel() // (rows * query.shape[-1])
    return int(2 * heads * rows * columns * (query.shape[-1] + value.shape[-1]))
