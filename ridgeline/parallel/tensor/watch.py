"""Gradients of activations that a model's own code looks at: hooks, kept gradients, `autograd.grad`.

Gradients pass from local tensor to local tensor, beside the DTensors that the model's code holds
(`move.own_of`). So whoever asks for the gradient of one is led to the local tensor that it was made of, and
is given a DTensor. Only inside the model's forward: code that holds an activation and asks for its gradient
after that is not seen. Called by `view.py`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ridgeline.parallel.tensor.move import enter, own_of, plain_gradient

if TYPE_CHECKING:
    from ridgeline.parallel.tensor.view import GlobalView

NAMES = frozenset(("register_hook", "retain_grad", "retains_grad", "grad_fn"))


def watch(view: GlobalView, name: str, func: Any, x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """One of `NAMES` of an activation."""
    own = own_of(x)
    if own is None or not own.requires_grad:
        return func(x, *args, **kwargs)
    if name == "grad_fn":
        return own.grad_fn
    if name == "retains_grad":
        return "_retained" in x.__dict__
    if name == "retain_grad":
        if "_retained" not in x.__dict__:
            keep = functools.partial(_keep, weakref.ref(x))
            x.__dict__["_retained"] = own.register_hook(_on_local(view, x, keep))
        return None
    return own.register_hook(_on_local(view, x, *args, **kwargs))


def _on_local(
    view: GlobalView, x: DTensor, hook: Callable[[DTensor], Any]
) -> Callable[[Tensor], Tensor]:
    """A hook for the local tensor that calls one for the whole, in which shapes are global too."""
    shape, places, runs = x.shape, plain_gradient(x.placements), view.runs(x)

    def on_local(grad: Tensor) -> Tensor:
        given = view.mark_runs(enter(grad, view.mesh, places, shape), runs)
        with view:  # wherever backward runs: another thread, or inside a call that the view handles
            changed = hook(given)
        # One that changed what it was given in place has changed `given`.
        return view.local(given if changed is None else changed, places, places, runs)

    return on_local


def _keep(of: weakref.ref[DTensor], gradient: DTensor) -> None:
    held = of()
    if held is not None:
        with torch._C.DisableTorchFunction():
            held.grad = gradient if held.grad is None else held.grad + gradient


def gradients(view: GlobalView, outputs: Any, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
    """`torch.autograd.grad` where some are activations."""
    asked = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    owns = [own_of(x) if isinstance(x, DTensor) else None for x in asked]
    given = [x if own is None else own for x, own in zip(asked, owns, strict=True)]
    found = list(torch.autograd.grad(outputs, given, **kwargs))
    for i, (x, own) in enumerate(zip(asked, owns, strict=True)):
        if own is not None and found[i] is not None:
            whole = enter(found[i], view.mesh, plain_gradient(x.placements), x.shape)
            found[i] = view.mark_runs(whole, view.runs(x))
    return tuple(found)
