"""AdamW for models that have some of their weights in bf16: what `master.py` and `stochastic.py` share.

The arithmetic is that of torch's AdamW, in float32 at least. On CUDA one kernel updates all parameters of a
kind (`kernels.py`); elsewhere it goes parameter by parameter, which is also how the kernel can be checked.
"""

from __future__ import annotations

import importlib.util
import math
from abc import abstractmethod
from array import array
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

_LOW = 0xFFFF
"""The half of a float32 that bf16 does not have."""
ALIGNED = 16
"""Bytes that a kernel reads at a time."""
TABLES = 16
"""Lists of tiles that are kept: one a group and kind, more where some parameters have no gradient."""


class Row(NamedTuple):
    """One parameter's tensors, all of its shape and in the same order of memory."""

    wide: Tensor
    """What is updated: a master, or the weight itself. Where it is bf16 it is rounded by chance."""
    grad: Tensor
    mean: Tensor
    square: Tensor
    narrow: Tensor | None = None
    """Takes the new value of a master."""
    seed: int = 0

    @property
    def kind(self) -> tuple[Any, ...]:
        narrow = None if self.narrow is None else self.narrow.dtype
        return self.wide.dtype, self.grad.dtype, self.mean.dtype, narrow, self.wide.device


@dataclass(frozen=True)
class Numbers:
    """What is the same for all parameters of a group that have taken as many steps."""

    shrink: float
    """Weights lose this share of themselves."""
    size: float
    root: float
    share1: float
    beta2: float
    share2: float
    eps: float

    @classmethod
    def of(cls, group: dict[str, Any], done: float) -> Numbers:
        beta1, beta2 = group["betas"]
        return cls(
            shrink=group["lr"] * group["weight_decay"],
            size=group["lr"] / (1 - beta1**done),
            root=math.sqrt(1 - beta2**done),
            share1=1 - beta1,
            beta2=beta2,
            share2=1 - beta2,
            eps=group["eps"],
        )


class NarrowAdamW(Optimizer):
    """`grad_scale`, when set, divides every gradient, as torch's fused optimizers have it."""

    takes_scale = True

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.grad_scale: Tensor | None = None
        self._kernels = Kernels()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            state = self.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)

    @abstractmethod
    def row_of(
        self, parameter: nn.Parameter, grad: Tensor, state: dict[str, Any], place: int
    ) -> Row:
        """`place` is the parameter's number among all, from 1 on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        place = 0
        for group in self.param_groups:
            members = []
            for parameter in group["params"]:
                place += 1
                if parameter.grad is not None and parameter.numel():
                    members.append((place, parameter, self.state[parameter]))
            if not members:
                continue
            torch._foreach_add_([state["step"] for _, _, state in members], 1)
            alike: dict[tuple[Any, ...], list[Row]] = {}
            for number, parameter, state in members:
                row = self.row_of(parameter, like(parameter.grad, parameter), state, number)
                alike.setdefault((float(state["step"]), *row.kind), []).append(row)
            for (done, *_), rows in alike.items():
                numbers = Numbers.of(group, done)
                if can_use_kernels(rows[0]):
                    self._kernels.update(rows, numbers, self.grad_scale)
                else:
                    for row in rows:
                        update_plainly(row, numbers, self.grad_scale)


def update_plainly(row: Row, numbers: Numbers, divisor: Tensor | None) -> None:
    """One parameter, element by element, as torch's AdamW orders it."""
    grad = row.grad.to(row.mean.dtype)
    if divisor is not None:
        grad = grad / divisor
    row.mean.copy_(row.mean + (grad - row.mean) * numbers.share1)
    row.square.copy_(row.square * numbers.beta2 + grad * grad * numbers.share2)
    old = row.wide.to(row.mean.dtype)
    new = old - numbers.shrink * old
    new = new - numbers.size * row.mean / (row.square.sqrt() / numbers.root + numbers.eps)
    if row.wide.dtype is torch.bfloat16:
        bits = chance(new.numel(), row.seed, new.device)
        flat(new).copy_(round_by_chance(flat(new), bits))
    row.wide.copy_(new)
    if row.narrow is not None:
        row.narrow.copy_(new)


def chance(num: int, seed: int, device: torch.device | None = None) -> Tensor:
    """16 bits for each of `num` places, as int32: a hash that mixes every bit of place and seed."""
    x = torch.arange(num, dtype=torch.int32, device=device) ^ seed
    x = (x ^ ((x >> 16) & _LOW)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    return (x ^ (x >> 16)) & _LOW


def round_by_chance(values: Tensor, bits: Tensor) -> Tensor:
    """float32 as bf16, up with the probability that the rest is of a step. What is not finite stays so."""
    raw = values.view(torch.int32)
    rounded = ((raw + bits) & ~_LOW).view(torch.float32)
    # A carry out of the largest number is infinity, as in any rounding; nan must not become that.
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def can_use_kernels(row: Row) -> bool:
    """Other types go the plain way."""
    narrow, wide = torch.bfloat16, torch.float32
    return (
        row.wide.is_cuda
        and _has_triton()
        and row.mean.dtype is wide
        and row.grad.dtype in (narrow, wide)
        and row.wide.dtype in ((narrow, wide) if row.narrow is None else (wide,))
        and (row.narrow is None or row.narrow.dtype is narrow)
    )


class Kernels:
    """Starts the kernel of `kernels.py` on many rows of one kind."""

    def __init__(self) -> None:
        self._tiles: dict[tuple[Any, ...], Tensor] = {}
        self._ones: dict[torch.device, Tensor] = {}

    def update(self, rows: list[Row], numbers: Numbers, divisor: Tensor | None) -> None:
        from ridgeline.optim import kernels

        first = rows[0]
        device, narrow = first.wide.device, torch.bfloat16
        lengths = tuple(row.wide.numel() for row in rows)
        tiles = self._tiles.pop((lengths, device), None)
        if tiles is None:
            tiles = kernels.list_tiles(lengths, device)
        self._tiles[lengths, device] = tiles  # the last used is the last
        if len(self._tiles) > TABLES:
            del self._tiles[next(iter(self._tiles))]
        if divisor is None:
            if device not in self._ones:
                self._ones[device] = torch.ones((), device=device)
            divisor = self._ones[device]
        table, is_aligned = list_rows(rows)
        # Gradients are elsewhere in every step; nobody waits for a copy from pinned memory.
        table = table.pin_memory().to(device, non_blocking=True)
        with torch.cuda.device_of(first.wide):
            kernels.update(
                table,
                tiles,
                divisor.to(torch.float32),
                (
                    numbers.shrink, numbers.size, 1 / numbers.root, numbers.share1, numbers.beta2,
                    numbers.share2, numbers.eps,
                ),
                master=first.narrow is not None,
                chance=first.wide.dtype is narrow,
                narrow=first.grad.dtype is narrow,
                aligned=is_aligned,
            )  # fmt: skip


def list_rows(rows: list[Row]) -> tuple[Tensor, bool]:
    """The kernel's table, and whether all that it tells of begins where 16 bytes do."""
    table, every = array("q"), 0
    for row in rows:
        narrow = 0 if row.narrow is None else row.narrow.data_ptr()
        wide, grad = row.wide.data_ptr(), row.grad.data_ptr()
        mean, square = row.mean.data_ptr(), row.square.data_ptr()
        every |= wide | grad | mean | square | narrow
        table.extend((wide, grad, mean, square, narrow, row.wide.numel(), row.seed))
    values = torch.frombuffer(table, dtype=torch.int64).view(len(rows), -1)
    return values, every % ALIGNED == 0


def flat(value: Tensor) -> Tensor:
    """All elements in the order of memory, which is the same for all tensors of a parameter."""
    return value.as_strided((value.numel(),), (1,))


def like(grad: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in its parameter's order of memory."""
    if grad.stride() == parameter.stride():
        return grad
    return torch.empty_like(parameter).copy_(grad)


def narrow_weights(model: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Give the matrices that autocast would cast this type; returns what they were, by parameter."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    masters = {}
    for parameter, modules in owners.items():
        products = all(isinstance(module, (nn.Linear, _ConvNd)) for module in modules)
        narrow = products and parameter.dim() > 1 and parameter.dtype is torch.float32
        if narrow and parameter.requires_grad:
            masters[parameter] = _dense(parameter.detach())
            parameter.data = masters[parameter].to(dtype)
    return masters


def _dense(value: Tensor) -> Tensor:
    return value if value.is_contiguous() else value.clone()
