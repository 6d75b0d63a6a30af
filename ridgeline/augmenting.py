"""Section `data.augment` of a recipe: what is done to samples on their way to the model, and its limits.

Part of `config.py`, which reads it; `data/augment` carries it out. Needs no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ridgeline.errors import UsageError


@dataclass(frozen=True)
class AugmentConfig:
    crop: str = "none"
    """none; resized: a random box, resized to `size`; padded: a random place of `size`; centre. An
    evaluation takes the centre in each."""
    size: tuple[int, ...] = ()
    """Height and width after the crop; without it those of the samples."""
    area: tuple[float, float] = (0.08, 1.0)
    """Share of the image that a box of crop=resized has, from and to."""
    ratio: tuple[float, float] = (0.75, 4 / 3)
    """Its width over its height, from and to."""
    padding: int = 0
    """Pixels of stored value 0 around an image that crop=padded moves in."""
    eval_area: float = 1.0
    """Share of the largest centre box that an evaluation of crop=resized takes, by area."""
    flip_horizontal: float = 0.0
    """Probability that left and right are exchanged."""
    flip_vertical: float = 0.0
    """Probability that top and bottom are exchanged."""
    roll: float = 0.0
    """Probability that columns move around the globe by any number of them (crop=none)."""
    scale: tuple[float, ...] = ()
    """Stored values x scale + offset are the values themselves; one number a channel, or one for all.
    Without it 1/255 for bytes, otherwise 1."""
    offset: tuple[float, ...] = ()
    """Like `scale`; without it 0."""
    mean: tuple[float, ...] = ()
    """Subtracted from the values, one number a channel or one for all."""
    std: tuple[float, ...] = ()
    """The rest is divided by this."""
    brightness: float = 0.0
    """Factor from 1 - x to 1 + x; it and the next three are for values from 0 to 1 (see `scale`)."""
    contrast: float = 0.0
    """Likewise, of the distance to the image's mean grey."""
    saturation: float = 0.0
    """Likewise, of the distance to a pixel's own grey."""
    hue: float = 0.0
    """Largest turn of the hue either way, in turns: 0.5 is any."""
    mixup: float = 0.0
    """Blend samples and labels in pairs by lambda from Beta(x, x); 0 never does."""
    cutmix: float = 0.0
    """Put a box of the partner into a sample, of area 1 - lambda from Beta(x, x); 0 never does. With
    mixup too, each sample has one of the two."""
    mix_share: float = 1.0
    """Probability that a sample is mixed at all."""
    where: str = "device"
    """device: on the GPU, beside the step; host: in the loader, for a GPU that has no time for it."""


CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "data.augment.where": ("device", "host"),
    "data.augment.crop": ("none", "resized", "padded", "centre"),
}

AT_LEAST: Final[dict[str, float]] = {
    "data.augment.padding": 0,
    "data.augment.eval_area": 0.001,
    "data.augment.flip_horizontal": 0,
    "data.augment.flip_vertical": 0,
    "data.augment.roll": 0,
    "data.augment.brightness": 0,
    "data.augment.contrast": 0,
    "data.augment.saturation": 0,
    "data.augment.hue": 0,
    "data.augment.mixup": 0,
    "data.augment.cutmix": 0,
    "data.augment.mix_share": 0,
}

AT_MOST: Final[dict[str, float]] = {
    "data.augment.eval_area": 1,
    "data.augment.flip_horizontal": 1,
    "data.augment.flip_vertical": 1,
    "data.augment.roll": 1,
    "data.augment.hue": 0.5,
    "data.augment.mix_share": 1,
}


def check_augment(augment: AugmentConfig) -> None:
    """The lists of numbers; what the samples have to do with them, `data/augment` checks."""
    if augment.size and (len(augment.size) != 2 or min(augment.size) < 1):
        raise UsageError(
            f"data.augment.size={list(augment.size)} is not a height and a width, e.g. [224, 224]"
        )
    for name, (low, high) in (("area", augment.area), ("ratio", augment.ratio)):
        if not 0 < low <= high < math.inf or (name == "area" and high > 1):
            limit = " and at most 1" if name == "area" else ""
            raise UsageError(
                f"data.augment.{name}={[low, high]} has to be two numbers above 0{limit}, the lower "
                "first"
            )
    for name in ("scale", "offset", "mean", "std"):
        numbers = getattr(augment, name)
        if not all(math.isfinite(number) for number in numbers):
            raise UsageError(f"data.augment.{name}={list(numbers)} are not all finite numbers")
    for name in ("scale", "std"):
        if 0 in getattr(augment, name):
            raise UsageError(
                f"data.augment.{name}={list(getattr(augment, name))} has a 0, which leaves nothing of "
                "a channel; leave it out or give another number"
            )
