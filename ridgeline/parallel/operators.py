"""Operators of our own, which a compiler calls without looking into them: how they are registered.

Called by `float8_ops.py` and `conv_ops.py`, each of which has its kernels in a file beside it that is
imported on CUDA alone; and what functions with a gradient of their own need to be compiled.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_OPERATORS = torch.library.Library("ridgeline", "FRAGMENT")


def build_operator(name: str, call: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Registered by hand: `torch.library.custom_op` looks for aliases and gradients in every call, which
    with a thousand calls a step is what a fast device waits for. `fake` makes what the compiler is told:
    tensors of the same shape, type and order in memory."""
    schema = torch.library.infer_schema(call, mutates_args=())
    _OPERATORS.define(f"{name}{schema}")
    _OPERATORS.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ridgeline::{name}", fake, lib=_OPERATORS)
    return getattr(torch.ops.ridgeline, name).default


def as_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another type, and x itself where it is of that type. For an `autograd.Function` that may be
    compiled: on torch 2.11 one that returns `out.to(type)` gets gradients of zero where that changes
    nothing. Where a `to` changes something, or is on what comes in, they are right."""
    return x if x.dtype == dtype else x.to(dtype)


@lru_cache(maxsize=1)
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def on_device_of(values: Tensor) -> AbstractContextManager[None]:
    """Kernels are started on the current device, wherever their tensors are."""
    here = torch.cuda.current_device() == values.device.index
    return nullcontext() if here else torch.cuda.device(values.device)
