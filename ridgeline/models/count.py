"""What one sample costs: parameters and FLOPs, counted on the meta device, where nothing is computed.

`train/setup.py` calls it before the model gets any memory; the figures go to `facts.json` and are what
MFU is measured with. Attention is counted too (torch counts it on meta, not on the CPU).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.facts import ModelFacts
from ridgeline.models.inputs import Inputs, first_of

ESTIMATED = "6N"
"""Where FLOPs come from if they could not be counted here."""

Objective = Callable[[nn.Module, Inputs, Tensor], Tensor]


def count_model(
    name: str,
    model: nn.Module,
    inputs: Inputs,
    targets: Tensor,
    objective: Objective,
    unit: str = "samples",
    units_per_sample: int = 1,
    trace: bool = True,
) -> ModelFacts:
    """Facts of a module that lives on the meta device, from one training step of `inputs` there.

    `trace=False` is for a module that could not be built there: FLOPs are then estimated.
    """
    parameters = list(model.parameters())
    num_parameters = sum(p.numel() for p in parameters)
    first = first_of(inputs)
    num_samples = first.shape[0]
    counted = _count(model, inputs, targets, objective) if trace else None
    # Without a count, the usual estimate: two FLOPs a parameter forward, twice that backward.
    forward = 2.0 * num_parameters * units_per_sample * num_samples
    forward, total = counted or (forward, 3.0 * forward)
    return ModelFacts(
        name=name,
        num_parameters=num_parameters,
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        train_flops_per_sample=total / num_samples,
        forward_flops_per_sample=forward / num_samples,
        flops_source="counted" if counted else ESTIMATED,
        sample_shape=tuple(first.shape[1:]),
        units_per_sample=units_per_sample,
        unit=unit,
    )


def _count(
    model: nn.Module, inputs: Inputs, targets: Tensor, objective: Objective
) -> tuple[float, float] | None:
    """FLOPs forward and in all; None for a module whose control flow depends on values, which the
    meta device has none of."""
    with FlopCounterMode(display=False) as counter, torch.enable_grad():
        try:
            loss = objective(model, inputs, targets)
            forward = float(counter.get_total_flops())
            loss.backward()
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
            return None
        return forward, float(counter.get_total_flops())
