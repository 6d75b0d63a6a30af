"""Recompute: activations are dropped in forward and computed again in backward, for memory.

torch's non-reentrant checkpoint does the work. What is by hand here is what it leaves to the
caller: which parts of an unknown module to take (its repeated blocks, else stretches of a
`Sequential`), which results are too dear to compute twice, and that the second pass starts from
the buffers of the first and leaves none changed, so that batch norm counts a batch once. The
module keeps its structure: only the `forward` of an instance is replaced. Called by `apply.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ridgeline.errors import UsageError, unknown_word
from ridgeline.parallel.blocks import find_blocks

HOW = ("selective", "full")
Contexts = Callable[[], AbstractContextManager[Any]]

# By name, because not every torch and build has every one of them.
_PRODUCTS = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "addmm", "linear", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm",
        "convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution",
    )
) | {"ridgeline::fp8_product"}  # fmt: skip
_BATCHED_PRODUCTS = frozenset({"aten::bmm", "aten::baddbmm"})
_REDUCTIONS = frozenset(
    f"_c10d_functional::{name}"
    for name in ("all_reduce", "reduce_scatter_tensor", "all_to_all_single")
)


def apply_recompute(
    model: nn.Module,
    how: str,
    contexts: Contexts | None = None,
    blocks: dict[str, nn.Module] | None = None,
) -> list[str]:
    """Make the blocks of `model` recompute in backward; the paths of those, none if it has none.

    `full` keeps only a block's inputs. `selective` also keeps the results of matrix products,
    convolutions, fused attention and reductions over ranks, and recomputes what is between them.
    A model without blocks has its `Sequential`s cut into about sqrt(n) stretches of layers each,
    named `path[start:stop]`. Losses, gradients and buffers are bit for bit what they were.

    `blocks` by their paths, where the caller knows them better than `find_blocks` would.

    `contexts` is called as a block's forward begins, and what it returns is entered around that
    block's recomputation (each time, should there be several): for a mode that is on in forward,
    which backward would otherwise not have. Under torch.compile the recomputation is part of the
    compiled graph, and it is not called.

    State that forward changes and that is no buffer (a counter in plain Python) is changed again.
    """
    if how not in HOW:
        raise unknown_word("recompute", how, HOW, "layout recompute=")
    if blocks is None:
        blocks = find_blocks(model)
    if blocks:
        for path, block in blocks.items():
            _patch_block(block, path, how, contexts)
        return list(blocks)
    return [
        place
        for path, module in _outermost_sequentials(model)
        for place in _patch_sequential(module, path, how, contexts)
    ]


# What is recomputed


class _Region:
    """One stretch of computation that is recomputed: a block, or layers of a `Sequential`."""

    def __init__(
        self,
        path: str,
        modules: list[nn.Module],
        how: str,
        contexts: Contexts | None,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        self.path, self.modules, self.how, self.contexts = path, modules, how, contexts
        self.forward = forward or self._run_in_turn
        self._own_forward = forward
        self._owners: list[nn.Module] | None = None
        # Buffers that forward has been seen to change, in training and in evaluation.
        self.changing: dict[bool, set[tuple[int, str]]] = {}

        def context_fn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return _build_contexts(self)

        context_fn.is_ridgelines = True  # type: ignore[attr-defined]  # see own_recompute.py
        # A plain function and no method, which is what torch.compile takes.
        self.context_fn = context_fn

    def __deepcopy__(self, memo: dict[int, Any]) -> _Region:
        modules = copy.deepcopy(self.modules, memo)
        forward = copy.deepcopy(self._own_forward, memo)
        return _Region(self.path, modules, self.how, self.contexts, forward)

    def __reduce__(self) -> Any:
        # As `nn.Module` pickles: a method by its name, which is the class's own forward again.
        return (_Region, (self.path, self.modules, self.how, None, self._own_forward))

    def _run_in_turn(self, x: Any) -> Any:
        for module in self.modules:
            x = module(x)
        return x

    @property
    def owners(self) -> list[nn.Module]:
        """Modules with buffers. Found when first asked: in a copy they are made after this."""
        if self._owners is None:
            found = [m for module in self.modules for m in module.modules() if m._buffers]
            self._owners = found
        return self._owners

    def buffers(self) -> dict[tuple[int, str], Tensor]:
        return {
            (index, name): buffer
            for index, owner in enumerate(self.owners)
            for name, buffer in owner._buffers.items()
            if buffer is not None
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self.modules[0].training:
            args = tuple(None if _is_cache(value) else value for value in args)
            kwargs = {key: _without_cache(key, value) for key, value in kwargs.items()}
        elif any(_is_cache(value) for value in (*args, *kwargs.values())):
            return self.forward(*args, **kwargs)  # generating with gradients: the cache is wanted
        if torch.compiler.is_compiling():
            return self._checkpoint(args, kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        versions = [t._version for t in tensors if not t.is_inference()]
        result = self._checkpoint(args, kwargs)
        if versions != [t._version for t in tensors if not t.is_inference()]:
            raise UsageError(
                f"layout recompute={self.how}: {self.path} changes its input in place, so it "
                "cannot be computed again from it; make its first operation not in place "
                "(inplace=False) or use recompute=none"
            )
        return result

    def _checkpoint(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return checkpoint(
            self.forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=self.context_fn,
            **kwargs,
        )


def _is_cache(value: Any) -> bool:
    """A key-value cache as `transformers` hands one to each layer, which a second pass would fill
    a second time. Training reads nothing from it."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _without_cache(key: str, value: Any) -> Any:
    if key == "use_cache" and isinstance(value, bool):
        return False
    return None if _is_cache(value) else value


def _patch_block(block: nn.Module, path: str, how: str, contexts: Contexts | None) -> None:
    region = _Region(path, [block], how, contexts, block.forward)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._recomputed(*args, **kwargs)

    # On the instance, and found through it: a deep copy recomputes itself and not the original.
    block._recomputed = region
    block.forward = MethodType(forward, block)


# Models without blocks


def _outermost_sequentials(model: nn.Module) -> list[tuple[str, nn.Sequential]]:
    """Plain ones; a subclass with a forward of its own does not run its layers in turn."""
    found: list[tuple[str, nn.Sequential]] = []

    def look(module: nn.Module, path: str) -> None:
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            if all(module is not known for _, known in found):
                found.append((path, module))
            return
        for name, child in module.named_children():
            look(child, f"{path}.{name}" if path else name)

    look(model, "")
    return found


def _patch_sequential(
    module: nn.Sequential, path: str, how: str, contexts: Contexts | None
) -> list[str]:
    layers = list(module)
    steps: list[Any] = []
    wrapped: list[str] = []
    for start, stop in _cut(layers):
        if stop - start == 1 and not list(layers[start].children()):
            steps.append(layers[start])  # a single layer keeps its input and nothing else anyway
            continue
        place = f"{path}[{start}:{stop}]"
        steps.append(_Region(place, layers[start:stop], how, contexts))
        wrapped.append(place)
    if not wrapped:
        return []

    def forward(self: nn.Sequential, input: Any) -> Any:
        for step in self._recomputed:
            input = step(input)
        return input

    head = layers[: _first_product(layers)]
    # A tuple, so that layers in it are not registered a second time.
    module._recomputed = (*head, *steps)
    module.forward = MethodType(forward, module)
    return wrapped


def _cut(layers: list[nn.Module]) -> list[tuple[int, int]]:
    """About sqrt(n) stretches of consecutive layers, each from a layer with a weight matrix on.

    So a norm, an activation (which may be in place) and dropout stay with the product before.
    """
    first = _first_product(layers)
    starts = [index for index in range(first, len(layers)) if _has_matrix(layers[index])]
    num = min(len(starts), round(math.sqrt(len(layers) - first))) if starts else 0
    cuts: list[int] = []
    for part in range(num):
        ideal = first + part * (len(layers) - first) / num
        left = [start for start in starts if start not in cuts and start >= max(cuts, default=0)]
        if left:
            cuts.append(min(left, key=lambda start: abs(start - ideal)))
    if not cuts:
        return []  # nothing in it is worth being computed twice
    return list(zip(cuts, [*cuts[1:], len(layers)], strict=True))


def _first_product(layers: list[nn.Module]) -> int:
    return next((i for i, layer in enumerate(layers) if _has_matrix(layer)), len(layers))


def _has_matrix(layer: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in layer.parameters())


# What is kept, and what the second pass must find


def _keep_expensive(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """torch's policy: save what costs arithmetic or communication, recompute the rest.

    A function of the operation and its arguments only: it may be asked again in backward.
    """
    return (
        CheckpointPolicy.MUST_SAVE
        if _is_expensive(op, args, kwargs)
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def _keep_nothing(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _is_expensive(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    schema = getattr(op, "_schema", None)
    if schema is None:
        return "flex_attention" in str(op)  # a higher-order operator
    name = schema.name
    if name in _PRODUCTS or name in _REDUCTIONS:
        return True
    if name in _BATCHED_PRODUCTS:
        # Scores of an attention that is spelled out are much larger than what they come from.
        left, right = args[-2:]
        num_out = left.shape[0] * left.shape[1] * right.shape[2]
        return bool(num_out <= left.numel() + right.numel())
    if "scaled_dot_product" in name or "flash_attn" in name or "attention_forward" in name:
        # With dropout it has drawn random numbers, and skipping it would shift all later draws.
        return not _argument(schema, "dropout_p", args, kwargs)
    return False


def _argument(schema: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for index, argument in enumerate(schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    return None


def _build_contexts(
    region: _Region,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For torch's checkpoint: what the first and the second pass of one call run in."""
    selective = region.how == "selective"
    if torch.compiler.is_compiling() or TracingContext.try_get() is not None:
        # The graph is what is recomputed, buffers are outside it, and torch wants bare modes.
        # 2.11 does not say here that it is compiling.
        policy = _keep_expensive if selective else _keep_nothing
        bare: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
        return bare
    saving: tuple[Any, Any] | None = None
    if selective:
        saving = create_selective_checkpoint_contexts(_keep_expensive)
    first = _FirstPass(region, saving[0] if saving else None)
    outer = region.contexts() if region.contexts is not None else None
    return first, _SecondPass(region, first, outer, saving[1] if saving else None)


class _FirstPass(AbstractContextManager["_FirstPass"]):
    """Notes what the buffers were, and has expensive results saved."""

    def __init__(self, region: _Region, saving: Any) -> None:
        self.region, self.saving = region, saving
        self.before: dict[tuple[int, str], Tensor] = {}

    def __enter__(self) -> _FirstPass:
        training = self.region.modules[0].training
        buffers = self.region.buffers()
        known = self.region.changing.get(training)
        keep = buffers if known is None else known
        self.before = {key: buffers[key].detach().clone() for key in keep if key in buffers}
        self.versions = {key: buffer._version for key, buffer in buffers.items()}
        self.training = training
        self.stack = ExitStack()
        if self.saving is not None:
            # The second pass casts every weight; one cast before the region would be missing here.
            torch.clear_autocast_cache()
            self.stack.enter_context(self.saving)
            self.stack.enter_context(_KeepSaved(self.saving))
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)
        first_time = self.training not in self.region.changing
        known = self.region.changing.setdefault(self.training, set())
        for key, buffer in self.region.buffers().items():
            # Batch norm's kernels change their statistics without a sign; the values tell.
            moved = buffer._version != self.versions.get(key)
            if moved or (first_time and not _same_values(buffer, self.before.get(key))):
                known.add(key)
        self.before = {key: value for key, value in self.before.items() if key in known}


def _same_values(one: Tensor, other: Tensor | None) -> bool:
    one, other = (getattr(t, "_local_tensor", t) for t in (one, other))
    if other is None or one.is_meta or isinstance(one, FakeTensor):
        return False  # not known to be
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and bool(torch.equal(one, other))


class _SecondPass(AbstractContextManager["_SecondPass"]):
    """Lends the region copies of its buffers as they were, and takes them away again."""

    def __init__(self, region: _Region, first: _FirstPass, outer: Any, saved: Any) -> None:
        self.region, self.first, self.outer, self.saved = region, first, outer, saved

    def __enter__(self) -> _SecondPass:
        self.stack = ExitStack()
        if self.outer is not None:
            self.stack.enter_context(self.outer)
        for index, name in self.region.changing.get(self.first.training, ()):
            owner = self.region.owners[index]
            now = owner._buffers[name]
            then = self.first.before.get((index, name), now)
            owner._buffers[name] = then.detach().clone()
            self.stack.callback(owner._buffers.__setitem__, name, now)
        if self.saved is not None:  # last, so that it does not see the copying
            self.stack.enter_context(self.saved)
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)


class _KeepSaved(TorchDispatchMode):  # type: ignore[misc]
    """Copies a saved result just before the module changes it in place.

    torch saves results by reference and would refuse in backward: of `x = self.proj(x); x += y`.
    """

    def __init__(self, saving: Any) -> None:
        super().__init__()
        self.saving = saving

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            written = [
                args[index] if index < len(args) else kwargs.get(argument.name)
                for index, argument in enumerate(schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            pointers = {p for leaf in tree_leaves(written) for p in _memory(leaf)}
            with _disable_current_modes():
                for entry in tree_leaves(dict(self.saving.storage)):
                    value: Any = getattr(entry, "val", None)
                    if pointers.intersection(_memory(value)):
                        entry.val = value.clone()
                        entry.version = entry.val._version
        return func(*args, **kwargs)


def _memory(value: Any) -> list[int]:
    """Which storages are behind a tensor, also of a DTensor's local part."""
    if not isinstance(value, Tensor):
        return []
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        return [pointer for name in names for pointer in _memory(getattr(value, name))]
    return [value.untyped_storage()._cdata]
