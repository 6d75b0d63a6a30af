"""Where parameters lie in flat memory, so that equal shares of it can be given to several ranks.

Parameters go into buckets in about the order in which backward reaches them, a bucket is padded so
that its ranks can each have an equal slice of it, and a parameter is a view of its bucket in its own
shape and strides (channels-last stays so, a complex one is a view of its real numbers). A rank's shard
is its slice of every bucket, hence one reduce-scatter and one all-gather a bucket and no copies.
Called by `zero.py`; `broadcast_module` also by `fsdp.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from ridgeline.errors import UsageError

ALIGN_BYTES = 128
"""Every parameter and every slice starts at a multiple of it, as fast kernels and collectives want."""


@dataclass(frozen=True)
class Kind:
    """What the parameters of one flat buffer have in common."""

    dtype: torch.dtype
    """Of the weights that the module computes with, and of their gradients."""
    master: torch.dtype
    """Of the values that the optimizer updates; other than `dtype` in mixed precision."""
    mixed: bool
    device: torch.device


@dataclass(frozen=True, eq=False)
class Slot:
    """Where one parameter lies in its bucket, counted in real numbers."""

    index: int
    """Of the parameter among the trainable ones of the module, in their order."""
    name: str
    parameter: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    numel: int

    def view(self, bucket: Tensor) -> Tensor:
        """The parameter's part of a bucket, in its shape and strides."""
        part = bucket[self.offset : self.offset + self.numel]
        if self.parameter.is_complex():
            part = torch.view_as_complex(part.view(-1, 2))
        return part.as_strided(self.shape, self.stride)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters that are reduced and gathered together: `size` elements from `start` of the flat."""

    number: int
    kind: Kind
    slots: tuple[Slot, ...]
    start: int
    size: int
    num_shards: int

    @property
    def shard_size(self) -> int:
        return self.size // self.num_shards

    def of(self, flat: Tensor) -> Tensor:
        """This bucket in the flat buffer of its kind."""
        return flat[self.start : self.start + self.size]

    def slice_of(self, bucket: Tensor, rank: int) -> Tensor:
        """The part of this bucket that `rank` owns."""
        return bucket[rank * self.shard_size : (rank + 1) * self.shard_size]

    def of_shard(self, shard: Tensor) -> Tensor:
        """This bucket's part of a rank's shard, which is its slices of all buckets in order."""
        start = self.start // self.num_shards
        return shard[start : start + self.shard_size]


@dataclass(frozen=True)
class Piece:
    """What a rank's optimizer updates of one parameter: elements `start` to `stop` in memory order."""

    name: str
    parameter: nn.Parameter
    """One-dimensional, a view of the rank's shard."""
    original_shape: torch.Size
    start: int
    stop: int
    original_stride: tuple[int, ...] = ()
    """The order in which the elements lie in memory; other than contiguous for channels-last."""
    is_complex: bool = False
    """Whether `start` and `stop` count the real numbers of complex elements."""


def plan_buckets(
    module: nn.Module,
    compute_dtype: torch.dtype | None,
    num_shards: int,
    bucket_bytes: float,
    spared: frozenset[str] = frozenset(),
) -> list[Bucket]:
    """Buckets over the trainable parameters of `module` but `spared`, in about the order of backward."""
    slots: dict[Kind, list[tuple[int, str, nn.Parameter]]] = {}
    filling: dict[Kind, int] = {}
    done: list[tuple[Kind, list[tuple[int, str, nn.Parameter]]]] = []
    wide = _norm_parameters(module)
    named = [(n, p) for n, p in module.named_parameters() if n not in spared]
    trainable = [(n, p) for n, p in named if p.requires_grad]
    for index, (name, parameter) in reversed(list(enumerate(trainable))):
        _require_plain(name, parameter)
        kind = _kind(parameter, None if parameter in wide else compute_dtype)
        num_bytes = _real_numel(parameter) * kind.dtype.itemsize
        # A large one is alone in its bucket, so that its gradient need not be copied into it.
        if slots.get(kind) and filling[kind] + num_bytes > bucket_bytes:
            done.append((kind, slots.pop(kind)))
        if not slots.setdefault(kind, []):
            filling[kind] = 0
        slots[kind].append((index, name, parameter))
        filling[kind] += num_bytes
    done.extend(slots.items())
    # By the parameter whose gradient comes last.
    done.sort(key=lambda entry: -entry[1][-1][0])
    starts: dict[Kind, int] = {}
    buckets = []
    for kind, members in done:
        bucket = _lay_out(len(buckets), kind, members, starts.get(kind, 0), num_shards)
        starts[kind] = bucket.start + bucket.size
        buckets.append(bucket)
    return buckets


def _lay_out(
    number: int,
    kind: Kind,
    members: list[tuple[int, str, nn.Parameter]],
    start: int,
    num_shards: int,
) -> Bucket:
    align = ALIGN_BYTES // kind.dtype.itemsize
    slots, offset = [], 0
    for index, name, parameter in members:
        numel = _real_numel(parameter)
        stride = _dense_stride(parameter)
        slots.append(Slot(index, name, parameter, parameter.shape, stride, offset, numel))
        offset += -(-numel // align) * align
    whole = align * num_shards
    return Bucket(number, kind, tuple(slots), start, -(-offset // whole) * whole, num_shards)


def _kind(parameter: nn.Parameter, compute_dtype: torch.dtype | None) -> Kind:
    if parameter.is_complex():  # there is no complex bf16
        real = parameter.dtype.to_real()
        return Kind(real, real, False, parameter.device)
    if compute_dtype is None:
        return Kind(parameter.dtype, parameter.dtype, False, parameter.device)
    master = torch.promote_types(parameter.dtype, torch.float32)
    return Kind(compute_dtype, master, compute_dtype != master, parameter.device)


def _real_numel(parameter: Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _dense_stride(parameter: Tensor) -> tuple[int, ...]:
    """Its own strides if they cover a block of memory without holes, else contiguous ones."""
    strided = torch.empty_like(parameter, device="meta")  # keeps strides exactly in that case
    return strided.stride() if strided.stride() == parameter.stride() else _contiguous(parameter)


def _contiguous(parameter: Tensor) -> tuple[int, ...]:
    return torch.empty(parameter.shape, device="meta").stride()


def _require_plain(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise UsageError(
            f"{name} is a DTensor, and zero=1 and zero=2 shard plain local tensors; give each rank "
            "the local parameter, or use zero=3"
        )
    if parameter.is_meta:
        raise UsageError(
            f"{name} is on the meta device and has no values to shard; initialize the model on its "
            "device before it is sharded"
        )


class _Identities:
    """A set of parameters by identity, as `in` on a set of tensors compares their elements."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._ids = {id(p) for p in parameters}

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._ids


def _norm_parameters(module: nn.Module) -> _Identities:
    """They stay in their own type: batch norm wants them in that of its running statistics, and the others
    no narrower than what comes in, which from another stage of a pipeline is as wide as on one device."""
    kinds = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)
    norms = [m for m in module.modules() if isinstance(m, kinds)]
    return _Identities(p for norm in norms for p in norm.parameters(recurse=False))


@torch.no_grad()
def broadcast_module(
    module: nn.Module,
    groups: Sequence[dist.ProcessGroup | None],
    spared: frozenset[str] = frozenset(),
) -> None:
    """Give every rank the parameters and buffers of the first one, but for the parameters `spared`.

    `groups` are those of this rank along each axis; after the last every rank has what the rank has
    that is first along all of them.
    """
    groups = [g for g in groups if g is not None and dist.get_world_size(g) > 1]
    parameters = [p for name, p in module.named_parameters() if name not in spared]
    for tensor in [*parameters, *module.buffers()]:
        if _shares_memory(tensor) or isinstance(tensor, DTensor) or tensor.is_meta:
            continue  # an expanded buffer is a view of a constant, and the same anyway
        values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        sent = values.contiguous()
        for group in groups:
            dist.broadcast(sent, group_src=0, group=group)
        if sent is not values:
            values.copy_(sent)


def _shares_memory(tensor: Tensor) -> bool:
    """Whether several elements of it are one in memory."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)
