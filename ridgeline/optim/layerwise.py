"""LARS and LAMB: the rate of each layer follows the size of its weights.

At large batches the rate that one layer bears is too much for another. Both scale a layer's update by
||weights|| / ||update||, LARS before momentum (You, Gitman, Ginsburg 2017) and LAMB after Adam's moments
(You et al. 2020). torch has neither, and those that others have take the norms of what a rank holds, which
is another optimizer for every layout. Here the layout sums the squares over the ranks that share a
parameter (`Whole`), so that a shard is scaled as the whole is. Biases and norm weights (one dimension or
none) are not scaled. Called by `build.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.config import OptimConfig
from ridgeline.errors import UsageError

_MOST_MADE = 64
"""Lists that are kept on a device; which parameters have gradients may differ from step to step."""
Whole = Callable[[Tensor], Tensor]
"""Squares of this rank's parts, one column for each of its parameters in their order, to those of the whole
parameters. Every rank calls it as often."""


@dataclass(frozen=True)
class _Row:
    """One parameter of the step at hand, as plain real tensors of this rank."""

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    column: int


class Layerwise(Optimizer, ABC):
    """What the two have in common. `scaled` are the parameters whose updates are; `whole`: see `Whole`."""

    moments: tuple[str, ...] = ()
    """Tensors that it keeps for a parameter, as large as that."""
    counts = False
    """Whether it counts a parameter's steps."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        scaled: Iterable[nn.Parameter],
        whole: Whole | None = None,
        order: Sequence[nn.Parameter] | None = None,
    ) -> None:
        super().__init__(groups, defaults)
        every = [p for group in self.param_groups for p in group["params"]]
        self._columns = {id(p): i for i, p in enumerate(every if order is None else order)}
        ids = {id(p) for p in scaled}
        self._scaled = [key in ids for key in self._columns]
        self._whole = whole
        self._made: dict[tuple[Any, ...], Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found: list[tuple[dict[str, Any], list[_Row], list[Tensor]]] = []
        for group in self.param_groups:
            rows = [self._row(p) for p in group["params"] if p.grad is not None]
            found.append((group, rows, self._directions(group, rows) if rows else []))
        ratios = self._ratios(found)
        for group, rows, directions in found:
            if rows:
                self._apply(group, rows, directions, ratios)
        return loss

    def _row(self, parameter: nn.Parameter) -> _Row:
        state = self.state[parameter]
        if not state:
            for name in self.moments:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if self.counts:
                state["step"] = torch.tensor(0.0)
        own = {name: plain(value) for name, value in state.items()}
        assert parameter.grad is not None
        return _Row(plain(parameter), plain(parameter.grad), own, self._columns[id(parameter)])

    @abstractmethod
    def _directions(self, group: dict[str, Any], rows: list[_Row]) -> list[Tensor]:
        """What weights would move along, before a layer's ratio; new tensors."""

    @abstractmethod
    def _compared(self, rows: list[_Row], directions: list[Tensor]) -> list[Tensor]:
        """The tensors whose norms weights are compared with."""

    @abstractmethod
    def _size(self, group: dict[str, Any], weight: Tensor, other: Tensor) -> Tensor:
        """The ratio from the norms of weights and of what is compared with them."""

    @abstractmethod
    def _apply(
        self, group: dict[str, Any], rows: list[_Row], directions: list[Tensor], ratios: Tensor
    ) -> None:
        """Move the weights, each along its direction times its ratio."""

    def _ratios(self, found: list[tuple[dict[str, Any], list[_Row], list[Tensor]]]) -> Tensor:
        """One for each parameter of this rank; no device is waited for."""
        first = next(p for group in self.param_groups for p in group["params"])
        device = plain(first).device
        # Wide enough that stages which hold the same weight, cut otherwise, come to the same ratio.
        squares = torch.zeros(2, len(self._columns), dtype=torch.float64, device=device)
        for _, rows, directions in found:
            self._put_squares(squares[0], rows, [row.weight for row in rows])
            self._put_squares(squares[1], rows, self._compared(rows, directions))
        if self._whole is not None:
            squares = self._whole(squares)
        weight, other = squares.sqrt()
        ratios = torch.ones_like(weight)
        usable = self._on(device, self._scaled) & (weight > 0) & (other > 0)
        for group, rows, _ in found:
            if rows:
                columns = self._on(device, [row.column for row in rows])
                sizes = self._size(group, weight[columns], other[columns])
                ratios[columns] = torch.where(usable[columns], sizes, 1.0)
        return ratios if first.dtype.to_real() is torch.float64 else ratios.float()

    def _put_squares(self, into: Tensor, rows: list[_Row], values: list[Tensor]) -> None:
        """The square of each tensor's norm at its row's column; an empty part has 0."""
        by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
        for row, value in zip(rows, values, strict=True):
            if value.numel():
                by_kind.setdefault((value.dtype, value.device), []).append((row.column, value))
        for members in by_kind.values():
            norms = torch._foreach_norm([value for _, value in members], 2.0, dtype=into.dtype)
            columns = self._on(into.device, [column for column, _ in members])
            into[columns] = torch.stack(list(norms)).square().to(into.device)

    def _on(self, device: torch.device, values: list[int] | list[bool]) -> Tensor:
        """The list as a tensor, made once: to copy one to a GPU is to wait for it."""
        key = (device, *values)
        if key not in self._made:
            if len(self._made) > _MOST_MADE:
                self._made.clear()
            self._made[key] = torch.tensor(values, device=device)
        return self._made[key]


class Lars(Layerwise):
    """SGD with momentum over gradients that are scaled by
    `trust * ||w|| / (||g|| + weight_decay * ||w|| + eps)`, after decay; the rate is outside of momentum, as
    in torch's SGD."""

    @property
    def moments(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("momentum_buffer",) if self.defaults["momentum"] else ()

    def _directions(self, group: dict[str, Any], rows: list[_Row]) -> list[Tensor]:
        grads, weights = [row.grad for row in rows], [row.weight for row in rows]
        return list(torch._foreach_add(grads, weights, alpha=group["weight_decay"]))

    def _compared(self, rows: list[_Row], directions: list[Tensor]) -> list[Tensor]:
        return [row.grad for row in rows]

    def _size(self, group: dict[str, Any], weight: Tensor, other: Tensor) -> Tensor:
        below = other + group["weight_decay"] * weight + group["eps"]
        return group["trust"] * weight / below

    def _apply(
        self, group: dict[str, Any], rows: list[_Row], directions: list[Tensor], ratios: Tensor
    ) -> None:
        _scale(directions, rows, ratios)
        if group["momentum"]:
            buffers = [row.state["momentum_buffer"] for row in rows]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, directions)
            if group["nesterov"]:
                torch._foreach_add_(directions, buffers, alpha=group["momentum"])
            else:
                directions = buffers
        torch._foreach_add_([row.weight for row in rows], directions, alpha=-float(group["lr"]))


class Lamb(Layerwise):
    """AdamW whose step, decay included, is as long as `||w||` times the rate in every layer."""

    moments, counts = ("exp_avg", "exp_avg_sq"), True

    def _directions(self, group: dict[str, Any], rows: list[_Row]) -> list[Tensor]:
        first, second = group["betas"]
        grads = [row.grad for row in rows]
        means = [row.state["exp_avg"] for row in rows]
        squares = [row.state["exp_avg_sq"] for row in rows]
        torch._foreach_lerp_(means, grads, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, grads, grads, 1 - second)
        for row in rows:
            row.state["step"].add_(1)
        steps = [float(row.state["step"]) for row in rows]
        # In one new tensor a parameter: 1 / (sqrt(v) + eps), then times m.
        directions = torch._foreach_sqrt(squares)
        torch._foreach_div_(directions, [math.sqrt(1 - second**step) for step in steps])
        torch._foreach_add_(directions, group["eps"])
        torch._foreach_reciprocal_(directions)
        torch._foreach_mul_(directions, means)
        torch._foreach_div_(directions, [1 - first**step for step in steps])
        if group["weight_decay"]:
            weights = [row.weight for row in rows]
            torch._foreach_add_(directions, weights, alpha=group["weight_decay"])
        return list(directions)

    def _compared(self, rows: list[_Row], directions: list[Tensor]) -> list[Tensor]:
        return directions

    def _size(self, group: dict[str, Any], weight: Tensor, other: Tensor) -> Tensor:
        return weight / other

    def _apply(
        self, group: dict[str, Any], rows: list[_Row], directions: list[Tensor], ratios: Tensor
    ) -> None:
        _scale(directions, rows, ratios)
        torch._foreach_add_([row.weight for row in rows], directions, alpha=-float(group["lr"]))


LAYERWISE: dict[str, type[Layerwise]] = {"lars": Lars, "lamb": Lamb}


def build_layerwise(
    groups: list[dict[str, Any]],
    lr: float,
    config: OptimConfig,
    scaled: list[nn.Parameter],
    whole: Whole | None,
    order: list[nn.Parameter],
) -> Optimizer:
    """The one that `config` names, over `groups`; for the rest see `Layerwise`."""
    if config.name == "lars" and config.trust <= 0:
        raise UsageError(
            f"optim.trust={config.trust:g} would leave every matrix where it is; 0.001 is usual"
        )
    read = ("momentum", "nesterov", "trust") if config.name == "lars" else ("betas",)
    own = {name: getattr(config, name) for name in read}
    defaults = {"lr": lr, "eps": config.eps, "weight_decay": 0.0, **own}
    return LAYERWISE[config.name](groups, defaults, scaled, whole, order)


def plain(tensor: Tensor) -> Tensor:
    """This rank's part, complex numbers as pairs of real ones."""
    local = getattr(tensor, "_local_tensor", tensor).detach()
    return torch.view_as_real(local) if local.is_complex() else local


def _scale(values: list[Tensor], rows: list[_Row], ratios: Tensor) -> None:
    """Each tensor times its row's ratio, in place."""
    each = ratios.unbind()
    factors = [each[row.column].to(value.device) for row, value in zip(rows, values, strict=True)]
    torch._foreach_mul_(values, factors)
