"""What holds for every model: shapes, types, one compiled graph, weights that follow the seed."""

import pytest
import torch

from ridgeline.errors import UsageError
from ridgeline.models import MODELS, build_model
from ridgeline.models.llama_sizes import SIZES

torch.set_num_threads(1)

TINY_LLAMA = {"vocab": 32, "width": 32, "depth": 2, "heads": 4, "kv_heads": 2, "max_seq": 16}
TINY_BERT = {"vocab": 32, "width": 32, "depth": 2, "heads": 4, "max_seq": 16}
TINY_VIT = {"image_size": 16, "patch": 8, "width": 32, "depth": 2, "heads": 4}

# name, arguments, input shape (tokens when it has two dims and the model reads them), output shape
TINY = [
    ("mlp", {"in_features": 64, "hidden": 16}, (2, 1, 8, 8), (2, 10)),
    ("cifar_cnn", {"width": 8}, (2, 3, 32, 32), (2, 10)),
    ("cifar_cnn", {"in_channels": 1, "image_size": 8, "batch_norm": True}, (2, 1, 8, 8), (2, 10)),
    ("resnet18", {"num_classes": 5, "small_images": True}, (2, 3, 8, 8), (2, 5)),
    ("unet2d", {"width": 4, "depth": 2}, (2, 3, 13, 18), (2, 2, 13, 18)),
    ("unet3d", {"width": 4, "depth": 2, "norm": "group"}, (1, 3, 5, 6, 7), (1, 2, 5, 6, 7)),
    ("vit", {**TINY_VIT, "num_classes": 7}, (2, 3, 16, 16), (2, 7)),
    ("vit", {**TINY_VIT, "num_classes": 7, "pool": "cls"}, (2, 3, 16, 16), (2, 7)),
    (
        "vit",
        {**TINY_VIT, "image_size": [16, 32], "task": "forecast"},
        (2, 3, 16, 32),
        (2, 3, 16, 32),
    ),
    ("llama", TINY_LLAMA, (2, 9), (2, 9, 32)),
    ("llama", {**TINY_LLAMA, "tie_embeddings": True}, (2, 9), (2, 9, 32)),
    ("bert", TINY_BERT, (2, 9), (2, 9, 32)),
    ("bert", {**TINY_BERT, "head": "pooler"}, (2, 9), (2, 32)),
]
CASES = pytest.mark.parametrize(("name", "kwargs", "in_shape", "out_shape"), TINY)


def example(name, in_shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    if name in ("llama", "bert"):
        return torch.randint(32, in_shape, generator=generator)
    return torch.randn(in_shape, generator=generator, dtype=dtype)


@CASES
def test_shape_and_gradients_in_float64(name, kwargs, in_shape, out_shape):
    model = build_model(name, **kwargs).double()
    seen = set()
    for module in model.modules():
        module.register_forward_hook(lambda m, i, out: seen.add(out.dtype))
    out = model(example(name, in_shape, torch.float64))
    assert out.shape == out_shape
    assert seen == {torch.float64}
    out.square().mean().backward()
    unused = [n for n, p in model.named_parameters() if p.grad is None or p.grad.dtype != p.dtype]
    assert not unused


@CASES
def test_compiles_to_one_graph(name, kwargs, in_shape, out_shape):
    torch._dynamo.reset()
    model = build_model(name, **kwargs).eval()
    x = example(name, in_shape)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


@CASES
def test_weights_follow_the_seed_by_either_way_of_building(name, kwargs, in_shape, out_shape):
    direct = build_model(name, **kwargs)
    with torch.device("meta"):
        materialised = build_model(name, **kwargs)
    materialised.to_empty(device="cpu")
    for model in (direct, materialised):
        torch.manual_seed(3)
        model.init_weights()
    left = dict(direct.named_parameters()) | dict(direct.named_buffers())
    right = dict(materialised.named_parameters()) | dict(materialised.named_buffers())
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_runs_in_bf16_autocast(name):
    kwargs = {"llama": TINY_LLAMA, "bert": TINY_BERT, "vit": {**TINY_VIT, "pool": "cls"}}[name]
    model = build_model(name, **kwargs)
    x = example(name, (2, 3, 16, 16) if name == "vit" else (2, 9))
    # On a CPU without bf16 the first such product turns mkldnn off for the whole process.
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(x)
    assert low.dtype == torch.bfloat16
    assert torch.isfinite(low).all()


def test_every_name_has_a_tiny_case_or_a_test_of_its_own():
    own = {"alexnet", "resnet34", "resnet50", "resnet101"}
    assert {name for name, *_ in TINY} | own == set(MODELS)


@pytest.mark.parametrize(("image_size", "in_channels"), [(8, 1), (32, 3), (64, 3)])
def test_alexnet_takes_small_images(image_size, in_channels):
    with torch.device("meta"):
        model = build_model(
            "alexnet", in_channels=in_channels, image_size=image_size, num_classes=4
        )
        assert model(torch.empty(1, in_channels, image_size, image_size)).shape == (1, 4)


@pytest.mark.parametrize("name", ["resnet34", "resnet50", "resnet101"])
def test_larger_resnets_fit_together(name):
    with torch.device("meta"):
        model = build_model(name, in_channels=1, num_classes=4)
        assert model(torch.empty(2, 1, 64, 64)).shape == (2, 4)


def test_vit_forecast_on_the_weather_grid():
    fields = {"image_size": (360, 720), "in_channels": 20, "patch": 8, "task": "forecast"}
    with torch.device("meta"):
        model = build_model("vit", **fields)
        assert model(torch.empty(1, 20, 360, 720)).shape == (1, 20, 360, 720)


def test_vit_forecast_puts_every_patch_back_where_it_was():
    model = build_model("vit", **TINY_VIT | {"image_size": (16, 24)}, task="forecast")
    x = torch.arange(2 * 3 * 16 * 24.0).view(2, 3, 16, 24)
    patches = torch.nn.functional.unfold(x, 8, stride=8).transpose(1, 2)
    assert torch.equal(model._unpatchify(patches), x)


@pytest.mark.parametrize("up", ["transpose", "interpolate"])
@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_unet_keeps_odd_sizes(up, norm):
    model = build_model("unet2d", width=4, depth=3, up=up, norm=norm)
    for size in [(8, 8), (9, 15), (31, 22)]:
        assert model(torch.randn(2, 3, *size)).shape == (2, 2, *size)


def test_zero_init_residual_starts_blocks_as_identity():
    model = build_model("resnet18", small_images=True, zero_init_residual=True)
    block = model.layer1[0].eval()
    x = torch.rand(1, 64, 4, 4)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("vit", {"image_size": 30}, "30x30 image does not divide into patches of 8"),
        ("vit", {"task": "forcast"}, "did you mean 'forecast'"),
        ("unet2d", {"norm": "layer"}, "unknown norm 'layer'"),
        ("llama", {"size": "llama3-7b"}, "did you mean 'llama"),
        ("llama", {"heads": 3}, "width 128 does not divide into 3 heads"),
        ("llama", {"kv_heads": 3}, "4 heads do not divide among 3 kv_heads"),
        ("mlp", {"activation": "rely"}, "did you mean 'relu'"),
        ("alexnet", {"image_size": 4}, "at least 8 pixels, not 4"),
    ],
)
def test_wrong_values_are_named(name, kwargs, words):
    with pytest.raises(UsageError, match=words):
        build_model(name, **kwargs)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_too_many_tokens_are_refused(name):
    model = build_model(name, **{"llama": TINY_LLAMA, "bert": TINY_BERT}[name])
    with pytest.raises(UsageError, match=r"17 tokens do not fit .*max_seq=16"):
        model(torch.zeros(1, 17, dtype=torch.long))


def test_a_new_width_or_head_count_resets_what_derives_from_it():
    with torch.device("meta"):
        model = build_model("llama", size="llama3-8b", width=256, heads=4, depth=1)
    assert (model.config.ffn_width, model.config.num_kv_heads) == (704, 4)
    assert model.config.vocab == SIZES["llama3-8b"].vocab
