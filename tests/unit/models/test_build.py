"""`build_model`: names, arguments, other people's classes, and one sentence for every mistake."""

import sys
import types

import pytest
import torch
from torch import nn

from ridgeline.errors import UsageError
from ridgeline.models import build_model

USER_MODULE = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width, name="net", depth=1):
        super().__init__()
        if depth < 1:
            raise ValueError("depth must be positive")
        self.layer = nn.Linear(width, width)

class Outer:
    class Inner(nn.Linear):
        pass

class Loose(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.kwargs = kwargs

def factory(width):
    return nn.Linear(width, 1)

def wrong():
    return 3

class NotAModel:
    pass

VALUE = 1
"""

CONFIG = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A module that only the working directory holds."""
    (tmp_path / "my_nets.py").write_text(USER_MODULE)
    (tmp_path / "broken_nets.py").write_text("import no_such_package\n")
    (tmp_path / "bad_nets.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield
    sys.modules.pop("my_nets", None)


@pytest.mark.usefixtures("user_module")
def test_users_own_classes():
    assert build_model("my_nets:Net", width=4, name="x").layer.in_features == 4
    assert build_model("my_nets:Outer.Inner", in_features=2, out_features=3).out_features == 3
    assert build_model("my_nets:factory", width=5).in_features == 5
    assert build_model("my_nets:Loose", anything=1).kwargs == {"anything": 1}
    assert isinstance(build_model("torch.nn:Identity"), nn.Identity)


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("resnet55", {}, r"unknown model 'resnet55' in model.name; did you mean 'resnet50'"),
        ("mlp", {"hiden": 3}, r"'mlp' has no argument 'hiden' in .*; did you mean 'hidden'\?"),
        ("resnet18", {"layers": 50}, "'resnet18' has no argument 'layers'"),
        ("unet2d", {"dims": 3}, "'unet2d' has no argument 'dims'"),
        ("mlp", {"hidden": "many"}, r"'mlp' refused its arguments \{'hidden': 'many'\}"),
        (":Net", {}, "should read module:name"),
        ("my_nets:", {}, "should read module:name"),
        ("my_nuts:Net", {}, "there is no module 'my_nuts'"),
        ("torch.no_such:Net", {}, "there is no module 'torch.no_such'"),
        ("broken_nets:Net", {}, "importing 'broken_nets' failed: No module named 'no_such_pack"),
        (
            "bad_nets:Net",
            {},
            r"importing 'bad_nets' failed: ZeroDivisionError: .*bad_nets.py:\d+\)",
        ),
        ("my_nets:Nett", {}, "has no 'Nett'; did you mean 'Net'"),
        ("my_nets:NotAModel", {}, "not a torch.nn.Module"),
        ("my_nets:VALUE", {}, "is a int, not a model class"),
        ("my_nets:wrong", {}, "gave a int where"),
        ("my_nets:Net", {"widht": 3}, "no argument 'widht' in model.args; did you mean 'width'"),
        ("my_nets:Net", {}, "needs width in model.args"),
        (
            "torch.nn:LazyLinear",
            {"out_features": 4},
            "parameter weight of model .* has no size before",
        ),
        (
            "torch.nn:Embedding",
            {"num_embeddings": 4, "embedding_dim": 2, "sparse": True},
            "sparse=True, and sparse gradients are neither clipped .*; use sparse=False",
        ),
        ("my_nets:Net", {"width": 4, "depth": 0}, r"depth must be positive \(.*my_nets.py:\d+\)"),
    ],
)
def test_a_mistake_gets_one_sentence(name, kwargs, words):
    with pytest.raises(UsageError, match=words) as caught:
        build_model(name, **kwargs)
    assert "\n" not in str(caught.value)


def test_the_constructors_own_error_is_kept():
    with pytest.raises(UsageError) as caught:
        build_model("torch.nn:GroupNorm", num_groups=2, num_channels=3)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("name", "extra"),
    [("AutoModelForCausalLM", {"model_type": "llama"}), ("LlamaForCausalLM", {})],
)
def test_transformers_from_a_config(name, extra):
    pytest.importorskip("transformers")
    model = build_model(f"transformers:{name}", config=CONFIG | extra)
    assert model(torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 32)
    with torch.device("meta"):
        assert next(build_model(f"transformers:{name}", config=CONFIG | extra).parameters()).is_meta


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("LlamaForCausalLM", {}, "needs config in model.args"),
        ("LlamaForCausalML", {"config": {}}, "did you mean 'LlamaForCausalLM'"),
        ("AutoModelForCausalLM", {"config": {}}, "needs model_type"),
        ("AutoModelForCausalLM", {"config": {"model_type": "lama"}}, "did you mean 'llama'"),
        ("LlamaForCausalLM", {"config": {"hiden_size": 8}}, "did you mean 'hidden_size'"),
        ("LlamaForCausalLM", {"config": {}, "depth": 3}, "no argument 'depth'"),
        ("AutoTokenizer", {"config": {}}, "is not a model class of transformers"),
    ],
)
def test_transformers_mistakes(name, kwargs, words):
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match=words):
        build_model(f"transformers:{name}", **kwargs)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="needs the package 'timm': pip install 'timm'"):
        build_model("timm:vit_tiny_patch16_224")
    with pytest.raises(UsageError, match=r"pip install 'ridgeline\[models\]'"):
        build_model("transformers:LlamaForCausalLM", config={})


def test_timm_models_go_through_create_model(monkeypatch):
    def create_model(model_name, pretrained=False, **kwargs):
        return nn.Linear(kwargs["in_chans"], 1)

    fake = types.ModuleType("timm")
    fake.create_model = create_model
    fake.is_model = lambda name: name == "vit_tiny"
    fake.list_models = lambda: ["vit_tiny"]
    monkeypatch.setitem(sys.modules, "timm", fake)
    assert build_model("timm:vit_tiny", in_chans=5).in_features == 5
    with pytest.raises(UsageError, match="did you mean 'vit_tiny'"):
        build_model("timm:vit_tin")
