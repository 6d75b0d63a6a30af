"""Facts of any `nn.Module` for the planner, from training steps on the meta device: no memory, no device.

The module is run forward and backward at two batch sizes in each of the planner's modes; `trace_record.py`
watches, `trace_device.py` makes the meta device behave as an accelerator does, `trace_facts.py` draws the
lines. A module whose control flow depends on values cannot be run there, and is told so by name. Called by
`train/traced.py` for recipes and for modules of the user's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.models.blocks import find_blocks
from ridgeline.models.trace_device import as_on_device
from ridgeline.models.trace_facts import (
    Pair,
    merge_equal,
    unit_costs,
    unit_halos,
    unit_leaves,
)
from ridgeline.models.trace_kernels import find_tensors
from ridgeline.models.trace_record import Recorder
from ridgeline.plan.module import MODES, Block, Experts, ModuleFacts

SIZES = (2, 4)
"""Batches that are traced; batch norm refuses to train on one value a channel."""
Batch = tuple[tuple[Any, ...], Any]
"""Positional inputs, and targets."""
_LEAST_HEAD = 1024
"""Columns from which an output head is worth dividing."""


def trace_module(
    name: str,
    build: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    loss: Callable[[Any, Any], Tensor] | None = None,
    inputs: Sequence[str] = (),
    unit: str = "samples",
    units_per_sample: int = 1,
    optimizer_slots: int = 2,
    wide_rms_norm: bool | None = None,
) -> ModuleFacts:
    """`build` makes the module, `batch(n)` the inputs and targets of n samples, `loss(output, targets)`
    one number; both are called with the meta device as torch's default. Without a loss it is the
    output's own `loss`, or the mean of what the module returns. `wide_rms_norm` is for facts of another
    release of torch: see `as_on_device`."""
    model = _build(name, build)
    blocks, how = _places(model)
    run = _Runs(name, model, blocks, batch, loss or mean_loss, wide_rms_norm)
    roles = _find_roles(run, model)
    pairs = {mode: run.pair(mode, roles) for mode in MODES}
    return ModuleFacts(
        name=name,
        blocks=_blocks(pairs, model, how, run.sizes),
        inputs=tuple(inputs),
        unit=unit,
        units_per_sample=units_per_sample,
        optimizer_slots=optimizer_slots,
        splits=_splits(pairs["wide"], model, roles),
        whole="" if roles else _why_whole(model),
        tied=_tied(model),
        tied_parameters=sum(model.get_parameter(name).numel() for name in _tied(model)),
    )


def mean_loss(output: Any, targets: Any) -> Tensor:
    """For a module that comes without a loss."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    found = [t for t in find_tensors(output) if t.is_floating_point()]
    if not found:
        raise UsageError(
            f"the module returned {type(output).__name__} with no tensor of floating point to train on"
        )
    return torch.stack([t.float().mean() for t in found]).sum()


def _build(name: str, build: Callable[[], nn.Module]) -> nn.Module:
    try:
        with torch.device("meta"):
            model = build()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{name} cannot be built on the meta device ({_first(error)}); its constructor looks at "
            "values: make them plain Python numbers"
        ) from error
    strangers = [n for n, p in model.named_parameters() if p.device.type != "meta"]
    if strangers:
        model = model.to("meta")
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"no parameter of {name} is trainable, so there is no step to plan")
    return model.train()


def _places(model: nn.Module) -> tuple[dict[str, nn.Module], str]:
    """Where the module can be cut: its repeated blocks, else the layers of its `Sequential`s."""
    blocks = find_blocks(model)
    if blocks:
        return blocks, "block"
    layers: dict[str, nn.Module] = {}

    def look(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            place = f"{path}.{name}" if path else name
            if isinstance(module, nn.Sequential) and all(child is not c for c in layers.values()):
                layers[place] = child
            else:
                look(child, place)

    look(model, "")
    return layers, "stretch"


class _Runs:
    """Steps of one module."""

    def __init__(
        self, name: str, model: nn.Module, blocks: dict[str, nn.Module],
        batch: Callable[[int], Batch], loss: Callable[[Any, Any], Tensor], wide_rms_norm: bool | None,
    ) -> None:  # fmt: skip
        self.name, self.model, self.blocks = name, model, blocks
        self.batch, self.loss, self.wide_rms_norm = batch, loss, wide_rms_norm
        self.sizes = {n: (p.numel(), p.element_size()) for n, p in model.named_parameters()}

    def pair(self, mode: str, roles: Mapping[str, str]) -> Pair:
        if mode == "half":
            _narrow(self.model)
        small, large = (self.step(mode, size, roles) for size in SIZES)
        pair = Pair(small, large, SIZES)
        pair.check(self.name)
        return pair

    def step(
        self, mode: str, size: int, roles: Mapping[str, str] | None,
        starts: frozenset[str] = frozenset(),
    ) -> Recorder:  # fmt: skip
        recorder = Recorder(self.model, self.blocks, roles, starts)
        with torch.device("meta"):
            inputs, targets = self.batch(size)
        dtype = None if mode == "wide" else torch.bfloat16
        for parameter in self.model.parameters():
            parameter.grad = None
        try:
            with torch.enable_grad(), torch.device("meta"), recorder.watching([inputs, targets]):
                with as_on_device(recorder, dtype, self.wide_rms_norm):
                    result = self.loss(_call(self.model, inputs), targets)
                recorder.start_backward()
                result.backward()
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(_cannot(self.name, recorder, error)) from error
        finally:
            for parameter in self.model.parameters():
                parameter.grad = None
        return recorder


def _call(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    if len(inputs) == 1 and isinstance(inputs[0], dict):
        return model(**inputs[0])
    return model(*inputs)


def _cannot(name: str, recorder: Recorder, error: Exception) -> str:
    place = recorder.place
    kind = recorder.classes.get(place, "")
    where = f"its module {place!r} ({kind})" if place else "its forward"
    what = f"{where} failed with {type(error).__name__}: {_first(error)}"
    if not any(word in str(error).lower() for word in ("meta", "data-dependent", "item()")):
        return f"{name} does not run on the inputs it was given: {what}; change them or the module"
    return (
        f"{name} cannot run on the meta device, where there are shapes and no values: {what}; control flow "
        "that depends on values (`.item()`, `if x.sum() > 0`) has to go for planning, or plan the model by "
        "its sizes"
    )


def _first(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:160] if lines else type(error).__name__


def _narrow(model: nn.Module) -> None:
    """16-bit weights, but for batch norms, which keep the type of their statistics."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dtype == torch.float32:
                # In place, so that tied parameters stay tied.
                parameter.data = parameter.data.to(torch.bfloat16)


# Tensor parallelism


def _find_roles(run: _Runs, model: nn.Module) -> dict[str, str]:
    """The pairs that cut most of the model. Adapters beside a layer (LoRA) are a pair, too, and that one
    keeps the layer's own apart: so where there are any, they are looked at as a part of that layer."""
    first = run.step("wide", SIZES[0], None)
    adapters = frozenset(name for name in first.pairs if _widens(model.get_submodule(name)))
    found = _roles(first, model)
    if adapters:
        other = _roles(run.step("wide", SIZES[0], None, adapters), model)
        found = max(found, other, key=lambda roles: _num_cut(model, roles))
    return found


def _widens(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, Tensor) and weight.dim() == 2 and 4 * weight.shape[1] <= weight.shape[0]
    )


def _num_cut(model: nn.Module, roles: Mapping[str, str]) -> int:
    return sum(p.numel() for name in roles for p in model.get_submodule(name).parameters())


def _roles(recorder: Recorder, model: nn.Module) -> dict[str, str]:
    """Linear layers in pairs: the first by columns, the second by rows; with such pairs also the token
    embeddings by rows of the vocabulary and the head by columns."""
    roles: dict[str, str] = {}
    for row, columns in recorder.pairs.items():
        good = columns - recorder.broken
        if good and good == columns:
            roles[row] = "row"
            roles |= dict.fromkeys(good, "column")
    if not roles:
        return {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings >= _LEAST_HEAD:
            roles[name] = "embedding"
    last = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in roles and name not in recorder.broken
    ]
    for name, module in last[-1:]:
        if module.out_features >= _LEAST_HEAD and recorder.units[-1].modules.count(name):
            roles[name] = "head"
    return roles


def _splits(pair: Pair, model: nn.Module, roles: Mapping[str, str]) -> int:
    """What ranks have to divide: heads where there is attention, else columns."""
    if not roles:
        return 1
    heads = [
        k.attention["heads"]
        for k in pair.small.kernels
        if k.attention is not None and k.split and k.attention["heads"] > 1
    ]
    widths = [
        weight.shape[0]
        for name, role in roles.items()
        if role == "column" and isinstance(weight := model.get_submodule(name).weight, Tensor)
    ]
    return math.gcd(*(heads or widths))


def _why_whole(model: nn.Module) -> str:
    linear = sum(isinstance(m, nn.Linear) for m in model.modules())
    if linear == 0:
        return "it has no linear layers"
    return f"none of its {linear} linear layers feeds another with only element-wise work between"


def _tied(model: nn.Module) -> tuple[str, ...]:
    once = {name for name, _ in model.named_parameters()}
    return tuple(n for n, _ in model.named_parameters(remove_duplicate=False) if n not in once)


# Blocks


def _blocks(
    pairs: Mapping[str, Pair], model: nn.Module, how: str, sizes: Mapping[str, tuple[int, int]]
) -> tuple[Block, ...]:
    wide = pairs["wide"].small
    costs = {mode: unit_costs(pair) for mode, pair in pairs.items()}
    owners = _owners(wide, model)
    blocks = []
    for index, unit in enumerate(wide.units):
        mine = [name for name, owner in owners.items() if owner == index]
        forward = costs["wide"][index].forward
        if not mine and not forward.kernels and not costs["wide"][index].backward.kernels:
            continue
        by_module: dict[str, list[str]] = {}
        for name in mine:
            by_module.setdefault(name.rpartition(".")[0], []).append(name)
        leaves = unit_leaves(pairs["wide"], index, model, by_module, sizes)
        parameters = {name: model.get_parameter(name) for name in mine}
        trainable = sum(p.numel() for p in parameters.values() if p.requires_grad)
        matrices = [p for n, p in parameters.items() if p.dim() > 1 and _is_cast(model, n)]
        reduced = [
            [(n, m) for (u, _, back, n), (_, _, _, m) in zip(
                wide.reduced, pairs["wide"].large.reduced, strict=True
            ) if u == index and back == direction]
            for direction in (False, True)
        ]  # fmt: skip
        amounts = [
            pairs["wide"].amount(sum(a for a, _ in rows), sum(b for _, b in rows))
            for rows in reduced
        ]
        blocks.append(
            Block(
                names=(unit.name if unit.module is not None else _between(wide, index),),
                kind=type(unit.module).__name__ if unit.module is not None else "",
                recompute=how if unit.module is not None else "",
                parameters=sum(p.numel() for p in parameters.values()),
                trainable=trainable,
                parameter_bytes=sum(math.prod(sizes[n]) for n in mine),
                split_parameters=sum(
                    p.numel()
                    for n, p in parameters.items()
                    if wide.roles.get(n.rpartition(".")[0]) and p.dim() > 1
                ),
                matrices=sum(p.numel() for p in matrices),
                buffer_bytes=sum(leaf.buffer_bytes for leaf in leaves),
                leaves=leaves,
                costs={mode: costs[mode][index] for mode in MODES},
                halos=unit_halos(pairs["wide"], index),
                reduced_forward=amounts[0],
                reductions_forward=len(reduced[0]),
                reduced_backward=amounts[1],
                reductions_backward=len(reduced[1]),
                logits=pairs["wide"].amount(unit.logits, pairs["wide"].large.units[index].logits),
                experts=_experts(pairs, index, model),
            )
        )
    return merge_equal(blocks)


def _experts(pairs: Mapping[str, Pair], index: int, model: nn.Module) -> tuple[Experts, ...]:
    """Those of a unit that ranks could have some each of."""
    calls = {
        mode: list(zip(p.small.routed, p.large.routed, strict=True)) for mode, p in pairs.items()
    }
    found = []
    for place, (small, large) in enumerate(calls["wide"]):
        if small.unit != index:
            continue
        own = list(model.get_submodule(small.module).parameters())
        found.append(
            Experts(
                number=len(own[0]),
                chosen=small.chosen,
                parameters=sum(p.numel() for p in own),
                trainable=sum(p.numel() for p in own if p.requires_grad),
                tokens=pairs["wide"].amount(small.tokens, large.tokens),
                sent={mode: float(rows[place][0].row_bytes) for mode, rows in calls.items()},
                returned={mode: float(rows[place][0].back_bytes) for mode, rows in calls.items()},
            )
        )
    return tuple(found)


def _is_cast(model: nn.Module, name: str) -> bool:
    """Whether autocast makes a copy of a parameter: it does for products' weights."""
    return not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)


def _between(recorder: Recorder, index: int) -> str:
    """A name for what stands between blocks: the modules that have parameters or do something."""
    unit = recorder.units[index]
    found = dict.fromkeys(k.module for k in recorder.kernels if k.unit == index and not k.backward)
    names = [name for name in found if name] or [name for name in unit.modules if name]
    if index == len(recorder.units) - 1:
        names.append("loss")
    return ", ".join(names[:4]) or "itself"


def _owners(recorder: Recorder, model: nn.Module) -> dict[str, int]:
    """The unit that reads each parameter first."""
    first: dict[int, int] = {}
    for kernel in recorder.kernels:
        if not kernel.backward:
            for number, _ in kernel.reads:
                first.setdefault(number, kernel.unit)
    return {name: first.get(recorder.numbers[name], 0) for name, _ in model.named_parameters()}
