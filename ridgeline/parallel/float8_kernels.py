"""The cast to fp8 as one kernel that writes a matrix, the matrix turned over, or both.

A product wants its contracted dimension together in memory, and the three products of a layer contract
three different ones, so activations and gradients are needed both ways. As plain torch that is a cast and
then a copy that jumps through memory at every byte; here a tile is read once, scaled, and written from
registers along either side. Called by `float8_ops.py` on CUDA, where torch brings Triton along.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.parallel.operators import on_device_of

BLOCK = (32, 128)
"""Rows and columns of a tile: the fastest on an H200 of those that `benchmarks/gpu_float8.py` tries."""
WARPS = 4


@triton.jit  # type: ignore[misc,unused-ignore]
def _cast(
    values, stride, rows, rows_top, rows_step, turned, turned_top, turned_step, num_rows, num_columns,
    MOST: tl.constexpr, LEAST: tl.constexpr, WITH_ROWS: tl.constexpr, WITH_TURNED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (r < num_rows)[:, None] & (c < num_columns)[None, :]
    tile = tl.load(values + r[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if WITH_ROWS:
        top = tl.load(rows_top + r * rows_step, mask=r < num_rows, other=1.0)
        scaled = tile * tl.div_rn(MOST, tl.maximum(top, LEAST))[:, None]
        narrow = tl.minimum(tl.maximum(scaled, -MOST), MOST).to(rows.dtype.element_ty)
        tl.store(rows + r[:, None] * num_columns + c[None, :], narrow, mask=inside)
    if WITH_TURNED:
        top = tl.load(turned_top + c * turned_step, mask=c < num_columns, other=1.0)
        scaled = tile * tl.div_rn(MOST, tl.maximum(top, LEAST))[None, :]
        narrow = tl.minimum(tl.maximum(scaled, -MOST), MOST).to(turned.dtype.element_ty)
        place = turned + c[:, None] * num_rows + r[None, :]
        tl.store(place, tl.trans(narrow), mask=tl.trans(inside))


def cast(
    values_RC: Tensor,
    rows_top: Tensor | None,
    turned_top: Tensor | None,
    dtype: torch.dtype,
    most: float,
    least: float,
) -> tuple[Tensor | None, Tensor | None]:
    """`values` in `dtype` as it lies and turned over, each where its largest values are given: one for
    each row of the result, or one for all."""
    if values_RC.stride(1) != 1:
        values_RC = values_RC.contiguous()
    num_rows, num_columns = values_RC.shape
    rows = turned = None
    if rows_top is not None:
        rows = torch.empty((num_rows, num_columns), dtype=dtype, device=values_RC.device)
    if turned_top is not None:
        turned = torch.empty((num_columns, num_rows), dtype=dtype, device=values_RC.device)
    if values_RC.numel():
        grid = (triton.cdiv(num_rows, BLOCK[0]), triton.cdiv(num_columns, BLOCK[1]))
        with on_device_of(values_RC):
            _cast[grid](
                values_RC, values_RC.stride(0), *_written(rows, rows_top, values_RC),
                *_written(turned, turned_top, values_RC), num_rows, num_columns, MOST=most,
                LEAST=least, WITH_ROWS=rows is not None, WITH_TURNED=turned is not None,
                BLOCK_R=BLOCK[0], BLOCK_C=BLOCK[1], num_warps=WARPS,
            )  # fmt: skip
    return rows, turned


def _written(
    made: Tensor | None, top: Tensor | None, any_tensor: Tensor
) -> tuple[Tensor, Tensor, int]:
    """What the kernel is told of one result; pointers it does not follow where there is none."""
    if made is None or top is None:
        return any_tensor, any_tensor, 0
    top = top.contiguous()
    return made, top, 1 if top.numel() > 1 else 0
