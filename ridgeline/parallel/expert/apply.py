"""Leave each rank its own experts and have the tokens travel: `apply_experts`.

A stack of weights becomes the rank's part of it, an expert of a list that is another rank's loses its
weights. `SpreadExperts` says which parameters are whole on no rank, for those who gather,
save, measure and reduce them. Called by `apply.py` of the room.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ridgeline.parallel.expert.find import ExpertPlan
from ridgeline.parallel.expert.listed import SpreadList, put_away
from ridgeline.parallel.expert.stacked import SpreadStack
from ridgeline.parallel.mesh import ExpertGroups


@dataclass(frozen=True)
class Stack:
    """This rank's part of a parameter that has all experts."""

    start: int
    """Its first expert."""
    num: int
    """Experts of the whole."""


@dataclass
class SpreadExperts:
    """What of a model's parameters is not the same on all replicas."""

    groups: ExpertGroups
    everywhere: frozenset[str] = frozenset()
    """Parameters of all experts of the model."""
    names: set[str] = field(default_factory=set)
    """Parameters of this rank's experts."""
    stacks: dict[str, Stack] = field(default_factory=dict)
    """Those of them that are parts of a whole."""


def apply_experts(
    parts: Sequence[nn.Module],
    plan: ExpertPlan,
    groups: ExpertGroups,
    replicas: dist.ProcessGroup,
    moment: Callable[[], Callable[[], AbstractContextManager[Any]]],
) -> SpreadExperts:
    """Spread the experts in `parts`, the modules of this rank; the weights of the first replica count."""
    spread = SpreadExperts(groups, plan.names)
    for part in parts:
        for stack in plan.stacked:
            module = part.get_submodule(stack.path)
            if next(module.parameters(), None) is None:
                continue  # another stage's
            _send(module, replicas)
            each = stack.num // groups.size
            start = groups.rank * each
            for name, parameter in module.named_parameters():
                path = f"{stack.path}.{name}"
                spread.names.add(path)
                spread.stacks[path] = Stack(start, stack.num)
                parameter.data = parameter.data[start : start + each].clone()
            module.forward = SpreadStack(module, stack, groups.size, groups.group)
        for one in plan.listed:
            experts = part.get_submodule(one.path)
            assert isinstance(experts, nn.ModuleList)
            if next(experts.parameters(), None) is None:
                continue
            _send(experts, replicas)
            each = one.num // groups.size
            here = range(groups.rank * each, (groups.rank + 1) * each)
            for number in range(one.num):
                if number not in here:
                    put_away(experts[number])
            around = part.get_submodule(one.around)
            around.forward = SpreadList(
                around, experts, one, groups.size, groups.rank, groups.group, moment
            )
            spread.names |= {f"{one.path}.{name}" for name, _ in experts.named_parameters()}
    # A module whose forward was replaced holds itself: what was put away may wait for the collector.
    gc.collect()
    return spread


@torch.no_grad()
def _send(module: nn.Module, replicas: dist.ProcessGroup) -> None:
    """The first replica's weights, while everybody still has room for all of them."""
    for parameter in module.parameters():
        values = parameter.detach()
        values = torch.view_as_real(values) if values.is_complex() else values
        sent = values.contiguous()
        dist.broadcast(sent, group_src=0, group=replicas)
        if sent is not values:
            values.copy_(sent)
