"""Gradient compression: fewer bytes between replicas, by 16-bit numbers or by low rank (PowerSGD).

Communication hooks for DistributedDataParallel, written by hand because torch's own cannot be
proven: its 16-bit hooks add up in 16 bits in whatever order the ranks stand (and overflow in
fp16), and its PowerSGD keeps its memory by bucket, not by parameter, starts later collectives from
callback threads (so that with several buckets ranks may disagree on their order), and divides by
zero on a zero gradient. Here every sum is taken in rank order and in a wide type, and nothing
depends on the buckets, so that `reference_compress` gives the same numbers on one process. Called
by `apply.py`; the reference by `verify/`.

A sum over n ranks is an all-to-all of the n parts, the addition by the part's owner, and an
all-gather of the results: 2 (n-1)/n of the compressed size is sent by each rank, as in a ring
all-reduce of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ridgeline.errors import UsageError
from ridgeline.parallel.mesh import all_gather_single

_CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}
_FP16_TOP_EXPONENT = 15
"""Gradients of a parameter are scaled to lie below 2**15; fp16 ends at 65504."""
_MIN_GAIN = 2
"""A matrix goes in low rank where that makes it at least this much smaller, as in torch's hook."""

Exchange = Generator[Any, None, Tensor]
"""Yields each collective it has started, and is resumed when that has ended."""


@dataclass(frozen=True)
class Method:
    """A `compress` field of a layout, parsed."""

    cast: torch.dtype | None = None
    rank: int = 0

    @classmethod
    def parse(cls, how: str) -> Method:
        """
        >>> Method.parse("powersgd:4")
        Method(cast=None, rank=4)
        """
        if how in _CASTS:
            return cls(cast=_CASTS[how])
        name, _, rank = how.partition(":")
        if name == "powersgd" and rank.isdecimal() and int(rank) > 0:
            return cls(rank=int(rank))
        raise UsageError(
            f"layout compress={how} is no compression; use compress=fp16, bf16 or powersgd:r with "
            "a rank r of 1 or more, such as powersgd:4"
        )


@dataclass
class Memory:
    """What PowerSGD carries from step to step, by parameter name."""

    num_steps: int = 0
    errors: dict[str, Tensor] = field(default_factory=dict)
    """What this rank's compressed gradients have left out so far; added to the next."""
    q: dict[str, Tensor] = field(default_factory=dict)
    """The right factor of the step before, the same on all ranks: where the next starts."""


# Arithmetic that the distributed run and the reference share


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _mean_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Mean of what the ranks sent, added up in rank order in the wide type."""
    total = parts[0].to(_wide(parts[0].dtype), copy=True)
    for part in parts[1:]:
        total += part
    return (total / len(parts)).to(parts[0].dtype)


def _largest(gradients: Sequence[Tensor]) -> Tensor:
    """The largest magnitude in each gradient; infinite where any value is not a number."""
    tops = [g.detach().abs().amax() if g.numel() else g.new_zeros(()) for g in gradients]
    stacked = torch.stack(tops)
    return torch.nan_to_num(stacked.to(_wide(stacked.dtype)), nan=torch.inf, posinf=torch.inf)


def _scales(tops: Tensor) -> Tensor:
    """The power of two by which a gradient with this largest value fills the range of fp16.

    By powers of two nothing is rounded. Where a value is infinite, 1: it stays so on every rank.
    """
    limit = 126 if tops.dtype == torch.float32 else 1000
    _, exponents = torch.frexp(tops.where(tops.isfinite(), 1.0))
    shifts = (_FP16_TOP_EXPONENT - exponents.to(torch.int64)).clamp(-limit, limit)
    # As the bits of a float64, because a power function need not be exact.
    powers = ((shifts + 1023) << 52).view(torch.float64)
    return powers.where(tops.isfinite() & (tops > 0), 1.0).to(tops.dtype)


def _is_compressed(shape: torch.Size, rank: int) -> bool:
    if len(shape) < 2 or shape.numel() == 0:
        return False
    rows, columns = shape[0], shape.numel() // shape[0]
    return bool((rows + columns) * min(rank, rows, columns) * _MIN_GAIN <= rows * columns)


def _as_matrix(gradient: Tensor) -> Tensor:
    return gradient.detach().reshape(gradient.shape[0], -1).to(_wide(gradient.dtype))


def _first_q(name: str, matrix: Tensor, rank: int) -> Tensor:
    """A start that depends on the parameter's name only, not on ranks, buckets or the device."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    rows, columns = matrix.shape
    q = torch.randn(columns, min(rank, rows, columns), generator=generator, dtype=torch.float64)
    return q.to(matrix)


def _orthogonal(columns: Tensor) -> Tensor:
    """By Householder reflections, which also give a basis where columns are zero or dependent."""
    return torch.linalg.qr(columns)[0]


def _remember(
    name: str, matrix: Tensor, low_rank: Tensor, q: Tensor, rank: int, memory: Memory
) -> None:
    """Keep the error and the factor; after a gradient that was not finite, start afresh, so that a
    step which loss scaling skips leaves nothing behind."""
    ok = low_rank.isfinite().all()
    error = matrix - low_rank
    memory.errors[name] = error.where(ok, torch.zeros_like(error))
    memory.q[name] = q.where(ok, _first_q(name, matrix, rank))


# On the ranks


@dataclass
class _Pending:
    """A bucket under way."""

    exchange: Exchange
    future: torch.futures.Future[Tensor]
    work: Any = None

    def advance(self) -> bool:
        """To the next collective; whether there is one."""
        try:
            if self.work is not None:
                self.work.wait()
            self.work = next(self.exchange)
        except StopIteration as stop:
            self.future.set_result(stop.value)
            return False
        return True


class Compression:
    """The state of the hook of one replicated model.

    Buckets come in the same order on every rank. When one comes, those before it are taken to their
    next collective first, so all ranks start all collectives in one order, and the exchange of a
    bucket goes on while backward computes the next ones.
    """

    def __init__(
        self, ddp: DistributedDataParallel, how: str, group: dist.ProcessGroup, start_step: int = 0
    ) -> None:
        self.method, self.group, self.start_step = Method.parse(how), group, start_step
        self.memory = Memory()
        self._names = {id(p): name for name, p in ddp.module.named_parameters()}
        self._pending: list[_Pending] = []

    def state_dict(self) -> dict[str, Any]:
        """This rank's memory: a restart is bit for bit the same with it. Errors differ by rank."""
        memory = self.memory
        return {
            "num_steps": memory.num_steps, "errors": dict(memory.errors), "q": dict(memory.q)
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory = Memory(state["num_steps"], dict(state["errors"]), dict(state["q"]))

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            self._pending.clear()  # of a backward pass that an error has ended
        buffer = bucket.buffer()
        names = [self._names[id(p)] for p in bucket.parameters()]
        gradients = bucket.gradients()
        if self.method.cast is not None:
            exchange = self._cast(buffer, gradients)
        elif self.memory.num_steps < self.start_step:
            exchange = self._plain(buffer)
        else:
            exchange = self._low_rank(buffer, gradients, names)
        devices = [buffer.device] if buffer.is_cuda else None
        pending = _Pending(exchange, torch.futures.Future(devices=devices))
        self._pending = [earlier for earlier in self._pending if earlier.advance()]
        if pending.advance():
            self._pending.append(pending)
        if bucket.is_last():
            while self._pending:
                self._pending = [earlier for earlier in self._pending if earlier.advance()]
            self.memory.num_steps += 1
        return pending.future

    def _mean(self, flat: Tensor) -> Exchange:
        """Mean of `flat` over the ranks: see the top of this file."""
        num_ranks = dist.get_world_size(self.group)
        part = -(-flat.numel() // num_ranks)
        sent = flat.new_zeros(num_ranks * part)
        sent[: flat.numel()] = flat
        received = torch.empty_like(sent)
        yield dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        mine = _mean_in_order(received.split(part) if part else [received])
        yield all_gather_single(sent, mine, group=self.group, async_op=True)
        return sent[: flat.numel()]

    def _plain(self, buffer: Tensor) -> Exchange:
        mean = yield from self._mean(buffer)
        return buffer.copy_(mean)

    def _cast(self, buffer: Tensor, gradients: list[Tensor]) -> Exchange:
        cast = self.method.cast
        assert cast is not None
        if cast is not torch.float16:  # bf16 has the range of float32
            mean = yield from self._mean(buffer.to(cast))
            return buffer.copy_(mean)
        tops = _largest(gradients)
        yield dist.all_reduce(tops, dist.ReduceOp.MAX, group=self.group, async_op=True)
        scales = _scales(tops).unbind(0)
        scaled = [
            (g.flatten().to(s.dtype) * s).to(cast) for g, s in zip(gradients, scales, strict=True)
        ]
        mean = yield from self._mean(torch.cat(scaled))
        parts = mean.split([g.numel() for g in gradients])
        for gradient, part, scale in zip(gradients, parts, scales, strict=True):
            gradient.copy_((part.to(scale.dtype) / scale).view_as(gradient))
        return buffer

    def _low_rank(self, buffer: Tensor, gradients: list[Tensor], names: list[str]) -> Exchange:
        memory, rank = self.memory, self.method.rank
        named = dict(zip(names, gradients, strict=True))
        matrices = {
            name: _as_matrix(gradient)
            for name, gradient in named.items()
            if _is_compressed(gradient.shape, rank)
        }
        plain = [gradient for name, gradient in named.items() if name not in matrices]
        left: list[Tensor] = []
        for name, matrix in matrices.items():
            if name in memory.errors:
                matrices[name] = matrix = matrix + memory.errors[name]
            q = memory.q[name] if name in memory.q else _first_q(name, matrix, rank)
            left.append(matrix @ _orthogonal(q))
        wide = _wide(buffer.dtype)
        mean = yield from self._mean(_join([*left, *(g.to(wide) for g in plain)], buffer, wide))
        parts = _split_like(mean, [*left, *plain])
        for gradient, part in zip(plain, parts[len(left) :], strict=True):
            gradient.copy_(part)
        if not matrices:
            return buffer
        left = [_orthogonal(part) for part in parts[: len(left)]]
        right = [matrix.T @ p for matrix, p in zip(matrices.values(), left, strict=True)]
        mean = yield from self._mean(_join(right, buffer, wide))
        right = _split_like(mean, right)
        for (name, matrix), p, q in zip(matrices.items(), left, right, strict=True):
            low_rank = p @ q.T
            _remember(name, matrix, low_rank, q.clone(), rank, memory)
            named[name].copy_(low_rank.view_as(named[name]))
        return buffer


def _join(tensors: Sequence[Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat([like.new_empty(0, dtype=dtype), *(t.flatten() for t in tensors)])


def _split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


# torch looks at annotations, and not at postponed ones.
def _hook(state, bucket):  # type: ignore[no-untyped-def]
    return state.reduce(bucket)


def apply_compression(
    ddp: DistributedDataParallel, how: str, group: dist.ProcessGroup, *, start_step: int = 0
) -> Compression:
    """Compress the gradients of `ddp` as the layout's `compress` field says; before any backward.

    `fp16`: each parameter's gradient, scaled by a power of two that its largest value on any rank
    gives (one small all-reduce a bucket), so that nothing overflows or vanishes in silence; what is
    infinite or no number stays so. `bf16`: cast only. `powersgd:r`: matrices in rank r with error
    feedback and warm start, from step `start_step` on (steps before it are not compressed);
    vectors, and matrices that would not become half as small, as they are. Returns the
    hook's state, which belongs in a checkpoint.
    """
    for name, parameter in ddp.module.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            raise UsageError(
                f"{name} is complex, and compress={how} is for real gradients; leave compress out"
            )
    state = Compression(ddp, how, group, start_step)
    ddp.register_comm_hook(state, _hook)
    return state


# On one process


def reference_compress(
    per_rank_gradients: list[dict[str, Tensor]],
    how: str,
    state: list[Memory],
    *,
    start_step: int = 0,
) -> dict[str, Tensor]:
    """What `apply_compression` makes of the gradients of n ranks, computed on one.

    `state` is `[]` before the first step and is carried from step to step.
    """
    method = Method.parse(how)
    if not state:
        state.extend(Memory() for _ in per_rank_gradients)
    is_plain = method.cast is None and state[0].num_steps < start_step
    result: dict[str, Tensor] = {}
    for name, first in per_rank_gradients[0].items():
        parts = [gradients[name].detach() for gradients in per_rank_gradients]
        if method.cast is torch.bfloat16:
            mean = _mean_in_order([part.to(torch.bfloat16) for part in parts])
        elif method.cast is torch.float16:
            scale = _scales(torch.stack([_largest([part])[0] for part in parts]).amax())
            mean = _mean_in_order(
                [(part.to(scale.dtype) * scale).to(torch.float16) for part in parts]
            )
            mean = mean.to(scale.dtype) / scale
        elif is_plain or not _is_compressed(first.shape, method.rank):
            wide = first.dtype if is_plain else _wide(first.dtype)
            mean = _mean_in_order([part.to(wide) for part in parts])
        else:
            mean = _reference_low_rank(name, parts, method.rank, state)
        result[name] = mean.to(first.dtype).view_as(first)
    for memory in state:
        memory.num_steps += 1
    return result


def _reference_low_rank(name: str, parts: list[Tensor], rank: int, state: list[Memory]) -> Tensor:
    matrices = [_as_matrix(part) for part in parts]
    for index, memory in enumerate(state):
        if name in memory.errors:
            matrices[index] = matrices[index] + memory.errors[name]
    q = state[0].q[name] if name in state[0].q else _first_q(name, matrices[0], rank)
    q = _orthogonal(q)
    p = _orthogonal(_mean_in_order([matrix @ q for matrix in matrices]))
    q = _mean_in_order([matrix.T @ p for matrix in matrices])
    low_rank = p @ q.T
    for matrix, memory in zip(matrices, state, strict=True):
        _remember(name, matrix, low_rank, q, rank, memory)
    return low_rank
