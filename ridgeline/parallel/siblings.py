"""Linear layers that read the very same tensor, found by watching a model run once: `find_siblings`.

Queries, keys and values of an attention, or the two sides of a gated feed-forward: several layers, one
input. What is looked for is that input as an argument of a module around the layers, because that is where
`merged.py` can compute them all at once. The model runs on the meta device if it can, else for real, as for
tensor parallelism; then once more with the layers merged, and modules whose code cannot take that (it
changes an output in place, or views it in a shape that a part of a larger matrix has not) are left alone.
Called by `apply.py` before anything has changed the model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ridgeline.models.inputs import call_arguments

MULTIPLE = 8
"""Outputs of a layer are a multiple of it, so that each part of the merged result begins on 16 bytes."""


@dataclass(frozen=True)
class Siblings:
    """Layers that get one argument of the module around them, by path."""

    around: str
    place: int | str
    """Of the argument: its number, or its name."""
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    groups: tuple[Siblings, ...]
    refused: tuple[str, ...] = ()
    """Classes of modules around siblings whose code cannot take parts of one result."""


def find_siblings(
    model: nn.Module,
    blocks: Sequence[str],
    example: tuple[Any, ...],
    merge: Callable[[nn.Module, Iterable[Siblings]], Callable[[], None]],
) -> Found:
    """Groups in the blocks at these paths of `model`, which is left as it was.

    `merge` has groups of a model computed together, and returns what undoes it.
    """
    device, groups = _on_some_device(
        lambda device: _watch(model, blocks, example, device), _has_values(model)
    )
    classes: dict[type, list[Siblings]] = defaultdict(list)
    for group in groups:
        classes[type(model.get_submodule(group.around))].append(group)
    refused = []
    for kind, alike in classes.items():
        undo = merge(model, alike)
        try:
            run_once(model, example, device)
        except Exception:
            refused.append(kind)
        finally:
            undo()
    kept = tuple(g for kind, alike in classes.items() if kind not in refused for g in alike)
    return Found(kept, tuple(kind.__name__ for kind in refused))


def _has_values(model: nn.Module) -> bool:
    return not any(parameter.is_meta for parameter in model.parameters())


def _on_some_device(
    look: Callable[[str | None], list[Siblings]], has_values: bool
) -> tuple[str | None, list[Siblings]]:
    """What `look` finds on the meta device, else on the model's own (None)."""
    try:
        return "meta", look("meta")
    except Exception as first:
        if not has_values:
            raise
        try:
            return None, look(None)
        except Exception as second:
            raise second from first


def run_once(model: nn.Module, example: tuple[Any, ...], device: str | None) -> None:
    """One forward with gradients, as in training, that leaves the model and torch's chance alone."""

    def place(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        return tensor.detach().to(device) if device else tensor.detach().clone()

    made: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for is_weight, held in ((True, module._parameters), (False, module._buffers)):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    # Weights are not changed by a forward, and a copy of them may have no room.
                    own = tensor if is_weight and device is None else place(tensor)
                    if own is not tensor:
                        own.requires_grad_(tensor.requires_grad)
                    made[id(tensor)] = own
                state[f"{path}.{name}" if path else name] = made[id(tensor)]
    with torch.random.fork_rng(), torch.enable_grad():
        args, kwargs = call_arguments(tree_map(place, example))
        torch.func.functional_call(model, state, args, kwargs, tie_weights=False)


@dataclass
class _Call:
    """A module that is running, and its arguments."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def place_of(self, value: Tensor) -> int | str | None:
        given: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        return next((place for place, one in given if one is value), None)


@dataclass
class _Watch:
    running: list[_Call] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    groups: dict[tuple[str, int | str, int, int], list[str]] = field(default_factory=dict)
    keep: list[Any] = field(default_factory=list)
    """Inputs, so that each has an identity of its own to the end."""

    def before(self, path: str, layer: nn.Linear | None, args: Any, kwargs: Any) -> None:
        self.calls[path] += 1
        if layer is not None and len(args) == 1 and isinstance(args[0], Tensor):
            value = args[0]
            for call in self.running:  # from the outside: the more layers the better
                place = call.place_of(value)
                if place is not None:
                    # One that was changed between two layers is another one.
                    key = (call.path, place, id(value), value._version)
                    self.groups.setdefault(key, []).append(path)
                    self.keep.append(value)
                    break
        self.running.append(_Call(path, args, kwargs))

    def after(self) -> None:
        self.running.pop()


def _watch(
    model: nn.Module, blocks: Sequence[str], example: tuple[Any, ...], device: str | None
) -> list[Siblings]:
    watch = _Watch()
    shared = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    inside = {
        f"{path}.{name}".strip("."): module
        for path in blocks
        for name, module in model.get_submodule(path).named_modules()
    }
    handles: list[Any] = []
    for path, module in inside.items():
        layer = module if _is_plain(module, shared) else None

        def before(_: Any, args: Any, kwargs: Any, path: str = path, layer: Any = layer) -> None:
            watch.before(path, layer, args, kwargs)

        def after(*_: Any) -> None:
            watch.after()

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    try:
        run_once(model, example, device)
    finally:
        for handle in handles:
            handle.remove()
    return list(_groups(watch, inside))


def _groups(watch: _Watch, inside: dict[str, nn.Module]) -> Iterable[Siblings]:
    for (around, place, _, _), paths in watch.groups.items():
        once = [path for path in paths if watch.calls[path] == 1]
        kinds: dict[tuple[bool, torch.dtype], list[str]] = defaultdict(list)
        for path in once:
            layer = inside[path]
            assert isinstance(layer, nn.Linear)
            kinds[layer.bias is not None, layer.weight.dtype].append(path)
        alike = max(kinds.values(), key=len, default=[])
        if len(alike) > 1 and watch.calls[around] == 1:
            yield Siblings(around, place, tuple(alike))


def _is_plain(module: nn.Module, shared: Counter[int]) -> bool:
    """Nothing but the product: no subclass, no hook, no weight that stands elsewhere too."""
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and not module.out_features % MULTIPLE
        and all(shared[id(p)] == 1 for p in module.parameters(recurse=False))
        and not any(
            getattr(module, name)
            for name in (
                "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
            )
        )
    )  # fmt: skip
