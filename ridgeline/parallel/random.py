"""Dropout that depends on (seed, step, sample, position) and on nothing of the layout.

torch's own dropout draws from a generator of the device, so that the number of ranks, the size of a
microbatch and recomputation change the experiment. Here an element is kept or dropped by a hash of what
it is: the call site in the model, the id of its sample and its position in the sample. `dropout.py`
puts this into models; techniques that split a sample themselves call `keyed_dropout` with the offsets.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.overrides import TorchFunctionMode

from ridgeline.errors import UsageError

Start = int | Sequence[int]
"""Where along a dim a part begins; or, if it has gaps, all of its indices."""
Place = tuple[Sequence[int], Sequence[Start]]
"""The shape of a whole tensor and where in it the part at hand lies."""


def seed_apart(seed: int, data_rank: int) -> None:
    """Seed the global generators, for a model that draws numbers itself: apart on ranks that hold different
    samples, alike on those that share theirs."""
    own = seed * 1_000_003 + data_rank
    torch.manual_seed(own)
    random.seed(own)
    np.random.seed(own % 2**32)


# The hash. Eagerly it is some fifteen element-wise kernels over int64, many times what torch's own
# dropout moves; compiled, all of it is one kernel with the multiplication, and no mask is stored.

_WRAP = 2**64


def _signed(value: int) -> int:
    return (value + _WRAP // 2) % _WRAP - _WRAP // 2


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def _mix(x: Tensor) -> Tensor:
    """A bijection of 64 bits in which every bit of `x` moves half of the result's; in place."""
    for shift, factor in _ROUNDS:
        x ^= (x >> shift) & (
            (1 << (64 - shift)) - 1
        )  # a shift of int64 copies the sign: cut it off
        if factor != 1:
            x *= factor
    return x


def _mix_number(value: int) -> int:
    for shift, factor in _ROUNDS:
        value %= _WRAP
        value = (value ^ (value >> shift)) * factor
    return _signed(value)


@dataclass(frozen=True)
class Keys:
    """The hash of (seed, step), and of it with each sample of the microbatch."""

    base: Tensor
    """That of (seed, step), and `_GOLDEN`. By a factor that it knows, inductor multiplies loop counters:
    that overflows, which C++ leaves undefined, and g++ takes for a promise that loops end before it does
    (for arrays of a width that is no multiple of its vectors it wrote over their ends)."""
    rows: Tensor | None = None
    sample_dim: int | None = None
    """Where samples lie in every tensor; below 0: nowhere; None: found by size, see `find_sample_dim`."""

    def on(self, device: torch.device) -> Keys:
        if self.base.device == device:
            return self
        rows = None if self.rows is None else self.rows.to(device)
        return Keys(self.base.to(device), rows, self.sample_dim)


def build_keys(seed: int, step: int, sample_ids: Tensor | None, sample_dim: int | None) -> Keys:
    number = _mix_number(_mix_number(seed * _GOLDEN + 1) + step * _GOLDEN)
    device = sample_ids.device if sample_ids is not None else None
    # Filled in there: a copy would make the host wait.
    base = torch.full((2,), _GOLDEN, dtype=torch.int64, device=device)
    base[:1].fill_(number)
    if sample_ids is None:
        return Keys(base, None, sample_dim)
    return Keys(base, _mix(base[0] + (sample_ids.to(torch.int64) + 1) * _GOLDEN), sample_dim)


def find_sample_dim(shape: Sequence[int], keys: Keys) -> int | None:
    """The dim of samples: the first if its size is a multiple of their number, else the only one of
    exactly that size. None: the tensor has no samples, and is keyed by position alone."""
    if keys.rows is None:
        return None
    num = keys.rows.shape[0]
    if keys.sample_dim is not None:
        dim = keys.sample_dim
        return dim if 0 <= dim < len(shape) and shape[dim] and shape[dim] % num == 0 else None
    if shape and shape[0] and shape[0] % num == 0:
        return 0
    exact = [dim for dim, size in enumerate(shape) if size == num]
    return exact[0] if len(exact) == 1 else None


def keyed_bits(shape: Sequence[int], keys: Keys, site: int, indices: Sequence[Tensor]) -> Tensor:
    """64 random bits (int64) for the elements `indices`, a vector a dim, of a tensor of `shape`.

    `shape` is the whole tensor's, of which the indices may be any part. A dim of samples that has
    several rows a sample (heads folded into the batch) counts the row in the sample as a position.
    """

    def along(values: Tensor, dim: int) -> Tensor:
        return values.view(-1, *[1] * (len(shape) - 1 - dim))

    sample = find_sample_dim(shape, keys)
    start, golden = keys.base[0], keys.base[1]
    parts: list[Tensor] = []
    stride = 1
    for dim in reversed(range(len(shape))):
        if dim != sample:
            parts.append(along(indices[dim] * stride * golden, dim))
            stride *= shape[dim]
    if sample is not None:
        assert keys.rows is not None
        per_sample = shape[sample] // keys.rows.shape[0]
        start = along(keys.rows[indices[sample] // per_sample], sample)
        parts.append(along(indices[sample] % per_sample * stride * golden, sample))
    bits = start ^ site
    for part in parts:
        bits = bits + part
    return _mix(bits)


def _ranges(shape: Sequence[int], offsets: Sequence[Start] | None, device: Any) -> list[Tensor]:
    starts = offsets or [0] * len(shape)
    return [
        torch.arange(a, a + n, device=device)
        if isinstance(a, int)
        else torch.tensor(a, dtype=torch.int64, device=device)
        for a, n in zip(starts, shape, strict=True)
    ]


def _keep(bits: Tensor, p: float) -> Tensor:
    """Compares the bits as they are: conversions to float are not the same on all devices."""
    return bits >= min(int(p * _WRAP) - _WRAP // 2, _WRAP // 2 - 1)


def keyed_mask(
    shape: Sequence[int],
    p: float,
    keys: Keys,
    site: int,
    offsets: Sequence[Start] | None = None,
    global_shape: Sequence[int] | None = None,
) -> Tensor:
    """Which elements are kept, each with probability 1 - p; `shape` may be a part of `global_shape`
    that begins at `offsets`."""
    indices = _ranges(shape, offsets, keys.base.device)
    return _keep(keyed_bits(global_shape or shape, keys, site, indices), p)


# Where a call is: the module that is running, and which of its calls this is.


class Node:
    """One module's place in the model, and how often it has run in this forward pass."""

    def __init__(
        self, randomness: Randomness, path: str, parent: Node | None, functional: bool
    ) -> None:
        self.randomness, self.parent, self.path = randomness, parent, path
        self.functional = functional
        """Whether functions that the module calls are watched."""
        self.sample_dims = randomness.sample_dims.get(path, {})
        self.salt = _signed(int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest()))
        self.below: list[Node] = []
        for node in self.ancestors():
            node.below.append(self)
        self.reset()

    def __deepcopy__(self, memo: Any) -> Node:
        return self  # a copy of a module belongs to the same job

    def reset(self) -> None:
        self.calls = self.index = self.replayed = self.num_functional = 0

    def begin(self) -> None:
        """Count a call. A call in backward that no other module made is one of forward's again."""
        randomness = self.randomness
        if randomness.is_recomputing():
            if any(node.calls > 1 for node in self.ancestors()):
                raise UsageError(
                    f"{self.path!r} is recomputed, and a module that holds it runs several times in a "
                    "forward pass; give checkpoint(..., context_fn=randomness.replay), which knows "
                    "which of its calls is meant"
                )
            # Backward goes through the calls from the last to the first.
            self.index = (self.calls - 1 - self.replayed) % max(self.calls, 1)
            self.replayed += 1
        else:
            self.index = self.calls
            self.calls += 1
            self.replayed = 0
        self.num_functional = 0
        for node in self.below:
            node.reset()

    @contextmanager
    def running(self) -> Iterator[None]:
        self.begin()
        self.randomness._stack.append(self)
        try:
            yield
        finally:
            self.randomness._stack.pop()

    def ancestors(self) -> Iterator[Node]:
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def site(self, number: int = 0, calls: Mapping[Node, int] | None = None) -> int:
        """The hash of this call of the module; `number` counts the functions called in it. `calls` says
        which call of some modules is meant, where it is not the one at hand."""
        site = self.salt
        node: Node | None = self
        while node is not None:
            index = node.index if calls is None else calls.get(node, node.index)
            if index:
                site = _mix_number(site + index * (node.salt | 1))
            node = node.parent
        return _mix_number(site + number * _GOLDEN)


class Randomness:
    """What random numbers of a job depend on: set `begin(step, sample_ids)` before a forward pass.

    `sample_ids` name the samples of the microbatch at hand, on the device of the model. `sample_dim`
    is for models that keep samples elsewhere than in the first dim (sequence first: 1).
    """

    def __init__(self, seed: int, sample_dim: int | None = None) -> None:
        self.seed, self.sample_dim = seed, sample_dim
        self.offsets_of: Callable[[Tensor], Place | None] = offsets_of
        """How a part of a tensor is recognised; a technique with parts of its own kind sets its own."""
        self.cut_like: Callable[[Tensor, DTensor], DTensor] = cut_like
        """Makes a DTensor of a part, cut as another one; goes with `offsets_of`."""
        self.attention: Callable[..., Tensor] = keyed_attention
        """What computes attention with dropout; one that splits the sequence sets its own."""
        self.site_of: Callable[[Node, int], Any] | None = None
        """What stands for a site while a program is traced that is to serve other calls too."""
        self.drawn = False
        """Whether a function, not a module, has asked for a site."""
        self.sample_dims: dict[str, dict[tuple[int, int], int]] = {}
        """By the path of a module, then by the number of the function in it and of the tensor's dims: where
        samples lie, if not in the first dim; see `sample_dims.py`."""
        self.shapes: dict[tuple[str, int, int], list[Sequence[int]]] | None = None
        """What was asked for, where a model runs only to be watched: by path and the same numbers."""
        self._mode: TorchFunctionMode | None = None
        self._nodes: list[Node] = []
        self._stack: list[Node] = []
        self._watching = False
        self._replaying = False
        self.begin(0, None)

    def __deepcopy__(self, memo: Any) -> Randomness:
        return self

    def begin(self, step: int, sample_ids: Tensor | None) -> None:
        self.step, self.sample_ids = step, sample_ids
        self.keys = build_keys(self.seed, step, sample_ids, self.sample_dim)
        for node in self._nodes:
            node.reset()

    @property
    def is_used(self) -> bool:
        """Whether any model has dropout that asks for it; if none has, `begin` need not be called."""
        return bool(self._nodes)

    def next_site(self) -> int:
        """The site of a function that the running module calls now; each call is another one."""
        if not self._stack:
            return _GOLDEN
        node = self._stack[-1]
        node.num_functional += 1
        self.drawn |= node.functional
        if self.site_of is not None:
            return self.site_of(node, node.num_functional)
        return node.site(node.num_functional)

    def sample_dim_of(self, shape: Sequence[int]) -> int | None:
        """Where samples lie in a tensor of `shape` that the function at hand works on; None: unknown."""
        if not self._stack:
            return None
        node = self._stack[-1]
        if self.shapes is not None:
            place = (node.path, node.num_functional, len(shape))
            self.shapes.setdefault(place, []).append(tuple(shape))
        return node.sample_dims.get((node.num_functional, len(shape)))

    @contextmanager
    def watching(self, wanted: bool) -> Iterator[None]:
        """Key the functions that are called inside, unless that is done already."""
        if not wanted or self._watching or self._mode is None:
            yield
            return
        self._watching = True
        try:
            with self._mode:
                yield
        finally:
            self._watching = False

    def is_recomputing(self) -> bool:
        if self._stack or self._replaying or torch.compiler.is_compiling():
            return False
        return torch._C._current_graph_task_id() != -1

    def replay(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """`checkpoint(..., context_fn=randomness.replay)`: the recomputation gets the masks of the
        forward pass it repeats, also when other microbatches ran in between, as in a pipeline."""
        return nullcontext(), self.moment()()

    def moment(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes contexts, as many as are wanted, in which everything draws as it would now."""
        state = self._state()
        return lambda: self._replayed(state)

    def _state(self) -> tuple[Any, ...]:
        counts = [(n.calls, n.index, n.replayed, n.num_functional) for n in self._nodes]
        return self.keys, list(self._stack), self._watching, self._replaying, counts

    def _restore(self, state: tuple[Any, ...]) -> None:
        self.keys, self._stack, self._watching, self._replaying, counts = state
        for node, numbers in zip(self._nodes, counts, strict=True):
            node.calls, node.index, node.replayed, node.num_functional = numbers

    @contextmanager
    def _replayed(self, state: tuple[Any, ...]) -> Iterator[None]:
        before = self._state()
        self._restore(state)
        self._stack, self._replaying = list(self._stack), True
        mode = self._mode if self._watching else None
        try:
            with mode or nullcontext():
                yield
        finally:
            self._restore(before)


# Dropout itself.


def offsets_of(x: Tensor) -> Place | None:
    """Of which tensor `x` is a part: known for a DTensor, uneven ones too."""
    if not isinstance(x, DTensor):
        return None
    _, offsets = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(x.shape), tuple(offsets)


def cut_like(part: Tensor, x: DTensor) -> DTensor:
    shape = {"shape": x.shape, "stride": x.stride()}
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, **shape)


def keyed_dropout(
    x: Tensor,
    p: float,
    randomness: Randomness,
    site: int,
    global_shape: Sequence[int] | None = None,
    offsets: Sequence[Start] | None = None,
    *,
    num_dims: int | None = None,
    sample_dim: int | None = None,
    inplace: bool = False,
) -> Tensor:
    """`F.dropout` in training. `x` may be a part of a tensor of `global_shape` that begins at
    `offsets`, in whose first dim `randomness.sample_ids` lie; of a DTensor that is known. With
    `num_dims` only that many leading dims have a mask of their own (channels)."""
    if not 0.0 < p <= 1.0:
        return F.dropout(x, p, True, inplace)  # nothing to do, or torch's word about a wrong p
    if global_shape is None:
        place = randomness.offsets_of(x)
        global_shape, offsets = place if place is not None else (x.shape, None)
    if isinstance(x, DTensor):
        dims = {"num_dims": num_dims, "sample_dim": sample_dim}
        with torch._C.DisableTorchFunction():  # other modes would take the parts for whole tensors
            part = keyed_dropout(x.to_local(), p, randomness, site, global_shape, offsets, **dims)
            if inplace:
                x.to_local().copy_(part)
                return x
            return randomness.cut_like(part, x)
    num = x.dim() if num_dims is None else num_dims
    keys = randomness.keys.on(x.device)
    if sample_dim is not None:
        keys = replace(keys, sample_dim=sample_dim)
    starts = None if offsets is None else list(offsets)[:num]
    keep = keyed_mask(x.shape[:num], p, keys, site, starts, list(global_shape)[:num])
    keep = keep.view(*keep.shape, *[1] * (x.dim() - num))
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    if inplace:
        return x.mul_(keep.to(x.dtype) * scale)
    return torch.where(keep, x * scale, 0.0)  # backward needs one byte an element


def attention_keep(
    p: float,
    randomness: Randomness,
    site: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    offsets: Sequence[int] = (0, 0),
    num_local: Sequence[int] | None = None,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Factors of dropout for attention's weights by positions of queries and keys: `ring_attention`'s
    `keep`. `shape` is (batch, heads, queries, keys) of the whole; `num_local` of the first two are
    here, beginning at `offsets`."""
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    held = replace(randomness.keys, sample_dim=0)  # in backward they may be another microbatch's

    def keep(rows: Tensor, cols: Tensor) -> Tensor:
        first = _ranges(num_local or shape[:2], offsets, rows.device)
        keys = held.on(rows.device)
        return _keep(keyed_bits(shape, keys, site, [*first, rows, cols]), p).to(dtype) * scale

    return keep


def keyed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: float,
    randomness: Randomness,
    site: int,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    place: Place | None = None,
) -> Tensor:
    """`scaled_dot_product_attention` with dropout, written out: a fused kernel's mask has no key.

    `q` may be some heads or rows of queries at `place`; keys, values and the mask are then those of
    these heads, and keys and values of all rows. Holds all scores of the part at one time.
    """
    shape, offsets = place or (q.shape, [0] * q.dim())
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.mT * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        rows, cols = _ranges(scores.shape[-2:], [offsets[-2], 0], scores.device)
        scores = scores.masked_fill(cols > rows[:, None], -math.inf)
    weights = _softmax(scores, attn_mask)
    whole, starts = [*shape[:-1], k.shape[-2]], [*offsets[:-1], 0]
    weights = keyed_dropout(weights, p, randomness, site, whole, starts, sample_dim=0)
    return weights.to(v.dtype) @ v


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """A row that may see nothing gives zero, and no gradient that is not a number."""
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
