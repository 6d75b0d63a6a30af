"""What a torch function does to tiles: the one table, and the way out for what is not in it.

A function is looked up by its name, since `torch.sum`, `Tensor.sum` and `x.sum` are the same one. A
handler that cannot do a case says `NotImplemented`; then, as for a name that is not in the table, the
tiles are gathered, the plain function is called on whole tensors, and what comes out with the image's
own sizes is cut again. That is always right, and is noted on the grid because it costs memory. Called
by `TileTensor`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ridgeline.parallel.spatial import conv, index, norm, pointwise, pool, reduce, resize, shape
from ridgeline.parallel.spatial.tensor import (
    TileTensor,
    cut,
    gather,
    like,
    require_no_history,
    tile,
)

HANDLERS: dict[str, Callable[..., Any]] = {
    **conv.HANDLERS,
    **pool.HANDLERS,
    **resize.HANDLERS,
    **norm.HANDLERS,
    **reduce.HANDLERS,
    **shape.HANDLERS,
    **index.HANDLERS,
    **pointwise.HANDLERS,
}

_OF_THE_WHOLE = (
    "shape dtype device ndim layout is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_mps "
    "is_xpu is_mkldnn is_sparse_csr size dim numel nelement ndimension element_size itemsize nbytes "
    "is_floating_point is_complex is_signed __len__ result_type stride names is_xla is_ipu is_vulkan "
    "is_maia is_hpu is_mtia is_distributed is_same_size can_cast is_conj is_neg"
)
"""What the wrapper knows by itself."""

_OF_THE_TILE = (
    "requires_grad grad_fn is_leaf grad output_nr _version is_contiguous retain_grad retains_grad "
    "register_hook is_inference new_empty new_zeros new_ones new_full new_tensor _backward_hooks "
    "__hash__ is_shared is_pinned get_device"
)
"""What is asked of the plain tensor within; new tensors of a size of their own are plain."""
_WHOLE, _TILE = frozenset(_OF_THE_WHOLE.split()), frozenset(_OF_THE_TILE.split())


def dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = _name_of(func)
    if name in _WHOLE:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in _TILE:
        return func(*tree_map(_local, args), **kwargs)
    for value in args:
        if isinstance(value, TileTensor):
            require_no_history(value)
    if name == "data":
        return like(args[0].local.data, args[0])
    handler = HANDLERS.get(name)
    result = NotImplemented
    if handler is not None:
        result = handler(func, *args, **kwargs)
    elif pointwise.is_pointwise(name):
        result = pointwise.pointwise(func, args, kwargs)
    return _fall_back(func, name, args, kwargs) if result is NotImplemented else result


def _local(value: Any) -> Any:
    return value.local if isinstance(value, TileTensor) else value


@functools.cache
def _name_of(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__"):  # a property: `Tensor.shape.__get__`
        return str(func.__self__.__name__)  # type: ignore[attr-defined]
    return name


def _fall_back(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    tiles = [t for t in tree_leaves((args, kwargs)) if isinstance(t, TileTensor)]
    x = max(tiles, key=lambda t: len(t.split_dims))
    if x.split_dims:
        x.grid.fallbacks.note(name, x.sizes, math.prod(x.sizes) * x.local.element_size())
    whole_args, whole_kwargs = tree_map(
        lambda v: gather(v) if isinstance(v, TileTensor) else v, (args, kwargs)
    )
    in_place = pointwise.is_in_place(name) or name == "__setitem__" or kwargs.get("inplace") is True
    changed = args[0] if in_place and args and isinstance(args[0], TileTensor) else None
    if changed is not None:
        if whole_args[0] is changed.local:  # never what autograd may have kept of others
            whole_args = (whole_args[0].clone(), *whole_args[1:])
        func(*whole_args, **whole_kwargs)
        changed.local = cut(whole_args[0], changed.axes, changed.grid)
        return None if name == "__setitem__" else changed
    result = func(*whole_args, **whole_kwargs)
    return tree_map(lambda v: _cut_again(v, x), result)


def _cut_again(value: Any, x: TileTensor) -> Any:
    """A result with the image's own sizes is an image still."""
    if not isinstance(value, Tensor) or isinstance(value, TileTensor) or not x.split_dims:
        return value
    if value.dim() != len(x.sizes):
        return value
    if any(value.shape[d] != x.sizes[d] for d in x.split_dims):
        return value
    return tile(value, x.axes, x.grid)
