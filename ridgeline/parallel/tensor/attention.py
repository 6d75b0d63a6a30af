"""Attention on this rank's heads: which heads of keys and values the local queries need.

The computation itself is one replaceable function on plain tensors (`view.attention`): torch's own,
or a ring over the ranks that share a sequence. Called by `view.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ridgeline.parallel.tensor.move import enter
from ridgeline.parallel.tensor.split import chunk_sizes

if TYPE_CHECKING:
    from ridgeline.parallel.tensor.view import GlobalView

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """torch's attention, as one device has it."""
    return F.scaled_dot_product_attention(query, key, value, **options)


def attention(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The rule for `scaled_dot_product_attention`.

    With dropout there is one argument more. On a ring `draw(shape, offsets, num_local)` makes the `keep`
    of `ring_attention`: of a shape (batch, heads, queries, keys), of which this rank has some heads.
    Elsewhere `keyed` computes the attention itself, of queries at a `place`.
    """
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    q, k, v = (given.pop(name) for name in _NAMES[:3])
    mask, draw = given.pop("attn_mask", None), given.pop("draw", None)
    keyed = given.pop("keyed", None)
    dims = q.dim()
    if k.dim() != dims or v.dim() != dims or dims < 3 or q.shape[: dims - 3] != k.shape[: dims - 3]:
        return NotImplemented
    head = dims - 3  # of a 3-D query that is the batch, which works just as well
    num_heads, num_kv = q.shape[head], k.shape[head]
    cut = _is_cut(view, q, head) or _is_cut(view, k, head)
    grouped = num_heads != num_kv
    size = view.mesh.size(view.tp) if view.tp is not None else 1
    if grouped and num_heads % size:
        cut = False
    whole_kv = grouped and num_kv % size != 0
    placements: list[Placement] = []
    kv: list[tuple[Placement, Placement]] = []
    masks: list[tuple[Placement, Placement]] = []
    for axis in range(view.mesh.ndim):
        if axis == view.tp and cut:
            place: Placement = Shard(head)
            kv.append((Replicate(), Partial()) if whole_kv else (place, place))
            masks.append(_mask_cut(mask, head - dims, num_heads))
        elif axis == view.cp and view.attention is not attend:
            place = Shard(dims - 2)
            kv.append((place, place))
            masks.append((Replicate(), Partial()))
        else:
            place = Replicate()
            kv.append((place, place))
            masks.append((place, place))
        placements.append(place)
    q_local = view.local(q, tuple(placements), tuple(placements))
    where, grads = (tuple(side) for side in zip(*kv, strict=True))
    k_local, v_local = view.local(k, where, grads), view.local(v, where, grads)
    if mask is not None:
        where, grads = (tuple(side) for side in zip(*masks, strict=True))
        mask = view.local(mask, where, grads)
    if cut and whole_kv:
        assert view.tp is not None
        first = view.mesh.get_local_rank(view.tp) * (num_heads // size)
        k_local, v_local = (
            _pick_heads(t, head, first, q_local.shape[head], num_heads // num_kv)
            for t in (k_local, v_local)
        )
    if grouped:
        given["enable_gqa"] = k_local.shape[head] != q_local.shape[head]
    if view.cp is not None and view.attention is not attend:
        pieces = view.mesh.size(view.cp)
        given["lengths"] = chunk_sizes(q.shape[-2], pieces)
        given["kv_lengths"] = chunk_sizes(k.shape[-2], pieces)
    elif not q_local.numel():  # more ranks than heads
        out = q_local.new_zeros((*q_local.shape[:-1], v.shape[-1]))
        return enter(out, view.mesh, tuple(placements), (*q.shape[:-1], v.shape[-1]))
    if draw is not None:
        given["keep"] = _keep_here(view, draw, q, k, q_local, head if cut else None)
    if keyed is not None:
        given["place"] = tuple(q.shape), (*_offsets(view, q, head if cut else None), 0, 0)
    out = (keyed or view.attention)(q_local, k_local, v_local, attn_mask=mask, **given)
    return enter(out, view.mesh, tuple(placements), (*q.shape[:-1], v.shape[-1]))


def _keep_here(
    view: GlobalView, draw: Callable[..., Any], q: Tensor, k: Tensor, local: Tensor, cut: int | None
) -> Any:
    """Dropout of the heads that are here."""
    one_head = (1,) if q.dim() == 3 else ()  # heads folded into the batch
    offsets = _offsets(view, q, cut)
    shape = (*q.shape[:-2], *one_head, q.shape[-2], k.shape[-2])
    return draw(shape, (*offsets, *[0] * len(one_head)), (*local.shape[:-2], *one_head))


def _offsets(view: GlobalView, q: Tensor, cut: int | None) -> list[int]:
    """Where this rank's part begins in the dims before the queries, of which tp may cut one."""
    offsets = [0] * (q.dim() - 2)
    if cut is not None:
        assert view.tp is not None
        lengths = chunk_sizes(q.shape[cut], view.mesh.size(view.tp))
        offsets[cut] = sum(lengths[: view.mesh.get_local_rank(view.tp)])
    return offsets


def _is_cut(view: GlobalView, x: Tensor, dim: int) -> bool:
    return view.tp is not None and isinstance(x, DTensor) and x.placements[view.tp] == Shard(dim)


def _mask_cut(mask: Tensor | None, dim: int, num_heads: int) -> tuple[Placement, Placement]:
    if mask is not None and mask.dim() >= -dim and mask.shape[dim] == num_heads > 1:
        place = Shard(mask.dim() + dim)
        return place, place
    return Replicate(), Partial()


def _pick_heads(kv: Tensor, dim: int, first: int, count: int, group: int) -> Tensor:
    """The key or value heads of the queries `first` to `first + count`, each `group` of which share.

    As few as serve whole groups, otherwise one for each query.
    """
    needed = [i // group for i in range(first, first + count)]
    heads = sorted(set(needed))
    share = count // len(heads)
    if needed == [h for h in heads for _ in range(share)]:
        needed = heads
    return kv.index_select(dim, torch.tensor(needed, device=kv.device))
