"""Linear layers that read the same input, computed as one product: `tune.merge`.

Three products of N columns leave the device partly idle three times, and their input gradients are three
matrices that are then added up; one product of 3N columns leaves it once, and backward adds to one sum.
Modules and parameters stay what they are, so optimizers and checkpoints know nothing of it. The module
around the layers (`siblings.py` finds both) computes their products when it is called, and passes its
argument on as a tensor of its own that carries them; each layer takes its product from the tensor that it
is given, or computes it where that is another one. So nothing is kept but in tensors that end with the
call, and a compiler and a recomputation see plain arithmetic. Called by `apply.py`.

A layer that is not called has no gradient, as without this; in compiled code its gradient is zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.parallel.float8 import Float8Linear, Scaling
from ridgeline.parallel.float8_merged import linears
from ridgeline.parallel.operators import as_type
from ridgeline.parallel.siblings import Found, Siblings

_CARRIED = "_ridgeline_products"


class _Products(torch.autograd.Function):
    """x (T, I) and the layers' weights (O, I) and then biases (O) -> (T, O) for each layer.

    Backward goes layer by layer and adds to one sum. To put the gradients side by side for one product
    takes longer than it saves: eager it is a copy of them all, and compiled the kernels that make them
    compute every part for every place (an H200, twice to four times their time).
    """

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, num_layers: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights, biases = parameters[:num_layers], parameters[num_layers:]
        ctx.set_materialize_grads(False)  # a layer that was not called is told from one with zeros
        ctx.num_layers = num_layers
        ctx.of_biases = tuple(bias.dtype for bias in biases)
        ctx.save_for_backward(x_TI, *weights)
        turned_IO = _cat(weights, x_TI.dtype).t()
        if biases:
            out_TO = torch.addmm(_cat(biases, x_TI.dtype), x_TI, turned_IO)
        else:
            out_TO = x_TI @ turned_IO
        return out_TO.split([weight.shape[0] for weight in weights], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x_TI, *weights = ctx.saved_tensors  # once: see parallel/recompute.py
        of_weights: list[Tensor | None] = [None] * ctx.num_layers
        of_biases: list[Tensor | None] = [None] * len(ctx.of_biases)
        grad_x = None
        needs_x, _, *needs = ctx.needs_input_grad
        needs_weights, needs_biases = needs[: ctx.num_layers], needs[ctx.num_layers :]
        for index, grad_TO in enumerate(grads):
            if grad_TO is None:
                continue
            if needs_x:
                weight_OI = as_type(weights[index], x_TI.dtype)
                grad_x = (
                    grad_TO @ weight_OI if grad_x is None else grad_x.addmm_(grad_TO, weight_OI)
                )
            if needs_weights[index]:
                of_weights[index] = as_type(grad_TO.t() @ x_TI, weights[index].dtype)
            if needs_biases and needs_biases[index]:
                of_biases[index] = as_type(grad_TO.sum(0), ctx.of_biases[index])
        return grad_x, None, *of_weights, *of_biases


def _cat(tensors: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    narrow = [as_type(tensor, dtype) for tensor in tensors]
    return torch.cat(narrow) if len(narrow) > 1 else narrow[0]


@dataclass(frozen=True, eq=False)
class Group:
    """Layers that are computed together."""

    place: int | str
    layers: tuple[nn.Linear, ...]
    scaling: Scaling | None = None
    """Of layers in fp8."""

    def pass_on(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the module around, with the products in the one that the layers read."""
        x = _at(args, kwargs, self.place)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return args, kwargs
        products = self.compute(x)
        carrier = x.view_as(x)
        setattr(carrier, _CARRIED, (self, products, _version(carrier)))
        # Everywhere, for code that asks whether two of its arguments are the same.
        args = tuple(carrier if value is x else value for value in args)
        return args, {key: carrier if value is x else value for key, value in kwargs.items()}

    def compute(self, x: Tensor) -> list[Tensor | None]:
        dtype = _autocast_dtype(x)
        flat = (x if dtype is None else x.to(dtype)).reshape(-1, x.shape[-1])
        weights = [layer.weight for layer in self.layers]
        biases = [layer.bias for layer in self.layers if layer.bias is not None]
        if self.scaling is not None:
            outs = linears(flat, weights, biases, self.scaling)
        else:
            outs = _Products.apply(flat, len(weights), *weights, *biases)
        return [out.view(*x.shape[:-1], out.shape[-1]) for out in outs]


def _take(layer: Any, input: Tensor) -> Tensor | None:
    """The layer's product, where its input carries one."""
    carried = getattr(input, _CARRIED, None)
    if carried is None:
        return None
    group, products, version = carried
    if group is not layer.group or version != _version(input):
        return None
    product: Tensor | None = products[layer.index]
    products[layer.index] = None  # it is the caller's now, and ends when the caller says
    return product


class MergedLinear(nn.Linear):
    """A linear layer after `apply_merge`, which changes its class and nothing else of it."""

    group: Group
    index: int

    def forward(self, input: Tensor) -> Tensor:
        product = _take(self, input)
        return super().forward(input) if product is None else product


class MergedFloat8Linear(Float8Linear):
    """The same in fp8."""

    group: Group
    index: int

    def forward(self, input: Tensor) -> Tensor:
        product = _take(self, input)
        return super().forward(input) if product is None else product


_MERGED: dict[type, type] = {nn.Linear: MergedLinear, Float8Linear: MergedFloat8Linear}


def _at(args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str) -> Any:
    if isinstance(place, str):
        return kwargs.get(place)
    return args[place] if place < len(args) else None


def _version(value: Tensor) -> int:
    """Whether it was changed in place; compiled code was looked at before (`siblings.py`)."""
    return 0 if torch.compiler.is_compiling() or value.is_inference() else value._version


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    if x.is_meta or x.dtype is torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Of a module around merged layers. Pickled by this name, it is that of the class again."""
    for group in self._merged_groups:
        args, kwargs = group.pass_on(args, kwargs)
    return self._unmerged_forward(*args, **kwargs)


def apply_merge(module: nn.Module, found: Iterable[Siblings]) -> list[Group]:
    """Have the groups that `module` holds the weights of computed together."""
    groups = []
    for siblings in found:
        # A stage of a pipeline has layers of others, without their weights.
        here = [
            layer
            for layer in map(module.get_submodule, siblings.layers)
            if isinstance(layer._parameters.get("weight"), Tensor)
        ]
        # Some may be in fp8 by now, and others not.
        kind, layers = max(
            ((kind, [layer for layer in here if type(layer) is kind]) for kind in _MERGED),
            key=lambda found: len(found[1]),
        )
        if len(layers) < 2:
            continue
        group = Group(siblings.place, tuple(layers), getattr(layers[0], "scaling", None))
        for index, layer in enumerate(layers):
            layer.__class__ = _MERGED[kind]
            layer.group, layer.index = group, index
        around: Any = module.get_submodule(siblings.around)
        # On the instance, and found through it: a deep copy computes with its own layers.
        if "_merged_groups" not in around.__dict__:
            around._merged_groups, around._unmerged_forward = (), around.forward
            around.forward = MethodType(forward, around)
        around._merged_groups = (*around._merged_groups, group)
        groups.append(group)
    return groups


def try_merge(module: nn.Module, found: Iterable[Siblings]) -> Callable[[], None]:
    """The same, and what undoes it."""
    found = list(found)
    owners: list[Any] = [module.get_submodule(siblings.around) for siblings in found]
    before = [owner.__dict__.get("forward") for owner in owners]
    groups = apply_merge(module, found)

    def undo() -> None:
        for owner, own in zip(owners, before, strict=True):
            for name in ("forward", "_merged_groups", "_unmerged_forward"):
                owner.__dict__.pop(name, None)
            if own is not None:
                owner.forward = own
        for group in groups:
            for layer in group.layers:
                del layer.group, layer.index
                layer.__class__ = nn.Linear

    return undo


def require_mergeable(layout: Layout) -> None:
    if layout.tp > 1 or layout.cp > 1 or layout.spatial != (1, 1):
        raise UsageError(
            f"tune.merge=true and {layout} do not compose: tp, cp and spatial run the layers on tensors "
            "that stand for others; leave one of them out"
        )


def describe_merge(groups: Iterable[Group], found: Found) -> str:
    """A note of the run."""
    sizes = [len(group.layers) for group in groups]
    note = f"{sum(sizes)} linear layers that share inputs are {len(sizes)} products"
    if found.refused:
        note += f"; those in {', '.join(found.refused)} stay apart, its code needs each alone"
    return note
