"""DeepSpeed's description of a pipeline: a list of layers, each given what the one before it returned.

Here it is an ordinary `Sequential` that runs on one device, too; the stages are cut by the measured time of
its layers (DeepSpeed's `partition_method` counts parameters or layers instead), and every rank builds all
of them before it lets go of the others' weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ridgeline.errors import UsageError


class LayerSpec:
    """A layer to be built: its class and arguments."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UsageError(
                f"LayerSpec was given {typename!r}; give a class of nn.Module and its arguments"
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """One that stands in several places under one `key`; `forward_fn(module, x)` is what it does there."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | list[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.attributes = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else tied_weight_attr
        )


class _Call(nn.Module):
    """A function among the layers."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class _Tied(nn.Module):
    """A layer with weights of another, in its own place."""

    def __init__(self, module: nn.Module, forward_fn: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.module, self.forward_fn = module, forward_fn

    def forward(self, x: Any) -> Any:
        return self.forward_fn(self.module, x)


class PipelineModule(nn.Sequential):
    """The layers one after the other; `num_stages` and `loss_fn` are for `initialize`."""

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Any = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        **others: Any,
    ) -> None:
        if num_stages is None and topology is not None:
            num_stages = topology.get_dim("pipe")
        if num_stages is None or num_stages < 1:
            raise UsageError(
                f"PipelineModule(num_stages={num_stages}): give the number of stages, 1 or more"
            )
        if seed_layers or seed_fn is not None:
            raise UsageError(
                "PipelineModule(seed_layers=...) is not here; all ranks build all layers, from one seed"
            )
        super().__init__(*_build(layers))
        self.num_stages = num_stages
        self.__dict__["loss_fn"] = loss_fn  # one that is a module is no layer
        self.recomputes = activation_checkpoint_interval > 0
        self.ignored = [name for name, value in others.items() if value]
        if partition_method != "parameters":
            self.ignored.append(f"partition_method={partition_method}")


def _build(layers: Iterable[Any]) -> list[nn.Module]:
    first: dict[str, nn.Module] = {}
    built: list[nn.Module] = []
    for place, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            built.append(_build_tied(layer, first))
        elif isinstance(layer, LayerSpec):
            built.append(layer.build())
        elif isinstance(layer, nn.Module):
            built.append(layer)
        elif callable(layer):
            built.append(_Call(layer))
        else:
            raise UsageError(
                f"layer {place} of a PipelineModule is a {type(layer).__name__}; give modules, LayerSpecs "
                "or "
                "functions"
            )
    if not built:
        raise UsageError("a PipelineModule was given no layers")
    return built


def _build_tied(layer: TiedLayerSpec, first: dict[str, nn.Module]) -> nn.Module:
    module = layer.build()
    owner = first.setdefault(layer.key, module)
    if owner is not module:
        for name in layer.attributes:
            path, _, last = name.rpartition(".")
            setattr(module.get_submodule(path), last, getattr(owner.get_submodule(path), last))
    return module if layer.forward_fn is None else _Tied(module, layer.forward_fn)
