"""Layers in fp8 that read the same input, as one product: the input and all gradients are cast once.

As `float8.py` for one layer. With scales a row, each row of each weight has its own, as it has apart; where
a scale is for a tensor, it is one for all weights of the group and one for all of its gradients, because
the product takes no more. Gradients of one layer that are ten thousand times smaller than another's keep
their digits in e5m2, and lose some in e4m3. Weights are cast anew in backward, inside the operator. Called
by `merged.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.parallel.float8 import Scaling, top_of_turned, wants_turned
from ridgeline.parallel.float8_ops import (
    CAST_BOTH_OP,
    CAST_OP,
    E4M3,
    PRODUCT_OP,
    WEIGHTS_OP,
    cast,
    cast_both,
    largest,
    product,
    product_with_weights,
    scale_of,
    together,
)
from ridgeline.parallel.operators import as_type


class _Linears(torch.autograd.Function):
    """x (T, I) and weights (O, I) -> (T, O) for each."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        rows: bool,
        rows_of_weight_gradient: bool,
        narrow_weight_gradient: bool,
        gradients: torch.dtype,
        fast: bool,
        native: bool,
        opaque: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a layer that was not called is told from one with zeros
        ctx.rows, ctx.gradients, ctx.fast, ctx.native = rows, gradients, fast, native
        ctx.rows_of_weight_gradient, ctx.opaque = rows_of_weight_gradient, opaque
        ctx.narrow_weight_gradient = narrow_weight_gradient
        top = largest(x_TI, rows)
        tops = _tops(weights, rows)
        cast_one = CAST_OP if opaque else cast
        right_OI = together([cast_one(w, t, E4M3) for w, t in zip(weights, tops, strict=True)], 0)
        of_right = scale_of(torch.cat(tops) if rows else tops[0], E4M3)
        kept, of_kept = x_TI, None
        if narrow_weight_gradient:
            top_turned = top_of_turned(x_TI, top, rows_of_weight_gradient)
            left, kept = (CAST_BOTH_OP if opaque else cast_both)(x_TI, top, top_turned, E4M3)
            of_kept = scale_of(top_turned, E4M3)
        else:
            left = cast_one(x_TI, top, E4M3)
        ctx.save_for_backward(kept, of_kept, *weights)
        multiply = PRODUCT_OP if opaque else product
        out_TO = multiply(left, right_OI, scale_of(top, E4M3), of_right, x_TI.dtype, fast, native)
        return out_TO.split([weight.shape[0] for weight in weights], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kept, of_kept, *weights = ctx.saved_tensors  # once: see parallel/recompute.py
        called = [index for index, grad in enumerate(grads) if grad is not None]
        of_weights: list[Tensor | None] = [None] * len(weights)
        nothing = (None,) * 7
        if not called:
            return None, *nothing, *of_weights
        used = [weights[index] for index in called]
        grad_TO = torch.cat([grad for grad in grads if grad is not None], 1)
        top = largest(grad_TO, ctx.rows)
        scale = scale_of(top, ctx.gradients)
        turned = top_turned = grad_x = None
        if ctx.narrow_weight_gradient:
            top_turned = top_of_turned(grad_TO, top, ctx.rows_of_weight_gradient)
            both = CAST_BOTH_OP if ctx.opaque else cast_both
            left, turned = both(grad_TO, top, top_turned, ctx.gradients)
        elif ctx.needs_input_grad[0]:
            left = (CAST_OP if ctx.opaque else cast)(grad_TO, top, ctx.gradients)
        if ctx.needs_input_grad[0]:
            multiply = WEIGHTS_OP if ctx.opaque else product_with_weights
            # Of the columns, which go through all weights; or of all.
            tops = [largest(w.t(), True) for w in used] if ctx.rows else _tops(used, False)[:1]
            top_weights = torch.stack(tops).amax(0)
            of_x = grad_TO.dtype
            grad_x = multiply(left, used, scale, top_weights, of_x, ctx.fast, ctx.native)
        if any(ctx.needs_input_grad[8:]):
            if turned is not None and top_turned is not None:
                of_turned = scale_of(top_turned, ctx.gradients)
                multiply = PRODUCT_OP if ctx.opaque else product
                # A sum over all tokens is too long for the short register.
                made = multiply(turned, kept, of_turned, of_kept, grad_TO.dtype, False, ctx.native)
            else:
                made = grad_TO.t() @ kept
            parts = made.split([weight.shape[0] for weight in used])
            for index, part in zip(called, parts, strict=True):
                of_weights[index] = as_type(part, weights[index].dtype)
        return grad_x, *nothing, *of_weights


def _tops(weights: Sequence[Tensor], rows: bool) -> list[Tensor]:
    """The largest values of each weight's rows, or that of all weights for each."""
    tops = [largest(weight, rows) for weight in weights]
    return tops if rows else [torch.stack(tops).amax()] * len(tops)


def linears(
    x_TI: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], scaling: Scaling
) -> list[Tensor]:
    """The layers' outputs in x's own type."""
    if not x_TI.shape[0]:  # nothing to scale
        return [x_TI @ as_type(weight, x_TI.dtype).t() for weight in weights]
    with torch.autocast(x_TI.device.type, enabled=False):
        outs = _Linears.apply(
            x_TI,
            scaling.rows,
            scaling.rows_of_weight_gradient,
            scaling.narrow_weight_gradient and wants_turned(x_TI, *weights),
            scaling.gradients,
            scaling.fast,
            scaling.native,
            torch.compiler.is_compiling(),
            *weights,
        )
        if not biases:
            return list(outs)
        return [out + bias.to(out.dtype) for out, bias in zip(outs, biases, strict=True)]
