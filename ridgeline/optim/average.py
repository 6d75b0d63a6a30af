"""A moving average of the weights (EMA): `optim.ema`, or `job.engine(..., ema=0.999)`.

After each update the average moves towards the new weights. It is of what this rank's optimizer updates,
shards, parts of matrices, flat pieces or a stage's share, number by number, so that every layout has the
same one. It is in float32 at least, and taken of the float32 master where weights are narrower. torch's
`AveragedModel` copies the module, which a layout has cut and hooked, and a copy of which computes with the
weights of the first. Made by `parallel/arranged.py`, which also has the weights of all ranks follow when
the average stands in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.errors import UsageError
from ridgeline.optim.layerwise import plain
from ridgeline.optim.update import Update


class Average:
    """The averages of `parameters`, which `optimizer` updates."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizer: Optimizer, decay: float, warmup: bool
    ) -> None:
        if not 0 < decay < 1:
            raise UsageError(
                f"ema={decay} is no share of an average that stays: from above 0 to below 1, such as 0.999"
            )
        self._parameters, self._optimizer = list(parameters), optimizer
        self._decay, self._warmup = decay, warmup
        self._places = {id(p): place for place, p in enumerate(self._parameters)}
        self._kept: list[Tensor | None] | None = None
        """While averages stand in place of weights: the weights that a wider average has no room for."""
        self.values = [_wide_like(self._source(p)) for p in self._parameters]
        """In the order of the parameters; real numbers, as this rank holds them."""
        self.num_updates = 0
        self.restart()

    @property
    def is_in_place(self) -> bool:
        """Whether the averages stand where the weights were."""
        return self._kept is not None

    def of(self, parameter: nn.Parameter) -> Tensor:
        return self.values[self._places[id(parameter)]]

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew with the weights as they are."""
        self.num_updates = 0
        for value, parameter in zip(self.values, self._parameters, strict=True):
            value.copy_(self._source(parameter))

    @torch.no_grad()
    def update(self) -> None:
        """After an update of the weights."""
        share = 1 - self.decay_of(self.num_updates)
        self.num_updates += 1
        alike: dict[tuple[torch.dtype, torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
        for value, parameter in zip(self.values, self._parameters, strict=True):
            source = self._source(parameter)
            if value.numel():
                key = value.dtype, source.dtype, value.device
                alike.setdefault(key, []).append((value, source))
        for (wide, dtype, _), members in alike.items():
            values = [value for value, _ in members]
            sources = [source for _, source in members]
            if wide is dtype:
                torch._foreach_lerp_(values, sources, share)
            else:  # torch's lerp takes one type; a sum widens as it goes
                torch._foreach_mul_(values, 1 - share)
                torch._foreach_add_(values, sources, alpha=share)

    def decay_of(self, num_updates: int) -> float:
        """What stays of the average in the update after so many."""
        if not self._warmup:
            return self._decay
        return min(self._decay, (1 + num_updates) / (10 + num_updates))

    @torch.no_grad()
    def exchange(self) -> None:
        """Put the averages where the weights are, or back: nothing is rounded on the way back."""
        found, kept = [], self._kept or [None] * len(self.values)
        for value, parameter, before in zip(self.values, self._parameters, kept, strict=True):
            weight = plain(parameter)
            if before is not None:
                weight.copy_(before)
                continue
            old = weight.clone()
            weight.copy_(value)
            if value.dtype is weight.dtype:  # no room is taken beyond one parameter's
                value.copy_(old)
            found.append(None if value.dtype is weight.dtype else old)
        self._kept = found if self._kept is None else None

    def _source(self, parameter: nn.Parameter) -> Tensor:
        """The widest there is of it on this rank."""
        master = self._optimizer.state.get(parameter, {}).get("master")
        return plain(parameter if master is None else master)


def averaging(update: Update, average: Average, is_left_out: Callable[[], bool]) -> Update:
    """`update`, and the average after it; `is_left_out` tells of one that an overflow has kept from the
    weights."""

    def averaged() -> Tensor | None:
        norm = update()
        if not is_left_out():
            average.update()
        return norm

    return averaged


def _wide_like(value: Tensor) -> Tensor:
    return torch.empty_like(value, dtype=torch.promote_types(value.dtype, torch.float32))
