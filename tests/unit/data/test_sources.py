"""Every source: a sample is a function of (seed, epoch, index), and the description is true."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from ridgeline.data.build import SOURCES, build_sources
from ridgeline.data.source import Source


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for name, mode in (("cat", "RGB"), ("dog", "L"), ("emu", "RGBA")):
        (root / name).mkdir()
        for number in range(8):
            shape = {"RGB": (20, 30, 3), "L": (25, 20), "RGBA": (16, 16, 4)}[mode]
            pixels = rng.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return str(root)


CASES = {
    "digits": ("digits", {}),
    "digits-augmented": ("digits", {"augment": True, "size": 20, "channels": 3}),
    "text": ("text", {"seq_len": 64, "max_bytes": 100_000}),
    "text-masked": ("text", {"seq_len": 64, "max_bytes": 100_000, "task": "masked_lm"}),
    "fields": ("fields", {"samples": 40, "height": 12, "width": 18}),
    "images": ("images", {"size": 16, "holdout": 0.25}),
    "images-augmented": ("images", {"size": 16, "augment": True, "holdout": 0.25}),
    "packed": ("packed", {"size": 16, "holdout": 0.25}),
    "packed-augmented": ("packed", {"size": 16, "augment": True, "holdout": 0.25}),
    "synthetic": ("synthetic", {"samples": 100, "shape": [3, 4], "distinct": 7}),
    "synthetic-lm": ("synthetic", {"samples": 100, "task": "causal_lm", "shape": [9], "vocab": 5}),
    "synthetic-forecast": ("synthetic", {"task": "forecast", "shape": [2, 4], "dtype": "bfloat16"}),
}
RANDOM_EACH_EPOCH = {"digits-augmented", "text-masked", "images-augmented", "packed-augmented"}


def test_every_source_has_a_case():
    assert {name for name, _ in CASES.values()} == set(SOURCES)


def build(case, image_folder, seed=5):
    name, args = CASES[case]
    takes_path = name in ("images", "packed")
    return build_sources(name, {**args, "path": image_folder} if takes_path else args, seed)


@pytest.mark.parametrize("case", CASES)
def test_description_is_true(case, image_folder):
    for source in build(case, image_folder):
        assert isinstance(source, Source)
        info = source.info
        inputs, targets = source.fetch(np.array([0, len(source) - 1]), 0)
        assert inputs.shape == (2, *info.input_shape)
        assert targets.shape == (2, *info.target_shape)
        assert inputs.dtype == info.input_dtype
        assert targets.dtype == info.target_dtype
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        if info.num_classes:
            assert targets.max() < info.num_classes
        if info.unit == "tokens":
            assert info.units_per_sample == inputs[0].numel()


@pytest.mark.parametrize("case", CASES)
def test_a_sample_does_not_depend_on_its_batch(case, image_folder):
    for source, again in zip(build(case, image_folder), build(case, image_folder), strict=True):
        indices = np.arange(len(source))[:18][::-1].copy()
        inputs, targets = source.fetch(indices, 3)
        for row, index in enumerate(indices):
            alone_inputs, alone_targets = again.fetch(np.array([index]), 3)
            assert torch.equal(alone_inputs[0], inputs[row])
            assert torch.equal(alone_targets[0], targets[row])


@pytest.mark.parametrize("case", CASES)
def test_epoch_changes_augmented_training_samples_alone(case, image_folder):
    train, held_out = build(case, image_folder)
    indices = np.arange(min(len(train), 16))
    same = torch.equal(train.fetch(indices, 0)[0], train.fetch(indices, 1)[0])
    assert same == (case not in RANDOM_EACH_EPOCH)
    indices = np.arange(min(len(held_out), 16))
    assert torch.equal(held_out.fetch(indices, 0)[0], held_out.fetch(indices, 1)[0])


@pytest.mark.parametrize("case", CASES)
def test_sources_survive_pickling(case, image_folder):
    # Worker processes get the source by pickle.
    train, _ = build(case, image_folder)
    indices = np.arange(4)
    before = train.fetch(indices, 0)
    after = pickle.loads(pickle.dumps(train)).fetch(indices, 0)
    assert all(map(torch.equal, before, after))


def test_seed_changes_random_sources():
    for name, args in (("fields", {"samples": 4}), ("synthetic", {"samples": 4})):
        one, other = (build_sources(name, args, seed)[0] for seed in (1, 2))
        assert not torch.equal(one.fetch(np.arange(4), 0)[0], other.fetch(np.arange(4), 0)[0])


def test_digits_split_and_scale():
    train, held_out = build_sources("digits", {}, 0)
    assert len(train) + len(held_out) == 1797
    assert abs(len(held_out) / 1797 - 0.2) < 0.01
    inputs, targets = train.fetch(np.arange(len(train)), 0)
    assert abs(inputs.mean()) < 1e-5
    assert abs(inputs.std() - 1) < 1e-3
    held_inputs, held_targets = held_out.fetch(np.arange(len(held_out)), 0)
    assert torch.bincount(held_targets).min() >= 34

    # No image is in both halves, and another seed gives the same split.
    def rows(x):
        return {image.numpy().tobytes() for image in x}

    assert len(rows(inputs) & rows(held_inputs)) == 0
    other = build_sources("digits", {}, 9)[1].fetch(np.arange(len(held_out)), 0)
    assert torch.equal(other[0], held_inputs)
    assert torch.equal(other[1], held_targets)
    assert torch.bincount(targets).numel() == 10


def test_digits_augmentation_shifts():
    plain, _ = build_sources("digits", {}, 0)
    shifted, _ = build_sources("digits", {"augment": True}, 0)
    indices = np.arange(60)
    before, after = plain.fetch(indices, 0)[0], shifted.fetch(indices, 0)[0]
    paper = before.min()
    padded = torch.nn.functional.pad(before, (1, 1, 1, 1), value=float(paper))
    windows = [padded[:, :, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
    matches = torch.stack([(after == w).flatten(1).all(1) for w in windows])
    assert matches.any(0).all()
    assert (matches.any(1)).sum() >= 8  # nearly all nine shifts occur


def test_synthetic_repeats_its_pool_on_any_device():
    train, _ = build_sources("synthetic", {"samples": 50, "distinct": 7, "shape": 3}, 0)
    inputs, _ = train.fetch(np.array([1, 8, 15, 2]), 0)
    assert torch.equal(inputs[0], inputs[1])
    assert torch.equal(inputs[0], inputs[2])
    assert not torch.equal(inputs[0], inputs[3])
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    for device in devices:
        made = train.device_fetch(np.array([1, 8, 15, 2]), device)[0]
        assert made.device.type == device
        assert torch.equal(made.cpu(), inputs)


@pytest.mark.parametrize("sides", [[40], [24, 40], [8, 12, 16]])
def test_synthetic_fields_on_a_grid_are_smooth(sides):
    def roughness(**more):
        args = {"shape": [3, *sides], "classes": 5, "distinct": 16, **more}
        source, _ = build_sources("synthetic", args, seed=0)
        x, _ = source.fetch(np.arange(16), 0)
        assert x.shape == (16, 3, *sides)
        assert float(x.std()) == pytest.approx(1.0, rel=0.15)
        return float((x[..., 1:] - x[..., :-1]).std())

    assert roughness(grid=4) < 0.5 * roughness()
    assert torch.isfinite(
        build_sources("synthetic", {"shape": [1, 8, 8], "grid": 1, "distinct": 1}, 0)[0].fetch(
            np.arange(2), 0
        )[0]
    ).all()
    assert roughness(grid=1000) > 0.9 * roughness()  # as many points as there are values


def test_synthetic_tokens_are_shifted():
    train, _ = build_sources("synthetic", {"task": "causal_lm", "shape": [12], "vocab": 300}, 0)
    inputs, targets = train.fetch(np.arange(8), 0)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.max() < 300
