"""A model's own activation checkpointing (`torch.utils.checkpoint` in its code) in any layout.

torch runs the model's code again in backward, after the layout has been left: tensors that are cut
would meet plain ones, and dropout would draw for whichever microbatch ran last. While a model runs,
what `checkpoint` does its work with is replaced, so that the second pass finds what the first one found.
Called by `apply.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torchs

Moment = Callable[[], Callable[[], AbstractContextManager[Any]]]
"""Called in forward; what it gives makes, as often as it is called, a context like that of the call."""

_WITHOUT = "_checkpoint_without_reentrant_generator"
_REENTRANT = "CheckpointFunction"
# Looked up in torch's module at each call; `checkpoint` itself may be imported by name.


def apply_own_recompute(module: nn.Module, moment: Moment) -> None:
    """Have checkpointing that `module` does itself recompute in a context of `moment`."""
    patched = vars(module).get("forward")
    # Of a method the function, so that a deep copy of the module runs itself and not the original.
    is_method = patched is None or getattr(patched, "__self__", None) is module
    forward = type(module).forward if patched is None else getattr(patched, "__func__", patched)

    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = (self, *args) if is_method else args
        if torch.compiler.is_compiling():  # the graph is what is recomputed
            return forward(*own, **kwargs)
        with _watching(moment):
            return forward(*own, **kwargs)

    run.__name__ = "forward"  # as which a copy by pickle finds the class's own
    module.forward = MethodType(run, module)


@contextmanager
def _watching(moment: Moment) -> Iterator[None]:
    if hasattr(getattr(torchs, _WITHOUT), "watches"):
        yield
        return
    before = {name: getattr(torchs, name) for name in (_WITHOUT, _REENTRANT)}

    def without_reentrant(
        function: Any, preserve: bool, context_fn: Any, *rest: Any, **given: Any
    ) -> Any:
        if not hasattr(context_fn, "is_ridgelines"):
            function = _again(function, moment)
        return before[_WITHOUT](function, preserve, context_fn, *rest, **given)

    without_reentrant.watches = True  # type: ignore[attr-defined]
    setattr(torchs, _WITHOUT, without_reentrant)
    setattr(torchs, _REENTRANT, _Reentrant)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(torchs, name, value)


def _again(function: Callable[..., Any], moment: Moment) -> Callable[..., Any]:
    """What torch is to call in backward in place of `function`; in forward it calls that itself."""
    enter = moment()

    def second_pass(*args: Any, **kwargs: Any) -> Any:
        with enter(), _watching(moment):  # one checkpoint may hold others
            return function(*args, **kwargs)

    return second_pass


class _Reentrant:
    """In place of torch's `CheckpointFunction`, whose backward inside of backward neither a pipeline nor
    a tensor that is cut can follow: the other variant, with the one difference that is documented."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args)
        if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            with torch.no_grad():  # then torch's gives no gradients, not even to parameters
                return function(*args)
        return torchs.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
