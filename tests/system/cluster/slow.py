"""A model of a few weights whose step takes its time without taking a core: two cores serve four ranks,
a scheduler and four hosts at once, and something has to be under way when it is stopped."""

from __future__ import annotations

import time

from torch import Tensor, nn

STEP_S = 0.05


class Net(nn.Module):
    """For digits of 8x8 pixels."""

    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            time.sleep(STEP_S)
        out: Tensor = self.layers(x)
        return out
