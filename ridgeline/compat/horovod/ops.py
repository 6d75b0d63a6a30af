"""What Horovod's collectives are told and give back: operations, compression, handles, scaling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.compat.horovod.job import size
from ridgeline.errors import UsageError


@dataclass(frozen=True)
class Op:
    name: str
    kind: Any


Average = Op("Average", dist.ReduceOp.SUM)
Sum = Op("Sum", dist.ReduceOp.SUM)
Min = Op("Min", dist.ReduceOp.MIN)
Max = Op("Max", dist.ReduceOp.MAX)
Product = Op("Product", dist.ReduceOp.PRODUCT)


class NoneCompressor:
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype)


class FP16Compressor(NoneCompressor):
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        narrow = tensor.to(torch.float16) if tensor.is_floating_point() else tensor
        return narrow, tensor.dtype


class Compression:
    """What travels: as it is, or in 16 bits."""

    none = NoneCompressor
    fp16 = FP16Compressor


@dataclass
class Handle:
    """A collective on its way."""

    works: list[dist.Work]
    finish: Callable[[], Any]
    """What there is when all of them have ended."""
    _result: list[Any] = field(default_factory=list)

    def wait(self) -> Any:
        if not self._result:
            for work in self.works:
                work.wait()
            self._result.append(self.finish())
        return self._result[0]

    def is_done(self) -> bool:
        return bool(self._result) or all(work.is_completed() for work in self.works)


def synchronize(handle: Handle) -> Any:
    return handle.wait()


def poll(handle: Handle) -> bool:
    return handle.is_done()


class _Everyone:
    """All ranks, the one set of processes there is."""


global_process_set = _Everyone()


def check_set(process_set: Any) -> None:
    if process_set is not None and process_set is not global_process_set:
        raise UsageError(
            "process_set= is not in ridgeline.compat.horovod; leave it out, and use torch.distributed's "
            "functions for groups of ranks"
        )


def choose_op(op: Op | None, average: bool | None) -> Op:
    """`average` is the older way to say it."""
    if op is not None and average is not None:
        raise UsageError("allreduce was given average= and op=; give op=hvd.Average or op=hvd.Sum")
    if op is None:
        return Sum if average is False else Average
    if not isinstance(op, Op):
        raise UsageError(f"op={op!r} is none of hvd.Average, Sum, Min, Max, Product")
    return op


def scale(tensor: Tensor, op: Op, after: float = 1.0) -> Tensor:
    """A sum as the op wants it, in place."""
    if op is Average and not tensor.is_floating_point() and not tensor.is_complex():
        tensor.div_(size(), rounding_mode="floor")
    elif op is Average:
        tensor.div_(size())
    return times(tensor, after)


def times(tensor: Tensor, factor: float) -> Tensor:
    """In place; whole numbers are rounded down."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor)
    return tensor.copy_((tensor.double() * factor).floor())
