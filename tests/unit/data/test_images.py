"""Folders of images: how they are found, split and decoded, and what is said when they are not."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from ridgeline.data.build import build_sources
from ridgeline.errors import UsageError

MEAN = torch.tensor([0.485, 0.456, 0.406])
STD = torch.tensor([0.229, 0.224, 0.225])


def save(file, colour, size=(12, 8)):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file)


def test_train_and_val_folders(tmp_path):
    for number in range(3):
        save(tmp_path / "train" / "red" / f"{number}.png", (255, 0, 0))
        save(tmp_path / "train" / "blue" / f"{number}.PNG", (0, 0, 255))
    save(tmp_path / "val" / "red" / "x.bmp", (255, 0, 0))
    (tmp_path / "train" / "red" / "notes.txt").write_text("not an image")
    train, held_out = build_sources("images", {"path": str(tmp_path), "size": 4}, 0)
    assert (len(train), len(held_out)) == (6, 1)
    assert train.class_names == ["blue", "red"]
    inputs, targets = train.fetch(np.arange(6), 0)
    assert targets.tolist() == [0, 0, 0, 1, 1, 1]
    colours = (inputs[:, :, 2, 2] * STD + MEAN).round(decimals=4)
    assert torch.equal(colours[0], torch.tensor([0.0, 0.0, 1.0]))
    assert torch.equal(colours[5], torch.tensor([1.0, 0.0, 0.0]))
    assert held_out.fetch(np.array([0]), 0)[1].tolist() == [1]


def test_single_folder_is_split_evenly_and_always_the_same(tmp_path):
    for name in ("a", "b"):
        for number in range(10):
            save(tmp_path / name / f"{number}.png", (number, 0, 0))
    args = {"path": str(tmp_path), "size": 4, "holdout": 0.2}
    train, held_out = build_sources("images", args, 0)
    assert (len(train), len(held_out)) == (16, 4)
    assert held_out.fetch(np.arange(4), 0)[1].tolist() == [0, 0, 1, 1]
    assert build_sources("images", args, 99)[1]._files == held_out._files
    assert not set(train._files) & set(held_out._files)


def test_centre_crop_takes_the_middle(tmp_path):
    pixels = np.zeros((8, 24, 3), dtype=np.uint8)
    pixels[:, 8:16] = 255
    for number in range(2):
        file = tmp_path / "c" / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(file)
    train, _ = build_sources("images", {"path": str(tmp_path), "size": 8, "holdout": 0.5}, 0)
    image = train.fetch(np.array([0]), 0)[0][0] * STD[:, None, None] + MEAN[:, None, None]
    assert torch.allclose(image, torch.ones(3, 8, 8), atol=1e-5)


def test_augmentation_flips_about_half(tmp_path):
    ramp = np.tile(np.arange(0, 240, 10, dtype=np.uint8)[None, :, None], (24, 1, 3))
    for number in range(2):
        file = tmp_path / "c" / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(ramp).save(file)
    args = {"path": str(tmp_path), "size": 8, "holdout": 0.5, "augment": True}
    train, _ = build_sources("images", args, 0)
    images = torch.cat([train.fetch(np.array([0]), epoch)[0] for epoch in range(200)])
    flipped = images[:, 0, 0, 0] > images[:, 0, 0, -1]
    assert 70 < int(flipped.sum()) < 130
    # Crops differ, too.
    assert images[:, 0, 4, 4].unique().numel() > 50


def test_errors(tmp_path):
    def build(**args):
        build_sources("images", args, 0)

    with pytest.raises(UsageError, match="needs 'path'"):
        build()
    with pytest.raises(UsageError, match=r"'/nowhere' in data.args is not a folder"):
        build(path="/nowhere")
    with pytest.raises(UsageError, match=r"path=7 in data.args must be a folder"):
        build(path=7)
    with pytest.raises(UsageError, match="has no class folders"):
        build(path=str(tmp_path))
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"no images under .*train"):
        build(path=str(tmp_path))
    save(tmp_path / "train" / "cat" / "1.png", (1, 2, 3))
    with pytest.raises(UsageError, match=r"holdout=0.1 of the 1 images"):
        build(path=str(tmp_path))
    save(tmp_path / "val" / "dog" / "1.png", (1, 2, 3))
    with pytest.raises(UsageError, match=r"val/dog.* no counterpart in .*train"):
        build(path=str(tmp_path))
    with pytest.raises(UsageError, match=r"holdout=2 .* at most 0.9"):
        build(path=str(tmp_path), holdout=2)


def test_corrupt_image_is_named(tmp_path):
    for number in range(4):
        save(tmp_path / "c" / f"{number}.png", (1, 2, 3))
    (tmp_path / "c" / "0.png").write_bytes(b"not a png")
    whole = (tmp_path / "c" / "2.png").read_bytes()
    (tmp_path / "c" / "2.png").write_bytes(whole[: len(whole) // 2])
    train, _ = build_sources("images", {"path": str(tmp_path), "size": 4, "holdout": 0.25}, 0)
    for index in (0, 2):
        with pytest.raises(UsageError, match=rf"cannot read image .*{index}\.png"):
            train.fetch(np.array([index]), 0)


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UsageError, match=r"ridgeline\[images\]"):
        build_sources("images", {"path": "."}, 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"ridgeline\[demo\]"):
        build_sources("digits", {}, 0)


def test_digits_are_read_without_loading_what_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # an import of it fails
    train, held_out = build_sources("digits", {}, 0)
    assert (len(train), len(held_out)) == (1442, 355)
