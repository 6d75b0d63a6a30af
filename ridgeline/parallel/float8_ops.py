"""fp8 by hand: the largest value, the cast, the product, and the last two as operators of our own.

A compiler that sees into `torch._scaled_mm` gets it wrong: on an H200 with torch 2.11 the compiled products
of backward came out as zeros. An operator of our own is opaque: the compiler knows the shape that comes
out and calls what runs in eager mode. The search for largest values is
not hidden from it: in the kernel that makes a matrix it costs nothing. The casts are hidden because they
cannot be fused with anything, the scale of a tensor being known only when all of it was seen, and because
a kernel of our own writes a matrix and the matrix turned over in one pass. Called by `float8.py`.

Shapes: M and N rows, K the contracted dimension, R and C any rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from ridgeline.parallel.operators import build_operator, has_triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
_LEAST = 1e-30
"""Of the largest value of a row, so that a row of zeros has a scale."""


def largest(values: Tensor, rows: bool) -> Tensor:
    """The largest absolute value of each row, (rows, 1), or of all. That of all is taken over rows first,
    which a compiler can do in the kernel that makes the rows."""
    top = values.abs().amax(1, keepdim=True)
    return (top if rows else top.amax()).float()


def scale_of(top: Tensor, dtype: torch.dtype) -> Tensor:
    """What values in `dtype` are to be multiplied with so that the largest number there is `top`."""
    return top.clamp(min=_LEAST) / LARGEST[dtype]


def has_fp8_products(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def cast(values: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
    """Values over their scale, in `dtype`, with rows that lie together in memory."""
    if _in_one_kernel(values):
        made = _kernel(values, top, None, dtype)[0]
        assert made is not None
        return made
    return _plain_cast(values, top, dtype)


def cast_turned(values_RC: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
    """The same of the matrix turned over, (C, R), of whose rows `top` is."""
    if _in_one_kernel(values_RC):
        made = _kernel(values_RC, None, top, dtype)[1]
        assert made is not None
        return made
    return _plain_cast(values_RC.t(), top, dtype)


def cast_both(
    values_RC: Tensor, top: Tensor, top_turned: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Both, (R, C) and (C, R), from one reading."""
    if _in_one_kernel(values_RC):
        made, turned = _kernel(values_RC, top, top_turned, dtype)
        assert made is not None
        assert turned is not None
        return made, turned
    return _plain_cast(values_RC, top, dtype), _plain_cast(values_RC.t(), top_turned, dtype)


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


def product_with_weight(
    a_MK: Tensor,
    weight_KN: Tensor,
    scale_a: Tensor,
    top: Tensor,
    dtype: torch.dtype,
    fast: bool,
    native: bool,
) -> Tensor:
    """a @ weight, which is cast here: backward then holds on to the parameter, which is there anyway, and
    not to a copy of it from forward, which a sharded replica would have no room for."""
    turned = cast_turned(weight_KN, top, E4M3)
    return product(a_MK, turned, scale_a, scale_of(top, E4M3), dtype, fast, native)


def product_with_weights(
    a_MK: Tensor,
    weights: Sequence[Tensor],
    scale_a: Tensor,
    top: Tensor,
    dtype: torch.dtype,
    fast: bool,
    native: bool,
) -> Tensor:
    """The same with the rows of several weights, one below the other; `top` is of all of them."""
    turned = together([cast_turned(weight, top, E4M3) for weight in weights], 1)
    return product(a_MK, turned, scale_a, scale_of(top, E4M3), dtype, fast, native)


def together(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Put together as bytes, which every device can."""
    return torch.cat([part.view(torch.uint8) for part in parts], dim).view(parts[0].dtype)


def _plain_cast(values: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
    most = LARGEST[dtype]
    # Rounding may take the largest value a little over the top, which has no number there.
    scaled = values.float() * (most / top.clamp(min=_LEAST))
    return scaled.clamp(-most, most).to(dtype).contiguous()


def _kernel(
    values: Tensor, top: Tensor | None, top_turned: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    from ridgeline.parallel.float8_kernels import cast

    return cast(values, top, top_turned, dtype, LARGEST[dtype], _LEAST)


def _in_one_kernel(values: Tensor) -> bool:
    """Tensors that stand for others (traced, cut over ranks) are for torch's own functions."""
    return values.is_cuda and type(values) in (Tensor, nn.Parameter) and _has_kernel(values.device)


@lru_cache(maxsize=16)
def _has_kernel(device: torch.device) -> bool:
    """Triton knows the types only where the device does."""
    return has_triton() and has_fp8_products(device)


def _fake_cast(values: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(values.shape, dtype=dtype, device=values.device)


def _fake_cast_both(
    values_RC: Tensor, top: Tensor, top_turned: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    made = _fake_cast(values_RC, top, dtype)
    return made, made.new_empty(values_RC.shape[::-1])


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


def _fake_with_weight(
    a_MK: Tensor,
    weight_KN: Tensor,
    scale_a: Tensor,
    top: Tensor,
    dtype: torch.dtype,
    fast: bool,
    native: bool,
) -> Tensor:
    return torch.empty((a_MK.shape[0], weight_KN.shape[1]), dtype=dtype, device=a_MK.device)


def _fake_with_weights(
    a_MK: Tensor,
    weights: Sequence[Tensor],
    scale_a: Tensor,
    top: Tensor,
    dtype: torch.dtype,
    fast: bool,
    native: bool,
) -> Tensor:
    return torch.empty((a_MK.shape[0], weights[0].shape[1]), dtype=dtype, device=a_MK.device)


CAST_OP = build_operator("fp8_cast", cast, _fake_cast)
CAST_BOTH_OP = build_operator("fp8_cast_both", cast_both, _fake_cast_both)
PRODUCT_OP = build_operator("fp8_product", product, _fake_product)
WEIGHT_OP = build_operator("fp8_product_with_weight", product_with_weight, _fake_with_weight)
WEIGHTS_OP = build_operator("fp8_product_with_weights", product_with_weights, _fake_with_weights)
