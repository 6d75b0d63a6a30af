"""Linear layers in fp8: values in one byte, scales found anew for every product.

A layer's three products (output, input gradient, weight gradient) each take operands in fp8 whose
contracted dimension lies together in memory, and a scale for each row of the left and each column of the
right one, or one for each tensor. Activations and weights are e4m3, gradients e5m2. Parameters stay what
they are, so optimizers and checkpoints know nothing of it. On a device without fp8 products the values
are rounded the same and multiplied in float32, so that what fp8 does to a model can be seen anywhere.

One scale for a tensor holds for the tensor turned over as well. Then every matrix is read and cast once, in
forward, and what backward needs is turned over in its bytes: half the memory of keeping the values, and no
second search for scales. With a scale a row the turned matrix has others, and is cast again.
Called by `apply.py`. Written by hand because torch itself has the product only; the arithmetic is in
`float8_ops.py`.

Shapes: T tokens, I and O the layer's inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.parallel import float8_ops
from ridgeline.parallel.float8_ops import E4M3, E5M2, find_largest, multiply, quantise
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
    route: str = float8_ops.ROUTE
    """What a compiler does not see into; see `float8_ops.ROUTES`."""


def build_scaling(tune: TuneConfig, device: torch.device | None = None) -> Scaling:
    return Scaling(
        rows=tune.fp8_scaling != "tensor",
        rows_of_weight_gradient=tune.fp8_scaling == "row",
        narrow_weight_gradient=tune.fp8_scaling != "careful",
        gradients={"e5m2": E5M2, "e4m3": E4M3}[tune.fp8_gradients],
        fast=tune.fp8_fast_accumulate,
        native=device is not None and has_fp8_products(device),
        route=float8_ops.ROUTE if tune.fp8_route == "auto" else tune.fp8_route,
    )


def has_fp8_products(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


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
        route: str,
    ) -> Tensor:
        top = find_largest(x_TI, rows, route)
        left = quantise(x_TI, E4M3, top, route)
        right = quantise(weight_OI, E4M3, find_largest(weight_OI, rows, route), route)
        narrow_weight_gradient = narrow_weight_gradient and x_TI.shape[0] % MULTIPLE == 0
        ctx.rows, ctx.gradients, ctx.fast, ctx.native = rows, gradients, fast, native
        ctx.rows_of_weight_gradient = rows_of_weight_gradient
        ctx.narrow_weight_gradient = narrow_weight_gradient
        ctx.route, ctx.dtypes = route, (x_TI.dtype, weight_OI.dtype)
        if rows:
            ctx.save_for_backward(x_TI, top, weight_OI, None)
        else:
            kept = _turn(left[0]) if narrow_weight_gradient else x_TI
            ctx.save_for_backward(kept, left[1], _turn(right[0]), right[1])
        return multiply(left, right, x_TI.dtype, fast, native, route)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight = ctx.dtypes
        kept = ctx.saved_tensors  # once: what was recomputed is handed out a single time
        top = find_largest(grad_TO, ctx.rows, ctx.route)
        left = quantise(grad_TO, ctx.gradients, top, ctx.route)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            right = _weight_turned(ctx, *kept[2:])
            grad_x = multiply(left, right, of_x, ctx.fast, ctx.native, ctx.route)
        if ctx.needs_input_grad[1]:
            if ctx.narrow_weight_gradient:
                pair = _pair_of_weight_gradient(ctx, grad_TO, top, left, *kept[:2])
                # A sum over all tokens is too long for the short register.
                grad_weight = multiply(*pair, of_x, False, ctx.native, ctx.route)
            else:
                grad_weight = grad_TO.t() @ kept[0]
            grad_weight = grad_weight.to(of_weight)
        return grad_x, grad_weight, None, None, None, None, None, None, None


def _turn(values: Tensor) -> Tensor:
    """Turned over, with its rows together in memory: a copy of bytes."""
    return values.t().contiguous()


def _weight_turned(ctx: Any, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    if not ctx.rows:
        return weight, scale
    turned = weight.t()
    return quantise(turned, E4M3, find_largest(turned, True, ctx.route), ctx.route)


def _pair_of_weight_gradient(
    ctx: Any,
    grad_TO: Tensor,
    top: Tensor,
    left: tuple[Tensor, Tensor],
    kept: Tensor,
    of_kept: Tensor,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Gradient (O, T) and input (I, T) in fp8."""
    if not ctx.rows:
        return (_turn(left[0]), left[1]), (kept, of_kept)
    grad_OT, x_IT = grad_TO.t(), kept.t()
    if ctx.rows_of_weight_gradient:
        tops = find_largest(grad_OT, True, ctx.route), find_largest(x_IT, True, ctx.route)
    else:
        tops = top.amax(), of_kept.amax()  # known already: nothing is read again
    return (
        quantise(grad_OT, ctx.gradients, tops[0], ctx.route),
        quantise(x_IT, E4M3, tops[1], ctx.route),
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Scaling) -> Tensor:
    """F.linear in fp8; the result has the type that autocast gives, or x's own."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    flat = x.to(dtype).reshape(-1, x.shape[-1])
    with torch.autocast(kind, enabled=False):
        out = _Linear.apply(
            flat,
            weight,
            scaling.rows,
            scaling.rows_of_weight_gradient,
            scaling.narrow_weight_gradient,
            scaling.gradients,
            scaling.fast,
            scaling.native,
            # Operators of our own are for compilers; called from Python they only cost.
            scaling.route if torch.compiler.is_compiling() else float8_ops.INLINE,
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
