"""A user's own optimizer, made over a model's parameters, updates what a layout has made of them.

Layouts replace parameters by parts of them (shards, flat pieces, a stage's share). The optimizer keeps its
class, its groups with their settings, and whatever schedule hangs on them; only the parameters in its
groups are others. Called by `train/engine.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ridgeline.errors import UsageError
from ridgeline.optim.build import Trainable

ELEMENTWISE = (
    *(
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
    ),
    *(torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop),
    *(torch.optim.Rprop, torch.optim.SGD),
)
"""Those of torch that look at each number of a parameter by itself, so that a part is updated as in the
whole."""


def learn_groups(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """The names of the parameters in each of the optimizer's groups; before a layout changes any."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if optimizer.state:
        raise UsageError(
            f"the {type(optimizer).__name__} given has done steps already, and its state is of whole "
            "parameters; give a new one, and load a checkpoint after that"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS runs the model several times in a step, by a closure, which an engine does not; use one "
            "that steps once, such as AdamW"
        )
    groups = []
    for group in optimizer.param_groups:
        strange = [p for p in group["params"] if id(p) not in names]
        if strange:
            raise UsageError(
                f"the {type(optimizer).__name__} given has a parameter of shape "
                f"{list(strange[0].shape)} that is not the model's; make it over model.parameters()"
            )
        groups.append([names[id(p)] for p in group["params"]])
    return groups


def freeze_others(model: nn.Module, groups: Sequence[Sequence[str]]) -> list[str]:
    """Parameters that no group has would get gradients that nothing ever clears; their names."""
    known = {name for names in groups for name in names}
    left = [(n, p) for n, p in model.named_parameters() if p.requires_grad and n not in known]
    for _, parameter in left:
        parameter.requires_grad_(False)
    return [name for name, _ in left]


def adopt(
    optimizer: Optimizer,
    groups: Sequence[Sequence[str]],
    trainables: Sequence[Trainable],
    *,
    cut: bool,
    elementwise: bool = False,
) -> None:
    """Have `optimizer` update `trainables`, each in the group that has its name.

    `cut` says that some are parts of parameters, which only an optimizer that goes number by number may be
    given; of one that is not known the caller may say so with `elementwise`.
    """
    name = type(optimizer).__name__
    if cut and not elementwise and not _goes_number_by_number(optimizer):
        raise UsageError(
            f"{name} is given parts of parameters in this layout, and it is not known to treat each number "
            "by itself; if it does, say elementwise=True, else use one of "
            f"{', '.join(sorted(kind.__name__ for kind in ELEMENTWISE))}, "
            "or a layout with dp alone"
        )
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        wanted = set(names)
        group["params"] = [t.parameter for t in trainables if t.name in wanted]
        _choose_kernel(group, name)


def _goes_number_by_number(optimizer: Optimizer) -> bool:
    """One of torch's, or a class of somebody's own that steps as it does. Torch puts a hook around the step
    of each class when it is first made."""
    step = inspect.unwrap(type(optimizer).step)
    return any(
        isinstance(optimizer, kind) and step is inspect.unwrap(kind.step) for kind in ELEMENTWISE
    )


def _choose_kernel(group: dict[str, object], name: str) -> None:
    """One kernel for all takes no two kinds of tensors, and SGD's no shards."""
    parameters = group["params"]
    assert isinstance(parameters, list)
    kinds = {isinstance(p, DTensor) for p in parameters}
    if len(kinds) > 1 or (name == "SGD" and True in kinds):
        for key in ("fused", "foreach"):
            if key in group:
                group[key] = False
    elif group.get("fused") and any(not _may_fuse(p) for p in parameters):
        group["fused"] = False


def _may_fuse(parameter: torch.Tensor) -> bool:
    return parameter.device.type in ("cuda", "cpu") and parameter.is_floating_point()
