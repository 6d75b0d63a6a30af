"""Experts in one module: weights of all of them stacked, called with tokens, numbers and weights.

`experts(x, index, weight)` gives for each row of `x` the sum over its `index` of what these experts make of
it, times `weight`: how `transformers` writes every mixture of experts, and torchtitan. A token goes once to
each rank that has experts for it; there the same module, with fewer experts, is run on a row for each pair
of token and expert, and what came out for a token is summed before it goes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline.errors import RunError
from ridgeline.models.experts import Place, argument
from ridgeline.parallel.expert.exchange import Counts, exchange, move, send_counts, tie


@dataclass(frozen=True)
class Stacked:
    """A module with the weights of `num` experts, and how it is called."""

    path: str
    num: int
    rows: Place
    index: Place
    weight: Place
    counters: tuple[str, ...] = ()
    """Attributes that say how many experts there are."""


def with_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], changes: dict[Place, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with some arguments exchanged for others."""
    positions = tuple(changes.get(number, value) for number, value in enumerate(args))
    return positions, {name: changes.get(name, value) for name, value in kwargs.items()}


@contextmanager
def counting(module: nn.Module, counters: tuple[str, ...], num: int) -> Iterator[None]:
    """The module believes that it has `num` experts."""
    before = {name: getattr(module, name) for name in counters}
    try:
        for name in counters:
            setattr(module, name, num)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@dataclass(frozen=True)
class Route:
    """Which rows of this rank go where, and what is to be done with them there."""

    tokens: Tensor
    """For each row that is sent, in the order of ranks, its number here."""
    pairs: Tensor
    """For each pair of a token and an expert, in the order of ranks, its place in the flat index."""
    errands: Tensor
    """For each of them: the token's place among those sent to the same rank, and the expert's there."""
    numbers: Tensor
    """Tokens and pairs for each rank."""


def plan_route(index_NK: Tensor, num_experts: int, num_ranks: int) -> Route:
    """Experts lie on ranks in order, as many on each. A number that is no expert's is for none."""
    each, index_NK = num_experts // num_ranks, index_NK.long()
    rank_NK = torch.div(index_NK, each, rounding_mode="floor")
    ranks_R = torch.arange(num_ranks, device=index_NK.device)
    goes_NKR = rank_NK.unsqueeze(-1) == ranks_R
    goes_NR = goes_NKR.any(1)
    place_NR = goes_NR.cumsum(0) - 1
    # Rank by rank, in each token by token and slot by slot.
    pairs = goes_NKR.permute(2, 0, 1).flatten(1).nonzero()
    rank_P, flat_P = pairs.unbind(1)
    token_P = torch.div(flat_P, index_NK.shape[1], rounding_mode="floor")
    expert_P = index_NK.flatten()[flat_P] - rank_P * each
    return Route(
        tokens=goes_NR.t().nonzero()[:, 1],
        pairs=flat_P,
        errands=torch.stack([place_NR[token_P, rank_P], expert_P], 1),
        numbers=torch.stack([goes_NR.sum(0), goes_NKR.sum((0, 1))], 1),
    )


class SpreadStack:
    """Stands for the forward of a module of which this rank has every `num_ranks`-th part."""

    def __init__(
        self, module: nn.Module, plan: Stacked, num_ranks: int, group: dist.ProcessGroup | None
    ) -> None:
        self.module, self.plan, self.num_ranks, self.group = module, plan, num_ranks, group
        self.inner = module.forward
        self.num_here = plan.num // num_ranks

    @torch.compiler.disable  # how many rows come is known as they come
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        plan = self.plan
        x = argument(args, kwargs, plan.rows)
        index_NK = argument(args, kwargs, plan.index)
        weight_NK = argument(args, kwargs, plan.weight)
        rows_ND = x.reshape(-1, x.shape[-1])
        route = plan_route(index_NK, plan.num, self.num_ranks)
        theirs = send_counts(route.numbers, self.group)
        # The one place where the host waits for the device.
        mine, others = torch.stack([route.numbers, theirs]).tolist()
        tokens, pairs = (Counts([n[i] for n in mine], [n[i] for n in others]) for i in range(2))
        errands = move(route.errands, pairs, self.group)
        (came_TD, weights_P), anchor = exchange(
            [rows_ND[route.tokens], weight_NK.flatten()[route.pairs]], [tokens, pairs], self.group
        )
        token_P = errands[:, 0] + _starts(tokens.received, pairs.received, errands.device)

        def call(rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
            changes: dict[Place, Any] = {plan.rows: rows, plan.weight: weights}
            changes[plan.index] = experts.to(index_NK.dtype)
            positions, names = with_arguments(args, kwargs, changes)
            with counting(self.module, plan.counters, self.num_here):
                out: Tensor = self.inner(*positions, **names)
            return out

        done_TD = self._work(call, came_TD, token_P, errands[:, 1], weights_P)
        (back_D,), anchor = exchange([done_TD], [tokens.back()], self.group, anchor)
        out_ND = add_rows(back_D, route.tokens, len(rows_ND))
        return tie(out_ND.reshape(*x.shape[:-1], out_ND.shape[1]), anchor)

    def _work(
        self, call: Any, came_TD: Tensor, token_P: Tensor, expert_P: Tensor, weight_P: Tensor
    ) -> Tensor:
        """For each token that came the sum of what this rank's experts make of it."""
        if not len(token_P):
            # Nothing to do, but the type of what would come out, and gradients of zero as on one device,
            # where experts without a token are parts of the same weights. It hangs on what came, of which
            # there is none: a backward that is split into inputs and weights begins the latter there.
            row = came_TD.sum(0, keepdim=True) + 1.0
            out = call(row, expert_P.new_zeros(1, 1), weight_P.sum().view(1, 1))
            return out[:0]
        out_PD = call(came_TD[token_P], expert_P[:, None], weight_P[:, None])
        if out_PD.shape[:-1] != token_P.shape:
            raise RunError(
                f"{self.plan.path} gave a tensor of shape {tuple(out_PD.shape)} for {len(token_P)} rows; "
                "under ep it has to give a row for each"
            )
        return add_rows(out_PD, token_P, len(came_TD))


class _AddRows(torch.autograd.Function):
    """As `index_add`, which keeps what it adds for the sake of its shape."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, num: int) -> Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(num, rows.shape[1]).index_add_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        return gradient.index_select(0, places), None, None


def add_rows(rows: Tensor, places: Tensor, num: int) -> Tensor:
    """`num` rows, each the sum of those whose place it is."""
    added: Tensor = _AddRows.apply(rows, places, num)  # type: ignore[no-untyped-call]
    return added


def _starts(tokens: list[int], pairs: list[int], device: torch.device) -> Tensor:
    """For each pair that came, where the tokens of its rank begin."""
    first, starts = 0, []
    for number in tokens:
        starts.append(first)
        first += number
    made = torch.tensor([starts, pairs], device=device)
    return made[0].repeat_interleave(made[1], output_size=sum(pairs))
