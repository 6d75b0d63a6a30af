"""How a torch function runs on the ranks' own parts of its arguments.

Most functions can be said in labels, as einsum says a product: every dim of every argument and result
has one, dims that run together share it. A label may be cut over the ranks, unless the function looks
along it (`frozen`); one that is summed over and not in the result gives partial sums. From labels the
placement of every argument, of the result and of all gradients follow (`run_labels`), and the
function itself runs on plain local tensors, exactly as on one device. A function without a rule gets
its arguments whole, in `view.py`. Called by `view.py` and `layers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_unflatten

from ridgeline.parallel.tensor.move import Placements, enter
from ridgeline.parallel.tensor.runs import Runs

if TYPE_CHECKING:
    from ridgeline.parallel.tensor.view import GlobalView

Labels = tuple[Any, ...]
Rule = Callable[["GlobalView", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def run_labels(
    view: GlobalView,
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    labels: Sequence[Labels],
    results: Sequence[Labels],
    *,
    frozen: Collection[Any] = (),
    summed: Collection[Any] = (),
    sizes: dict[Any, int] | None = None,
) -> Any:
    """`function` of the local tensors, cut along whatever the arguments are cut along already.

    `sizes` gives the length of labels in the results that are not those of the arguments.
    """
    cuts = tuple(_cut_of(view, tensor) for tensor in tensors)
    given = tuple(sizes.items()) if sizes else ()
    chosen = arrange(
        view.mesh.ndim,
        cuts,
        tuple(labels),
        tuple(results),
        frozenset(frozen),
        frozenset(summed),
        given,
    )
    locals_ = [
        view.local(tensor, *how) for tensor, how in zip(tensors, chosen.arguments, strict=True)
    ]
    outcome = function(*locals_)
    several = isinstance(outcome, (tuple, list))
    if not several and not isinstance(outcome, Tensor):
        return outcome
    made = []
    for local, how in zip(outcome if several else [outcome], chosen.results, strict=True):
        places, shape, runs = how
        made.append(view.settle(view.mark_runs(enter(local, view.mesh, places, shape), runs)))
    return type(outcome)(made) if several else made[0]


Cut = tuple[torch.Size, Placements | None, Runs]
"""A tensor's shape, its placements (None: plain, and so whole), and the runs of its cuts."""


def _cut_of(view: GlobalView, tensor: Tensor) -> Cut:
    places = tensor.placements if isinstance(tensor, DTensor) else None
    return tensor.shape, places, view.runs(tensor)


class Arranged(NamedTuple):
    """What a function's arguments have to be, and what its results are."""

    arguments: tuple[tuple[Placements, Placements, Runs], ...]
    """Placements, those of gradients, and runs."""
    results: tuple[tuple[Placements, torch.Size, Runs], ...]


@lru_cache(maxsize=16384)
def arrange(
    num_axes: int,
    cuts: tuple[Cut, ...],
    labels: tuple[Labels, ...],
    results: tuple[Labels, ...],
    frozen: frozenset[Any],
    summed: frozenset[Any],
    sizes: tuple[tuple[Any, int], ...],
) -> Arranged:
    """From labels to placements; remembered, because every layer and step asks the same."""
    lengths: dict[Any, int] = {}
    for (shape, _, _), names in zip(cuts, labels, strict=True):
        for name, length in zip(names, shape, strict=True):
            lengths[name] = (
                max(lengths.get(name, 0), length) if length != 1 else (lengths.get(name, 1))
            )
    free = {name for name in lengths if name not in frozen and lengths[name] > 1}
    chosen, runs = _choose(num_axes, cuts, labels, results, free, summed)
    arguments = []
    for (shape, _, _), names in zip(cuts, labels, strict=True):
        places: list[Placement] = []
        grads: list[Placement] = []
        own = []
        for name, num in zip(chosen, runs, strict=True):
            at = names.index(name) if name is not None and name in names else None
            cut = at is not None and shape[at] == lengths[name]
            place = Shard(at) if cut and at is not None else Replicate()
            places.append(place)
            grads.append(Partial() if name is not None and not cut else place)
            own.append(num if cut else 1)
        arguments.append((tuple(places), tuple(grads), tuple(own)))
    lengths |= dict(sizes)
    made = []
    for names in results:
        after: Placements = tuple(
            Replicate()
            if name is None
            else Shard(names.index(name))
            if name in names
            else Partial()
            for name in chosen
        )
        left = tuple(num if p.is_shard() else 1 for p, num in zip(after, runs, strict=True))
        made.append((after, torch.Size(lengths[name] for name in names), left))
    return Arranged(tuple(arguments), tuple(made))


def _choose(
    num_axes: int,
    cuts: Sequence[Cut],
    labels: Sequence[Labels],
    results: Sequence[Labels],
    free: set[Any],
    summed: Collection[Any],
) -> tuple[list[Any], list[int]]:
    """For each mesh axis the label that is cut over it, or None, and of how many runs it is: what
    the largest argument has."""
    order = sorted(range(len(cuts)), key=lambda i: -cuts[i][0].numel())
    chosen: list[Any] = []
    runs: list[int] = []
    for axis in range(num_axes):
        label, num = None, 1
        for i in order:
            _, places, own = cuts[i]
            place = places[axis] if places is not None else None
            if not isinstance(place, Shard):
                continue
            name = labels[i][place.dim]
            kept = name in summed or all(name in names for names in results)
            others = zip(chosen, runs, strict=True)
            if name in free and kept and all(own[axis] == n for o, n in others if o == name):
                label, num = name, own[axis]
                break
        chosen.append(label)
        runs.append(num)
    return chosen, runs


@lru_cache(maxsize=64)
def aligned(dim: int) -> Labels:
    """Labels that line up from the right, as broadcasting does."""
    return tuple(range(-dim, 0))


@lru_cache(maxsize=4096)
def _broadcast(*shapes: torch.Size) -> torch.Size:
    return torch.broadcast_shapes(*shapes)


def elementwise(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Any function that works element by element with broadcasting, whatever its other arguments."""
    nested = kwargs or any(isinstance(arg, (tuple, list, dict)) for arg in args)
    leaves, spec = tree_flatten((args, kwargs)) if nested else (list(args), None)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i] for i in places]
    shape = _broadcast(*(t.shape for t in tensors))

    def call(*local: Tensor) -> Any:
        for i, tensor in zip(places, local, strict=True):
            leaves[i] = tensor
        if spec is None:
            return func(*leaves)
        new_args, new_kwargs = tree_unflatten(leaves, spec)
        return func(*new_args, **new_kwargs)

    return run_labels(
        view, call, tensors, [aligned(t.dim()) for t in tensors], [aligned(len(shape))]
    )


def along_dim(position: int, default: int | None) -> Rule:
    """A function of one tensor that looks along the dim in argument `position` and keeps the shape."""

    def rule(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("input")
        dim = args[position] if len(args) > position else kwargs.get("dim", default)
        if not isinstance(x, Tensor) or not isinstance(dim, int):
            return NotImplemented
        rest = {k: v for k, v in kwargs.items() if k != "input"}
        names = tuple(range(x.dim()))
        return run_labels(
            view, lambda t: func(t, *args[1:], **rest), [x], [names], [names],
            frozen={dim % x.dim()},
        )  # fmt: skip

    return rule


def normalise(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """layer_norm and rms_norm: they look along the last dims."""
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    if func.__name__ == "rms_norm":
        names = ("input", "normalized_shape", "weight", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    x, shape = given["input"], tuple(given["normalized_shape"])
    inner = aligned(len(shape))
    affine = [k for k in ("weight", "bias") if given.get(k) is not None]

    def call(local: Tensor, *rest: Tensor) -> Any:
        return func(**{**given, "input": local, **dict(zip(affine, rest, strict=True))})

    tensors = [x, *(given[k] for k in affine)]
    labels = [aligned(x.dim()), *([inner] * len(affine))]
    return run_labels(view, call, tensors, labels, labels[:1], frozen=inner)


def reduction(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Reductions over some dims: a sum or a mean of parts is partial, others look along the dims."""
    name = func.__name__
    x = args[0] if args else kwargs["input"]
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "dim", "axis")}
    more = list(args[1:])
    dim = more.pop(0) if more else kwargs.get("dim", kwargs.get("axis"))
    if more:
        rest["keepdim"] = more.pop(0)
    if more or rest.get("out") is not None or isinstance(dim, (str, bool, Tensor)):
        return NotImplemented
    if dim is None and name not in ("sum", "mean"):
        return NotImplemented
    dims = range(x.dim()) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    gone = {d % x.dim() for d in dims} if x.dim() else set()
    keep = bool(rest.pop("keepdim", False))
    names = tuple(range(x.dim()))
    left = tuple(("kept", d) if d in gone else d for d in names if keep or d not in gone)
    count = 1
    for d in gone:
        count *= x.shape[d]
    order = sorted(gone)
    sizes = {("kept", d): 1 for d in gone}

    def call(local: Tensor) -> Any:
        if name == "mean":
            if local.dtype in (torch.float16, torch.bfloat16) and rest.get("dtype") is None:
                return (
                    local.sum(order, keepdim=keep, dtype=torch.float32).div(count).to(local.dtype)
                )
            return local.sum(order, keepdim=keep, **rest) / count if order else local / count
        if name == "sum":
            return local.sum(order, keepdim=keep, **rest) if order else local.sum(**rest)
        return func(local, dim if isinstance(dim, int) else order, keepdim=keep, **rest)

    if name in ("sum", "mean"):
        return run_labels(view, call, [x], [names], [left], summed=gone, sizes=sizes)
    results = [left, left] if name in ("max", "min", "median", "topk") else [left]
    return run_labels(view, call, [x], [names], results, frozen=gone, sizes=sizes)


def matmul(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Products of matrices and stacks of them."""
    if len(args) != 2 or kwargs:
        return NotImplemented
    a, b = args if func.__name__ != "__rmatmul__" else (args[1], args[0])
    if a.dim() < 2 or b.dim() < 2:
        return NotImplemented
    batch = max(a.dim(), b.dim()) - 2
    lead = [("b", i) for i in range(batch)]
    labels = [
        (*lead[batch - (a.dim() - 2) :], "m", "k"),
        (*lead[batch - (b.dim() - 2) :], "k", "n"),
    ]
    out = (*lead, "m", "n")
    return run_labels(view, torch.matmul, [a, b], labels, [out], summed={"k"})


def addmm(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """bias + a @ b (and its batched form), as two steps, so that partial sums get the bias once."""
    if len(args) != 3 or kwargs:
        return NotImplemented
    bias, a, b = args
    return elementwise(view, torch.add, (bias, matmul(view, torch.matmul, (a, b), {})), {})


def linear(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """x @ weight.T + bias with a whole weight; split ones are in `layers.py`."""
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    lead = tuple(range(x.dim() - 1))
    labels: list[Labels] = [(*lead, "k"), ("n", "k")]
    out = [(*lead, "n")]
    if bias is None:
        return run_labels(view, func, [x, weight], labels, out, summed={"k"})
    if view.is_cut(x, x.dim() - 1):
        product = run_labels(view, func, [x, weight], labels, out, summed={"k"})
        return elementwise(view, torch.add, (product, bias), {})
    return run_labels(view, func, [x, weight, bias], [*labels, ("n",)], out)


def einsum(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Any equation in letters, without an ellipsis and without a letter twice in one operand."""
    if kwargs or not isinstance(args[0], str):
        return NotImplemented
    operands = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
    equation = args[0].replace(" ", "")
    inputs, arrow, out = equation.partition("->")
    terms = inputs.split(",")
    if "." in equation or not arrow or any(len(set(t)) != len(t) for t in terms):
        return NotImplemented
    gone = set("".join(terms)) - set(out)
    labels = [tuple(term) for term in terms]
    # A letter of length 1 in one operand and longer in another broadcasts.
    call = lambda *local: torch.einsum(equation, *local)  # noqa: E731
    # A letter that is in one operand only and not in the result is summed too: still linear.
    return run_labels(view, call, list(operands), labels, [tuple(out)], summed=gone)


def cat(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """cat and concat: the dim along which they join stays whole."""
    tensors = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    if kwargs.get("out") is not None or not isinstance(dim, int):
        return NotImplemented
    tensors = [t for t in tensors if t.dim() != 1 or t.numel()]  # torch lets empty ones through
    num = tensors[0].dim()
    dim %= num
    if any(t.dim() != num for t in tensors):
        return NotImplemented
    labels = [tuple(("cat", i) if d == dim else d for d in range(num)) for i in range(len(tensors))]
    out = tuple("cat" if d == dim else d for d in range(num))
    total = sum(t.shape[dim] for t in tensors)
    frozen = {("cat", i) for i in range(len(tensors))}
    return run_labels(
        view, lambda *local: torch.cat(local, dim), tensors, labels, [out],
        frozen=frozen, sizes={"cat": total},
    )  # fmt: skip


def stack(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """stack: a new dim, which is whole."""
    tensors = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if kwargs.get("out") is not None:
        return NotImplemented
    names = tuple(range(tensors[0].dim()))
    at = dim % (len(names) + 1)
    return run_labels(
        view, lambda *local: torch.stack(local, at), tensors, [names] * len(tensors),
        [(*names[:at], "stack", *names[at:])], sizes={"stack": len(tensors)},
    )  # fmt: skip


def pointwise_loss(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """mse_loss and its like: the element-wise loss, then its mean or sum."""
    kwargs = dict(kwargs)
    reduction_name = kwargs.pop("reduction", "mean")
    if (
        len(args) + ("input" in kwargs) + ("target" in kwargs) != 2
        or kwargs.get("weight") is not None
    ):
        return NotImplemented
    if kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        return NotImplemented
    each = elementwise(view, func, args, {**kwargs, "reduction": "none"})
    if reduction_name == "none":
        return each
    whole = torch.mean if reduction_name == "mean" else torch.sum
    return reduction(view, whole, (each,), {})
