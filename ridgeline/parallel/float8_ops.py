"""fp8 by hand: the largest value, the cast, the product, each as plain torch and as an opaque operator.

A compiler that sees `torch._scaled_mm` puts kernels of its own beside the library's even when it was not
asked to tune matrix kernels, and takes whichever is faster in its own trial; on an H200 with torch 2.11 the
compiled products came out as zeros. An operator of our own is opaque: the compiler knows the shape that
comes out and calls what runs in eager mode. `ROUTES` are how much is hidden from it. What is not hidden is
fused with what comes before it (the largest value of a norm's output costs nothing there), so the fewer the
better: `benchmarks/gpu_float8.py` says which are right and how fast each is. Called by `float8.py`.

Shapes: M and N rows, K the contracted dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
_LEAST = 1e-30
"""Of the largest value of a row, so that a row of zeros has a scale."""

INLINE, PRODUCT, CAST, WHOLE = "inline", "product", "cast", "whole"
ROUTES = (INLINE, PRODUCT, CAST, WHOLE)
"""What a compiler does not see into: nothing; products; casts as well; and largest values."""
ROUTE = PRODUCT
"""The one that `tune.fp8_route=auto` means."""
COMPILED_ON_CUDA = False
"""Whether `auto` is let through with compile=true on CUDA. True once `benchmarks/gpu_float8.py` has shown
the route to be right there; until then a route has to be named in the recipe."""


def largest(values: Tensor, rows: bool) -> Tensor:
    """The largest absolute value of each row, (rows, 1), or of all. That of all is taken over rows first,
    which a compiler can do in the kernel that makes the rows."""
    top = values.abs().amax(1, keepdim=True)
    return (top if rows else top.amax()).float()


def scale_of(top: Tensor, dtype: torch.dtype) -> Tensor:
    """What values in `dtype` are to be multiplied with so that the largest number there is `top`."""
    return top.clamp(min=_LEAST) / LARGEST[dtype]


def cast(values: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
    """Values over their scale, in `dtype`, with rows that lie together in memory."""
    most = LARGEST[dtype]
    # Rounding may take the largest value a little over the top, which has no number there.
    scaled = values.float() * (most / top.clamp(min=_LEAST))
    return scaled.clamp(-most, most).to(dtype).contiguous()


def product(
    a_MK: Tensor,
    b_NK: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    fast: bool,
    native: bool,
) -> Tensor:
    """a @ b.T in `dtype`, with a scale for each row of both or one for each."""
    if not native:
        return ((a_MK.float() @ b_NK.float().t()) * scale_a * scale_b.t()).to(dtype)
    # Sums are float32 in the device whatever is written; wider than bf16 would only be more bytes.
    out = torch._scaled_mm(
        a_MK.contiguous(),
        b_NK.contiguous().t(),
        scale_a=scale_a,
        scale_b=scale_b.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return out.to(dtype)


@lru_cache(maxsize=1)
def _fused_cast() -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
    return torch.compile(cast, dynamic=True)


def _opaque_cast(values: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
    # In a graph of its own: one kernel rather than four, and nothing around it to go wrong with.
    return _fused_cast()(values, top, dtype) if values.is_cuda else cast(values, top, dtype)


LARGEST_OP = torch.library.custom_op("ridgeline::fp8_largest", largest, mutates_args=())
CAST_OP = torch.library.custom_op("ridgeline::fp8_cast", _opaque_cast, mutates_args=())
PRODUCT_OP = torch.library.custom_op("ridgeline::fp8_product", product, mutates_args=())


def _fake_largest(values: Tensor, rows: bool) -> Tensor:
    return values.new_empty((values.shape[0], 1) if rows else (), dtype=torch.float32)


def _fake_cast(values: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(values.shape, dtype=dtype, device=values.device)


def _fake_product(
    a_MK: Tensor,
    b_NK: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    fast: bool,
    native: bool,
) -> Tensor:
    return torch.empty((a_MK.shape[0], b_NK.shape[0]), dtype=dtype, device=a_MK.device)


LARGEST_OP.register_fake(_fake_largest)
CAST_OP.register_fake(_fake_cast)
PRODUCT_OP.register_fake(_fake_product)


def find_largest(values: Tensor, rows: bool, route: str) -> Tensor:
    return LARGEST_OP(values, rows) if route == WHOLE else largest(values, rows)


def quantise(
    values: Tensor, dtype: torch.dtype, top: Tensor, route: str = INLINE
) -> tuple[Tensor, Tensor]:
    """A matrix in `dtype`, and what to multiply it with; `top` is the largest value of each row or of
    all, and becomes the largest number that the type has."""
    hidden = route in (CAST, WHOLE)
    made = CAST_OP(values, top, dtype) if hidden else cast(values, top, dtype)
    return made, scale_of(top, dtype)


def multiply(
    left: tuple[Tensor, Tensor],
    right: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    fast: bool,
    native: bool,
    route: str,
) -> Tensor:
    """left @ right.T of (M, K) and (N, K), with their scales."""
    call = product if route == INLINE else PRODUCT_OP
    return call(left[0], right[0], left[1], right[1], dtype, fast, native)
