"""`hvd.DistributedOptimizer`: an optimizer whose step waits for gradients averaged over ranks.

Gradients are put together into buckets of one type, in the order in which backward usually reaches them,
and each bucket is sent off as soon as it is complete and those before it are: in one order on all ranks,
whatever a rank's graph looks like, over a group of the optimizer's own, so that what the script sends
meanwhile does not come in between. What had no gradient counts as zero.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.compat.horovod.job import the_group
from ridgeline.compat.horovod.ops import (
    Average,
    Compression,
    NoneCompressor,
    Op,
    check_set,
    choose_op,
    scale,
)
from ridgeline.errors import UsageError

_BUCKET_BYTES = 25 * 2**20


@dataclass
class _Flight:
    """A bucket on its way."""

    parameters: list[nn.Parameter]
    sent: Tensor
    dtype: torch.dtype
    work: dist.Work | None


class Reducer:
    """Averages the gradients of some parameters, while backward goes on."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        compression: type[NoneCompressor],
        passes: int,
        op: Op,
        predivide: float,
    ) -> None:
        self._compression, self._op, self._predivide = compression, op, predivide
        self.passes = passes
        # One device a thread in backward.
        self._lock = threading.Lock()
        is_alone = the_group() is None
        self._group = None if is_alone else dist.new_group()
        # Alone gradients are as they are.
        self._buckets = [] if is_alone else list(_fill(parameters))
        self._left: dict[int, int] = {}
        self._flights: list[_Flight] = []
        self.begin()
        reference = weakref.ref(self)  # a hook outlives what it belongs to

        def arrived(parameter: Tensor) -> None:
            reducer = reference()
            if reducer is not None:
                reducer._arrived(parameter)

        for bucket in self._buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(arrived)

    @property
    def is_under_way(self) -> bool:
        return bool(self._flights)

    def begin(self) -> None:
        self._left = {id(p): self.passes for bucket in self._buckets for p in bucket}

    def _arrived(self, parameter: Tensor) -> None:
        with self._lock:
            self._count(parameter)

    def _count(self, parameter: Tensor) -> None:
        if self._left[id(parameter)] <= 0:
            raise UsageError(
                f"backward ran more than {self.passes} times before a step of hvd.DistributedOptimizer; "
                "give backward_passes_per_step= as many as there are, or step in between"
            )
        self._left[id(parameter)] -= 1
        while len(self._flights) < len(self._buckets):
            bucket = self._buckets[len(self._flights)]
            if any(self._left[id(p)] for p in bucket):
                return
            self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: list[nn.Parameter]) -> None:
        parts = [_dense(p).reshape(-1) for p in bucket]
        sent, dtype = self._compression.compress(torch.cat(parts))
        if self._op is Average and self._predivide != 1.0:
            sent = sent.div(self._predivide)
        work = dist.all_reduce(sent, self._op.kind, group=self._group, async_op=True)
        self._flights.append(_Flight(bucket, sent, dtype, work))

    @torch.no_grad()
    def finish(self) -> None:
        """Every gradient is that of all ranks."""
        while len(self._flights) < len(self._buckets):
            self._send(self._buckets[len(self._flights)])
        factor = self._predivide if self._op is Average else 1.0
        for flight in self._flights:
            if flight.work is not None:
                flight.work.wait()
            whole = scale(self._compression.decompress(flight.sent, flight.dtype), self._op, factor)
            parts = whole.split([p.numel() for p in flight.parameters])
            for parameter, part in zip(flight.parameters, parts, strict=True):
                if parameter.grad is None or parameter.grad.is_sparse:
                    parameter.grad = part.view_as(parameter).clone()
                else:
                    parameter.grad.copy_(part.view_as(parameter))
        self._flights.clear()
        self.begin()


def _fill(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    filled = 0
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        num_bytes = parameter.numel() * parameter.element_size()
        alike = bucket and (bucket[0].dtype, bucket[0].device) == kind
        if bucket and (not alike or filled + num_bytes > _BUCKET_BYTES):
            yield bucket
            bucket, filled = [], 0
        bucket.append(parameter)
        filled += num_bytes
    if bucket:
        yield bucket


def _dense(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient


class _Distributed:
    """What is put before the class of an optimizer."""

    _reducer: Reducer
    _is_synchronized: bool
    _waits: bool

    def synchronize(self) -> None:
        """Wait for all gradients, to clip them say; then `with optimizer.skip_synchronize():` and step."""
        self._reducer.finish()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self._waits = False
        try:
            yield
        finally:
            self._waits = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        waits, self._is_synchronized = self._waits and not self._is_synchronized, False
        if closure is None:
            if waits:
                self._reducer.finish()
            return super().step()  # type: ignore[misc]

        def whole() -> Any:
            """What backward in it leaves is averaged before it is used."""
            loss = closure()
            self._reducer.finish()
            return loss

        return super().step(whole)  # type: ignore[misc]

    # Torch wraps a class's step for its hooks once; the class below this one has that.
    step.hooked = True  # type: ignore[attr-defined]

    def set_backward_passes_per_step(self, passes: int) -> None:
        self._reducer.passes = passes
        self._reducer.begin()

    def load_state_dict(self, state: Any) -> None:
        self._is_synchronized = False
        super().load_state_dict(state)  # type: ignore[misc]

    def add_param_group(self, group: Any) -> None:
        raise UsageError(
            "optimizer.add_param_group() after hvd.DistributedOptimizer would leave its parameters out of "
            "the average; add them before"
        )

    def zero_grad(self, *args: Any, **options: Any) -> None:
        if self._reducer.is_under_way:
            raise UsageError(
                "optimizer.zero_grad() between backward and step() would change gradients on their way; "
                "call it before backward, or after step()"
            )
        super().zero_grad(*args, **options)  # type: ignore[misc]


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: type[NoneCompressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> Any:
    """The optimizer itself, of a class that steps with the gradients of all ranks.

    Buckets are chosen here, so `num_groups` and `groups` are taken and not needed; so is
    `sparse_as_dense`: sparse gradients are made dense.
    """
    if isinstance(optimizer, _Distributed):
        raise UsageError("hvd.DistributedOptimizer was given one; give it torch's optimizer, once")
    if backward_passes_per_step < 1:
        raise UsageError(f"backward_passes_per_step={backward_passes_per_step}; use 1 or more")
    check_set(process_set)
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise UsageError(
            f"gradient_predivide_factor={gradient_predivide_factor} goes with op=hvd.Average; leave it out"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            "hvd.DistributedOptimizer makes sparse gradients dense, and SparseAdam takes none; use Adam"
        )
    held = [p for group in optimizer.param_groups for p in group["params"]]
    names = dict(named_parameters) if named_parameters is not None else {}
    known = {id(p) for p in names.values()}
    missing = [p for p in held if id(p) not in known]
    if names and missing:
        raise UsageError(
            f"named_parameters names {len(held) - len(missing)} of the optimizer's {len(held)} parameters; "
            "give model.named_parameters(), or leave it out"
        )
    chosen = choose_op(op, None)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {})
    changed: Any = optimizer
    changed.__dict__.pop("step", None)  # a scheduler's wrapper, which would call the class before
    changed._reducer = Reducer(
        [p for p in held if p.requires_grad],
        compression,
        backward_passes_per_step,
        chosen,
        gradient_predivide_factor,
    )
    changed._is_synchronized, changed._waits = False, True
    return changed
