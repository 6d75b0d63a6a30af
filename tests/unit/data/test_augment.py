"""Augmentation against plain references for one sample, and independence of rank, batch and layout."""

from __future__ import annotations

import colorsys
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ridgeline.augmenting import AugmentConfig
from ridgeline.data.augment import build_augment, colour, geometry, mix
from ridgeline.data.keyed import keyed_uniform
from ridgeline.data.order import piece_bounds
from ridgeline.data.source import SourceInfo
from ridgeline.errors import UsageError

EPS = 2.0**-24


def info_of(shape=(3, 12, 10), dtype=torch.uint8, task="classify", target=(), classes=7):
    return SourceInfo(
        shape, dtype, target, torch.float32 if task == "forecast" else torch.int64, classes, task
    )


def samples(num=8, shape=(3, 12, 10), dtype=np.uint8, seed=0):
    rng = np.random.default_rng(seed)
    if np.issubdtype(dtype, np.floating):
        values = rng.standard_normal((num, *shape)).astype(dtype)
    else:
        limits = np.iinfo(dtype)
        values = rng.integers(limits.min, limits.max, (num, *shape), dtype, endpoint=True)
    return torch.from_numpy(values), torch.from_numpy(rng.integers(0, 7, num))


def alone(num):
    """Rows that are all a batch's own and have no partner."""
    return np.arange(num), np.arange(num)


def run(config, inputs, targets, indices=None, epoch=3, train=True, seed=11, **info):
    info = info_of(tuple(inputs.shape[1:]), inputs.dtype, **info)
    augment = build_augment(config, info, seed, train)
    indices = np.arange(len(inputs)) + 40 if indices is None else indices
    return augment(inputs, targets, indices, epoch, *alone(len(inputs)))


# Values


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.float16, np.float32])
def test_stored_values_are_scaled_and_normalised_in_float32(dtype):
    inputs, targets = samples(dtype=dtype)
    config = AugmentConfig(
        scale=(0.5, 0.002, 3.0), offset=(1.0, 273.0, -4.0), mean=(2.0,), std=(3.0, 0.5, 7.0)
    )
    found, _ = run(config, inputs, targets)
    wide = inputs.numpy().astype(np.float64)
    assert found.dtype == torch.float32
    for c in range(3):
        wanted = (wide[:, c] * config.scale[c] + config.offset[c] - 2.0) / config.std[c]
        # As x a + b: a and b are rounded, so are the product and the sum.
        part = np.abs(wide[:, c] * config.scale[c] / config.std[c])
        bound = 1.001 * EPS * (3 * part + 2 * abs((config.offset[c] - 2.0) / config.std[c]))
        assert (np.abs(found[:, c].numpy() - wanted) <= bound).all()


def test_bytes_are_parts_of_255_and_other_types_as_they_are():
    inputs, targets = samples()
    found, _ = run(AugmentConfig(), inputs, targets)
    torch.testing.assert_close(found, inputs.float() / 255, rtol=2 * EPS, atol=0)
    wide, targets = samples(dtype=np.int16)
    assert torch.equal(run(AugmentConfig(), wide, targets)[0], wide.float())
    assert build_augment(AugmentConfig(), info_of(dtype=torch.float32), 0, True) is None
    tokens = SourceInfo((8,), torch.int64, (8,), torch.int64, 256, "causal_lm", "tokens", 8)
    assert build_augment(AugmentConfig(), tokens, 0, True) is None


def test_inputs_are_not_changed_in_place():
    inputs, targets = samples(dtype=np.float32)
    before = inputs.clone()
    run(AugmentConfig(mean=(3.0,), brightness=0.5), inputs, targets)
    assert torch.equal(inputs, before)
    dense = {"task": "forecast", "target": (3, 12, 10)}
    run(AugmentConfig(mean=(3.0,)), inputs, inputs, **dense)
    run(AugmentConfig(mean=(3.0,), crop="centre"), inputs, inputs, **dense)
    assert torch.equal(inputs, before)


# Crops and flips


def box_of(index, size, config, epoch=3, seed=11):
    """The box of one sample, in plain arithmetic."""
    u = keyed_uniform((seed, epoch, 1), np.array([index]), 4)[0]
    area = size[0] * size[1] * (config.area[0] + (config.area[1] - config.area[0]) * u[0])
    low, high = math.log(config.ratio[0]), math.log(config.ratio[1])
    ratio = math.exp(low + (high - low) * u[1])
    height = min(max(round(math.sqrt(area / ratio)), 1), size[0])
    width = min(max(round(math.sqrt(area * ratio)), 1), size[1])
    return int(u[2] * (size[0] - height + 1)), int(u[3] * (size[1] - width + 1)), height, width


def flips_of(index, epoch=3, seed=11):
    return keyed_uniform((seed, epoch, 2), np.array([index]), 2)[0]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
@pytest.mark.parametrize("size", [(12, 10), (5, 9), (24, 31)])
def test_a_resized_crop_is_torchs_bilinear_of_the_box(dtype, size):
    inputs, targets = samples(num=30, dtype=dtype)
    config = AugmentConfig(crop="resized", size=size, scale=(1.0,), flip_horizontal=0.5)
    found, _ = run(config, inputs, targets)
    assert found.shape == (30, 3, *size)
    exact = torch.from_numpy(inputs.numpy().astype(np.float64))
    for row in range(30):
        top, left, height, width = box_of(row + 40, (12, 10), config)
        box = exact[row : row + 1, :, top : top + height, left : left + width]
        wanted = F.interpolate(box, size=size, mode="bilinear", align_corners=False)[0]
        if flips_of(row + 40)[1] < 0.5:
            wanted = wanted.flip(-1)
        assert (found[row] - wanted).abs().max() <= 6 * EPS * exact.abs().max()


def test_a_padded_crop_is_a_slice_of_the_padded_image():
    inputs, targets = samples(num=40)
    config = AugmentConfig(crop="padded", padding=3, size=(12, 10), flip_vertical=0.5)
    found, _ = run(config, inputs, targets)
    padded = F.pad(inputs, (3, 3, 3, 3)).float() * torch.tensor(1 / 255)
    starts = set()
    for row in range(40):
        u = keyed_uniform((11, 3, 1), np.array([row + 40]), 2)[0]
        top, left = int(u[0] * 7), int(u[1] * 7)
        starts.add((top, left))
        wanted = padded[row, :, top : top + 12, left : left + 10]
        assert torch.equal(found[row], wanted.flip(-2) if flips_of(row + 40)[0] < 0.5 else wanted)
    assert len(starts) > 20


def test_an_evaluation_takes_the_centre_and_draws_nothing():
    inputs, targets = samples()
    scale = {"scale": (1.0,)}
    for crop in ("padded", "centre"):
        config = AugmentConfig(crop=crop, size=(6, 7), flip_horizontal=1.0, mixup=1.0, **scale)
        found, labels = run(config, inputs, targets, train=False)
        assert torch.equal(found, inputs[:, :, 3:9, 1:8].float())
        assert torch.equal(labels, targets)
    config = AugmentConfig(crop="resized", size=(5, 5), eval_area=0.64, hue=0.5, **scale)
    found, _ = run(config, inputs, targets, train=False)
    box = inputs[:, :, 2:10, 1:9].double()  # 10 * sqrt(0.64) = 8
    wanted = F.interpolate(box, size=(5, 5), mode="bilinear", align_corners=False)
    assert (found - wanted).abs().max() <= 6 * EPS * 255
    padding = AugmentConfig(crop="padded", padding=2, size=(14, 12), **scale)
    found, _ = run(padding, inputs, targets, train=False)
    assert torch.equal(found, F.pad(inputs, (1, 1, 1, 1)).float())


def test_flips_come_as_often_as_asked_and_apart():
    inputs = torch.arange(4, dtype=torch.uint8).view(1, 1, 2, 2).expand(4000, 1, 2, 2)
    config = AugmentConfig(flip_horizontal=0.3, flip_vertical=0.6, scale=(1.0,))
    found, _ = run(config, inputs, torch.zeros(4000, dtype=torch.int64))
    corner = found[:, 0, 0, 0]
    shares = [(corner == value).double().mean().item() for value in range(4)]
    # 0: neither, 1: horizontal, 2: vertical, 3: both.
    for share, wanted in zip(shares, (0.28, 0.12, 0.42, 0.18), strict=True):
        assert abs(share - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / 4000)


def test_targets_on_the_pixels_move_with_them():
    inputs, _ = samples(num=6, shape=(1, 8, 8))
    labels = inputs[:, 0].long()
    config = AugmentConfig(crop="padded", size=(4, 4), flip_horizontal=0.5, scale=(1.0,))
    found, moved = run(config, inputs, labels, task="segment", target=(8, 8))
    assert torch.equal(found[:, 0].long(), moved)
    config = AugmentConfig(crop="resized", size=(8, 8), area=(1.0, 1.0), ratio=(1.0, 1.0))
    _, moved = run(config, inputs, labels, task="segment", target=(8, 8))
    assert torch.equal(moved, labels)
    fields, _ = samples(num=6, shape=(2, 8, 8), dtype=np.float32)
    config = AugmentConfig(crop="resized", size=(5, 5), flip_horizontal=0.5, mean=(1.0,))
    found, moved = run(config, fields, fields, task="forecast", target=(2, 8, 8))
    assert torch.equal(found, moved)


def test_columns_roll_around_with_their_targets():
    fields = torch.arange(10.0).expand(2000, 1, 2, 10)
    config = AugmentConfig(roll=0.75)
    found, moved = run(config, fields, fields, task="forecast", target=(1, 2, 10))
    assert torch.equal(found, moved)
    shifts = found[:, 0, 0, 0]
    assert torch.equal(
        found[:, 0], (shifts[:, None, None] + torch.arange(10)).expand(-1, 2, -1) % 10
    )
    counts = torch.bincount(shifts.long(), minlength=10) / 2000
    wanted = torch.full((10,), 0.075)
    wanted[0] = 0.325  # a quarter stays, and some roll by nothing
    assert ((counts - wanted).abs() < 4 * (wanted * (1 - wanted) / 2000).sqrt()).all()
    shape = info_of(shape=(1, 2, 10), dtype=torch.float32, task="forecast", target=(1, 2, 10))
    assert build_augment(config, shape, 0, train=False) is None  # an evaluation does not roll
    with pytest.raises(UsageError, match="cuts it open"):
        run(AugmentConfig(roll=1.0, crop="centre", size=(2, 4)), fields, fields, task="forecast")


# Colours


def colours_of(sample, brightness, contrast, saturation, turn):
    """One sample in float64, pixel by pixel where that is plainer."""
    x = np.clip(sample.astype(np.float64) * brightness, 0, 1)
    grey = 0.2989 * x[0] + 0.587 * x[1] + 0.114 * x[2]
    x = np.clip(contrast * x + (1 - contrast) * grey.mean(), 0, 1)
    grey = 0.2989 * x[0] + 0.587 * x[1] + 0.114 * x[2]
    x = np.clip(saturation * x + (1 - saturation) * grey, 0, 1)
    out = np.empty_like(x)
    for i in range(x.shape[1]):
        for j in range(x.shape[2]):
            hue, strength, value = colorsys.rgb_to_hsv(*x[:, i, j])
            out[:, i, j] = colorsys.hsv_to_rgb((hue + turn) % 1.0, strength, value)
    return out


def test_colours_are_those_of_the_formulas():
    inputs, targets = samples(num=12)
    inputs[0, :, :6] = 128  # grey has no hue
    inputs[1] = 0
    config = AugmentConfig(brightness=0.4, contrast=0.5, saturation=0.6, hue=0.5)
    found, _ = run(config, inputs, targets)
    draws = 2 * keyed_uniform((11, 3, 3), np.arange(12) + 40, 4) - 1
    for row in range(12):
        b, c, s = (1 + m * d for m, d in zip((0.4, 0.5, 0.6), draws[row], strict=False))
        wanted = colours_of(inputs[row].numpy() / 255, b, c, s, 0.5 * draws[row, 3])
        assert np.abs(found[row].numpy() - wanted).max() < 2.0**-20
    assert found.min() >= 0
    assert found.max() <= 1


def test_a_colour_step_alone_and_no_change():
    x = torch.rand(5, 3, 6, 6)
    one = torch.ones(5)
    for change in (colour.brighten, colour.change_contrast, colour.saturate):
        torch.testing.assert_close(change(x, one), x, rtol=0, atol=0)
    torch.testing.assert_close(colour.turn_hue(x, 0 * one), x, rtol=0, atol=1e-6)
    torch.testing.assert_close(colour.turn_hue(x, one), x, rtol=0, atol=1e-6)
    third = colour.turn_hue(x, one / 3)  # red to green, green to blue
    torch.testing.assert_close(third, x.roll(1, dims=1), rtol=0, atol=1e-6)


# Mixing


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 1.0, 2.0, 8.0, 100.0])
def test_lambda_has_the_moments_of_its_distribution(alpha):
    draws = (np.arange(200_000) + 0.5) / 200_000
    lam = mix.beta_lambda(alpha, draws)
    assert lam.min() >= 0
    assert lam.max() <= 1
    assert abs(lam.mean() - 0.5) < 1e-6
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(lam.var() / variance - 1) < 2e-3
    fourth = 3 / ((2 * alpha + 1) * (2 * alpha + 3)) / 16
    assert abs(((lam - 0.5) ** 4).mean() / fourth - 1) < 5e-3
    assert (np.diff(lam) >= 0).all()


def test_mixup_blends_samples_and_labels():
    inputs, targets = samples(num=8, dtype=np.float32)
    augment = build_augment(AugmentConfig(mixup=0.4), info_of(dtype=torch.float32), 5, True)
    own, mate = np.array([0, 1, 2, 4]), np.array([1, 0, 7, 4])
    indices = np.arange(8) * 3
    mixed, soft = augment(inputs, targets, indices, 2, own, mate)
    lam = mix.beta_lambda(0.4, keyed_uniform((5, 2, 4), indices[own], 5)[:, 2])
    for row in range(3):
        a, b = inputs[own[row]].double(), inputs[mate[row]].double()
        wanted = lam[row] * a + (1 - lam[row]) * b
        assert (mixed[row] - wanted).abs().max() < 4 * EPS * inputs.abs().max()
        label = np.zeros(7)
        label[targets[own[row]]] += lam[row]
        label[targets[mate[row]]] += 1 - lam[row]
        assert np.abs(soft[row].numpy() - label).max() < 4 * EPS
    assert torch.equal(mixed[3], inputs[4])
    assert soft[3].tolist() == F.one_hot(targets[4], 7).tolist()


def test_cutmix_puts_a_box_of_the_partner_in_and_shares_labels_by_area():
    inputs = torch.zeros(200, 1, 12, 10)
    inputs[100:] = 1.0
    targets = torch.tensor([0] * 100 + [1] * 100)
    info = info_of((1, 12, 10), torch.float32)
    augment = build_augment(AugmentConfig(cutmix=1.0), info, 0, True)
    own, mate = np.arange(100), np.arange(100) + 100
    mixed, soft = augment(inputs, targets, np.arange(200), 0, own, mate)
    share = mixed.mean((1, 2, 3))
    torch.testing.assert_close(soft[:, 1], share, rtol=0, atol=1e-6)
    torch.testing.assert_close(soft.sum(1), torch.ones(100))
    assert share.min() < 0.1
    assert share.max() > 0.6
    for image in mixed[:, 0]:
        rows, columns = image.amax(1), image.amax(0)
        assert torch.equal(image, rows[:, None] * columns)  # a box
        assert rows.diff().abs().sum() <= 2


def test_with_both_each_sample_has_one_and_some_have_none():
    inputs = torch.zeros(2000, 1, 8, 8)
    inputs[1000:] = 1.0
    config = AugmentConfig(cutmix=1.0, mixup=1.0, mix_share=0.5)
    augment = build_augment(config, info_of((1, 8, 8), torch.float32), 0, True)
    own, mate = np.arange(1000), np.arange(1000) + 1000
    mixed, _ = augment(inputs, torch.zeros(2000).long(), np.arange(2000), 0, own, mate)
    flat = mixed.flatten(1)
    untouched = (flat == 0).all(1)
    blended = ((flat > 0) & (flat < 1)).all(1)
    binary = ((flat == 0) | (flat == 1)).all(1)
    assert (blended | binary).all()
    assert abs(untouched.double().mean() - 0.5) < 0.07  # and boxes of no size
    assert abs(blended.double().mean() - 0.25) < 0.06


# Independence


EVERYTHING = AugmentConfig(
    crop="resized",
    size=(8, 9),
    flip_horizontal=0.5,
    flip_vertical=0.5,
    mean=(0.4, 0.5, 0.6),
    std=(0.2, 0.3, 0.1),
    brightness=0.4,
    contrast=0.4,
    saturation=0.4,
    hue=0.1,
    mixup=0.3,
    cutmix=1.0,
)


def test_a_sample_has_the_same_bits_alone_and_in_any_batch():
    inputs, targets = samples(num=9)
    indices = np.array([5, 900, 17, 4, 2**40, 63, 1, 0, 8])
    augment = build_augment(EVERYTHING, info_of(), 11, True)
    whole, labels = augment(inputs, targets, indices, 3, *alone(9))
    for order in ([3], [8, 0], [4, 2, 6, 1, 0]):
        part, part_labels = augment(
            inputs[order], targets[order], indices[order], 3, *alone(len(order))
        )
        assert torch.equal(part, whole[order])
        assert torch.equal(part_labels, labels[order])
    other = augment(inputs, targets, indices, 4, *alone(9))[0]
    assert not torch.equal(other, whole)


def dealt(num, rank, world):
    """Rows of one rank of a global batch in pairs p, p^1: what it has to fetch, own and mate."""
    first, last = piece_bounds(num, rank, world)
    own = list(range(first, last))
    mates = [p ^ 1 if p ^ 1 < num else p for p in own]
    fetched = own + [p for p in mates if p not in own]
    at = {p: row for row, p in enumerate(fetched)}
    return fetched, np.array([at[p] for p in own]), np.array([at[p] for p in mates])


@pytest.mark.parametrize("num", [8, 7])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_together_make_the_batch_of_one(num, world):
    inputs, targets = samples(num=num)
    indices = np.random.default_rng(1).permutation(1000)[:num]
    augment = build_augment(EVERYTHING, info_of(), 11, True)

    def union(world):
        found = []
        for rank in range(world):
            rows, own, mate = dealt(num, rank, world)
            found.append(augment(inputs[rows], targets[rows], indices[rows], 0, own, mate))
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    for mine, one in zip(union(world), union(1), strict=True):
        assert torch.equal(mine, one)


def test_steps_do_not_change_each_others_draws():
    inputs, targets = samples()
    flips = AugmentConfig(flip_horizontal=0.5, scale=(1.0,))
    crops = AugmentConfig(crop="padded", padding=2, flip_horizontal=0.5, scale=(1.0,))
    plain, _ = run(flips, inputs, targets)
    for row in range(8):
        assert torch.equal(plain[row], inputs[row].float()) == (flips_of(row + 40)[1] >= 0.5)
    both, _ = run(crops, inputs, targets)
    assert both.shape == plain.shape


def test_pickles_and_says_what_comes_out():
    augment = pickle.loads(pickle.dumps(build_augment(EVERYTHING, info_of(), 11, True)))
    inputs, targets = samples()
    out = augment.output_info(info_of())
    assert augment.mixes
    assert (out.input_shape, out.input_dtype) == ((3, 8, 9), torch.float32)
    assert (out.target_shape, out.target_dtype) == ((7,), torch.float32)
    mixed, soft = augment(inputs, targets, np.arange(8), 0, *alone(8))
    assert mixed.shape[1:] == out.input_shape
    assert soft.shape[1:] == out.target_shape
    held_out = build_augment(EVERYTHING, info_of(), 11, False)
    assert not held_out.mixes
    assert held_out.output_info(info_of()).target_shape == ()
    assert held_out(inputs, targets, np.arange(8), 0, *alone(8))[0].shape[1:] == (3, 8, 9)
    dense = info_of((2, 8, 8), torch.int16, "forecast", (2, 8, 8), None)
    crop = AugmentConfig(crop="centre", size=(4, 6))
    assert build_augment(crop, dense, 0, True).output_info(dense).target_shape == (2, 4, 6)


def test_rows_that_are_not_ones_own_are_left_out():
    inputs, targets = samples()
    augment = build_augment(AugmentConfig(flip_vertical=1.0), info_of(), 0, True)
    whole, _ = augment(inputs, targets, np.arange(8), 0, *alone(8))
    own = np.array([6, 2])
    part, labels = augment(inputs, targets, np.arange(8), 0, own, own)
    assert torch.equal(part, whole[own])
    assert torch.equal(labels, targets[own])


@pytest.mark.parametrize(
    ("config", "info", "message"),
    [
        (
            {"cutmix": 1.0},
            {"task": "forecast", "target": (3, 12, 10), "classes": None},
            r"cutmix=1.0 mixes class labels.*targets of shape \[3, 12, 10\] for task forecast",
        ),
        ({"mixup": 1.0}, {"classes": None}, "an unknown number of classes"),
        ({"hue": 0.1}, {"shape": (20, 8, 8)}, "hue=0.1 is for colours in 3 channels.* have 20"),
        ({"saturation": 0.1}, {"shape": (1, 8, 8)}, "in 3 channels"),
        ({"contrast": 0.1}, {"shape": (2, 8, 8)}, "in 1 or 3 channels"),
        (
            {"crop": "padded", "size": (16, 10)},
            {},
            r"size=\[16, 10\] is larger .* 12 high, with padding=0; use a smaller size, more padding",
        ),
        ({"crop": "centre", "size": (8, 11)}, {}, "10 wide"),
        ({"size": (8, 8)}, {}, r"size=\[8, 8\] has no meaning with data.augment.crop=none"),
        ({"crop": "centre", "padding": 2}, {}, "padding=2 has no meaning with crop=centre"),
        ({"crop": "centre"}, {"shape": (64,)}, r"is for images .* have the shape \[64\]"),
        ({"flip_vertical": 0.5}, {"shape": (64,)}, "flip_vertical=0.5 is for images"),
        ({"mean": (1.0, 2.0)}, {}, "mean has 2 numbers, and .* have 3 channels; give 3, or one"),
        (
            {"crop": "resized"},
            {"task": "segment", "target": (6, 5)},
            r"targets of data.source have the shape \[6, 5\] and do not lie on the pixels",
        ),
        (
            {"crop": "padded", "padding": 2},
            {"task": "segment", "target": (12, 10)},
            "no value outside the image",
        ),
    ],
)
def test_errors(config, info, message):
    with pytest.raises(UsageError, match=message):
        build_augment(AugmentConfig(**config), info_of(**info), 0, True)


def test_places_are_inside_the_image():
    draws = keyed_uniform((0,), np.arange(5000), 4)
    starts, lengths = geometry.random_boxes(draws, (7, 5), (0.01, 1.0), (0.2, 5.0))
    assert starts.min() >= 0
    assert lengths.min() >= 1
    assert (starts + lengths <= (7, 5)).all()
    areas = geometry.random_boxes(draws, (700, 500), (0.3, 0.5), (1.0, 1.0))[1].prod(1) / 350_000
    assert abs(areas.mean() - 0.4) < 0.005
