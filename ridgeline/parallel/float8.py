"""Linear layers in fp8: values in one byte, scales found anew for every product.

A layer's three products (output, input gradient, weight gradient) each take operands in fp8 whose
contracted dimension lies together in memory, and a scale for each row of the left and each column of the
right one, or one for each tensor. Activations and weights are e4m3, gradients e5m2. Parameters stay what
they are, so optimizers and checkpoints know nothing of it. On a device without fp8 products the values
are rounded the same and multiplied in float32, so that what fp8 does to a model can be seen anywhere.

Activations and gradients are read once and cast both ways, as they lie and turned over; backward keeps
the turned activation, a byte a value. A scale of its own for each row of the turned matrix needs another
search (`row`); one for all of it is known from the first (`mixed`, `tensor`). Weights are cast anew in
backward, so that nothing is kept of them: a sharded replica has no room for another copy.
Called by `apply.py`. Written by hand because torch itself has the product only; the arithmetic is in
`float8_ops.py`.

Shapes: T tokens, I and O the layer's inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.parallel.float8_ops import (
    CAST_BOTH_OP,
    CAST_OP,
    E4M3,
    E5M2,
    PRODUCT_OP,
    WEIGHT_OP,
    cast,
    cast_both,
    has_fp8_products,
    largest,
    product,
    product_with_weight,
    scale_of,
)
from ridgeline.parallel.operators import as_type
from ridgeline.tuning import TuneConfig

MULTIPLE = 16
"""The products want dimensions that are multiples of it."""


@dataclass(frozen=True)
class Scaling:
    """How a layer scales; see `TuneConfig`."""

    rows: bool = True
    """One scale a row in the output and the input gradient."""
    rows_of_weight_gradient: bool = False
    narrow_weight_gradient: bool = True
    """Whether the weight gradient is an fp8 product at all."""
    gradients: torch.dtype = E5M2
    fast: bool = True
    native: bool = False
    """Whether the device has fp8 products; looked up once, not in the step."""


def build_scaling(tune: TuneConfig, device: torch.device | None = None) -> Scaling:
    return Scaling(
        rows=tune.fp8_scaling != "tensor",
        rows_of_weight_gradient=tune.fp8_scaling == "row",
        narrow_weight_gradient=tune.fp8_scaling != "careful",
        gradients={"e5m2": E5M2, "e4m3": E4M3}[tune.fp8_gradients],
        fast=tune.fp8_fast_accumulate,
        native=device is not None and has_fp8_products(device),
    )


class _Linear(torch.autograd.Function):
    """x (T, I) and weight (O, I) -> (T, O). The fields of `Scaling` come one by one, as plain constants,
    which a compiler takes in any version."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: Tensor,
        rows: bool,
        rows_of_weight_gradient: bool,
        narrow_weight_gradient: bool,
        gradients: torch.dtype,
        fast: bool,
        native: bool,
        opaque: bool,
    ) -> Tensor:
        top, top_weight = largest(x_TI, rows), largest(weight_OI, rows)
        cast_weight = CAST_OP if opaque else cast
        right = cast_weight(weight_OI, top_weight, E4M3), scale_of(top_weight, E4M3)
        ctx.rows, ctx.gradients, ctx.fast, ctx.native = rows, gradients, fast, native
        ctx.rows_of_weight_gradient = rows_of_weight_gradient
        ctx.narrow_weight_gradient = narrow_weight_gradient
        ctx.opaque, ctx.dtypes = opaque, (x_TI.dtype, weight_OI.dtype)
        kept, of_kept = x_TI, None
        if narrow_weight_gradient:
            top_turned = top_of_turned(x_TI, top, rows_of_weight_gradient)
            left, kept = (CAST_BOTH_OP if opaque else cast_both)(x_TI, top, top_turned, E4M3)
            of_kept = scale_of(top_turned, E4M3)
        else:
            left = (CAST_OP if opaque else cast)(x_TI, top, E4M3)
        ctx.save_for_backward(kept, of_kept, weight_OI, None if rows else top_weight)
        multiply = PRODUCT_OP if opaque else product
        return multiply(left, right[0], scale_of(top, E4M3), right[1], x_TI.dtype, fast, native)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight = ctx.dtypes
        kept, of_kept, weight_OI, top_weight = ctx.saved_tensors  # once: see parallel/recompute.py
        top = largest(grad_TO, ctx.rows)
        scale = scale_of(top, ctx.gradients)
        turned = top_turned = grad_x = grad_weight = None
        if ctx.narrow_weight_gradient:
            top_turned = top_of_turned(grad_TO, top, ctx.rows_of_weight_gradient)
            both = CAST_BOTH_OP if ctx.opaque else cast_both
            left, turned = both(grad_TO, top, top_turned, ctx.gradients)
        elif ctx.needs_input_grad[0]:
            left = (CAST_OP if ctx.opaque else cast)(grad_TO, top, ctx.gradients)
        if ctx.needs_input_grad[0]:
            if top_weight is None:
                top_weight = largest(weight_OI.t(), True)
            multiply = WEIGHT_OP if ctx.opaque else product_with_weight
            grad_x = multiply(left, weight_OI, scale, top_weight, of_x, ctx.fast, ctx.native)
        if ctx.needs_input_grad[1]:
            if turned is not None and top_turned is not None:
                of_turned = scale_of(top_turned, ctx.gradients)
                multiply = PRODUCT_OP if ctx.opaque else product
                # A sum over all tokens is too long for the short register.
                grad_weight = multiply(turned, kept, of_turned, of_kept, of_x, False, ctx.native)
            else:
                grad_weight = grad_TO.t() @ kept
            grad_weight = as_type(grad_weight, of_weight)
        return grad_x, grad_weight, None, None, None, None, None, None, None


def top_of_turned(values: Tensor, top: Tensor, rows: bool) -> Tensor:
    """The largest values of a matrix turned over: of its rows, or of all, which `top` knows already."""
    return largest(values.t(), True) if rows else top.amax()


def wants_turned(x_TI: Tensor, *weights: Tensor) -> bool:
    """Whether there will be a weight gradient, and as many tokens as its product takes."""
    trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    return trained and not x_TI.shape[0] % MULTIPLE


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Scaling) -> Tensor:
    """F.linear in fp8; the result has the type that autocast gives, or x's own."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    flat = x.to(dtype).reshape(-1, x.shape[-1])
    if not flat.shape[0]:  # an expert without tokens, say: there is nothing to scale
        return F.linear(x, weight, bias)
    with torch.autocast(kind, enabled=False):
        out = _Linear.apply(
            flat,
            weight,
            scaling.rows,
            scaling.rows_of_weight_gradient,
            scaling.narrow_weight_gradient and wants_turned(flat, weight),
            scaling.gradients,
            scaling.fast,
            scaling.native,
            # Operators of our own are for compilers; called from Python they only cost.
            torch.compiler.is_compiling(),
        )
        out = out.view(*x.shape[:-1], weight.shape[0])
        return out if bias is None else out + bias.to(dtype)


class Float8Linear(nn.Linear):
    """A linear layer after `apply_float8`, which changes its class and nothing else of it."""

    scaling: Scaling

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, self.scaling)


@dataclass(frozen=True)
class Changed:
    """What `apply_float8` did."""

    changed: tuple[str, ...]
    kept: dict[str, str]
    """Linear layers that stay in bf16, and why."""


def apply_float8(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    tune: TuneConfig,
    paths: Sequence[str] | None = None,
) -> Changed:
    """Make linear layers of the repeated blocks compute in fp8.

    `blocks` are those of `module` by path, and `paths` those of the whole model where it is a stage.

    Without blocks every linear layer but the last, which gives the model's outputs. Subclasses of
    `nn.Linear` are left alone: what they do beside the product is not known.
    """
    changed: list[str] = []
    kept: dict[str, str] = {}
    # A stage of a pipeline has layers of others, without their weights.
    linears = {
        name: child
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear) and isinstance(child._parameters.get("weight"), Tensor)
    }
    order = list(paths if paths is not None else blocks)
    owners = {id(m): order.index(path) for path, b in blocks.items() for m in b.modules()}
    last = next(reversed(linears), None)
    counts: dict[int, int] = {}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    for name, layer in linears.items():
        place = owners.get(id(layer))
        reason = _why_kept(name, layer, tune)
        if reason is None and counts[id(layer.weight)] > 1:
            reason = "it shares its weight"
        if reason is None and (place is None if order else name == last):
            reason = "it is outside the repeated blocks" if order else "it gives the outputs"
        if reason is None and place is not None:
            first, end = tune.fp8_keep_first, len(order) - tune.fp8_keep_last
            reason = None if first <= place < end else "its block is kept"
        if reason is not None:
            kept[name] = reason
            continue
        layer.__class__ = Float8Linear
        layer.scaling = build_scaling(tune, layer.weight.device)  # type: ignore[assignment]
        changed.append(name)
    return Changed(tuple(changed), kept)


def _why_kept(name: str, layer: nn.Linear, tune: TuneConfig) -> str | None:
    if type(layer) is not nn.Linear:
        return f"it is a {type(layer).__name__}"
    if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
        return f"{layer.in_features} x {layer.out_features} are not both multiples of {MULTIPLE}"
    if any(part in f"{name}." for part in tune.fp8_keep):
        return "tune.fp8_keep names it"
    return None
