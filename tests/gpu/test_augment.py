"""Augmentation on a CUDA device gives the bits that the CPU gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline.augmenting import AugmentConfig
from ridgeline.data.augment import build_augment
from ridgeline.data.source import SourceInfo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

COLOURS = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.2}
CONFIGS = {
    "values": AugmentConfig(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1)),
    "padded": AugmentConfig(crop="padded", padding=4, flip_horizontal=0.5),
    "resized": AugmentConfig(crop="resized", size=(29, 35), flip_vertical=0.5),
    "colours": AugmentConfig(mean=(0.5,), std=(0.3,), **COLOURS),
    "mixed": AugmentConfig(crop="resized", size=(32, 32), mixup=0.2, cutmix=1.0, **COLOURS),
}


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.float16])
@pytest.mark.parametrize("name", CONFIGS)
def test_same_bits_as_on_the_cpu(name: str, dtype: type) -> None:
    rng = np.random.default_rng(0)
    if dtype is np.float16:
        inputs = torch.from_numpy(rng.random((64, 3, 40, 33)).astype(dtype))
    else:
        limits = np.iinfo(dtype)
        values = rng.integers(limits.min, limits.max, (64, 3, 40, 33), dtype, endpoint=True)
        inputs = torch.from_numpy(values)
    targets = torch.from_numpy(rng.integers(0, 10, 64))
    info = SourceInfo((3, 40, 33), inputs.dtype, (), torch.int64, 10, "classify")
    augment = build_augment(CONFIGS[name], info, 3, True)
    if augment is None:
        pytest.skip("nothing to do for this type")
    own = np.arange(64)
    arguments = (np.arange(64) * 7, 2, own, own ^ 1)
    here = augment(inputs, targets, *arguments)
    there = augment(inputs.cuda(), targets.cuda(), *arguments)
    for mine, theirs in zip(here, there, strict=True):
        assert theirs.is_cuda
        assert torch.equal(mine, theirs.cpu())
