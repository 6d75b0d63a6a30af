"""Mixup and cutmix: pairs of samples made one, with the shares of their labels.

How much of a sample stays (lambda) is drawn from Beta(alpha, alpha) by the inverse of its distribution,
one keyed number a sample, so that no draw is ever repeated or rejected. Called by `apply.py`.

Shapes: N samples, K classes, H height, W width.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

_NODES = 4096


def beta_lambda(alpha: float, draws: np.ndarray) -> np.ndarray:
    """Numbers from 0 to 1 with the distribution Beta(alpha, alpha), for uniform draws."""
    shares, values = _lower_half(alpha)
    lower = np.minimum(draws, 1.0 - draws)
    found = np.interp(lower, shares, values)
    if alpha < 1.0:
        found = found ** (1.0 / alpha)
    lam: np.ndarray = np.where(draws <= 0.5, found, 1.0 - found)
    return lam


@functools.lru_cache(maxsize=8)
def _lower_half(alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """The distribution up to 1/2: its shares, and where they are reached.

    The density x**(a-1) (1-x)**(a-1) has a pole at 0 for a < 1; in y = x**a it has none.
    """
    if alpha < 1.0:
        values = np.linspace(0.0, 0.5**alpha, _NODES)
        density = (1.0 - values ** (1.0 / alpha)) ** (alpha - 1.0)
    else:
        values = np.linspace(0.0, 0.5, _NODES)
        # As a power of 4 x (1-x), which is 1 in the middle and cannot underflow there.
        density = (4.0 * values * (1.0 - values)) ** (alpha - 1.0)
    shares = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return shares * (0.5 / shares[-1]), values


def cut_boxes(
    lam: np.ndarray, draws: np.ndarray, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts and stops (N, 2) of boxes of area 1 - lambda, and what is really left outside them.

    A box lies around a point anywhere in the image, and is cut to the image.
    """
    extent = np.array(size)
    lengths = np.floor(extent * np.sqrt(1.0 - lam)[:, None]).astype(np.int64)
    middles = np.floor(draws * extent).astype(np.int64)
    starts = np.clip(middles - lengths // 2, 0, extent)
    stops = np.clip(middles - lengths // 2 + lengths, 0, extent)
    inside = (stops - starts).prod(axis=1)
    return starts, stops, 1.0 - inside / extent.prod()


def mix_whole(own: Tensor, mate: Tensor, lam_N: Tensor) -> Tensor:
    """lambda of one and the rest of the other, for every element."""
    lam = lam_N.view(-1, *[1] * (own.dim() - 1))
    return (own * lam).add_(mate * (1.0 - lam))


def mix_boxes(own: Tensor, mate: Tensor, starts_N2: Tensor, stops_N2: Tensor) -> Tensor:
    """`own`, and `mate` inside the boxes; (N, C, H, W)."""
    inside = []
    for dim in (0, 1):
        at = torch.arange(own.shape[2 + dim], device=own.device)
        inside.append((at >= starts_N2[:, dim, None]) & (at < stops_N2[:, dim, None]))
    box_N1HW = (inside[0][:, :, None] & inside[1][:, None, :]).unsqueeze(1)
    return torch.where(box_N1HW, mate, own)


def mix_labels(own: Tensor, mate: Tensor, lam_N: Tensor, num_classes: int) -> Tensor:
    """Shares of classes (N, K): lambda of one label, the rest of the other."""
    lam = lam_N[:, None]
    classes = torch.arange(num_classes, device=own.device)
    is_own, is_mate = (labels[:, None] == classes for labels in (own, mate))
    return (is_own * lam).add_(is_mate * (1.0 - lam))
