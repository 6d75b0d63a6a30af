"""Operations that look at one place of the image at a time: element-wise ones and those along channels.

torch marks its element-wise operations itself (`torch.Tag.pointwise`), so there is no list of them
here but for the few it composes in Python. Operands are broadcast as ever; plain ones, which every
rank has whole, are cut to the tile. Called by `dispatch.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ridgeline.parallel.random import keyed_dropout
from ridgeline.parallel.spatial.tensor import TileTensor, align, as_dim, cut, like, wrap

_COMPOSED = (
    "relu6 celu selu softsign tanhshrink threshold hardtanh hardsigmoid hardswish mish "
    "leaky_relu elu silu gelu softplus logsigmoid hardshrink softshrink sigmoid tanh relu float_power "
    "square clip masked_fill where copy_ fill_ zero_ isclose isreal isfinite isinf isnan "
    "nan_to_num lerp maximum minimum fmax fmin bitwise_not logical_not clamp_min clamp_max "
    "true_divide divide multiply subtract negative absolute"
)
_OPERATORS = (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv div rdiv idiv pow rpow ipow "
    "mod rmod floordiv rfloordiv ifloordiv neg pos abs invert and or xor rand ror rxor iand ior ixor "
    "eq ne lt le gt ge"
)
_COMPOSED_NAMES = frozenset(_COMPOSED.split())
_OPERATOR_NAMES = frozenset(_OPERATORS.split())
# Draw numbers, or answer for all elements at once.
_NEVER = frozenset(["dropout", "bernoulli", "normal", "uniform", "equal"])


@functools.cache
def is_pointwise(name: str) -> bool:
    if name.startswith("__") and name.endswith("__"):
        return name.strip("_") in _OPERATOR_NAMES
    base = name.rstrip("_")
    if base in _NEVER:
        return False
    if name in _COMPOSED_NAMES or base in _COMPOSED_NAMES:
        return True
    packet = getattr(torch.ops.aten, base, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket) or base.startswith("_"):
        return False
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]
    return any(
        torch.Tag.pointwise in t and torch.Tag.nondeterministic_seeded not in t for t in tags
    )


def is_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name.startswith("__i") and name.strip("_")[1:] in _OPERATOR_NAMES
    return name.endswith("_")


def pointwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.__name__ == "where" and len(args) + len(kwargs) == 1:
        return NotImplemented  # places, not values
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    tiles = [t for t in tensors if isinstance(t, TileTensor)]
    first, grid = tiles[0], tiles[0].grid
    try:
        shape = torch.broadcast_shapes(*[t.shape for t in tensors])
    except RuntimeError:
        return NotImplemented  # torch itself has the words for it
    axes = _common_axes(tiles, len(shape))
    in_place = is_in_place(func.__name__) or kwargs.get("inplace") is True
    if in_place:
        if args[0] is not first or tuple(shape) != first.sizes or axes != list(first.axes):
            return NotImplemented
    elif "out" in kwargs:
        return NotImplemented
    local_args, local_kwargs = tree_map(lambda v: align(v, axes, shape, grid), (args, kwargs))
    result = func(*local_args, **local_kwargs)
    if in_place:
        return first
    return tree_map(lambda v: wrap(v, shape, axes, grid) if isinstance(v, Tensor) else v, result)


def _common_axes(tiles: Sequence[TileTensor], num_dims: int) -> list[int | None]:
    """The axes of the first operand that is in pieces, and of others where they do not clash."""
    axes: list[int | None] = [None] * num_dims
    for x in sorted(tiles, key=lambda t: not t.split_dims):
        offset = num_dims - len(x.sizes)
        for dim, axis in enumerate(x.axes):
            if axis is not None and axes[offset + dim] is None and axis not in axes:
                axes[offset + dim] = axis
    return axes


def unary(func: Callable[..., Any], input: Any, *args: Any, **kwargs: Any) -> Any:
    """Conversions and copies: the same on the tile."""
    if not isinstance(input, TileTensor):
        return NotImplemented
    args = tuple(a.local if isinstance(a, TileTensor) else a for a in args)
    local = func(input.local, *args, **kwargs)
    if local is input.local:
        return input
    return like(local, input) if isinstance(local, Tensor) else local


def along_channels(func: Callable[..., Any], input: Any, *args: Any, **kwargs: Any) -> Any:
    """softmax and its like, which mix the elements of one dim, and keep the dims."""
    if not isinstance(input, TileTensor):
        return NotImplemented
    dim = kwargs.get("dim", args[0] if args else None)
    if func.__name__ == "normalize":
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 1)
    elif func.__name__ == "glu" and dim is None:
        dim = -1
    if not isinstance(dim, int) or input.is_split(as_dim(dim, len(input.sizes))):
        return NotImplemented
    found = func(input.local, *args, **kwargs)
    if isinstance(found, Tensor):
        return like(found, input)
    return type(found)([like(part, input) for part in found])


def over_channels(func: Callable[..., Any], input: Any, *args: Any, **kwargs: Any) -> Any:
    """prelu and local response norm: dim 1 alone."""
    if not isinstance(input, TileTensor) or input.axes[1] is not None:
        return NotImplemented
    return like(func(input.local, *args, **kwargs), input)


def linear(func: Callable[..., Any], input: Any, weight: Any, bias: Any = None) -> Any:
    """A linear layer on the last dim, which is how channels-last models do 1x1 convolutions."""
    if not isinstance(input, TileTensor) or input.is_split(len(input.sizes) - 1):
        return NotImplemented
    if isinstance(weight, TileTensor) or isinstance(bias, TileTensor):
        return NotImplemented
    local = func(input.local, weight, bias)
    sizes = [*input.sizes[:-1], local.shape[-1]]
    return wrap(local, sizes, [*input.axes[:-1], None], input.grid)


def matmul(func: Callable[..., Any], input: Any, other: Any) -> Any:
    if not isinstance(input, TileTensor) or isinstance(other, TileTensor) or other.dim() != 2:
        return NotImplemented
    if input.is_split(len(input.sizes) - 1) or other.shape[0] != input.sizes[-1]:
        return NotImplemented
    local = torch.matmul(input.local, other)
    sizes = [*input.sizes[:-1], local.shape[-1]]
    return wrap(local, sizes, [*input.axes[:-1], None], input.grid)


# Randomness


def drop(x: TileTensor, p: float, channels: bool) -> Tensor:
    """What to multiply a tile with in dropout: by sample and position where the job has such
    randomness, else drawn for the whole image and cut, which is what one device draws if the
    generators of all ranks are alike.
    """
    randomness = x.grid.randomness
    if randomness is not None:
        offsets = [x.own(dim)[0] for dim in range(len(x.sizes))]
        local = torch.ones_like(x.local)
        site = randomness.next_site()
        num_dims = 2 if channels else None
        return keyed_dropout(local, p, randomness, site, x.sizes, offsets, num_dims=num_dims)
    shape = [*x.sizes[:2], *([1] * (len(x.sizes) - 2))] if channels else x.sizes
    ones = torch.ones(shape, dtype=x.local.dtype, device=x.local.device)
    mask = F.dropout(ones, p, True)
    return mask if channels else cut(mask, x.axes, x.grid)


def dropout(
    func: Callable[..., Tensor],
    input: Any,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    if not isinstance(input, TileTensor):
        return NotImplemented
    if not training or p == 0.0:
        return input
    channels = func.__name__ != "dropout"
    if channels and input.axes[:2] != (None, None):
        return NotImplemented
    mask = drop(input, p, channels)
    if inplace:
        input.local.mul_(mask)
        return input
    return like(input.local * mask, input)


def random_like(func: Callable[..., Tensor], input: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(input, TileTensor):
        return NotImplemented
    given = {"dtype": input.dtype, "device": input.device, **kwargs}
    given.pop("memory_format", None)
    maker = getattr(torch, func.__name__.removesuffix("_like"))
    if maker is torch.randint:
        return NotImplemented
    whole = maker(input.sizes, *args, **given)
    return wrap(cut(whole, input.axes, input.grid), input.sizes, input.axes, input.grid)


_UNARY = (
    "to type type_as float double half bfloat16 int long short bool byte cpu cuda contiguous clone "
    "detach detach_ requires_grad_ zeros_like ones_like empty_like full_like"
)
_ALONG = "softmax log_softmax softmin glu cumsum cumprod normalize sort topk logcumsumexp"

HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_UNARY.split(), unary),
    **dict.fromkeys(_ALONG.split(), along_channels),
    **dict.fromkeys(("prelu", "local_response_norm"), over_channels),
    **dict.fromkeys(("dropout", "dropout2d", "dropout3d"), dropout),
    **dict.fromkeys(("rand_like", "randn_like"), random_like),
    **dict.fromkeys(("matmul", "__matmul__"), matmul),
    "linear": linear,
}
