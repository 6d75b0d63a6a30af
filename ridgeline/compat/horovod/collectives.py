"""Horovod's collectives: by value or in place, at once or with a handle, with its averages and compression.

Averages of whole numbers are rounded down, as Horovod's are. What comes back from `allreduce`, `allgather`
and `broadcast` has gradients where the argument has. Names and priorities are taken and not needed: ranks
call these in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.compat.horovod.job import rank, size, the_group
from ridgeline.compat.horovod.ops import (
    Average,
    Compression,
    Handle,
    NoneCompressor,
    Op,
    Sum,
    check_set,
    choose_op,
    scale,
    times,
)
from ridgeline.errors import UsageError


def _reduce(
    tensors: Sequence[Tensor],
    outs: Sequence[Tensor] | None,
    op: Op,
    compression: type[NoneCompressor],
    before: float,
    after: float,
) -> Handle:
    """Into `outs`, or into new tensors."""
    group, sent, works = the_group(), [], []
    with torch.no_grad():
        for tensor in tensors:
            narrow, dtype = compression.compress(tensor.detach())
            own = narrow.clone(memory_format=torch.contiguous_format)
            sent.append((times(own, before), dtype))
        if group is not None:
            works = [dist.all_reduce(own, op.kind, group=group, async_op=True) for own, _ in sent]

    @torch.no_grad()
    def finish() -> list[Tensor]:
        done = [scale(compression.decompress(own, dtype), op, after) for own, dtype in sent]
        if outs is None:
            return done
        for out, value in zip(outs, done, strict=True):
            out.detach().copy_(value)
        return list(outs)

    return Handle(works, finish)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: Op, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.op, ctx.reduce = op, reduce
        return reduce(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.op not in (Average, Sum):
            raise UsageError(f"allreduce(op=hvd.{ctx.op.name}) has no gradient; use Average or Sum")
        return ctx.reduce(gradient), None, None


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[NoneCompressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Tensor:
    """The average (or what `op` says) over ranks, as a new tensor."""
    check_set(process_set)
    chosen = choose_op(op, average)

    def reduce(value: Tensor) -> Tensor:
        factors = (prescale_factor, postscale_factor)
        found: Tensor = _reduce([value], None, chosen, compression, *factors).wait()[0]
        return found

    if tensor.requires_grad and torch.is_grad_enabled():
        result: Tensor = _AllReduce.apply(tensor, chosen, reduce)  # type: ignore[no-untyped-call]
        return result
    return reduce(tensor)


def _only(handle: Handle) -> Handle:
    """Of a handle of one tensor, that tensor."""
    return Handle(handle.works, lambda: handle.wait()[0])


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    check_set(process_set)
    factors = (prescale_factor, postscale_factor)
    return _only(_reduce([tensor], None, choose_op(op, average), Compression.none, *factors))


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    check_set(process_set)
    factors = (prescale_factor, postscale_factor)
    return _only(_reduce([tensor], [tensor], choose_op(op, average), Compression.none, *factors))


def allreduce_(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """The same in place."""
    done: Tensor = allreduce_async_(tensor, *args, **options).wait()
    return done


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[NoneCompressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[Tensor]:
    check_set(process_set)
    factors = (prescale_factor, postscale_factor)
    done: list[Tensor] = _reduce(
        tensors, None, choose_op(op, average), compression, *factors
    ).wait()
    return done


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    process_set: Any = None,
) -> list[Tensor]:
    check_set(process_set)
    done: list[Tensor] = _reduce(
        tensors, tensors, choose_op(op, average), Compression.none, 1.0, 1.0
    ).wait()
    return done


def grouped_allreduce_async(tensors: Sequence[Tensor], *args: Any, **options: Any) -> Handle:
    done = grouped_allreduce(tensors, *args, **options)
    return Handle([], lambda: done)


def grouped_allreduce_async_(tensors: Sequence[Tensor], *args: Any, **options: Any) -> Handle:
    done = grouped_allreduce_(tensors, *args, **options)
    return Handle([], lambda: done)


# Tensors that differ in their first dim


def _gather(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """All ranks' rows, and how many each has."""
    rows = tensor.detach() if tensor.dim() else tensor.detach().view(1)
    group = the_group()
    if group is None:
        return rows.clone(), [len(rows)]
    counts = torch.zeros(size(), dtype=torch.int64, device=rows.device)
    counts[rank()] = len(rows)
    dist.all_reduce(counts, group=group)
    numbers = counts.tolist()
    padded = rows.new_zeros(max(numbers), *rows.shape[1:])
    padded[: len(rows)] = rows
    found = [torch.empty_like(padded) for _ in numbers]
    dist.all_gather(found, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(found, numbers, strict=True)]), numbers


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        gathered, numbers = _gather(tensor)
        ctx.start, ctx.shape = sum(numbers[: rank()]), tensor.shape
        ctx.count = numbers[rank()]
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total: Tensor = _reduce([gradient], None, Sum, Compression.none, 1.0, 1.0).wait()[0]
        return total[ctx.start : ctx.start + ctx.count].reshape(ctx.shape)


def allgather(tensor: Tensor, name: str | None = None, process_set: Any = None) -> Tensor:
    """All ranks' rows one after the other; ranks may have different numbers of them."""
    check_set(process_set)
    gathered: Tensor = _AllGather.apply(tensor)  # type: ignore[no-untyped-call]
    return gathered


def allgather_async(tensor: Tensor, name: str | None = None, process_set: Any = None) -> Handle:
    """Done when it returns: the numbers of rows have to be known first."""
    check_set(process_set)
    gathered = _gather(tensor)[0]
    return Handle([], lambda: gathered)


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> Any:
    """Rows to each rank, as many as `splits` says, else as many to each; with `splits` also how many came
    from each."""
    check_set(process_set)
    group, count = the_group(), size()
    if splits is None:
        if len(tensor) % count:
            raise UsageError(
                f"alltoall of {len(tensor)} rows over {count} ranks; give splits=, or rows that divide"
            )
        sent = [len(tensor) // count] * count
    else:
        sent = [int(n) for n in splits]
        if len(sent) != count or sum(sent) != len(tensor):
            raise UsageError(
                f"alltoall(splits={sent}) of {len(tensor)} rows over {count} ranks; give a number for each "
                "rank, and all rows"
            )
    numbers = torch.tensor(sent, device=tensor.device)
    came = numbers.clone()
    if group is not None:
        dist.all_to_all_single(came, numbers, group=group)
    received = tensor.new_empty(int(came.sum()), *tensor.shape[1:])
    if group is None:
        received.copy_(tensor)
    else:
        dist.all_to_all_single(received, tensor.contiguous(), came.tolist(), sent, group=group)
    return received if splits is None else (received, came.cpu())


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[NoneCompressor] = Compression.none,
    op: Op = Average,
    process_set: Any = None,
) -> Tensor:
    """This rank's rows of the average; where they do not divide the first ranks have one more."""
    check_set(process_set)
    whole = allreduce(tensor, compression=compression, op=op)
    each, more = divmod(len(whole), size())
    start = rank() * each + min(rank(), more)
    return whole[start : start + each + (rank() < more)].clone()


def alltoall_async(tensor: Tensor, *args: Any, **options: Any) -> Handle:
    """Done when it returns, as the next."""
    received = alltoall(tensor, *args, **options)
    return Handle([], lambda: received)


def reducescatter_async(tensor: Tensor, *args: Any, **options: Any) -> Handle:
    mine = reducescatter(tensor, *args, **options)
    return Handle([], lambda: mine)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: Any = None
) -> list[Tensor]:
    return [allgather(tensor, name, process_set) for tensor in tensors]


# From one to all


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int) -> Tensor:
        ctx.root_rank = root_rank
        out = tensor.detach().clone()
        _send(out, root_rank)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total: Tensor = _reduce([gradient], None, Sum, Compression.none, 1.0, 1.0).wait()[0]
        return total if rank() == ctx.root_rank else torch.zeros_like(total), None


def _send(tensor: Tensor, root_rank: int, asynchronous: bool = False) -> dist.Work | None:
    if not 0 <= root_rank < size():
        raise UsageError(f"root_rank={root_rank} of {size()} ranks; use 0 to {size() - 1}")
    group = the_group()
    if group is None:
        return None
    work: dist.Work | None = dist.broadcast(
        tensor, group_src=root_rank, group=group, async_op=asynchronous
    )
    return work


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> Tensor:
    """What `root_rank` has, as a new tensor."""
    check_set(process_set)
    out: Tensor = _Broadcast.apply(tensor, root_rank)  # type: ignore[no-untyped-call]
    return out


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> Handle:
    check_set(process_set)
    values = tensor.detach()
    sent = values.contiguous()
    work = _send(sent, root_rank, asynchronous=True)

    def finish() -> Tensor:
        if sent is not values:
            values.copy_(sent)
        return tensor

    return Handle([work] if work is not None else [], finish)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> Handle:
    check_set(process_set)
    return broadcast_async_(tensor.detach().clone(), root_rank)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> Tensor:
    check_set(process_set)
    done: Tensor = broadcast_async_(tensor, root_rank).wait()
    return done


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: Any = None
) -> Any:
    """Anything that can be pickled, from `root_rank`."""
    check_set(process_set)
    group, box = the_group(), [obj]
    if group is not None:
        dist.broadcast_object_list(box, group_src=root_rank, group=group)
    return box[0]


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    check_set(process_set)
    group, found = the_group(), [obj] * size()
    if group is not None:
        dist.all_gather_object(found, obj, group=group)
    return found


def barrier(process_set: Any = None) -> None:
    check_set(process_set)
    group = the_group()
    if group is not None:
        dist.barrier(group=group)
