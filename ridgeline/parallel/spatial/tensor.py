"""`TileTensor`: a tensor that says it is the whole image and holds this rank's tile of it.

Code that has never heard of tiles asks for `shape`, pads to it, concatenates and reduces; all of that
means the whole image. Every torch function on a `TileTensor` arrives in `dispatch.py`, which does the
same on the tile, with communication where needed. Autograd sees only the plain tile within. Made by
`apply.py`; every file of operations takes it apart and puts it together with the functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.errors import UsageError
from ridgeline.parallel.spatial.comm import Route, fetch
from ridgeline.parallel.spatial.grid import Span, TileGrid

Axes = tuple[int | None, ...]
"""For each dim of a tensor, the axis of the grid it is cut along."""


class TileTensor(torch.Tensor):
    """`shape`, `size()` and `dim()` are those of the whole image; `local` is this rank's tile."""

    local: Tensor
    sizes: tuple[int, ...]
    """`shape` without the way through `__torch_function__`."""
    axes: Axes
    grid: TileGrid

    @staticmethod
    def __new__(
        cls: type[TileTensor], local: Tensor, shape: Sequence[int], axes: Axes, grid: TileGrid
    ) -> TileTensor:
        self: TileTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            tuple(shape),
            dtype=local.dtype,
            device=local.device,
            # Only so that `require_no_history` can see what went past autograd within.
            requires_grad=local.requires_grad,
        )
        self.local, self.sizes, self.axes, self.grid = local, tuple(shape), axes, grid
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def gather(self, *args: Any, **kwargs: Any) -> Tensor:
        """The whole image as a plain tensor, on every rank; with arguments, `torch.gather`."""
        return torch.gather(self, *args, **kwargs) if args or kwargs else gather(self)

    def is_split(self, dim: int) -> bool:
        """Whether `dim` is in pieces; one with fewer elements than ranks is whole everywhere."""
        return self.grid.splits(self.axes[dim], self.sizes[dim])

    def own(self, dim: int) -> Span:
        """What this rank holds of `dim`."""
        return self.grid.own(self.axes[dim], self.sizes[dim])

    @property
    def split_dims(self) -> list[int]:
        return [dim for dim in range(len(self.axes)) if self.is_split(dim)]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"TileTensor(shape={self.sizes}, axes={self.axes}, local={self.local})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Here and not above: the operations are written in terms of this class.
        from ridgeline.parallel.spatial.dispatch import dispatch

        return dispatch(func, tuple(args), kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        raise UsageError(
            f"{func} reached a tile below torch's functions, from compiled code or an extension; "
            "call that on `image.gather()`, or leave spatial out of the layout"
        )


def require_no_history(x: TileTensor) -> None:
    """The wrapper has a history of its own only out of an `autograd.Function` that was called on it.

    Its backward would never be reached, so the gradient would be lost in silence.
    """
    with torch._C.DisableTorchFunctionSubclass():
        function = x.grad_fn
    if function is not None:
        name = type(function).__name__.removesuffix("Backward")
        raise UsageError(
            f"{name} is an autograd.Function of the model's own and was called on an image that is "
            "in tiles; call it on `image.gather()` there, or leave spatial out of the layout"
        )


def wrap(local: Tensor, shape: Sequence[int], axes: Sequence[int | None], grid: TileGrid) -> Tensor:
    """A TileTensor, or the plain tensor where no dim is cut along any axis."""
    if all(axis is None for axis in axes):
        return local
    return TileTensor(local, shape, tuple(axes), grid)


def like(local: Tensor, tile: TileTensor, dims: Sequence[int] | None = None) -> Tensor:
    """`local` as a tile whose dims mean those of `tile`; sizes of dims without axis are its own.

    `dims[i]` is the dim of `tile` that dim i came from, -1 for none; by default the same dims.
    """
    dims = range(local.dim()) if dims is None else dims
    axes = [tile.axes[dim] if dim >= 0 else None for dim in dims]
    shape = [
        local.shape[i] if axis is None else tile.sizes[dim]
        for i, (dim, axis) in enumerate(zip(dims, axes, strict=True))
    ]
    return wrap(local, shape, axes, tile.grid)


def cut(whole: Tensor, axes: Sequence[int | None], grid: TileGrid) -> Tensor:
    """This rank's part of a tensor that every rank has whole, as a plain tensor."""
    for dim, axis in enumerate(axes):
        if grid.splits(axis, whole.shape[dim]):
            low, high = grid.own(axis, whole.shape[dim])
            whole = whole.narrow(dim, low, high - low)
    return whole


def tile(whole: Tensor, axes: Sequence[int | None], grid: TileGrid) -> Tensor:
    return wrap(cut(whole, axes, grid), whole.shape, axes, grid)


def settle(
    local: Tensor, shape: Sequence[int], axes: Sequence[int | None], grid: TileGrid
) -> Tensor:
    """`local` as a tile, after cutting dims that are still whole and large enough to be cut."""
    whole = [
        axis if size == shape[dim] else None
        for dim, (axis, size) in enumerate(zip(axes, local.shape, strict=True))
    ]
    return wrap(cut(local, whole, grid), shape, axes, grid)


def route(x: TileTensor, dim: int, needed: Sequence[Span]) -> Route:
    """For ranks that need `needed` of a dim of `x`, which has to be split."""
    axis = x.axes[dim]
    assert axis is not None
    held = x.grid.spans(axis, x.sizes[dim])
    return Route(dim, x.grid.rank(axis), held, tuple(needed), x.grid.group(axis))


def fetch_span(x: TileTensor, dim: int, needed: Sequence[Span]) -> Tensor:
    """The local tensor with `needed[rank]` of `dim` in place of what this rank holds of it."""
    if x.is_split(dim):
        return fetch(x.local, route(x, dim, needed))
    axis = x.axes[dim]
    low, high = needed[0 if axis is None else x.grid.rank(axis)]
    return x.local.narrow(dim, low, high - low)


def refetch(
    local: Tensor, dim: int, axis: int, held: Sequence[Span], needed: Sequence[Span], grid: TileGrid
) -> Tensor:
    """From any partition of a dim to any other."""
    if tuple(held) == tuple(needed):
        return local
    if len(set(held)) == 1:  # everybody has everything
        low, high = needed[grid.rank(axis)]
        return local.narrow(dim, low - held[0][0], high - low)
    return fetch(local, Route(dim, grid.rank(axis), tuple(held), tuple(needed), grid.group(axis)))


def gather_dim(x: TileTensor, dim: int) -> Tensor:
    """`x` with one dim whole on every rank; that dim has no axis any more."""
    local = x.local
    if x.is_split(dim):
        axis = x.axes[dim]
        assert axis is not None
        local = fetch_span(x, dim, [(0, x.sizes[dim])] * x.grid.size(axis))
    axes = [None if d == dim else axis for d, axis in enumerate(x.axes)]
    return wrap(local, x.sizes, axes, x.grid)


def gather(x: Tensor) -> Tensor:
    """The whole, as a plain tensor."""
    while isinstance(x, TileTensor):
        require_no_history(x)
        dim = next(d for d, axis in enumerate(x.axes) if axis is not None)
        x = gather_dim(x, dim)
    return x


def groups_of(x: TileTensor, dims: Sequence[int]) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which something that was reduced over `dims` locally is still partial."""
    return tuple(x.grid.group(x.axes[d]) for d in dims if x.is_split(d))  # type: ignore[arg-type]


def align(operand: Any, axes: Sequence[int | None], shape: Sequence[int], grid: TileGrid) -> Any:
    """The local part of an operand that is broadcast to `shape`, cut along `axes`."""
    if not isinstance(operand, Tensor):
        return operand
    missing = len(shape) - operand.dim()
    if missing < 0:
        axes = [None] * -missing + list(axes)
        shape = [1] * -missing + list(shape)
        missing = 0
    wanted = [
        axes[missing + d] if size == shape[missing + d] else None
        for d, size in enumerate(operand.shape)
    ]
    if isinstance(operand, TileTensor):
        held = [operand.axes[d] if operand.is_split(d) else None for d in range(operand.dim())]
        really = [
            a if grid.splits(a, s) else None for a, s in zip(wanted, operand.shape, strict=True)
        ]
        if held == really:
            return operand.local
        operand = gather(operand)
    return cut(operand, wanted, grid)


def as_dim(dim: int, num_dims: int) -> int:
    """A dim counted from the front."""
    if not -num_dims <= dim < num_dims:
        raise IndexError(f"dim {dim} of a tensor with {num_dims} dims")
    return dim % num_dims
