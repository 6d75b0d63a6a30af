"""Gradients of small batches at the weights of a checkpoint, for the noise scale.

The trainer's own model, loss, data and precision on one device; no step is taken. Called by
`ridgeline scale noise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.checkpoint.held import hold_state
from ridgeline.checkpoint.load import load_state
from ridgeline.checkpoint.manifest import MODEL, read_manifest
from ridgeline.config import RunConfig
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout, read_auto
from ridgeline.optim.update import norms_of
from ridgeline.scaling.noise import GROUPS, Noise, Products, estimate
from ridgeline.scaling.request import for_one_rank
from ridgeline.train.setup import Training, build_training

LEAST = 12
"""Gradients that can be asked for: two in each group."""
_EPOCH = 1 << 20
"""Whose order of samples no training has met."""


def measure_noise(
    config: RunConfig,
    checkpoints: list[Path],
    batch: int,
    gradients: int,
    advance: Callable[[], None] = lambda: None,
) -> list[Noise]:
    """At each of the checkpoints, or at the first weights where there is none."""
    alone = _alone(config, batch, gradients)
    training = build_training(alone, read_rank_env({}), resumes=bool(checkpoints))
    try:
        have = len(training.loader.source)
        if have < batch * gradients:
            fewer = [f"--gradients {have // batch}"] if have // batch >= LEAST else []
            fewer += [f"--batch {have // gradients}"] if have >= gradients else []
            raise UsageError(
                f"{gradients} gradients of {batch} samples each need {batch * gradients} samples, and "
                f"data.source={config.data.source} has {have}; take {' or '.join(fewer) or 'more data'}"
            )
        found = []
        for path in checkpoints:
            step = _read_weights(path, training)
            found.append(_measure(training, batch, gradients, step, advance))
        return found or [_measure(training, batch, gradients, 0, advance)]
    finally:
        training.close_loaders()


def _alone(config: RunConfig, batch: int, gradients: int) -> RunConfig:
    """The recipe on one device, in batches of that size."""
    given = read_auto(config.layout) or Layout.parse(config.layout, "layout")
    # The loss scale of fp16 is found over many steps, and none is taken here.
    precision = "fp32" if given.precision == "fp16" else given.precision
    layout = Layout(precision=precision, recompute=given.recompute)
    one = for_one_rank(config, str(layout), config.device)
    return replace(
        one,
        train=replace(one.train, batch=batch, steps=gradients, epochs=None),
        tune=replace(one.tune, weights="wide", search_tiles=False),
    )


def _read_weights(path: Path, training: Training) -> int:
    """The checkpoint's weights and buffers; its step."""
    manifest = read_manifest(path)
    state = hold_state(training.arranged, training.optimizer)
    wanted = {name: held for name, held in state.items() if name.startswith(MODEL)}
    missing = [name for name in wanted if name not in manifest.tensors]
    if missing:
        raise UsageError(
            f"the model has {missing[0].removeprefix(MODEL)} and the checkpoint {path} has not; "
            "give the recipe it was made with"
        )
    load_state(path, manifest, wanted)
    return manifest.step


def _measure(
    training: Training, batch: int, gradients: int, step: int, advance: Callable[[], None]
) -> Noise:
    parameters = [t.parameter for t in training.arranged.trainables()]
    sums: list[list[Tensor]] = [[] for _ in range(GROUPS)]
    squares: list[list[float]] = [[] for _ in range(GROUPS)]
    losses = []
    training.arranged.train()
    for index, samples in enumerate(training.loader.onward(_EPOCH, 0, gradients)):
        loss = training.forward_backward(training.to_device(samples), training.clock)
        losses.append(float(loss))
        found = _take_gradients(parameters)
        group = index % GROUPS
        squares[group].append(_square(found, losses[-1], step))
        found = [
            tensor.cpu() for tensor in found
        ]  # sums of six groups are more than a device has over
        if sums[group]:
            torch._foreach_add_(sums[group], found)
        else:
            sums[group] = found
        advance()
    means = {
        (a, b): _product(sums[a], sums[b]) / (len(squares[a]) * len(squares[b]))
        for a, b in combinations(range(GROUPS), 2)
    }
    products = Products(squares, means, batch, len(training.loader.source))
    return estimate(products, step, sum(losses) / len(losses))


def _take_gradients(parameters: list[torch.nn.Parameter]) -> list[Tensor]:
    """In float32 or wider; the parameters are left without."""
    found = []
    for parameter in parameters:
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        grad = torch.view_as_real(grad) if grad.is_complex() else grad
        wide = torch.promote_types(grad.dtype, torch.float32)
        found.append(grad.to(wide))
        parameter.grad = None
    return found


def _square(tensors: list[Tensor], loss: float, step: int) -> float:
    square = float(torch.stack(norms_of(tensors, torch.float64)).square().sum())
    if not math.isfinite(square) or square == 0:
        kind = "zero" if square == 0 else "not finite"
        raise UsageError(
            f"a gradient at step {step} is {kind} (loss {loss:g}), so there is no noise to compare it "
            "with; give a checkpoint of a training that goes well"
        )
    return square


def _product(a: list[Tensor], b: list[Tensor]) -> float:
    parts = [torch.dot(x.flatten(), y.flatten()).double() for x, y in zip(a, b, strict=True)]
    return float(torch.stack(parts).sum())
