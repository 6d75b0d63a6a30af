"""Brightness, contrast, saturation and hue of a batch, each sample with factors of its own.

The formulas are those of torchvision's ColorJitter (blends with black, with the mean grey and with a
pixel's grey; hue turned in HSV), always in this order. Values are from 0 to 1. Only single operations that
every device rounds alike are used, and the mean grey is summed in whole numbers, so a sample has the same
bits on every device and in any batch; each step is within 2**-20 of exact arithmetic. Called by
`apply.py`.

Shapes: N samples, C channels (1 or 3), H height, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GREY = (0.2989, 0.587, 0.114)
# Division by a constant is a product with its inverse on some devices and not on others.
_SIXTH = 1.0 / 6.0
_FIXED_POINT = 2.0**30
"""Greys are counted in this part of 1: exact for more pixels than an image has."""


def brighten(x_NCHW: Tensor, factor_N: Tensor) -> Tensor:
    return x_NCHW.mul(_each(factor_N)).clamp_(0, 1)


def change_contrast(x_NCHW: Tensor, factor_N: Tensor) -> Tensor:
    grey = grey_of(x_NCHW)
    # Sums of floats would depend on their order, which depends on the device and on the batch.
    counted = (grey * _FIXED_POINT).to(torch.int64).sum((1, 2, 3))
    pixels = grey.shape[2] * grey.shape[3]
    mean_N = (counted.double() * (1.0 / (_FIXED_POINT * pixels))).float()
    return _blend(x_NCHW, _each(mean_N), factor_N)


def saturate(x_NCHW: Tensor, factor_N: Tensor) -> Tensor:
    return _blend(x_NCHW, grey_of(x_NCHW), factor_N)


def grey_of(x_NCHW: Tensor) -> Tensor:
    """(N, 1, H, W)"""
    if x_NCHW.shape[1] == 1:
        return x_NCHW
    red, green, blue = (x_NCHW[:, c : c + 1] for c in range(3))
    return (red * _GREY[0]).add_(green * _GREY[1]).add_(blue * _GREY[2])


def turn_hue(x_NCHW: Tensor, turn_N: Tensor) -> Tensor:
    """Every colour `turn` of a full turn around the circle of hues."""
    red, green, blue = x_NCHW.unbind(1)
    high, low = x_NCHW.amax(1), x_NCHW.amin(1)
    chroma = high - low
    flat = chroma == 0
    saturation = chroma / torch.where(high == 0, 1.0, high)
    divisor = torch.where(flat, 1.0, chroma)
    # Where on the circle, in sixths: 0 is red, 2 green, 4 blue.
    from_red = (green - blue) / divisor
    from_green = (blue - red) / divisor + 2.0
    from_blue = (red - green) / divisor + 4.0
    sixths = torch.where(high == green, from_green, from_blue)
    sixths = torch.where(high == red, from_red, sixths)
    hue = torch.where(flat, 0.0, sixths) * _SIXTH + turn_N[:, None, None]
    return _from_hue(hue - hue.floor(), saturation, high)


def _from_hue(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Each channel is at its height within a sixth of the circle from its colour, and falls beside."""
    away = 5.0 - 2.0 * torch.arange(3, device=hue.device)
    at = (hue * 6.0).unsqueeze(1) + away[:, None, None]
    at = at - (at * _SIXTH).floor() * 6.0
    down = torch.minimum(at, 4.0 - at).clamp_(0, 1)
    chroma = (value * saturation).unsqueeze(1)
    return (value.unsqueeze(1) - chroma * down).clamp_(0, 1)


def _blend(x: Tensor, other: Tensor, factor_N: Tensor) -> Tensor:
    factor = _each(factor_N)
    return (x * factor).add_(other * (1.0 - factor)).clamp_(0, 1)


def _each(value_N: Tensor) -> Tensor:
    return value_N[:, None, None, None]
