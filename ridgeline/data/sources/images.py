"""An ordinary folder of images, one subfolder a class.

Either `path/train/<class>/...` beside `path/val|valid|test|eval/<class>/...`, or class folders
alone, of which `holdout` is kept for evaluation. Decoding is Pillow's; it is the slow part, which
is why the loader has worker processes. Built by `data/build.py`.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.data.arguments import flag, number, whole, wrong_value
from ridgeline.data.keyed import keyed_uniform
from ridgeline.data.pixels import (
    IMAGE_SUFFIXES,
    NUM_DRAWS,
    decode_image,
    normalise_into,
    require_pillow,
)
from ridgeline.data.source import SourceInfo
from ridgeline.data.spent import Spent
from ridgeline.errors import UsageError

EVAL_FOLDERS = ("val", "valid", "validation", "test", "eval")
# A class's file and its label.
_Labelled = tuple[str, int]


class Images:
    """Image files, decoded and cropped to `size` when they are fetched."""

    def __init__(
        self,
        files: list[_Labelled],
        class_names: list[str],
        size: int,
        crop: float,
        augment: bool,
        seed: int,
    ) -> None:
        self.class_names = class_names
        self._files = files
        self._size = size
        self._crop = crop
        self._augment = augment
        self._seed = seed
        self.spent = Spent()
        self.info = SourceInfo(
            input_shape=(3, size, size),
            input_dtype=torch.float32,
            target_shape=(),
            target_dtype=torch.int64,
            num_classes=len(class_names),
            task="classify",
        )

    def __len__(self) -> int:
        return len(self._files)

    def fetch(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        images = np.empty((len(indices), 3, self._size, self._size), dtype=np.float32)
        labels = np.empty(len(indices), dtype=np.int64)
        draws = keyed_uniform((self._seed, epoch), indices, NUM_DRAWS)
        for row, index in enumerate(indices.tolist()):
            file, labels[row] = self._files[index]
            opened = self._read(file) if self.spent.is_on else file
            with self.spent.during("decode"):
                try:
                    pixels = decode_image(
                        opened, self._size, self._crop, draws[row] if self._augment else None
                    )
                except ValueError as error:
                    raise UsageError(
                        f"source 'images': cannot read image {file!r}: {error}; replace or remove it"
                    ) from error
                normalise_into(pixels, images[row])
        return torch.from_numpy(images), torch.from_numpy(labels)

    def _read(self, file: str) -> io.BytesIO:
        """The whole file first, so that reading and decoding are timed apart."""
        with self.spent.during("read"):
            with self.spent.during("open"):
                opened = open(file, "rb", buffering=0)  # noqa: SIM115 (closed below)
            with opened:
                return io.BytesIO(opened.readall())


def build_images(
    seed: int,
    *,
    path: Any = None,
    size: Any = 224,
    augment: Any = False,
    holdout: Any = 0.1,
    crop: Any = 1.0,
) -> tuple[Images, Images]:
    """`size`: pixels a side. `holdout`: share kept for evaluation when there is no such folder;
    0 keeps none.

    `crop`: share of the shorter side that the centre crop takes (0.875 is usual for ImageNet).
    """
    size = whole("images", "size", size)
    augment = flag("images", "augment", augment)
    holdout = number("images", "holdout", holdout, 0.0, 0.9, or_zero=True)
    crop = number("images", "crop", crop, 0.0, 1.0)
    require_pillow("images")
    if path is None:
        raise UsageError("source 'images' needs 'path' in data.args: the folder of the images")
    if not isinstance(path, str | os.PathLike):
        raise wrong_value("images", "path", path, "a folder")
    root = Path(path)
    if not root.is_dir():
        raise UsageError(f"source 'images': path {str(root)!r} in data.args is not a folder")
    train, held_out, names = _find_splits(root, holdout)
    return (
        Images(train, names, size, crop, augment, seed),
        Images(held_out, names, size, crop, False, seed),
    )


def _find_splits(root: Path, holdout: float) -> tuple[list[_Labelled], list[_Labelled], list[str]]:
    train_root = root / "train" if (root / "train").is_dir() else root
    names = _class_names(train_root)
    train = _scan(train_root, names)
    for folder in EVAL_FOLDERS:
        eval_root = root / folder
        if train_root != root and eval_root.is_dir():
            strangers = sorted(set(_class_names(eval_root)) - set(names))
            if strangers:
                raise UsageError(
                    f"source 'images': class folder {str(eval_root / strangers[0])!r} has no "
                    f"counterpart in {str(train_root)!r}"
                )
            return train, _scan(eval_root, names), names
    return *_split(train, holdout, train_root), names


def _class_names(root: Path) -> list[str]:
    names = sorted(
        entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    if not names:
        raise UsageError(
            f"source 'images': folder {str(root)!r} (path in data.args) has no class folders; "
            "images are expected in <path>/train/<class>/ or <path>/<class>/"
        )
    return names


def _scan(root: Path, names: list[str]) -> list[_Labelled]:
    found: list[_Labelled] = []
    for label, name in enumerate(names):
        files = []
        for folder, _, entries in os.walk(root / name, followlinks=True):
            files += [
                os.path.join(folder, e) for e in entries if e.lower().endswith(IMAGE_SUFFIXES)
            ]
        found += [(file, label) for file in sorted(files)]
    if not found:
        raise UsageError(
            f"source 'images': no images under {str(root)!r} (path in data.args); looked in "
            f"{len(names)} class folders for {', '.join(IMAGE_SUFFIXES)}"
        )
    return found


def _split(
    files: list[_Labelled], holdout: float, root: Path
) -> tuple[list[_Labelled], list[_Labelled]]:
    """Hold out evenly spaced files of a class: those where j * holdout passes a whole number."""
    if not holdout:
        return files, []
    train: list[_Labelled] = []
    held_out: list[_Labelled] = []
    seen: dict[int, int] = {}
    for file, label in files:
        position = seen.get(label, 0)
        seen[label] = position + 1
        passes = int((position + 1) * holdout) > int(position * holdout)
        (held_out if passes else train).append((file, label))
    if not held_out or not train:
        raise UsageError(
            f"source 'images': holdout={holdout:g} of the {len(files)} images under {str(root)!r} "
            "leaves no sample in one of the two halves; raise holdout, add images, or hold out none (0)"
        )
    return train, held_out
