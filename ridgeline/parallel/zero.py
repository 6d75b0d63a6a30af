"""ZeRO stages 1 and 2: ranks that hold the same weights share out the optimizer's work on them.

Written by hand because no torch piece holds what the stages promise. In mixed precision with Adam that
is, in bytes a parameter and with d ranks, 4 + 12/d for stage 1 (weights and gradients in 2 bytes each;
master weights and two moments, 12 bytes, sharded) and 2 + 14/d for stage 2 (gradients sharded as
well); `ZeroRedundancyOptimizer` keeps no master weights and full gradients, `fully_shard` shards the
weights too, which is stage 3 (`fsdp.py`). The memory is counted where a step is largest, at the end of
backward. Gradients are averaged over the ranks as DDP does. Called by `apply.py`; the optimizer is
made over `pieces`.

    zero = FlatZero(model, 2, group, None, torch.bfloat16)
    optimizer = AdamW([piece.parameter for piece in zero.pieces])
    loss.backward(); zero.finish_gradients(); optimizer.step(); zero.after_step()
    zero.clear_gradients()
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.errors import UsageError
from ridgeline.parallel.flat import (
    Bucket,
    Kind,
    Piece,
    Slot,
    broadcast_module,
    plan_buckets,
)
from ridgeline.parallel.mesh import all_gather_single
from ridgeline.parallel.offload import build_host_buffer
from ridgeline.parallel.zero_reduce import Flights, Rounds, to_dense

_BYTES_PER_MB = 2**20


@dataclass
class _Store:
    """The memory of one kind of parameter on this rank."""

    weights: Tensor
    """All of them; the module's parameters are views of it."""
    master: Tensor | None
    """This rank's shard in the optimizer's type or on the host; None where it is a slice of `weights`."""
    gradients: Tensor | None = None
    """Stage 1: of all parameters, in their type. Stage 2: of the shard, in the weights' type."""
    reduced: Tensor | None = None
    """Between `finish_gradients` and `clear_gradients`: of the shard, in the optimizer's type."""


class FlatZero:
    """Shards optimizer state (stage 1) and gradients (stage 2) of a module among `shard_group`.

    `copies_group` are the ranks that hold the same shard, whose gradients are averaged in as well.
    With `compute_dtype` weights and gradients are of that type and the optimizer updates a float32
    copy of this rank's shard; batch-norm parameters stay as they are. `offload_optimizer` keeps that
    shard, and so the optimizer's state and work, on the host. None for a group means this rank alone.

    Every backward of stage 2 reduces every bucket once, so the ranks have to run equally many. After
    it the module's parameters have no `.grad`. A module of which a backward reaches only a part (the
    stages that a pipeline rank holds) is better given part by part, each to a `FlatZero` of its own;
    `spared` names what this one leaves to another. `summed` says of how many ranks a gradient is a sum
    already when it comes, as that of an expert to which they all send their tokens.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        shard_group: dist.ProcessGroup | None,
        copies_group: dist.ProcessGroup | None,
        compute_dtype: torch.dtype | None,
        bucket_mb: float = 25.0,
        offload_optimizer: bool = False,
        spared: frozenset[str] = frozenset(),
        summed: int = 1,
    ) -> None:
        if stage not in (1, 2):
            raise UsageError(f"zero={stage} is not a stage of FlatZero; use 1 or 2")
        self.module, self.stage, self.offload = module, stage, offload_optimizer
        self._spared, self._summed = spared, summed
        self._group = _several(shard_group)
        self._copies = _several(copies_group)
        self.num_shards = 1 if self._group is None else dist.get_world_size(self._group)
        self.rank = 0 if self._group is None else dist.get_rank(self._group)
        self._buckets = plan_buckets(
            module, compute_dtype, self.num_shards, bucket_mb * _BYTES_PER_MB, spared
        )
        if not self._buckets and not spared:
            raise UsageError(
                f"{type(module).__name__} has no trainable parameter, so zero={stage} has nothing to "
                "shard; leave zero out"
            )
        broadcast_module(module, [self._group, self._copies], spared)
        self._stores = self._pack()
        self.pieces = self._cut_pieces()
        self._flights = Flights(self._group, self._copies, self._landed)
        self._rounds = Rounds(self._buckets, self._flights)
        self._unused: set[str] = set()
        self._fresh = set(range(len(self._buckets)))
        """Buckets whose gradient begins anew with the next that lands."""
        for bucket in self._buckets:
            for place in range(len(bucket.slots)):
                self._watch(bucket.number, place)

    @property
    def names(self) -> list[str]:
        """Of the parameters that it looks after, also those of which this rank has no piece."""
        return [slot.name for bucket in self._buckets for slot in bucket.slots]

    # Construction

    @torch.no_grad()
    def _pack(self) -> dict[Kind, _Store]:
        sizes: dict[Kind, int] = {}
        for bucket in self._buckets:
            sizes[bucket.kind] = bucket.start + bucket.size
        stores = {}
        for kind, size in sizes.items():
            weights = torch.zeros(size, dtype=kind.dtype, device=kind.device)
            master = None
            if self.offload:
                master = build_host_buffer(size // self.num_shards, kind.master, kind.device)
            elif kind.mixed:
                master = torch.zeros(size // self.num_shards, dtype=kind.master, device=kind.device)
            stores[kind] = _Store(weights, master)
        for bucket in self._buckets:
            store = stores[bucket.kind]
            if store.master is not None:
                # Before the weights lose digits; a bucket in full is the most that exists twice.
                full = torch.zeros(bucket.size, dtype=bucket.kind.master, device=bucket.kind.device)
                for slot in bucket.slots:
                    slot.view(full).copy_(slot.parameter)
                bucket.of_shard(store.master).copy_(bucket.slice_of(full, self.rank))
            for slot in bucket.slots:
                view = slot.view(bucket.of(store.weights))
                view.copy_(slot.parameter)
                slot.parameter.data = view
        return stores

    def _cut_pieces(self) -> list[Piece]:
        found: list[tuple[int, Piece]] = []
        for bucket in self._buckets:
            values = self._master_slice(bucket)
            first = self.rank * bucket.shard_size
            for slot in bucket.slots:
                start = max(slot.offset, first)
                stop = min(slot.offset + slot.numel, first + bucket.shard_size)
                if start < stop:
                    part = values[start - first : stop - first]
                    found.append((slot.index, _piece(slot, part, start - slot.offset)))
        if not found and self._buckets:
            # A rank whose slices are all padding; torch's optimizers want at least one parameter.
            slot = self._buckets[0].slots[0]
            found.append((0, _piece(slot, self._master_slice(self._buckets[0])[:0], 0)))
        return [piece for _, piece in sorted(found, key=lambda entry: entry[0])]

    def _watch(self, number: int, place: int) -> None:
        # Python's collector does not see what a hook holds: one that held this object, or the
        # parameter, would keep both and all their memory for ever.
        reference = weakref.ref(self)

        def arrived(_: Tensor) -> None:
            zero = reference()
            if zero is None:
                return
            bucket = zero._buckets[number]
            if zero.stage == 1:
                zero._keep(bucket, bucket.slots[place])
            else:
                zero._rounds.arrived(bucket, bucket.slots[place])

        parameter = self._buckets[number].slots[place].parameter
        parameter.register_post_accumulate_grad_hook(arrived)

    def _master_slice(self, bucket: Bucket) -> Tensor:
        """This rank's slice of a bucket, as the optimizer updates it."""
        store = self._stores[bucket.kind]
        if store.master is None:
            return bucket.slice_of(bucket.of(store.weights), self.rank)
        return bucket.of_shard(store.master)

    # Gradients

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """After the last backward of a step: every piece's `.grad` is the average over all ranks.

        A parameter without a gradient counts as zero where others have one; where nobody has, its
        pieces have None, and the optimizer leaves it alone as it would on one device.
        """
        if not self._buckets:
            return  # another has all of it
        if self.stage == 1:
            used = self._reduce_all()
        else:
            if self._rounds.num_done == 0 or self._rounds.is_left():
                self._rounds.end()
            used = self._rounds.used
        self._unused = self._find_unused(used)
        self._hand_over()
        self._fresh = set(range(len(self._buckets)))
        self._rounds.begin()

    def gradient_versions(self) -> list[int]:
        """Of what microbatches have left, numbers that change with it."""
        found = (store.gradients for store in self._stores.values())
        return [gradients._version for gradients in found if gradients is not None]

    def clear_gradients(self) -> None:
        """Forget all gradients, also those of a step that was not finished."""
        self._rounds.reset()
        for bucket in self._buckets:
            for slot in bucket.slots:
                slot.parameter.grad = None
        for piece in self.pieces:
            piece.parameter.grad = None
        for store in self._stores.values():
            if not self.offload:
                store.reduced = None
            if self.stage == 2:
                store.gradients = None
        self._fresh = set(range(len(self._buckets)))

    def _keep(self, bucket: Bucket, slot: Slot) -> Tensor:
        """Stage 1: bring a parameter's gradient into the flat buffer, where the next ones add up."""
        store = self._stores[bucket.kind]
        if store.gradients is None:
            store.gradients = torch.zeros_like(store.weights)
        view, gradient = slot.view(bucket.of(store.gradients)), slot.parameter.grad
        if gradient is None:  # unused, or set to None by the user: the buffer holds an older one
            view.zero_()
        elif (gradient := to_dense(gradient)).data_ptr() != view.data_ptr():
            view.copy_(gradient)
        slot.parameter.grad = view
        return view

    def _reduce_all(self) -> set[int]:
        """Stage 1: average everything; returns which parameters had a gradient here."""
        used = set()
        for bucket in self._buckets:
            for slot in bucket.slots:
                if slot.parameter.grad is not None:
                    used.add(slot.index)
                self._keep(bucket, slot)
                slot.parameter.grad = None
            gradients = self._stores[bucket.kind].gradients
            assert gradients is not None
            self._flights.start(bucket, bucket.of(gradients))
        self._flights.land_all()
        return used

    def _find_unused(self, used: set[int]) -> set[str]:
        """Names of the parameters that had no gradient on any rank."""
        slots = [slot for bucket in self._buckets for slot in bucket.slots]
        device, num = self._buckets[0].kind.device, len(slots)
        if len(used) == num:
            # The usual case, in which the host neither copies anything nor waits for the answer.
            flags = torch.ones(num, dtype=torch.int32, device=device)
        else:
            flags = torch.zeros(num, dtype=torch.int32)
            flags[list(used)] = 1
            flags = flags.to(device)
        for group in (self._group, self._copies):
            if group is not None:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        if len(used) == num:
            return set()
        anywhere = flags.tolist()
        return {slot.name for slot in slots if not anywhere[slot.index]}

    def _landed(self, bucket: Bucket, result: Tensor) -> None:
        """The average of a bucket is there; in stage 1 it is in its place already."""
        if self._summed > 1:
            result.div_(self._summed)
        if self.stage == 1:
            return
        store = self._stores[bucket.kind]
        if store.gradients is None:
            store.gradients = store.weights.new_zeros(len(store.weights) // self.num_shards)
        part = bucket.of_shard(store.gradients)
        if bucket.number in self._fresh:
            part.copy_(result)
            self._fresh.discard(bucket.number)
        else:
            part.add_(result)

    def _hand_over(self) -> None:
        """Point every piece's `.grad` to its part of the reduced gradients, in the piece's type."""
        for kind, store in self._stores.items():
            if self.offload or kind.mixed:
                self._convert(kind, store)
            if self.offload and kind.device.type == "cuda":
                torch.cuda.current_stream(kind.device).synchronize()  # the host will read them
        pieces = {piece.name: piece for piece in self.pieces}
        for bucket in self._buckets:
            first, values = self.rank * bucket.shard_size, self._gradient_slice(bucket)
            for slot in bucket.slots:
                piece = pieces.get(slot.name)
                if piece is None:
                    continue
                start = max(0, slot.offset + piece.start - first)
                part = values[start : start + piece.stop - piece.start]
                piece.parameter.grad = None if slot.name in self._unused else part

    def _convert(self, kind: Kind, store: _Store) -> None:
        """The shard's gradients in the optimizer's type and place."""
        buckets = [bucket for bucket in self._buckets if bucket.kind == kind]
        size = len(store.weights) // self.num_shards
        gradients = store.gradients
        assert gradients is not None
        if self.offload:
            if store.reduced is None:
                store.reduced = build_host_buffer(size, kind.master, kind.device)
            for bucket in buckets:
                # Converted on this side: a copy that changes type does not run beside others.
                values = self._weight_gradient_slice(bucket).to(kind.master)
                bucket.of_shard(store.reduced).copy_(values, non_blocking=True)
        elif self.stage == 2:
            store.reduced = gradients.to(kind.master)
        elif size * kind.master.itemsize <= gradients.nbytes:
            # What the others own in the buffer of stage 1 is not needed any more: no new memory.
            values = torch.cat([self._weight_gradient_slice(bucket) for bucket in buckets])
            store.reduced = gradients.view(kind.master)[:size].copy_(values)
        else:
            values = torch.cat([self._weight_gradient_slice(bucket) for bucket in buckets])
            store.reduced = values.to(kind.master)
        if self.stage == 2:
            store.gradients = None

    def _weight_gradient_slice(self, bucket: Bucket) -> Tensor:
        """This rank's part of a bucket's reduced gradient, in the weights' type."""
        gradients = self._stores[bucket.kind].gradients
        assert gradients is not None
        if self.stage == 2:
            return bucket.of_shard(gradients)
        return bucket.slice_of(bucket.of(gradients), self.rank)

    def _gradient_slice(self, bucket: Bucket) -> Tensor:
        """The same as the optimizer sees it."""
        reduced = self._stores[bucket.kind].reduced
        return self._weight_gradient_slice(bucket) if reduced is None else bucket.of_shard(reduced)

    # Weights

    @torch.no_grad()
    def after_step(self) -> None:
        """After the optimizer's step: every rank gets the weights that the others have updated."""
        works = []
        for bucket in reversed(self._buckets):  # in the order in which forward wants them
            store = self._stores[bucket.kind]
            full = bucket.of(store.weights)
            mine = bucket.slice_of(full, self.rank)
            if store.master is not None:
                values = bucket.of_shard(store.master)
                mine.copy_(values.to(bucket.kind.device, non_blocking=True))
            if self._group is not None:
                works.append(all_gather_single(full, mine, group=self._group, async_op=True))
        for work in works:
            work.wait()

    @torch.no_grad()
    def after_load(self) -> None:
        """After new values were written into the module's parameters: the optimizer's copy follows. Where
        it is wider, and rounds to what is there, it keeps its digits."""
        for bucket in self._buckets:
            store = self._stores[bucket.kind]
            if store.master is not None:
                values = bucket.of_shard(store.master)
                mine = bucket.slice_of(bucket.of(store.weights), self.rank).to(values.device)
                values.copy_(
                    torch.where(values.to(mine.dtype) == mine, values, mine.to(values.dtype))
                )

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer has copies of its own of the weights."""
        return any(store.master is not None for store in self._stores.values())

    # Looking at it

    def tensors(self) -> dict[str, list[Tensor]]:
        """What this rank holds of weights, gradients and master weights; several may share memory."""
        stores = list(self._stores.values())
        named = self.module.named_parameters()
        parameters = [p for name, p in named if name not in self._spared]
        parts: dict[str, list[Tensor | None]] = {
            "weights": [*parameters, *[store.weights for store in stores]],
            "gradients": [p.grad for p in parameters]
            + [piece.parameter.grad for piece in self.pieces]
            + [tensor for store in stores for tensor in (store.gradients, store.reduced)],
            "optimizer": [store.master for store in stores]
            + [piece.parameter for piece in self.pieces],
        }
        return {name: [t for t in found if t is not None] for name, found in parts.items()}

    def held_bytes(self, optimizer: Optimizer | None = None) -> dict[str, int]:
        """Bytes of this rank in weights, gradients, optimizer state (with the master weights), and,
        with `offload_optimizer`, what of these is on the host."""
        stores = list(self._stores.values())
        parts = self.tensors()
        for state in optimizer.state.values() if optimizer is not None else ():
            parts["optimizer"] += [value for value in state.values() if isinstance(value, Tensor)]
        seen: set[int] = set()
        held = dict.fromkeys([*parts, "host"], 0)
        away = (
            _storages(t for s in stores for t in (s.master, s.reduced)) if self.offload else set()
        )
        for place, tensors in parts.items():
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    is_away = (self.offload and place == "optimizer") or storage.data_ptr() in away
                    held["host" if is_away else place] += storage.nbytes()
        return held

    @torch.no_grad()
    def full_gradients(self) -> dict[str, Tensor]:
        """Averaged gradients in full by parameter name, without those that no rank has, between
        `finish_gradients` and `clear_gradients`; every rank has to call it."""
        full = self._gather(self._gradient_slice)
        return {name: value for name, value in full.items() if name not in self._unused}

    @torch.no_grad()
    def full_weights(self) -> dict[str, Tensor]:
        """Weights in full by parameter name, as the optimizer has them; every rank has to call it."""
        return self._gather(self._master_slice)

    def _gather(self, slice_of: Callable[[Bucket], Tensor]) -> dict[str, Tensor]:
        found: dict[int, tuple[str, Tensor]] = {}
        for bucket in self._buckets:
            mine = slice_of(bucket).to(bucket.kind.device)
            full = mine.clone()
            if self._group is not None:
                full = mine.new_empty(bucket.size)
                all_gather_single(full, mine.contiguous(), group=self._group)
            for slot in bucket.slots:
                found[slot.index] = (slot.name, slot.view(full))
        return dict(found[index] for index in sorted(found))


def _storages(tensors: Iterable[Tensor | None]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if t is not None}


def _several(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return group if group is not None and dist.get_world_size(group) > 1 else None


def _piece(slot: Slot, values: Tensor, start: int) -> Piece:
    parameter = nn.Parameter(values.detach())
    stop, is_complex = start + len(values), slot.parameter.is_complex()
    return Piece(slot.name, parameter, slot.shape, start, stop, slot.stride, is_complex)
