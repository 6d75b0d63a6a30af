"""From an encoded image to pixels of one size: decoding, cropping, resizing.

The one place that calls Pillow. Called by the sources `images` and `packed`, which give the same bits
for the same files.
"""

from __future__ import annotations

from typing import IO, Any

import numpy as np

from ridgeline.errors import UsageError

IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm",
)  # fmt: skip
NUM_DRAWS = 5
"""Random numbers that one image takes."""
# The statistics of ImageNet, which published weights expect.
MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
STD = np.array([0.229, 0.224, 0.225], dtype=np.float32)
# The usual random-resized crop: share of the image's area, and width over height.
_CROP_AREA = (0.08, 1.0)
_CROP_RATIO = (3 / 4, 4 / 3)
# Each of the 256 values of a channel, normalised: looked up, not computed for every pixel.
_NORMALISED = ((np.arange(256, dtype=np.float32)[:, None] / np.float32(255) - MEAN) / STD).T.copy()


def require_pillow(source: str) -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"source {source!r} in data.source needs Pillow to decode images: "
            "pip install 'ridgeline[images]'"
        ) from error


def decode_image(
    file: str | IO[bytes], size: int, crop: float, draws: np.ndarray | None
) -> np.ndarray:
    """One image as (size, size, 3) bytes: the centre, or with `draws` a random crop, maybe flipped.

    Raises ValueError for what is no image.
    """
    from PIL import Image

    try:
        with Image.open(file) as opened:
            opened.load()
            # To convert what is right already would be a copy.
            image: Image.Image = opened if opened.mode == "RGB" else opened.convert("RGB")
    # Pillow raises SyntaxError too, for some broken headers.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from error
    if draws is None:
        box = _centre_box(image.width, image.height, crop)
    else:
        box = _random_box(image.width, image.height, draws)
    if box != (0, 0, size, size) or image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    pixels: np.ndarray[Any, Any] = np.asarray(image)
    return pixels[:, ::-1] if draws is not None and draws[4] < 0.5 else pixels


def normalise_into(pixels: np.ndarray, out: np.ndarray) -> None:
    """(H, W, 3) bytes to (3, H, W) float32 with the mean and spread of ImageNet."""
    for channel in range(3):
        np.take(_NORMALISED[channel], pixels[:, :, channel], out=out[channel], mode="clip")


def _centre_box(width: int, height: int, crop: float) -> tuple[float, float, float, float]:
    side = crop * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(width: int, height: int, draws: np.ndarray) -> tuple[float, float, float, float]:
    """A random-resized crop; one that would stick out is cut to the image, not drawn again."""
    area = width * height * (_CROP_AREA[0] + (_CROP_AREA[1] - _CROP_AREA[0]) * draws[0])
    low, high = np.log(_CROP_RATIO)
    ratio = np.exp(low + (high - low) * draws[1])
    box_width = float(min(width, max(1.0, np.sqrt(area * ratio))))
    box_height = float(min(height, max(1.0, np.sqrt(area / ratio))))
    left = float(draws[2]) * (width - box_width)
    top = float(draws[3]) * (height - box_height)
    return left, top, left + box_width, top + box_height
