"""Convolutions with the batch norm after them folded into their weights, for a model that no longer trains.

In evaluation a batch norm is one factor and one offset for each channel, which the convolution before it
can have in its own weights: a pass over the activations less for each. Pairs are found by watching the
model run (the norm is given the very tensor that the convolution made), and the changed model is held
against the old one on the same inputs: one that uses the convolution's output elsewhere too is refused. For
evaluation and export, on a copy of the model; never for training, where the statistics still move.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils._pytree import tree_leaves

from ridgeline.errors import UsageError

BOUND = 1e-4
"""How far outputs may be apart, relative to the largest: rounding in another order."""


@torch.no_grad()
def fold_conv_norms(model: nn.Module, example: tuple[Any, ...]) -> tuple[nn.Module, list[str]]:
    """A copy of `model` for evaluation with what could be folded, and the convolutions' paths."""
    folded = copy.deepcopy(model).eval()
    before = folded(*example)
    pairs = _find_pairs(folded, example)
    for conv_path, norm_path in pairs:
        conv, norm = folded.get_submodule(conv_path), folded.get_submodule(norm_path)
        _set(folded, conv_path, fuse_conv_bn_eval(conv, norm, _is_transposed(conv)))  # type: ignore[type-var]
        _set(folded, norm_path, nn.Identity())
    after = folded(*example)
    for one, other in zip(tree_leaves(before), tree_leaves(after), strict=True):
        if isinstance(one, Tensor) and one.is_floating_point():
            most = one.abs().max().clamp(min=1e-12)
            if not bool(((one - other).abs().max() / most) < BOUND):
                raise UsageError(
                    f"{type(model).__name__} uses what a convolution made beside the norm after it, so "
                    "that norms cannot be folded; evaluate it as it is"
                )
    return folded, [conv for conv, _ in pairs]


def _find_pairs(model: nn.Module, example: tuple[Any, ...]) -> list[tuple[str, str]]:
    made: dict[int, tuple[str, Tensor]] = {}
    calls: dict[str, int] = {}
    pairs: list[tuple[str, str]] = []

    def after_conv(path: str, out: Tensor) -> None:
        calls[path] = calls.get(path, 0) + 1
        made[id(out)] = (path, out)  # the tensor too, so that its id stays its own

    def before_norm(path: str, given: tuple[Any, ...]) -> None:
        calls[path] = calls.get(path, 0) + 1
        if given and id(given[0]) in made:
            pairs.append((made[id(given[0])][0], path))

    handles = []
    for path, module in model.named_modules():
        if isinstance(module, _ConvNd):
            handles.append(
                module.register_forward_hook(lambda _, __, out, path=path: after_conv(path, out))
            )
        elif isinstance(module, _BatchNorm) and module.track_running_stats:
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, given, path=path: before_norm(path, given)
                )
            )
    try:
        model(*example)
    finally:
        for handle in handles:
            handle.remove()
    # One that is called twice would have the factor twice, or for the wrong inputs.
    return [pair for pair in pairs if calls[pair[0]] == calls[pair[1]] == 1]


def _is_transposed(conv: nn.Module) -> bool:
    return isinstance(conv, _ConvTransposeNd)


def _set(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
