"""Whether stages compute what the model does: run one after the other on this rank, and compared with it.

A plan that sends what modules returned long ago rests on what was seen of the forward pass, and code can do
what is not seen (a hook, an output kept on a module, a list that changes hands). So such a plan is tried on
random inputs, in training and in evaluation, before it is believed. Called by `staged.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.models.inputs import call_arguments
from ridgeline.parallel.dropout import seems_to_drop
from ridgeline.parallel.pipeline.plan import StagePlan
from ridgeline.parallel.pipeline.stage import build_stages
from ridgeline.parallel.pipeline.structure import map_leaves, shared_copy, tensors_in

_CLOSE = 1e-3
"""Of the largest number: the order of sums may differ, and nothing else."""


def tell_difference(model: nn.Module, plan: StagePlan, example: Any, gradients: bool) -> str:
    """In what the stages of `plan` differ from `model`, in words; empty where in nothing. The model and
    torch's random state are as before."""
    inputs = _random_like(example)
    modes = [False] if seems_to_drop(model) else [False, True]
    for mode in modes:
        try:
            with _as_before(model):
                expected = _run(shared_copy(model).train(mode), inputs, gradients)
            if expected is None:
                continue  # a model that cannot run in this mode: nothing to compare with
            with _as_before(model):
                stages = build_stages(model, plan, range(plan.num_stages))
                found = _run(_Chain(stages).train(mode), inputs, gradients)
            strayed = next((s._stage.strayed for s in stages if s._stage.strayed), "")
            if found is None or strayed:
                return strayed or "a stage failed"
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        if told := _compare(expected, found):
            return told
    return ""


class _Chain(nn.Module):
    """Stages one after the other, with the parameters of all of them."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs: Any = ()
        for stage in self.stages:
            outputs = stage(*outputs, inputs=kwargs or args)
        return outputs


_Results = dict[str, Tensor]


def _run(module: nn.Module, inputs: Any, gradients: bool) -> _Results | None:
    """Outputs, and gradients of a sum of them; None where the module itself fails."""
    args, kwargs = call_arguments(inputs)
    with torch.set_grad_enabled(gradients):
        try:
            outputs = module(*args, **kwargs)
        except Exception:
            if isinstance(module, _Chain):
                raise
            return None
    found = {f"output {where}": tensor for where, tensor in tensors_in(outputs)}
    if gradients:
        found |= _gradients(module, list(found.values()))
    return {name: tensor.detach() for name, tensor in found.items()}


def _gradients(module: nn.Module, outputs: list[Tensor]) -> _Results:
    generator = torch.Generator().manual_seed(2)
    total: Tensor | None = None
    for output in outputs:
        if output.requires_grad and output.is_floating_point():
            factors = torch.rand(output.shape, generator=generator).to(output.device, output.dtype)
            part = (output * factors).sum()
            total = part if total is None else total + part
    # By themselves: a chain of stages has the same ones, under other names.
    trained = {id(p): p for p in module.parameters() if p.requires_grad}
    if total is None or not trained:
        return {}
    values = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    return {
        f"gradient {key}": value
        for key, value in zip(trained, values, strict=True)
        if value is not None
    }


def _compare(expected: _Results, found: _Results) -> str:
    for name, value in expected.items():
        other, what = found.get(name), "a gradient" if name.startswith("gradient") else "an output"
        if other is None or other.shape != value.shape:
            return f"{what} is not there"
        if not value.is_floating_point():
            continue
        scale = value.abs().max() if value.numel() else value.new_zeros(())
        apart = (value - other).abs().max() if value.numel() else scale
        if not bool(apart <= _CLOSE * scale + 1e-30) and bool(torch.isfinite(scale)):
            return f"{what} differs by {float(apart):.1e} where the largest is {float(scale):.1e}"
    return ""


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Random numbers alike each time, and buffers put back."""
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda and p.device.index})
    with torch.random.fork_rng(devices=devices or None):
        torch.manual_seed(1)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in kept:
                    buffer.copy_(value)


def _random_like(example: Any) -> Any:
    generator = torch.Generator().manual_seed(1)

    def draw(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator).to(leaf.device, leaf.dtype)
        return leaf

    return map_leaves(example, draw)
