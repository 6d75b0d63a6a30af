"""Whether the steps of `data.augment` make sense for the samples of a source, before any is read.

Called by `apply.py`; ranges of single values are checked with the rest of the configuration.
"""

from __future__ import annotations

from ridgeline.augmenting import AugmentConfig
from ridgeline.data.source import SourceInfo
from ridgeline.errors import UsageError

_COLOURS = ("brightness", "contrast", "saturation", "hue")


def check_augment(config: AugmentConfig, info: SourceInfo) -> None:
    """Raise for the first step that the samples do not allow."""
    _check_values(config, info)
    _check_crop(config, info)
    _check_colours(config, info)
    _check_mixing(config, info)


def _check_values(config: AugmentConfig, info: SourceInfo) -> None:
    for name in ("scale", "offset", "mean", "std"):
        numbers = getattr(config, name)
        if numbers and info.unit == "tokens":
            raise UsageError(
                f"data.augment.{name}={list(numbers)} is for numbers, and the samples of data.source "
                "are tokens; leave it out"
            )
        channels = info.input_shape[0] if info.input_shape else 1
        if len(numbers) not in (0, 1, channels):
            raise UsageError(
                f"data.augment.{name} has {len(numbers)} numbers, and the samples of data.source have "
                f"{channels} channels; give {channels}, or one for all"
            )
        dense = info.target_shape
        if len(numbers) > 1 and info.task == "forecast" and dense and dense[0] != channels:
            raise UsageError(
                f"data.augment.{name} has a number for each of {channels} channels, and the targets, "
                f"which are treated alike, have {dense[0]}; give one number for all, or decode in the "
                "source"
            )


def _check_crop(config: AugmentConfig, info: SourceInfo) -> None:
    flips = [name for name in ("flip_horizontal", "flip_vertical", "roll") if getattr(config, name)]
    if config.roll and config.crop != "none":
        raise UsageError(
            f"data.augment.roll={config.roll} moves columns around the globe, and crop={config.crop} cuts "
            "it open; use one of them"
        )
    if config.crop == "none" and (config.size or config.padding):
        what = f"size={list(config.size)}" if config.size else f"padding={config.padding}"
        raise UsageError(
            f"data.augment.{what} has no meaning with data.augment.crop=none; use crop=resized, padded "
            "or centre"
        )
    if config.padding and config.crop != "padded":
        raise UsageError(
            f"data.augment.padding={config.padding} has no meaning with crop={config.crop}; use "
            "crop=padded"
        )
    if config.crop == "none" and not flips:
        return
    step = (
        f"crop={config.crop}"
        if config.crop != "none"
        else f"{flips[0]}={getattr(config, flips[0])}"
    )
    _require_image(step, info)
    dense = info.target_shape[-2:]
    if info.task in ("segment", "forecast") and dense != info.input_shape[-2:]:
        raise UsageError(
            f"data.augment.{step}: the targets of data.source have the shape "
            f"{list(info.target_shape)} and do not lie on the pixels of the inputs "
            f"({list(info.input_shape)}), so they cannot move with them; leave it out"
        )
    if config.crop in ("padded", "centre"):
        sides = zip(("high", "wide"), info.input_shape[-2:], config.size or (), strict=False)
        for name, side, wanted in sides:
            if wanted > side + 2 * config.padding:
                raise UsageError(
                    f"data.augment.size={list(config.size)} is larger than the images of data.source, "
                    f"which are {side} {name}, with padding={config.padding}; use a smaller size, more "
                    "padding (crop=padded), or crop=resized"
                )
    if config.padding and info.task in ("segment", "forecast"):
        raise UsageError(
            f"data.augment.padding={config.padding}: the targets of task {info.task} have no value "
            "outside the image; use padding=0 or crop=resized"
        )


def _check_colours(config: AugmentConfig, info: SourceInfo) -> None:
    for name in _COLOURS:
        value = getattr(config, name)
        if not value:
            continue
        _require_image(f"{name}={value}", info)
        channels = info.input_shape[0]
        allowed = (1, 3) if name in ("brightness", "contrast") else (3,)
        if channels not in allowed:
            words = " or ".join(str(number) for number in allowed)
            raise UsageError(
                f"data.augment.{name}={value} is for colours in {words} channels, and the samples of "
                f"data.source have {channels}; leave it out"
            )
        if info.task == "forecast":
            raise UsageError(
                f"data.augment.{name}={value} changes inputs, and the targets of task forecast would "
                "keep the old colours; leave it out"
            )


def _check_mixing(config: AugmentConfig, info: SourceInfo) -> None:
    for name in ("mixup", "cutmix"):
        value = getattr(config, name)
        if not value:
            continue
        if info.task != "classify" or info.target_shape or info.num_classes is None:
            known = "" if info.num_classes is not None else " and an unknown number of classes"
            raise UsageError(
                f"data.augment.{name}={value} mixes class labels, and data.source has targets of shape "
                f"{list(info.target_shape)} for task {info.task}{known}; leave it out"
            )
        if name == "cutmix":
            _require_image(f"{name}={value}", info)


def _require_image(step: str, info: SourceInfo) -> None:
    if len(info.input_shape) != 3 or info.unit == "tokens":
        raise UsageError(
            f"data.augment.{step} is for images of (channels, height, width), and the samples of "
            f"data.source have the shape {list(info.input_shape)}; leave it out"
        )
