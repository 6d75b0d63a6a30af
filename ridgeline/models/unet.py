"""U-Net (Ronneberger et al. 2015) in two and three dimensions, from image to image.

The 2-D default is the construction most people mean by "U-Net in PyTorch": same padding, batch
norm, bias-free convolutions, transposed convolutions on the way up. The 3-D one has the
same plan and is the model whose activations outgrow a device first. Built by
`build_model("unet2d")` and `build_model("unet3d")`.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.errors import UsageError, unknown_word
from ridgeline.models.init import reset_layers

NORMS = ("batch", "group", "none")
UPS = ("transpose", "interpolate")
MAX_GROUPS = 8


class UNet(nn.Module):
    """`depth` halvings from `width` channels to `width * 2**depth`, and back with skip connections.

    Any input size of at least `2**depth` works: where a halving dropped an odd row, the way up pads
    it back to the skip's size, so the output is exactly as large as the input.
    """

    def __init__(
        self,
        dims: int = 2,
        in_channels: int = 3,
        out_channels: int = 2,
        width: int = 64,
        depth: int = 4,
        norm: str = "batch",
        up: str = "transpose",
    ) -> None:
        super().__init__()
        if dims not in (2, 3):
            raise UsageError(f"UNet has 2 or 3 dims, not {dims}")
        if norm not in NORMS:
            raise unknown_word("norm", norm, NORMS, "UNet(norm=)")
        if up not in UPS:
            raise unknown_word("up", up, UPS, "UNet(up=)")
        self.smallest_size = 2**depth
        widths = [width * 2**level for level in range(depth + 1)]
        conv = nn.Conv2d if dims == 2 else nn.Conv3d
        pool = nn.MaxPool2d if dims == 2 else nn.MaxPool3d
        self.stem = _double_conv(dims, in_channels, width, norm)
        self.downs = nn.ModuleList(
            nn.Sequential(pool(2), *_double_conv(dims, a, b, norm)) for a, b in pairwise(widths)
        )
        self.ups = nn.ModuleList(UpBlock(dims, w, norm, up) for w in reversed(widths[1:]))
        self.head = conv(width, out_channels, 1)

    def init_weights(self) -> None:
        reset_layers(self)

    def forward(self, x: Tensor) -> Tensor:
        if min(x.shape[2:]) < self.smallest_size:
            raise UsageError(
                f"UNet of this depth takes images of at least {self.smallest_size} in every"
                f" dimension, not {tuple(x.shape[2:])}"
            )
        x = self.stem(x)
        skips = []
        for down in self.downs:
            skips.append(x)
            x = down(x)
        for up in self.ups:
            x = up(x, skips.pop())
        out: Tensor = self.head(x)
        return out


class UpBlock(nn.Module):
    """Doubles the maps and halves the channels, joins the skip, then two convolutions."""

    def __init__(self, dims: int, in_channels: int, norm: str, up: str) -> None:
        super().__init__()
        half = in_channels // 2
        self.up: nn.Module
        if up == "transpose":
            transpose = nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d
            self.up = transpose(in_channels, half, 2, stride=2)
        else:
            # Nearest commutes with a 1x1 convolution, which is cheaper first; and its backward is
            # deterministic on CUDA, where that of linear interpolation is not.
            conv = nn.Conv2d if dims == 2 else nn.Conv3d
            self.up = nn.Sequential(conv(in_channels, half, 1), nn.Upsample(scale_factor=2.0))
        self.conv = _double_conv(dims, in_channels, half, norm)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = _pad_to(self.up(x), skip)
        out: Tensor = self.conv(torch.cat([skip, x], dim=1))
        return out


def _double_conv(dims: int, in_channels: int, out_channels: int, norm: str) -> nn.Sequential:
    """Twice: 3-wide convolution, norm, ReLU."""
    conv = nn.Conv2d if dims == 2 else nn.Conv3d
    layers: list[nn.Module] = []
    for channels in (in_channels, out_channels):
        layers.append(conv(channels, out_channels, 3, padding=1, bias=norm == "none"))
        if norm == "batch":
            layers.append((nn.BatchNorm2d if dims == 2 else nn.BatchNorm3d)(out_channels))
        elif norm == "group":
            layers.append(nn.GroupNorm(math.gcd(MAX_GROUPS, out_channels), out_channels))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def _pad_to(x: Tensor, target: Tensor) -> Tensor:
    """Zero-pad the far end of each spatial dim of `x` to the size of `target`."""
    missing = [t - s for t, s in zip(target.shape[2:], x.shape[2:], strict=True)]
    if not any(missing):
        return x
    return F.pad(x, [p for m in reversed(missing) for p in (0, m)])
