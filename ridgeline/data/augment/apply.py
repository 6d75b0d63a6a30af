"""The steps of `data.augment` on a batch: decode, crop, flip, colours, normalise, then mix.

A sample's numbers depend on the seed, the epoch and its own index, and each step has draws of its own, so
neither the rank, the place in the batch nor another step changes them. An evaluation has no random step.
Built by `build_augment` for the loader.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ridgeline.augmenting import AugmentConfig
from ridgeline.data.augment import colour, geometry, mix
from ridgeline.data.augment.check import check_augment
from ridgeline.data.augment.geometry import KeptTables, Places, Put, to_device, widen
from ridgeline.data.keyed import keyed_uniform
from ridgeline.data.source import SourceInfo
from ridgeline.errors import UsageError

# Keys of the draws of each step.
_CROP, _FLIP, _COLOUR, _MIX, _ROLL = 1, 2, 3, 4, 5
_STORED = (torch.uint8, torch.uint16, torch.int16)
"""Types in which samples are kept and no model computes."""
_COLOURS = (
    ("brightness", colour.brighten),
    ("contrast", colour.change_contrast),
    ("saturation", colour.saturate),
    ("hue", colour.turn_hue),
)


def build_augment(
    config: AugmentConfig, info: SourceInfo, seed: int, train: bool
) -> Augment | None:
    """What `data.augment` asks for on samples like `info`; None where there is nothing to do."""
    check_augment(config, info)
    decodes = info.input_dtype in _STORED and info.task in ("classify", "segment", "forecast")
    augment = Augment(config, info, seed, train)
    if info.arguments:
        if augment.does_something:
            raise UsageError(
                f"data.augment changes one input, and the samples of data.source have "
                f"{len(info.arguments)}; leave it out, and change them in the data set"
            )
        return None
    return augment if decodes or augment.does_something else None


class Augment:
    """`mixes` says whether samples are mixed, in which case the caller brings their partners."""

    def __init__(self, config: AugmentConfig, info: SourceInfo, seed: int, train: bool) -> None:
        self._config, self._info, self._seed, self._train = config, info, seed, train
        self.mixes = train and config.mix_share > 0 and (config.mixup > 0 or config.cutmix > 0)
        self._flips = train and (config.flip_horizontal > 0 or config.flip_vertical > 0)
        self._rolls = train and config.roll > 0
        self._moves = config.crop != "none" or self._flips or self._rolls
        self._colours = [
            (name, change) for name, change in _COLOURS if train and getattr(config, name) > 0
        ]
        self._decode, self._normalise = self._build_affine()
        self._put: Put = to_device

    @property
    def does_something(self) -> bool:
        steps = self._moves or self._colours or self.mixes
        return bool(steps or self._decode is not None or self._normalise is not None)

    def output_info(self, info: SourceInfo) -> SourceInfo:
        """What samples like `info` are afterwards."""
        shape = info.input_shape
        if self._moves:
            shape = (shape[0], *self._size(info))
        changed = replace(info, input_shape=shape, input_dtype=torch.float32)
        if self.mixes:
            assert info.num_classes is not None
            return replace(changed, target_shape=(info.num_classes,), target_dtype=torch.float32)
        if self._has_dense_targets:
            dense = (*info.target_shape[:-2], *shape[-2:])
            dtype = torch.float32 if info.task == "forecast" else info.target_dtype
            return replace(changed, target_shape=dense, target_dtype=dtype)
        return changed

    def __call__(
        self,
        inputs: Tensor,
        targets: Tensor,
        indices: np.ndarray,
        epoch: int,
        own: np.ndarray,
        mate: np.ndarray,
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the rows `own`, each mixed with its row of `mate`.

        All rows are samples that were fetched, with their `indices`; a row of `own` without a partner
        is its own mate.
        """
        places = self._places(indices, epoch) if self._moves else None
        inputs = self._change(inputs, places, indices, epoch)
        if self._has_dense_targets:
            targets = self._change_dense(targets, places)
        if self.mixes:
            return self._mix(inputs, targets, indices, epoch, own, mate)
        if len(own) == len(indices) and (own == np.arange(len(own))).all():
            return inputs, targets
        rows = to_device(own, inputs.device)
        return inputs.index_select(0, rows), targets.index_select(0, rows)

    def alone(self) -> Callable[[Tensor], Tensor]:
        """What an evaluation does to inputs, without targets and for any number of samples: it is the same
        for each, so the tables of one serve all, and nothing depends on how many there are. For a model
        that is to be called by a program that knows nothing of samples (`export`)."""
        assert not self._train
        mine = copy.copy(self)
        mine._put = KeptTables()
        one = np.zeros(1, dtype=np.int64)
        places = mine._places(one, 0) if mine._moves else None
        return lambda inputs: mine._change(inputs, places, one, 0)

    def _draw(self, step: int, indices: np.ndarray, epoch: int, num: int) -> np.ndarray:
        return keyed_uniform((self._seed, epoch, step), indices, num)

    # Crops and flips

    @property
    def _has_dense_targets(self) -> bool:
        return self._info.task in ("segment", "forecast")

    def _size(self, info: SourceInfo) -> tuple[int, int]:
        height, width = self._config.size or info.input_shape[-2:]
        return height, width

    def _places(self, indices: np.ndarray, epoch: int) -> Places:
        config, num = self._config, len(indices)
        size = (self._info.input_shape[-2], self._info.input_shape[-1])
        wanted = self._size(self._info)
        flips = np.zeros((num, 2), dtype=bool)
        if self._flips:
            chances = (config.flip_vertical, config.flip_horizontal)
            flips = self._draw(_FLIP, indices, epoch, 2) < chances
        if config.crop == "resized":
            if self._train:
                draws = self._draw(_CROP, indices, epoch, 4)
                boxes = geometry.random_boxes(draws, size, config.area, config.ratio)
            else:
                boxes = geometry.centre_box(size, wanted, config.eval_area)
            starts, lengths = (np.broadcast_to(part, (num, 2)) for part in boxes)
            rows, columns = (
                geometry.blended_lines(starts[:, d], lengths[:, d], wanted[d], flips[:, d])
                for d in (0, 1)
            )
            return Places(rows, columns, resizes=True)
        if config.crop == "padded" and self._train:
            draws = self._draw(_CROP, indices, epoch, 2)
            room = np.array(size) + 2 * config.padding - wanted
            starts = geometry.random_starts(draws, room) - config.padding
        else:
            starts = np.broadcast_to((np.array(size) - wanted) // 2, (num, 2))
        rows, columns = (geometry.whole_lines(starts[:, d], wanted[d], flips[:, d]) for d in (0, 1))
        if self._rolls:
            draws = self._draw(_ROLL, indices, epoch, 2)
            shifts = geometry.random_starts(draws[:, 1], np.array(wanted[1] - 1))
            shifts = np.where(draws[:, 0] < config.roll, shifts, 0)
            columns = geometry.rolled_lines(columns, shifts, size[1])
        return Places(rows, columns, resizes=False)

    def _change_dense(self, targets: Tensor, places: Places | None) -> Tensor:
        """Targets that lie on the pixels of the input move with them; labels are never blended."""
        is_labels = self._info.task == "segment"
        if is_labels:
            if places is None:
                return targets
            return geometry.take(targets.unsqueeze(1), places, self._put).squeeze(1)
        moved = self._move(targets, places)
        return self._scaled(self._scaled(moved, self._decode), self._normalise)

    def _move(self, x: Tensor, places: Places | None) -> Tensor:
        """Cropped and flipped, as float32 in memory of its own."""
        if places is not None and places.resizes:
            return geometry.blend(x, places, self._put)
        moved = x if places is None else geometry.take(x, places, self._put)
        return widen(moved) if moved is x or moved.dtype != torch.float32 else moved

    # Values

    def _build_affine(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Factor and summand a channel, (2, channels), before the colours and after them.

        Without colours the two are one, in float64: then values are rounded twice and not four times.
        """
        config = self._config
        usual = 1 / 255 if self._info.input_dtype == torch.uint8 else 1.0
        parts = (config.scale or (usual,), config.offset or (0.0,))
        scale, offset = np.broadcast_arrays(*(np.array(p, dtype=np.float64) for p in parts))
        parts = (config.std or (1.0,), config.mean or (0.0,))
        std, mean = np.broadcast_arrays(*(np.array(p, dtype=np.float64) for p in parts))
        if self._colours:
            return _affine(scale, offset), _affine(1 / std, -mean / std)
        return _affine(scale / std, (offset - mean) / std), None

    def _change(self, x: Tensor, places: Places | None, indices: np.ndarray, epoch: int) -> Tensor:
        x = self._scaled(self._move(x, places), self._decode)
        if self._colours:
            draws = 2.0 * self._draw(_COLOUR, indices, epoch, len(_COLOURS)) - 1.0
            columns = {name: column for column, (name, _) in enumerate(_COLOURS)}
            for name, change in self._colours:
                most = getattr(self._config, name)
                factors = most * draws[:, columns[name]]
                if name != "hue":
                    factors = np.maximum(1.0 + factors, 0.0)
                x = change(x, to_device(factors.astype(np.float32), x.device))
        return self._scaled(x, self._normalise)

    def _scaled(self, x: Tensor, affine: np.ndarray | None) -> Tensor:
        if affine is None:
            return x
        shape = (1, -1, *[1] * (x.dim() - 2))
        factor, summand = self._put(affine, x.device).float().view(2, *shape).unbind(0)
        return x.mul_(factor).add_(summand)

    # Pairs

    def _mix(
        self,
        inputs: Tensor,
        targets: Tensor,
        indices: np.ndarray,
        epoch: int,
        own: np.ndarray,
        mate: np.ndarray,
    ) -> tuple[Tensor, Tensor]:
        config, device = self._config, inputs.device
        draws = self._draw(_MIX, indices[own], epoch, 5)
        is_mixed = (own != mate) & (draws[:, 0] < config.mix_share)
        cuts = np.full(len(own), config.cutmix > 0)
        if config.mixup and config.cutmix:
            cuts = draws[:, 1] < 0.5
        lam = np.ones(len(own))
        if config.mixup:
            lam = np.where(is_mixed & ~cuts, mix.beta_lambda(config.mixup, draws[:, 2]), lam)
        own_rows, mate_rows = to_device(own, device), to_device(mate, device)
        own_inputs, mate_inputs = (inputs.index_select(0, rows) for rows in (own_rows, mate_rows))
        mixed = own_inputs
        if config.mixup:
            mixed = mix.mix_whole(mixed, mate_inputs, _float32(lam, device))
        if config.cutmix:
            kept = np.where(is_mixed & cuts, mix.beta_lambda(config.cutmix, draws[:, 2]), 1.0)
            size = (inputs.shape[2], inputs.shape[3])
            starts, stops, outside = mix.cut_boxes(kept, draws[:, 3:5], size)
            lam = np.where(is_mixed & cuts, outside, lam)
            bounds = (to_device(part, device) for part in (starts, stops))
            mixed = mix.mix_boxes(mixed, mate_inputs, *bounds)
        assert self._info.num_classes is not None
        own_labels, mate_labels = (targets.index_select(0, rows) for rows in (own_rows, mate_rows))
        shares = _float32(lam, device)
        return mixed, mix.mix_labels(own_labels, mate_labels, shares, self._info.num_classes)


def _float32(values: np.ndarray, device: torch.device) -> Tensor:
    return to_device(values.astype(np.float32), device)


def _affine(factor: np.ndarray, summand: np.ndarray) -> np.ndarray | None:
    """Factor and summand a channel as one table; None for 1 and 0."""
    if (factor == 1.0).all() and (summand == 0.0).all():
        return None
    return np.stack(np.broadcast_arrays(factor, summand))
