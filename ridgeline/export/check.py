"""Whether a package gives what the model gives: differences, and how large rounding allows them to be.

A compiled model adds in another order than the model itself, so bits differ; how much they may is
measured, as `ridgeline verify` does it: the model's own distance from the same model in float64, times a
factor, and at least a few units in the last place of its type. Called by `package.py` and `native.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import RunError
from ridgeline.export.deployed import Deployed
from ridgeline.models.inputs import Inputs, change_each
from ridgeline.train.setup import convert
from ridgeline.verify.rounding import EPS, FACTOR

_EPS = {
    torch.float64: 2.0**-48,
    torch.float32: EPS["fp32"],
    torch.bfloat16: EPS["bf16"],
    torch.float16: EPS["fp16"],
}
_UNMEASURED = 32.0
"""Units that count in place of a measurement, where the model does not run in float64."""


@dataclass(frozen=True)
class Bound:
    """What rounding allows for one output."""

    most: float
    largest: float
    """Of the output's values."""
    rounding: float | None
    """Distance of the model from itself in float64; None where it does not run there."""

    def plain(self) -> dict[str, Any]:
        return {"bound": self.most, "largest_value": self.largest, "rounding": self.rounding}


@dataclass(frozen=True)
class Measured:
    """The largest difference of one output, over all batch sizes that were tried."""

    name: str
    difference: float
    bound: float


def exact_outputs(deployed: Deployed, tensors: Sequence[Tensor]) -> dict[str, Tensor] | None:
    """The same in float64: its weights as they are, its inputs as they come to the model. None where the
    model does not run in float64."""
    try:
        wide = copy.deepcopy(deployed)
        convert(wide.model, torch.float64)
        prepare = wide.prepare
        wide.prepare = lambda inputs: _wide_inputs(prepare(inputs))
        with torch.no_grad():
            return wide.named(*tensors)
    except (
        Exception
    ):  # whatever a model has against another type, the type alone says the bound then
        return None


def _wide_inputs(inputs: Inputs) -> Inputs:
    return change_each(inputs, lambda x: x.double() if x.is_floating_point() else x)


def find_bounds(
    outputs: Mapping[str, Tensor], exact: Mapping[str, Tensor] | None, dtype: torch.dtype
) -> dict[str, Bound]:
    """For each output of the model in `dtype`."""
    bounds = {}
    for name, value in outputs.items():
        largest = largest_value(value)
        whole = not (value.is_floating_point() or value.is_complex())
        least = 0.0 if whole else _EPS[dtype] * largest
        rounding = None
        if exact is not None and name in exact:
            rounding = difference(value, exact[name])
        if rounding is None or not math.isfinite(rounding):
            bounds[name] = Bound(FACTOR * _UNMEASURED * least, largest, None)
        else:
            bounds[name] = Bound(FACTOR * max(rounding, least), largest, rounding)
    return bounds


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest of any element; infinite where shapes differ or only one of the two is a number."""
    if found.shape != expected.shape:
        return math.inf
    a, b = (_real(value) for value in (found, expected))
    if not a.numel():
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (a - b).abs())
    return float(torch.where(apart.isfinite(), apart, math.inf).max())


def _real(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    return torch.view_as_real(value).double() if value.is_complex() else value.double()


def largest_value(value: Tensor) -> float:
    """By size, of those that are numbers."""
    values = _real(value).abs()
    values = values[values.isfinite()]
    return float(values.max()) if values.numel() else 0.0


def require_repeatable(
    deployed: Deployed,
    tensors: Sequence[Tensor],
    outputs: Mapping[str, Tensor],
    bounds: Mapping[str, Bound],
) -> None:
    """A model that answers differently each time cannot be held to anything."""
    with torch.no_grad():
        again = deployed.named(*tensors)
    for name, value in outputs.items():
        apart = difference(again[name], value)
        if apart > bounds[name].most:
            raise RunError(
                f"the model gives another {name} when it is asked twice (by up to {apart:.3g}, where "
                f"rounding allows {bounds[name].most:.3g}): it draws random numbers in evaluation, so no "
                "package can be held to it; draw them in training alone, or use --no-check"
            )


def compare(
    deployed: Deployed,
    package: Callable[[Sequence[Tensor]], list[Tensor]],
    batches: Sequence[Sequence[Tensor]],
    counts: Sequence[int],
    bounds: Mapping[str, Bound],
) -> list[Measured]:
    """The package beside the model on each batch; raises on the first output that is further off than
    rounding takes it."""
    worst = dict.fromkeys(bounds, 0.0)
    for tensors, count in zip(batches, counts, strict=True):
        with torch.no_grad():
            expected = deployed.named(*tensors)
        found = package(tensors)
        if len(found) != len(expected):
            raise RunError(f"the package gives {len(found)} outputs and the model {len(expected)}")
        for (name, value), given in zip(expected.items(), found, strict=True):
            apart = difference(given, value)
            worst[name] = max(worst[name], apart)
            if not apart <= bounds[name].most:
                raise RunError(_off(name, given, value, apart, bounds[name], count))
    return [Measured(name, apart, bounds[name].most) for name, apart in worst.items()]


def _off(name: str, given: Tensor, value: Tensor, apart: float, bound: Bound, count: int) -> str:
    if given.shape != value.shape:
        what = f"has shape {list(given.shape)} where the model gives {list(value.shape)}"
    else:
        what = (
            f"differs from the model's by up to {apart:.3g}, where rounding allows {bound.most:.3g} "
            f"(its largest value is {bound.largest:.3g})"
        )
    return (
        f"output {name} of the package {what}, in a batch of {count}; nothing was written. Try --batch N "
        "or another --dtype, and please report this"
    )


def worst_of(measured: Sequence[Measured]) -> Measured:
    """The one that comes nearest to its bound."""
    return max(measured, key=lambda m: m.difference / m.bound if m.bound else m.difference)
