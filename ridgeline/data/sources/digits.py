"""Handwritten digits: scikit-learn's bundled 1797 images of 8x8 pixels.

The data set of the demos and the tests: real, learnable in seconds on a laptop, and there without a
download. The split is fixed, so that accuracies of any two runs compare. Built by `data/build.py`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.data.arguments import choice, flag, whole
from ridgeline.data.keyed import keyed_bits
from ridgeline.data.source import SourceInfo
from ridgeline.errors import RunError, UsageError

_NATIVE_SIZE = 8
_HOLD_OUT_EVERY = 5


class Digits:
    """Images in memory; with `augment`, shifted by up to one of the original's pixels a side."""

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, background: float, seed: int, augment: bool
    ) -> None:
        self._size = images.shape[-1]
        self._shift = max(1, round(self._size / _NATIVE_SIZE)) if augment else 0
        self._seed = seed
        self._labels = labels
        margin = (self._shift, self._shift)
        # Padded once with the colour of paper, so that a shift is only another window.
        self._padded = np.pad(
            images, ((0, 0), (0, 0), margin, margin), constant_values=np.float32(background)
        )
        self.info = SourceInfo(
            input_shape=tuple(images.shape[1:]),
            input_dtype=torch.float32,
            target_shape=(),
            target_dtype=torch.int64,
            num_classes=10,
            task="classify",
        )

    def __len__(self) -> int:
        return len(self._labels)

    def fetch(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        labels = torch.from_numpy(self._labels[indices])
        if not self._shift:
            return torch.from_numpy(self._padded[indices]), labels
        # Shifts of -1, 0 or 1 original pixels, as corners of the window in the padded image.
        corners = (keyed_bits((self._seed, epoch), indices, 2) % np.uint64(3)).astype(np.int64)
        window = np.arange(self._size)
        rows = corners[:, 0, None] * self._shift + window
        columns = corners[:, 1, None] * self._shift + window
        images = self._padded[indices[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        # Advanced indices around a slice put the slice last: N, H, W, C.
        return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))), labels


def build_digits(
    seed: int, *, size: Any = _NATIVE_SIZE, augment: Any = False, channels: Any = 1
) -> tuple[Digits, Digits]:
    """`size`: pixels a side, resized bilinearly. `channels`: 1, or 3 equal ones."""
    size = whole("digits", "size", size)
    augment = flag("digits", "augment", augment)
    channels = choice("digits", "channels", channels, (1, 3))
    table = _read_table()
    labels = table[:, -1].astype(np.int64)
    images = torch.from_numpy(table[:, :-1].reshape(-1, 1, _NATIVE_SIZE, _NATIVE_SIZE)) / 16.0
    if size != _NATIVE_SIZE:
        images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    held_out = _held_out(labels)
    pixels = images.numpy()
    mean, std = (pixels[~held_out].mean(dtype="f8"), pixels[~held_out].std(dtype="f8"))
    pixels = ((pixels - mean) / std).astype(np.float32).repeat(channels, axis=1)
    background = -mean / std
    return (
        Digits(pixels[~held_out], labels[~held_out], background, seed, augment),
        Digits(pixels[held_out], labels[held_out], background, seed, augment=False),
    )


def _read_table() -> np.ndarray:
    """A row an image: its 64 pixels of 0 to 16, and its label.

    Read from scikit-learn's file itself: importing scikit-learn and the scipy that it loads would take
    every rank longer than its first hundred steps.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise UsageError(
            "source 'digits' in data.source needs scikit-learn, which holds the images: "
            "pip install 'ridgeline[demo]'"
        )
    path = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    try:
        return np.loadtxt(path, delimiter=",", dtype=np.float32)
    except (OSError, ValueError) as error:
        raise RunError(
            f"source 'digits' cannot be read from {path} ({error}): install scikit-learn again"
        ) from error


def _held_out(labels: np.ndarray) -> np.ndarray:
    """Every fifth image of each class, whatever the seed."""
    mask = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        mask[np.flatnonzero(labels == label)[_HOLD_OUT_EVERY - 1 :: _HOLD_OUT_EVERY]] = True
    return mask
