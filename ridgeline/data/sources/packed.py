"""A packed data set, or files in any of the formats, as a source.

`path` is a data set (`ridgeline data pack`), a folder, or a file of samples; or it holds two of them,
`train` and `eval` (or val, valid, validation, test). Which field is the input and which the target is
found by their names, or said. Images are decoded here; arrays come as they lie on the disk, straight
into the batch. Built by `data/build.py`.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.data.arguments import choice, flag, number, whole, wrong_value
from ridgeline.data.dali import DaliDecoder, require_dali
from ridgeline.data.dataset import CHECKS, Dataset, open_dataset
from ridgeline.data.formats.contract import BadSample, Schema, describe_schema
from ridgeline.data.keyed import keyed_uniform
from ridgeline.data.memory import empty_batch
from ridgeline.data.pack import classes_of
from ridgeline.data.pixels import (
    IMAGE_SUFFIXES,
    NUM_DRAWS,
    decode_image,
    normalise_into,
    require_pillow,
)
from ridgeline.data.source import SourceInfo
from ridgeline.data.sources.images import EVAL_FOLDERS
from ridgeline.errors import RunError, UsageError

_INPUTS = ("input", "inputs", "image", "img", "x", "data", "tokens", "npy", "array")
_TARGETS = ("target", "targets", "label", "labels", "cls", "class", "y")
_LARGE_BYTES = 256 * 1024
# How far a sample that cannot be read looks for one that can.
_MAX_STEPS = 1000
# torch has hardly any operations on these; uint16 pixels stay, because `data.augment` decodes them.
_TORCH_INTEGERS = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}
_STORED_REALS = ("int16", "uint16")


class Packed:
    """Some samples of a data set: inputs from one field, targets from another or from folders."""

    def __init__(
        self,
        dataset: Dataset,
        members: np.ndarray,
        fields: _Fields,
        labels: np.ndarray | None,
        class_names: Sequence[str],
        seed: int,
        augment: bool,
        on_error: str,
    ) -> None:
        self.dataset = dataset
        self.class_names = list(class_names)
        self._members = members
        self._fields = fields
        self._labels = labels
        self._seed = seed
        self._augment = augment
        self._on_error = on_error
        field = dataset.schema[fields.input]
        self._is_large = field.is_fixed and field.num_bytes >= _LARGE_BYTES
        # By thread: each reads a batch and asks what was skipped in it.
        self._skipped: dict[int, list[str]] = {}
        self.info = _info(dataset, fields, len(self.class_names) or None, self._first_target())

    def __len__(self) -> int:
        return len(self._members)

    def fetch(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, ...]:
        try:
            return self._fetch(indices, epoch)
        except BadSample:
            if self._on_error != "skip":
                raise
        return self._fetch(self._readable(indices), epoch)

    @property
    def members(self) -> np.ndarray:
        """Numbers of its samples in the data set."""
        return self._members

    def take_skipped(self) -> list[str]:
        """Sentences on the samples that this thread passed over since it last asked."""
        return self._skipped.pop(threading.get_ident(), [])

    def ahead(self, first: int, last: int) -> None:
        """Samples first..last-1 are wanted soon."""
        members = self._members[first:last]
        if not len(members):
            return
        low, high = int(members[0]), int(members[-1]) + 1
        # Those held out lie between them; members that are far apart are better left alone.
        if high - low <= 2 * len(members):
            self.dataset.ahead(low, high)

    def ask(self, indices: np.ndarray) -> None:
        """These samples are wanted next. Small ones are read sooner than asked for."""
        if self._is_large:
            for member in self._members[indices].tolist():
                self.dataset.ahead(member, member + 1)

    def _fetch(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, ...]:
        fields = self._fields
        members = self._members[indices]
        names = [fields.input] if fields.target is None else [fields.input, fields.target]
        spent = self.dataset.spent
        # Arrays are read to where they stay.
        made = {
            name: tensor for name in names if (tensor := self._room(name, len(members))) is not None
        }
        with spent.during("read"):
            out = {name: tensor.numpy() for name, tensor in made.items()}
            batch: dict[str, Any] = dict(self.dataset.read_batch(members, names, out))
        batch.update(made)
        with spent.during("decode"):
            found = batch[fields.input]
            if fields.is_image:
                inputs = self._decode(found, members, indices, epoch)
            else:
                inputs = _stack(found, fields.input, self.dataset)
        if self._labels is not None:
            return inputs, torch.from_numpy(self._labels[indices])
        if fields.target is None:  # tokens: predict the next
            return inputs[:, :-1].contiguous(), inputs[:, 1:].contiguous()
        return inputs, self._targets(batch[fields.target], members)

    def _room(self, name: str, num: int) -> Tensor | None:
        """Memory for a field of `num` samples; None where it does not come as one array."""
        field = self.dataset.schema[name]
        if not field.is_fixed or _widened(field.dtype, len(field.shape)) is not None:
            return None
        dtype = torch.from_numpy(np.empty(0, dtype=field.dtype)).dtype
        return empty_batch((num, *(side or 0 for side in field.shape)), dtype)

    def _decode(self, found: Any, members: np.ndarray, indices: np.ndarray, epoch: int) -> Tensor:
        fields, size = self._fields, self._fields.size
        if fields.as_bytes:
            # As decoders give them, pixel by pixel; the tensor is a view of that with channels first.
            made = empty_batch((len(members), size, size, 3), torch.uint8).permute(0, 3, 1, 2)
        else:
            made = empty_batch((len(members), 3, size, size), torch.float32)
        images = made.numpy()
        for row, pixels in enumerate(self._pixels(found, members, indices, epoch)):
            if fields.as_bytes:
                images[row] = pixels.transpose(2, 0, 1)
            else:
                normalise_into(pixels, images[row])
        return made

    def _pixels(
        self, found: Any, members: np.ndarray, indices: np.ndarray, epoch: int
    ) -> Iterator[np.ndarray]:
        """Each image as (size, size, 3) bytes; an error names the sample."""
        fields = self._fields
        if fields.dali is not None:
            try:
                yield from fields.dali(found)
                return
            except ValueError as error:
                if self._on_error == "stop" and len(members) > 1:
                    # It does not say which: one at a time, the one that fails is named below.
                    for row in range(len(members)):
                        list(
                            self._pixels(
                                found[row : row + 1], members[row : row + 1], indices, epoch
                            )
                        )
                raise self._damaged(int(members[0]), f"is no image: {error}") from error
        draws = keyed_uniform((self._seed, epoch), indices, NUM_DRAWS)
        for row, data in enumerate(found):
            try:
                yield decode_image(
                    io.BytesIO(data),
                    fields.size,
                    fields.crop,
                    draws[row] if self._augment else None,
                )
            except ValueError as error:
                raise self._damaged(int(members[row]), f"is no image: {error}") from error

    def _targets(self, found: Any, members: np.ndarray) -> Tensor:
        if isinstance(found, Tensor | np.ndarray):
            return _as_tensor(found)
        if self.dataset.schema[str(self._fields.target)].kind == "array":
            return _stack(found, str(self._fields.target), self.dataset)
        labels = np.empty(len(members), dtype=np.int64)
        for row, (value, member) in enumerate(zip(found, members.tolist(), strict=True)):
            labels[row] = self._label(value, member)
        return torch.from_numpy(labels)

    def _label(self, value: Any, member: int) -> int:
        """A class number that was written as text, as in WebDataset's `cls` files."""
        try:
            return int(bytes(value).decode())
        except ValueError as error:
            why = f"has the label {bytes(value)[:20]!r}, which is no whole number"
            raise self._damaged(member, why) from error

    def _damaged(self, member: int, why: str) -> BadSample:
        shard, row = self.dataset.locate(member)
        return self.dataset.shard(shard).damaged(row, why)

    def _first_target(self) -> np.ndarray | None:
        """Of the first sample that can be read."""
        if self._fields.target is None:
            return None
        # A part that holds nothing has targets like the other.
        looked_at = (self._members[:_MAX_STEPS] if len(self) else np.arange(1)).tolist()
        for member in looked_at:
            try:
                target = self.dataset.read(member)[self._fields.target]
                if isinstance(target, np.ndarray):
                    return target
                return np.array(self._label(target, member))
            except BadSample:
                if self._on_error != "skip" or member == looked_at[-1]:
                    raise
        return None

    def _readable(self, indices: np.ndarray) -> np.ndarray:
        """The same samples, with the next one that can be read in the place of each that cannot."""
        chosen = []
        for index in indices.tolist():
            for step in range(_MAX_STEPS):
                other = (index + step) % len(self)
                try:
                    self._fetch(np.array([other]), 0)
                except BadSample as error:
                    self._skipped.setdefault(threading.get_ident(), []).append(str(error))
                    continue
                chosen.append(other)
                break
            else:
                raise RunError(
                    f"{_MAX_STEPS} samples in a row cannot be read, from sample {index} on; "
                    f"`ridgeline data verify {self.dataset.path}` lists them"
                )
        return np.array(chosen, dtype=indices.dtype)


class _Fields:
    """Which field is what, and how images become inputs."""

    def __init__(
        self,
        dataset: Dataset,
        input_name: str | None,
        target_name: str | None,
        size: int,
        crop: float,
        pixels: str,
        decoder: str,
    ) -> None:
        schema = dataset.schema
        self.size, self.crop, self.as_bytes = size, crop, pixels == "bytes"
        images = [name for name in schema if _is_image(name) and schema[name].kind == "bytes"]
        only = [*schema] if len(schema) == 1 else []
        self.input = input_name or _pick(schema, (*images, *_INPUTS, *only))
        if self.input is None or self.input not in schema:
            raise UsageError(
                f"source 'packed': {dataset.path} has the fields {describe_schema(schema)}, and which of "
                f"them is the input is not plain (input={input_name!r} in data.args); name one of them"
            )
        self.is_image = schema[self.input].kind == "bytes"
        self.dali = DaliDecoder(size, crop) if self.is_image and decoder == "dali" else None
        if not self.is_image:
            _check_type(dataset, self.input)
        elif self.dali is None:
            require_pillow("packed")
        self.target = target_name or _pick(schema, _TARGETS)
        if self.target is not None and self.target not in schema:
            raise UsageError(
                f"source 'packed': there is no field {self.target!r} (target in data.args) in "
                f"{dataset.path}, which has {describe_schema(schema)}"
            )
        if self.target is None and not self.is_image and len(schema) == 2 and target_name is None:
            self.target = next(name for name in schema if name != self.input)
        if self.target is not None and schema[self.target].kind == "array":
            _check_type(dataset, self.target)
        self.wants_labels = self.target is None and not self._is_text(dataset)

    def _is_text(self, dataset: Dataset) -> bool:
        """Whole numbers in a row, and nothing else: the next one is the target."""
        field = dataset.schema[self.input]
        return (
            field.kind == "array" and len(field.shape) == 1 and np.dtype(field.dtype).kind in "iu"
        )


def _check_type(dataset: Dataset, name: str) -> None:
    dtype = np.dtype(dataset.schema[name].dtype)
    try:
        _as_tensor(np.zeros(1, dtype=dtype))
    except TypeError as error:
        raise UsageError(
            f"source 'packed': the field {name!r} of {dataset.path} holds {dtype}, which no tensor can; "
            "name another field, or pack numbers"
        ) from error


def _is_image(name: str) -> bool:
    return f".{name.rpartition('.')[2].lower()}" in IMAGE_SUFFIXES


def _pick(schema: Schema, names: Sequence[str]) -> str | None:
    return next((name for name in names if name in schema), None)


def _stack(found: Any, name: str, dataset: Dataset) -> Tensor:
    if isinstance(found, Tensor | np.ndarray):
        return _as_tensor(found)
    shapes = sorted({value.shape for value in found})
    if len(shapes) > 1:
        raise UsageError(
            f"source 'packed': the field {name!r} of {dataset.path} has arrays of different shapes in "
            f"one batch, {shapes[0]} and {shapes[-1]}; a batch needs one shape"
        )
    return _as_tensor(np.stack(found))


def _widened(dtype: str, num_dims: int) -> type | None:
    """The type that values of a field with so many dimensions are brought to."""
    return None if dtype == "uint16" and num_dims > 1 else _TORCH_INTEGERS.get(dtype)


def _as_tensor(array: np.ndarray | Tensor) -> Tensor:
    if isinstance(array, Tensor):
        return array
    return torch.from_numpy(
        array.astype(wide) if (wide := _widened(array.dtype.name, array.ndim - 1)) else array
    )


def _info(
    dataset: Dataset, fields: _Fields, num_classes: int | None, target: np.ndarray | None
) -> SourceInfo:
    if fields.is_image:
        shape: tuple[int, ...] = (3, fields.size, fields.size)
        dtype = torch.uint8 if fields.as_bytes else torch.float32
    else:
        field = dataset.schema[fields.input]
        if not field.is_fixed:
            raise UsageError(
                f"source 'packed': the field {fields.input!r} of {dataset.path} has arrays of different "
                "shapes; a batch needs one shape, so pack them cropped or padded to one"
            )
        shape = tuple(side or 0 for side in field.shape)
        dtype = _as_tensor(np.zeros((1, *([1] * len(shape))), dtype=field.dtype)).dtype
        # Brought to the model's type on the device, where that costs nothing.
        dtype = torch.float32 if dtype.is_floating_point else dtype
    if target is None and not fields.wants_labels:
        tokens = (shape[0] - 1,)
        return SourceInfo(
            tokens,
            dtype,
            tokens,
            dtype,
            None,
            "causal_lm",
            unit="tokens",
            units_per_sample=tokens[0],
        )
    if target is None:
        return SourceInfo(shape, dtype, (), torch.int64, num_classes, "classify")
    wanted = _as_tensor(np.zeros((1, *([1] * target.ndim)), dtype=target.dtype)).dtype
    if wanted.is_floating_point:
        return SourceInfo(shape, dtype, target.shape, torch.float32, None, "forecast")
    if target.dtype.name in _STORED_REALS and target.shape == shape and dtype == wanted:
        # Real values that were packed into 16 bits, as climate data are; `data.augment` unpacks them.
        return SourceInfo(shape, dtype, target.shape, wanted, None, "forecast")
    task = "classify" if target.ndim == 0 else "segment"
    return SourceInfo(shape, dtype, target.shape, wanted, num_classes, task)


def build_packed(
    seed: int,
    *,
    path: Any = None,
    input: Any = None,
    target: Any = None,
    classes: Any = None,
    size: Any = 224,
    crop: Any = 1.0,
    augment: Any = False,
    pixels: Any = "float",
    decoder: Any = "pillow",
    holdout: Any = 0.1,
    check: Any = "once",
    on_error: Any = "stop",
) -> tuple[Packed, Packed]:
    """`size`, `crop`, `augment`: of images, as for the source `images`. `pixels`: `float`, normalised, or
    `bytes`, for `data.augment` to work on. `decoder`: `pillow`, or `dali` where that is installed.
    `holdout`: share kept for evaluation where there is no such part; 0 keeps none. `check`: compare
    checksums once (a process), always or never. `on_error`: `stop` at a sample that cannot be read, or
    `skip` to the next that can."""
    size = whole("packed", "size", size)
    crop = number("packed", "crop", crop, 0.0, 1.0)
    augment = flag("packed", "augment", augment)
    pixels = choice("packed", "pixels", pixels, ("float", "bytes"))
    decoder = choice("packed", "decoder", decoder, ("pillow", "dali"))
    if decoder == "dali":
        require_dali()
        if augment:
            raise UsageError(
                "source 'packed': augment=true in data.args is Pillow's; with decoder='dali' use "
                "pixels='bytes' and data.augment.crop=resized"
            )
    holdout = number("packed", "holdout", holdout, 0.0, 0.9, or_zero=True)
    check = choice("packed", "check", check, CHECKS)
    on_error = choice("packed", "on_error", on_error, ("stop", "skip"))
    if classes is not None:
        classes = whole("packed", "classes", classes)
    if path is None:
        raise UsageError(
            "source 'packed' needs 'path' in data.args: a data set, a file or a folder"
        )
    if not isinstance(path, str | os.PathLike):
        raise wrong_value("packed", "path", path, "a path")
    parts = _find_parts(Path(path), holdout, check)
    names = parts[0][0].classes or classes_of(parts[0][0].iter_keys())
    made = []
    for (dataset, members), augmented in zip(parts, (augment, False), strict=True):
        fields = _Fields(dataset, input, target, size, crop, pixels, decoder)
        labels = _labels(dataset, members, names) if fields.wants_labels else None
        listed = names if fields.wants_labels else [str(i) for i in range(classes or 0)]
        made.append(Packed(dataset, members, fields, labels, listed, seed, augmented, on_error))
    return made[0], made[1]


_Part = tuple[Dataset, np.ndarray]


def _find_parts(path: Path, holdout: float, check: str) -> tuple[_Part, _Part]:
    if (path / "train").is_dir():
        train = open_dataset(path / "train", check)
        for name in EVAL_FOLDERS:
            if (path / name).is_dir():
                held_out = open_dataset(path / name, check)
                return (train, np.arange(len(train))), (held_out, np.arange(len(held_out)))
        return _split(train, np.arange(len(train)), holdout)
    dataset = open_dataset(path, check)
    first = np.array([key.partition("/")[0] if "/" in key else "" for key in dataset.iter_keys()])
    numbers = np.arange(len(dataset))
    for name in EVAL_FOLDERS:
        if name in first and "train" in first:
            return (dataset, numbers[first == "train"]), (dataset, numbers[first == name])
    return _split(dataset, numbers, holdout)


def _split(dataset: Dataset, numbers: np.ndarray, holdout: float) -> tuple[_Part, _Part]:
    """Hold out evenly spaced samples of a class: those where j * holdout passes a whole number."""
    if not holdout:
        return (dataset, numbers), (dataset, numbers[:0])
    names = dataset.classes or classes_of(dataset.iter_keys())
    labels = _labels(dataset, numbers, names) if names else np.zeros(len(numbers), dtype=np.int64)
    passes = np.zeros(len(numbers), dtype=bool)
    for label in np.unique(labels):
        mine = np.flatnonzero(labels == label)
        position = np.arange(len(mine))
        passes[mine] = ((position + 1) * holdout).astype(int) > (position * holdout).astype(int)
    if passes.all() or not passes.any():
        raise UsageError(
            f"source 'packed': holdout={holdout:g} of the {len(numbers)} samples of {dataset.path} "
            "leaves none in one of the two halves; raise holdout, add samples, or hold out none (0)"
        )
    return (dataset, numbers[~passes]), (dataset, numbers[passes])


def _labels(dataset: Dataset, members: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The number of the folder that each sample lay in."""
    if not names:
        raise UsageError(
            f"source 'packed': the samples of {dataset.path} have no field that looks like a target and "
            f"lie in no folders; name one with target=... (fields: {describe_schema(dataset.schema)})"
        )
    known = {name: number for number, name in enumerate(names)}
    keys = list(dataset.iter_keys())
    labels = np.empty(len(members), dtype=np.int64)
    for row, member in enumerate(members.tolist()):
        folder = keys[member].rpartition("/")[0].rpartition("/")[2]
        if folder not in known:
            raise UsageError(
                f"source 'packed': sample {keys[member]!r} of {dataset.path} is of class {folder!r}, "
                "which the training samples do not have"
            )
        labels[row] = known[folder]
    return labels
