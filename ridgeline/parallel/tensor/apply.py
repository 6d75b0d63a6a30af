"""Cut the weights that a plan names and put the split forwards in their place.

Parameters stay plain tensors that hold this rank's part, so optimizers, sharding and replication need
not know. Called by `parallel/apply.py` and by pipelines, with a plan of `plan.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ridgeline.errors import UsageError
from ridgeline.parallel.tensor.layers import split_forward
from ridgeline.parallel.tensor.plan import TensorPlan
from ridgeline.parallel.tensor.split import Split, cut_local
from ridgeline.parallel.tensor.view import GlobalView


def cut_layers(view: GlobalView, model: nn.Module, plan: TensorPlan) -> None:
    """Cut the layers of the plan that `model` has parameters of: all, or those of a stage.

    Every rank has the full weights before, the same on all.
    """
    size = 1 if view.tp is None else view.mesh.size(view.tp)
    rank = 0 if view.tp is None else view.mesh.get_local_rank(view.tp)
    if size != plan.size:
        raise UsageError(f"a tensor plan for tp={plan.size} was applied on {size} ranks")
    view.report = plan.report if size > 1 else ""
    if size == 1:
        return
    modules = dict(model.named_modules(remove_duplicate=False))
    done: dict[int, Split] = {}
    for path, layer in plan.layers.items():
        module = modules.get(path)
        if module is None or any(module._parameters.get(name) is None for name in layer.splits):
            continue  # of another stage, of which a tied weight may be here as well
        for name, split in layer.splits.items():
            parameter = getattr(module, name)
            if id(parameter) in done:  # a tied parameter is cut once
                continue
            done[id(parameter)] = split
            if view.was_cut(parameter):  # by another stage of this rank
                continue
            with torch.no_grad():
                parameter.data = cut_local(parameter.data, split, rank, size)
            parameter.grad = None
            view.note_cut(parameter)
        _install(module, split_forward(view, module, layer))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in done:  # under every name that it has
            view.splits[name] = done[id(parameter)]


def _install(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Put `forward` where the class's own is called, inside what other techniques have put around."""
    around = module.__dict__.get("forward")
    for cell in getattr(around, "__closure__", None) or ():
        inner = cell.cell_contents
        if getattr(inner, "__func__", None) is type(module).forward:
            cell.cell_contents = forward
            return
    module.forward = forward


def enter_view(view: GlobalView, module: nn.Module) -> None:
    """Have calls of `module` run inside the view: plain tensors in, plain tensors out."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        return view.run(forward, *args, **kwargs)

    module.forward = run


def enter_stage(view: GlobalView, stage: nn.Module) -> None:
    """Have a pipeline stage run inside the view; what it returns stays as it is, cut or not."""
    forward = stage.forward

    def run(*received: Any, inputs: Any) -> Any:
        with view.active():
            return forward(*received, inputs=tree_map(view.enter_input, inputs))

    stage.forward = run
