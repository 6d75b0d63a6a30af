"""Classes that are made of a model's own class while it runs, such that its modules can be saved whole.

A module that is to compute otherwise (under autocast, compiled) keeps its weights, its name and its type,
and gets a class that is derived from its own. Pickle looks classes up by name and finds the original there,
so that `torch.save(model)` would fail: modules of a derived class therefore say how they are made again.
Used by `train/settings.py` and `fused_norms.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Maker = Callable[..., type[nn.Module]]
"""A function of a module, found by its name: (class, *how) -> derived class."""


def derive_class(
    base: type[nn.Module], forward: Callable[..., Any], maker: Maker, *how: Any
) -> type[nn.Module]:
    """`base` with another forward; `maker(base, *how)` makes the same again where a module is loaded."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        # As the class itself would have it, with its own `__getstate__` or `__reduce__` where it has one.
        own: Any = base.__reduce_ex__
        build, arguments, *rest = own(self, protocol)
        plain = tuple(base if argument is type(self) else argument for argument in arguments)
        return (_build_derived, (build, plain, maker, how), *rest)

    members = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    return type(base.__name__, (base,), members)


def _build_derived(
    build: Callable[..., nn.Module], arguments: tuple[Any, ...], maker: Maker, how: tuple[Any, ...]
) -> nn.Module:
    """What pickle calls: the plain module, and then the class of it that computes as the saved one did."""
    module = build(*arguments)
    module.__class__ = maker(type(module), *how)
    return module
