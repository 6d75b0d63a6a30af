"""One convolution of a model, forward or backward: its sizes, what it computes, and more channels for it.

A convolution has more to it than three sizes, so that it is kept as it was called and called again to be
timed. Called by `shapes.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

_FORWARD, _BACKWARD = "aten::convolution", "aten::convolution_backward"


@dataclass(frozen=True)
class Convolution:
    """A call of torch's convolution."""

    inputs: tuple[int, ...]
    """(samples, channels, then the sizes of the maps)."""
    weight: tuple[int, ...]
    """(filters, channels of a group, kernel); channels and filters change places where it is transposed."""
    outputs: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    extra: tuple[int, ...]
    """Torch's `output_padding`."""
    groups: int
    mask: tuple[bool, bool] | None = None
    """Of backward: whether the gradients of the inputs and of the weight are wanted; None: forward."""

    @property
    def flops(self) -> float:
        places = math.prod(self.inputs if self.transposed else self.outputs)
        times = 1 if self.mask is None else sum(self.mask)
        return 2.0 * times * places * math.prod(self.weight[1:])

    @property
    def dims(self) -> tuple[int, ...]:
        """(samples, channels, maps, filters, kernel), for people."""
        return (*self.inputs, self.outputs[1], *self.weight[2:])

    def with_channels(self, channels: int, filters: int) -> Convolution:
        pair = (channels, filters) if self.transposed else (filters, channels)
        return replace(
            self,
            inputs=(self.inputs[0], channels, *self.inputs[2:]),
            weight=(*pair, *self.weight[2:]),
            outputs=(self.outputs[0], filters, *self.outputs[2:]),
        )

    def build(self, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
        """A function that does it once, on random numbers; on CUDA with channels last, the fastest."""
        generator = torch.Generator(device=device).manual_seed(0)

        def numbers(size: tuple[int, ...]) -> Tensor:
            made = torch.randn(size, device=device, generator=generator).to(dtype)
            if device.type == "cuda" and len(size) == 4:
                made = made.contiguous(memory_format=torch.channels_last)
            return made

        x, w = numbers(self.inputs), numbers(self.weight)
        how = (self.stride, self.padding, self.dilation, self.transposed, self.extra, self.groups)
        ops: Any = torch.ops.aten
        if self.mask is None:
            return lambda: ops.convolution(x, w, None, *how)
        grad, mask = numbers(self.outputs), [*self.mask, False]
        return lambda: ops.convolution_backward(grad, x, w, None, *how, mask)


def read_convolution(op: str, args: Sequence[Any], result: Any) -> Convolution | None:
    """An op's call as it goes by a dispatch mode; None where it is no convolution."""
    if op not in (_FORWARD, _BACKWARD):
        return None
    back = op == _BACKWARD
    inputs, weight, _, *how = args[1:] if back else args
    outputs = args[0] if back else result
    stride, padding, dilation, transposed, extra, groups, *mask = how
    stride, padding, dilation, extra = (
        _spread(v, len(inputs.shape) - 2) for v in (stride, padding, dilation, extra)
    )
    return Convolution(
        inputs=tuple(inputs.shape),
        weight=tuple(weight.shape),
        outputs=tuple(outputs.shape),
        stride=stride,
        padding=padding,
        dilation=dilation,
        transposed=bool(transposed),
        extra=extra,
        groups=int(groups),
        mask=(bool(mask[0][0]), bool(mask[0][1])) if back else None,
    )


def _spread(values: Sequence[int], num: int) -> tuple[int, ...]:
    found = tuple(int(v) for v in values)
    return found * num if len(found) == 1 else found
