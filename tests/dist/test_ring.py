"""Ring attention is attention: outputs and gradients of any split of the sequence are one device's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ridgeline.errors import UsageError
from ridgeline.parallel import ring
from ridgeline.parallel.ring import planned_work, ring_attention

EVEN = {2: [6, 6], 3: [4, 4, 4], 4: [3, 3, 3, 3]}
UNEVEN = {2: [7, 6], 3: [5, 5, 1], 4: [4, 4, 3, 0]}
EMPTY = {2: [5, 0], 3: [3, 0, 4], 4: [1, 1, 1, 0]}
LENGTHS = {"even": EVEN, "uneven": UNEVEN, "empty": EMPTY}


def group_of_all() -> dist.ProcessGroup:
    return dist.new_group(list(range(dist.get_world_size())))


def make_inputs(
    total: int, kv_total: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)

    def draw(h: int, t: int, d: int) -> Tensor:
        return torch.randn(2, h, t, d, generator=generator, dtype=torch.float64).to(dtype)

    shapes = ((heads, total, 8), (kv_heads, kv_total, 8), (kv_heads, kv_total, 6))
    return [draw(*shape) for shape in (*shapes, (heads, total, 6))]


def make_mask(
    kind: str, total: int, kv_total: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    generator = torch.Generator().manual_seed(2)
    if kind == "rows":  # with a row that sees nothing at all
        mask = torch.rand(2, 1, total, kv_total, generator=generator) > 0.3
        mask[0, 0, total // 2] = False
        return mask
    if kind == "padding":
        mask = torch.ones(2, 1, 1, kv_total, dtype=torch.bool)
        mask[1, ..., -2:] = False
        return mask
    if kind in ("bias", "flat"):
        shape = (heads, total, kv_total) if kind == "bias" else (total, kv_total)
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    if kind == "lowest":  # as `transformers` writes masks; the last row has nothing but lowest
        mask = torch.zeros(2, 1, total, kv_total, dtype=dtype)
        mask[:, :, :, -3:] = torch.finfo(dtype).min
        mask[:, :, -1] = torch.finfo(dtype).min
        return mask
    return None


def local(x: Tensor, lengths: list[int], dim: int) -> Tensor:
    return x.split(lengths, dim)[dist.get_rank()]


def run_both(
    lengths: list[int],
    causal: bool,
    mask_kind: str = "",
    kv_heads: int = 4,
    options: dict[str, Any] | None = None,
    kv_lengths: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> float:
    """The largest relative difference of out, dq, dk, dv and dmask on this rank."""
    options = options or {}
    split, kv_split = lengths, kv_lengths or lengths
    total, kv_total = sum(split), sum(kv_split)
    *inputs, grad = make_inputs(total, kv_total, 4, kv_heads, dtype)
    mask = make_mask(mask_kind, total, kv_total, 4, dtype)
    learned = mask is not None and mask.is_floating_point() and mask_kind != "lowest"

    whole = [x.double().clone().requires_grad_() for x in inputs]
    whole_mask = mask.double().clone() if mask is not None and mask.is_floating_point() else mask
    if learned:
        whole_mask.requires_grad_()
    gqa = kv_heads != 4
    scale = options.get("scale")
    expected = F.scaled_dot_product_attention(
        *whole, attn_mask=whole_mask, is_causal=causal, scale=scale, enable_gqa=gqa
    )
    expected.backward(grad.double())

    dims = (split, kv_split, kv_split)
    parts = [
        local(x, sizes, 2).clone().requires_grad_() for x, sizes in zip(inputs, dims, strict=True)
    ]
    part_mask = mask
    if mask is not None and mask.shape[-2] > 1:
        part_mask = local(mask, split, -2).clone()
    if learned:
        part_mask.requires_grad_()
    out = ring_attention(
        *parts,
        group_of_all(),
        is_causal=causal,
        attn_mask=part_mask,
        enable_gqa=gqa,
        lengths=split,
        kv_lengths=kv_split,
        **options,
    )
    assert out.dtype == dtype
    out.backward(local(grad, split, 2))

    pairs = [(out, expected, split, 2)]
    for part, x, sizes in zip(parts, whole, dims, strict=True):
        pairs.append((part.grad, x.grad, sizes, 2))
    if learned:
        pairs.append((part_mask.grad, whole_mask.grad, split, -2))
    worst = 0.0
    for mine, right, sizes, dim in pairs:
        difference = (mine.double() - local(right, sizes, dim)).abs()
        assert mine.isfinite().all()
        if mine.numel():  # beside a gradient that is zero everywhere the difference counts as it is
            worst = max(worst, (difference.max() / (right.abs().max() or 1.0)).item())
    return worst


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("split", ["even", "uneven", "empty"])
@pytest.mark.parametrize("mode", ["causal", "causal unbalanced", "full"])
def test_any_split_is_one_device(ranks: Any, size: int, split: str, mode: str) -> None:
    options = {"balance": mode == "causal"}
    found = ranks(size, run_both, LENGTHS[split][size], mode != "full", "", 4, options)
    assert max(found) < 1e-13


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["rows", "padding", "bias", "flat", "lowest"])
def test_masks(ranks: Any, size: int, kind: str) -> None:
    """Boolean and additive, one row or all, learned ones with their gradient, rows without a key."""
    for split in ("even", "uneven"):
        found = ranks(size, run_both, LENGTHS[split][size], False, kind)
        assert max(found) < 1e-13, (split, found)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_and_scale(ranks: Any, kv_heads: int) -> None:
    for causal in (True, False):
        found = ranks(3, run_both, UNEVEN[3], causal, "", kv_heads, {"scale": 0.3})
        assert max(found) < 1e-13
    assert max(ranks(3, run_both, UNEVEN[3], False, "rows", kv_heads)) < 1e-13


def test_cross_attention_splits_keys_on_their_own(ranks: Any) -> None:
    for causal in (False, True):  # causal: the first query sees the first key, as torch has it
        found = ranks(3, run_both, [3, 3, 2], causal, "", 2, None, [5, 0, 6])
        assert max(found) < 1e-13
    assert max(ranks(2, run_both, [3, 3], False, "bias", 4, None, [5, 5])) < 1e-13


def test_low_precision_is_summed_in_float32(ranks: Any) -> None:
    """Against float64 of the same rounded inputs: a rounding or two of the result."""
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
        for causal in (True, False):
            found = ranks(4, run_both, EVEN[4], causal, "", 2, None, None, dtype)
            assert max(found) < bound, (dtype, found)


# Work and memory


def test_balance_evens_the_causal_work() -> None:
    for lengths in ([512] * 4, [300, 300, 300, 7], [129] * 8, [512, 512, 1, 0]):
        balanced = planned_work(lengths, is_causal=True)
        plain = planned_work(lengths, is_causal=True, balance=False)
        total = sum(lengths) * (sum(lengths) + 1) // 2
        assert sum(balanced) == sum(plain) == total  # nothing twice, nothing left out
        assert max(balanced) / min(balanced) < 1.03
        assert max(plain) / max(min(plain), 1) > 3
    assert planned_work([8, 8], is_causal=False) == [128, 128]


def scores_computed(lengths: list[int], balance: bool) -> int:
    """Elements of all score matrices that this rank really made, forward and backward."""
    seen = [0]
    scores = ring._Tile.scores

    def counting(tile: Any) -> Tensor:
        result = scores(tile)
        seen[0] += (result > -math.inf).sum().item()
        return result

    ring._Tile.scores = counting
    try:
        q = torch.randn(1, 1, lengths[dist.get_rank()], 4, requires_grad=True)
        out = ring_attention(
            q, q, q, group_of_all(), is_causal=True, balance=balance, lengths=lengths
        )
        out.sum().backward()
    finally:
        ring._Tile.scores = scores
    return seen[0]


@pytest.mark.parametrize("balance", [True, False])
def test_the_plan_is_what_is_computed(ranks: Any, balance: bool) -> None:
    for size, lengths in ((4, [8, 8, 8, 8]), (3, [5, 5, 1])):
        planned = planned_work(lengths, is_causal=True, balance=balance)
        assert ranks(size, scores_computed, lengths, balance) == [2 * work for work in planned]


def largest_tensors(length: int) -> tuple[int, int]:
    """Elements of the largest tensor made in forward and backward, and of all that are saved."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple | list) else [result]:
                if isinstance(x, Tensor):
                    largest[0] = max(largest[0], x.numel())
            return result

    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes() // x.element_size()
        return x

    tile = ring._TILE_ELEMENTS
    ring._TILE_ELEMENTS = 2**10
    try:
        q = torch.randn(1, 2, length, 4, requires_grad=True)
        with Watch(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = ring_attention(q, q.clone(), q.clone(), group_of_all(), is_causal=True)
            out.sum().backward()
    finally:
        ring._TILE_ELEMENTS = tile
    return largest[0], sum(saved.values())


def test_memory_grows_with_the_length_and_not_its_square(ranks: Any) -> None:
    short, long = (ranks(2, largest_tensors, length)[0] for length in (128, 512))
    assert long[1] <= 4 * short[1]  # saved: queries, keys, values, result and two numbers a row
    assert long[1] <= (4 * 4 + 2) * 2 * 512
    assert (
        long[0] <= 16 * 2 * 1024
    )  # the largest tile; all scores of this rank would be 512 * 1024 * 2


def tiled(lengths: list[int]) -> float:
    """The same with tiles of a few rows, so that a block has many."""
    tile = ring._TILE_ELEMENTS
    ring._TILE_ELEMENTS = 1
    try:
        return max(run_both(lengths, causal) for causal in (True, False))
    finally:
        ring._TILE_ELEMENTS = tile


def test_tiles_do_not_change_the_result(ranks: Any) -> None:
    assert max(ranks(2, tiled, [41, 38])) < 1e-13


# Around it


def dropped(lengths: list[int]) -> float:
    """With factors on the weights after the softmax, by global position."""
    total = sum(lengths)
    *inputs, grad = make_inputs(total, total, 4, 2)
    table = torch.rand(total, total, generator=torch.Generator().manual_seed(3)).double()
    whole = [x.requires_grad_() for x in inputs]
    q, k, v = whole
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(
        ~torch.ones(total, total, dtype=torch.bool).tril(), -math.inf
    )
    expected = (scores.softmax(-1) * table) @ v
    expected.backward(grad)
    parts = [local(x.detach(), lengths, 2).clone().requires_grad_() for x in whole]
    out = ring_attention(
        *parts,
        group_of_all(),
        is_causal=True,
        enable_gqa=True,
        lengths=lengths,
        keep=lambda rows, cols: table[rows][:, cols],
    )
    out.backward(local(grad, lengths, 2))
    pairs = [(out, expected), *((p.grad, x.grad) for p, x in zip(parts, whole, strict=True))]
    return max(
        ((mine - local(right, lengths, 2)).abs().max() / right.abs().max()).item()
        for mine, right in pairs
        if mine.numel()
    )


def test_factors_on_the_weights_follow_global_positions(ranks: Any) -> None:
    assert max(ranks(3, dropped, [5, 5, 3])) < 1e-13


def three_dims_and_autocast() -> tuple[float, Any, Any]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, 8, 4, generator=generator, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    mine = x.chunk(2, 1)[dist.get_rank()]
    group = group_of_all()
    out = ring_attention(mine, mine, mine, group, is_causal=True)
    difference = (out - expected.chunk(2, 1)[dist.get_rank()]).abs().max().item()
    low = mine.float().unsqueeze(1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        result = ring_attention(low, low, low.double().float(), group, is_causal=True)
        result.sum().backward()
    return difference, result.dtype, low.grad.dtype


def test_three_dimensions_and_autocast(ranks: Any) -> None:
    for difference, dtype, grad_dtype in ranks(2, three_dims_and_autocast):
        assert difference < 1e-14
        assert (dtype, grad_dtype) == (torch.bfloat16, torch.float32)


def recomputed() -> float:
    """Inside a checkpoint that runs forward again in backward, and in two calls of one graph."""
    from torch.utils.checkpoint import checkpoint

    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, 2, 12, 4, generator=generator, dtype=torch.float64)
    group = group_of_all()
    whole = x.clone().requires_grad_()
    y = whole
    for _ in range(2):
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
    y.square().sum().backward()
    part = x.chunk(4, 2)[dist.get_rank()].clone().requires_grad_()
    y = part
    for _ in range(2):
        y = checkpoint(
            lambda z: ring_attention(z, z, z, group, is_causal=True), y, use_reentrant=False
        )
    y.square().sum().backward()
    return (part.grad - whole.grad.chunk(4, 2)[dist.get_rank()]).abs().max().item()


def test_recompute(ranks: Any) -> None:
    assert max(ranks(4, recomputed)) < 1e-13


def refusals() -> list[str]:
    group = group_of_all()
    x = torch.zeros(1, 4, 3, 8)
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((x, x[:, :2], x[:, :2]), {}),
        ((x, x[:, :3], x[:, :3]), {"enable_gqa": True}),
        ((x, x, x), {"lengths": [4, 3] if dist.get_rank() == 0 else [3, 4]}),
        ((x, x, x), {"attn_mask": torch.zeros(3, 3)}),
        ((x[0, 0], x[0, 0], x[0, 0]), {}),
    ]
    messages = []
    for args, options in calls:
        with pytest.raises(UsageError) as error:
            ring_attention(*args, group, is_causal=False, **options)
        messages.append(str(error.value))
    return messages


def test_what_cannot_be_is_said(ranks: Any) -> None:
    heads, divisor, lengths, mask, dims = ranks(2, refusals)[0]
    assert "4 heads of queries, 2 of keys" in heads
    assert "enable_gqa=True" in heads
    assert "3 of keys" in divisor
    assert "[4, 3]" in lengths
    assert "(3, 3)" in mask
    assert "(3 or 1, 6)" in mask
    assert "(3, 8)" in dims
