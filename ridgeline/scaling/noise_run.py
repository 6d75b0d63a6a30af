"""Gradients of small batches at the weights of a checkpoint, for the noise scale.

The trainer's own model, loss, data and precision on one device; no step is taken. Called by
`ridgeline scale noise`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from ridgeline.scaling.noise import GROUPS, Noise, estimate
from ridgeline.scaling.request import for_one_rank
from ridgeline.train.setup import Training, build_training

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
    training = build_training(_alone(config, batch, gradients), read_rank_env({}))
    try:
        have = len(training.loader) * batch
        if have < batch * gradients:
            raise UsageError(
                f"{gradients} gradients of {batch} samples each need {batch * gradients} samples, and "
                f"data.source={config.data.source} has {have}; take fewer with --gradients or --batch"
            )
        found = []
        for path in checkpoints:
            step = _read_weights(path, training)
            found.append(_measure(training, batch, gradients, step, advance))
        return found or [_measure(training, batch, gradients, 0, advance)]
    finally:
        training.close_loaders()


def _alone(config: RunConfig, batch: int, gradients: int) -> RunConfig:
    """The recipe on one device, with batches that are all as large."""
    wanted = (read_auto(config.layout) or Layout.parse(config.layout, "layout")).precision
    if wanted == "fp16":
        wanted = "fp32"  # its loss scale is found over many steps, and none is taken here
    one = for_one_rank(config, str(Layout(precision=wanted)), config.device)
    return replace(
        one,
        data=replace(one.data, drop_last=True),
        train=replace(one.train, batch=batch, steps=gradients, epochs=None),
        tune=replace(one.tune, weights="wide"),
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
        losses.append(loss.detach().double())
        found = _take_gradients(parameters)
        group = index % GROUPS
        squares[group].append(_square(found))
        if sums[group]:
            torch._foreach_add_(sums[group], found)
        else:
            sums[group] = found
        advance()
    counts = [len(group) for group in squares]
    products = [
        [_product(a, b) / (m * n) for b, n in zip(sums, counts, strict=True)]
        for a, m in zip(sums, counts, strict=True)
    ]
    return estimate(squares, products, batch, step, float(torch.stack(losses).mean()))


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


def _square(tensors: list[Tensor]) -> float:
    return float(torch.stack(norms_of(tensors, torch.float64)).square().sum())


def _product(a: list[Tensor], b: list[Tensor]) -> float:
    parts = [torch.dot(x.flatten(), y.flatten()).double() for x, y in zip(a, b, strict=True)]
    return float(torch.stack(parts).sum())
