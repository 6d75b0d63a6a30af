"""Every published parameter count, and the entries of known state dicts; all on meta."""

import pytest
import torch
from torch import nn

from ridgeline.models import MODELS, build_model
from ridgeline.models.llama_sizes import SIZES
from ridgeline.models.vit import SIZES as VIT_SIZES

PUBLISHED = [
    ("alexnet", {}, 61_100_840),
    ("resnet18", {}, 11_689_512),
    ("resnet34", {}, 21_797_672),
    ("resnet50", {}, 25_557_032),
    ("resnet101", {}, 44_549_160),
    ("resnet18", {"small_images": True, "num_classes": 10}, 11_173_962),
    ("unet2d", {"in_channels": 3, "out_channels": 2}, 31_037_698),
    ("vit", VIT_SIZES["s16"], 22_050_664),
    ("vit", VIT_SIZES["b16"], 86_567_656),
    ("vit", VIT_SIZES["l16"], 304_326_632),
    ("bert", {}, 109_514_298),
    ("bert", {"head": "pooler"}, 109_482_240),
    ("llama", {"size": "llama2-7b"}, 6_738_415_616),
    ("llama", {"size": "llama2-13b"}, 13_015_864_320),
    ("llama", {"size": "llama2-70b"}, 68_976_648_192),
    ("llama", {"size": "llama3-8b"}, 8_030_261_248),
    ("llama", {"size": "llama3-70b"}, 70_553_706_496),
    ("llama", {"size": "llama3-405b"}, 405_853_388_800),
    ("llama", {"size": "llama3.2-1b"}, 1_235_814_400),
    ("llama", {"size": "llama3.2-3b"}, 3_212_749_824),
]


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("name", "kwargs", "expected"), PUBLISHED)
def test_published_parameter_count(name, kwargs, expected):
    with torch.device("meta"):
        assert count(build_model(name, **kwargs)) == expected


@pytest.mark.parametrize(
    ("size", "millions"),
    [("1m", 1.07), ("5m", 5.34), ("15m", 15.7), ("60m", 59.3), ("124m", 135.3), ("1.3b", 1367)],
)
def test_own_llama_sizes_are_about_what_their_name_says(size, millions):
    with torch.device("meta"):
        assert count(build_model("llama", size=size)) / 1e6 == pytest.approx(millions, rel=0.01)


def test_the_124m_llama_has_the_shape_that_was_measured():
    config = SIZES["124m"]
    assert (config.depth, config.width, config.heads, config.head_width) == (12, 768, 6, 128)
    assert (config.vocab, config.ffn_width, config.tie_embeddings) == (32_768, 2048, False)


@pytest.mark.parametrize(
    ("name", "num_parameters", "num_entries"),
    [("alexnet", 16, 16), ("resnet18", 62, 122), ("resnet50", 161, 320)],
)
def test_state_dict_has_as_many_entries_as_torchvision(name, num_parameters, num_entries):
    with torch.device("meta"):
        model = build_model(name)
    assert len(list(model.parameters())) == num_parameters
    assert len(model.state_dict()) == num_entries


def test_state_dict_keys_are_torchvisions():
    with torch.device("meta"):
        resnet, alexnet = build_model("resnet50"), build_model("alexnet")
    assert {"layer1.0.downsample.1.running_var", "layer4.2.conv3.weight", "fc.bias"} <= set(
        resnet.state_dict()
    )
    assert {"features.10.weight", "classifier.6.bias"} <= set(alexnet.state_dict())


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_builds_on_meta_and_all_of_it_is_there(name):
    with torch.device("meta"):
        model = build_model(name)
    tensors = [*model.parameters(), *model.buffers()]
    assert tensors
    assert all(t.is_meta for t in tensors)
