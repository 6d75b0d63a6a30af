"""From a name and arguments to a model: ours by a short name, yours as `module:Class`, or others'.

`train/setup.py` and the commands call `build_model` with the `model` section of a run's config, so
every mistake here is a user's and is answered in one sentence. Which device and type the model is
built on is the caller's choice (`with torch.device("meta")`).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ridgeline.errors import UsageError, nearest_word, tell_where, unknown_word
from ridgeline.models.alexnet import AlexNet
from ridgeline.models.bert import Bert
from ridgeline.models.cnn import CifarCNN
from ridgeline.models.llama import Llama
from ridgeline.models.mlp import MLP
from ridgeline.models.resnet import ResNet
from ridgeline.models.unet import UNet
from ridgeline.models.vit import ViT
from ridgeline.named import find_attribute, import_named

MODELS: dict[str, Callable[..., nn.Module]] = {
    "alexnet": AlexNet,
    "bert": Bert,
    "cifar_cnn": CifarCNN,
    "llama": Llama,
    "mlp": MLP,
    "resnet18": partial(ResNet, 18),
    "resnet34": partial(ResNet, 34),
    "resnet50": partial(ResNet, 50),
    "resnet101": partial(ResNet, 101),
    "unet2d": partial(UNet, 2),
    "unet3d": partial(UNet, 3),
    "vit": ViT,
}


def build_model(name: str, /, **kwargs: Any) -> nn.Module:
    """The model called `name`, built with `kwargs`.

    A name with a colon is not ours: `package.module:Class` is any `nn.Module` (or function that
    returns one) that can be imported from the working directory or the installed packages,
    `transformers:LlamaForCausalLM` is built from `config={...}` with random weights, and
    `timm:vit_tiny_patch16_224` goes through `timm.create_model`.
    """
    if ":" not in name:
        if name not in MODELS:
            raise unknown_word("model", name, MODELS, "model.name")
        return _call(name, MODELS[name], kwargs)
    module_name, _, path = name.partition(":")
    if module_name == "timm":
        return _build_timm(name, path, kwargs)
    if module_name == "transformers":
        return _build_transformers(name, path, kwargs)
    builder = import_named(name, "model.name")
    if isinstance(builder, type) and not issubclass(builder, nn.Module):
        raise UsageError(f"model.name {name!r} is a class but not a torch.nn.Module")
    if not callable(builder):
        raise UsageError(f"model.name {name!r} is a {type(builder).__name__}, not a model class")
    return _call(name, builder, kwargs)


def _call(name: str, builder: Callable[..., Any], kwargs: Mapping[str, Any]) -> nn.Module:
    """Call a class or function, turning what the arguments can cause into one sentence."""
    _check_arguments(name, builder, kwargs)
    try:
        model = builder(**kwargs)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"model {name!r} refused its arguments {dict(kwargs)}: {error}{tell_where(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise UsageError(f"model {name!r} gave a {kind} where a torch.nn.Module was expected")
    _require_dense(name, model)
    return model


def _require_dense(name: str, model: nn.Module) -> None:
    """Every parameter has a size, and gradients of that size."""
    for path, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UsageError(
                f"parameter {path} of model {name!r} has no size before the model has run; name the sizes "
                "(nn.Linear(in, out) for nn.LazyLinear(out)), or run it once in its constructor"
            )
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(
                f"{path or 'the embedding'} of model {name!r} has sparse=True, and sparse gradients are "
                "neither clipped nor reduced nor taken by AdamW; use sparse=False"
            )


def _check_arguments(name: str, builder: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise on a keyword that `builder` does not take, or a required one that is missing."""
    try:
        parameters = inspect.signature(builder).parameters.values()
    except (TypeError, ValueError):  # built in, without a signature: the call itself will tell
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for key in kwargs:
            _check_key(name, key, [p.name for p in named], "argument", "model.args")
    missing = [p.name for p in named if p.default is p.empty and p.name not in kwargs]
    if missing:
        raise UsageError(f"model {name!r} needs {', '.join(missing)} in model.args")


def _check_key(name: str, key: str, known: Iterable[str], kind: str, place: str) -> None:
    names = sorted(known)
    if key in names:
        return
    guess = nearest_word(key, names)
    hint = f"did you mean {guess!r}? " if guess else ""
    takes = f"(it takes: {', '.join(names) or 'nothing'})"
    raise UsageError(f"model {name!r} has no {kind} {key!r} in {place}; {hint}{takes}")


def _import_package(package: str, name: str, install: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UsageError(
            f"model {name!r} needs the package {package!r}: pip install {install!r} ({error})"
        ) from error


def _build_timm(name: str, path: str, kwargs: Mapping[str, Any]) -> nn.Module:
    timm = _import_package("timm", name, "timm")
    if not timm.is_model(path):
        raise unknown_word("timm model", path, timm.list_models(), "model.name")
    return _call(name, partial(timm.create_model, path), kwargs)


def _build_transformers(name: str, path: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """A model of `transformers` from `config={...}`, with random weights and no download."""
    transformers = _import_package("transformers", name, "ridgeline[models]")
    model_class = find_attribute(transformers, path, name, "model.name")
    config = kwargs.get("config")
    if not isinstance(config, Mapping):
        raise UsageError(
            f"model {name!r} needs config in model.args: a mapping such as"
            " {model_type: llama, hidden_size: 64}"
        )
    rest = {key: value for key, value in kwargs.items() if key != "config"}
    fields = dict(config)
    model_type = fields.pop("model_type", None)
    is_auto = hasattr(model_class, "from_config")
    if is_auto:
        known = transformers.CONFIG_MAPPING
        if model_type is None:
            raise UsageError(f"model {name!r} needs model_type in model.args.config, e.g. llama")
        if model_type not in known:
            raise unknown_word("model_type", model_type, known, "model.args.config")
        config_class = known[model_type]
    else:
        config_class = getattr(model_class, "config_class", None)
        if config_class is None:
            raise UsageError(f"model.name {name!r} is not a model class of transformers")
    defaults = config_class()
    unknown = [key for key in fields if not hasattr(defaults, key)]
    for key in unknown:  # transformers itself would keep it and use the default instead
        _check_key(name, key, defaults.to_dict(), "field", "model.args.config")
    try:
        built_config = config_class(**fields)
    except (TypeError, ValueError) as error:
        raise UsageError(f"model {name!r} refused its config {fields}: {error}") from error
    if is_auto:
        return _call(name, partial(model_class.from_config, built_config), rest)
    return _call(name, partial(model_class, built_config), rest)
