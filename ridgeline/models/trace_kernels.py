"""Single kernels of a recorded step: what they are, their sizes as products, and what they reach over.

Everything here looks at one call's name, shapes and strides; `trace_record.py` decides whose it is and what
becomes of its result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NORMS = ("native_layer_norm", "native_group_norm", "rms_norm", "_fused_rms_norm")
BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit")
FUSABLE = frozenset(
    {
        *("_to_copy", "clone", "copy_", "native_dropout", "native_dropout_backward", "sum", "mean"),
        *("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"),
        *(
            "cat",
            "embedding",
            "nll_loss_forward",
            "nll_loss_backward",
            "fill_",
            "mse_loss",
            "where",
        ),
        *("mse_loss_backward", "native_group_norm", "native_group_norm_backward", "slice_backward"),
        *(
            "select_backward",
            "constant_pad_nd",
            "upsample_nearest2d",
            "upsample_nearest2d_backward",
        ),
        *("native_layer_norm", "native_layer_norm_backward", "rms_norm", "rms_norm_backward"),
        *("full_like", "ones_like", "zeros_like", "zeros", "full", "ones", "expand", "add_"),
        *("native_batch_norm", "native_batch_norm_backward", "threshold_backward", "gelu_backward"),
        *("silu_backward", "_native_batch_norm_legit", "hardtanh_backward", "tanh_backward"),
    }
)
"""Kernels that a compiler puts together with their neighbours, besides those that torch calls pointwise."""
EMPTY = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
)
Sizes = tuple[str, tuple[int, int, int, int], str, int]
"""A product's kind, m, n, k and batch, which of them is split, and the elements it moves."""


@dataclass
class Storage:
    """One piece of memory; numbered in the order of appearance, so that two recordings compare."""

    number: int
    num_bytes: int
    unit: int
    split: bool = False
    gathered: bool = False
    """Read by a layer that is split, which needs all of it."""
    lent: bool = False
    """What a split layer was called with: gathered beside a rank's part until the call is over, and cast
    to what the layer reads."""
    of_experts: bool = False
    """Weights of experts that lie side by side, their casts and their gradients."""
    kind: str = "made"
    """`made`, `parameter`, `buffer`, `input` or `weight` (a parameter in another type)."""
    producer: int = -1
    """Index of the kernel that wrote it first."""
    saved_by: tuple[int, str] | None = None
    """Unit and module that keep it first."""
    is_product: bool = False
    is_gradient: bool = False
    is_mask: bool = False
    sources: frozenset[str] = frozenset()
    """Linear layers whose results it follows from, with nothing between that needs all columns."""
    scores_width: int = 0
    """Of a product of two activations: its inner dimension."""

    @property
    def place(self) -> int:
        """Among bytes that are whole, split, gathered, and of experts' weights."""
        if self.of_experts:
            return 3
        return 1 if self.split else 2 if self.gathered or self.lent else 0


@dataclass
class Kernel:
    """One call that does something."""

    name: str
    unit: int
    module: str
    backward: bool
    reads: list[tuple[int, int]]
    """Storages and bytes."""
    writes: list[tuple[int, int]]
    split: bool = False
    kind: str = "plain"
    flops: int = 0
    product: Sizes | None = None
    more: Sizes | None = None
    """The second product of a convolution's backward."""
    attention: dict[str, Any] | None = None
    halo: tuple[int, int] | None = None
    fusable: bool = False


def is_linear(module: nn.Module, name: str, roles: Mapping[str, str]) -> bool:
    """A linear layer, under whatever name; an embedding where it has a role."""
    if isinstance(module, nn.Embedding):
        return name in roles
    weight = getattr(module, "weight", None)
    named = type(module).__name__ in ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear")
    return (
        isinstance(weight, Tensor)
        and weight.dim() == 2
        and (named or isinstance(module, nn.Linear))
    )


def find_tensors(values: Any) -> list[Tensor]:
    """In whatever they are put; torch's own walk through trees takes several times as long."""
    found: list[Tensor] = []
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, Mapping):
            waiting += value.values()
    return found[::-1]


def num_bytes(tensor: Tensor) -> int:
    """Of what is read: what is broadcast is read once."""
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes())


def is_pointwise(func: Any) -> bool:
    return func is not None and torch.Tag.pointwise in func.tags


def kind_of(name: str, read: list[Tensor], written: list[Tensor], func: Any) -> str:
    """Which of the slower kinds a kernel is."""
    if name in ("native_layer_norm_backward", "rms_norm_backward", "native_group_norm_backward"):
        return "norm_back"
    if not written or not read:
        return "plain"
    out = written[0]
    if name in ("_to_copy", "copy_"):
        source = read[-1] if name == "copy_" else read[0]
        return "upcast" if source.element_size() < out.element_size() else "plain"
    if not is_pointwise(func):
        return "plain"
    operands = [t for t in read if t.is_floating_point() and t.dim() > 0]
    if len({t.dtype for t in operands}) > 1:
        return "mixed"
    if any(not _is_dense(t) for t in operands if t.numel() * 8 > out.numel()):
        return "strided"
    return "plain"


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def is_kept(name: str, read: list[Tensor], written: Tensor) -> bool:
    """Whether selective recompute keeps it (`parallel/recompute.py`): a product's, convolution's or fused
    attention's, but not scores that are larger than what they come from."""
    if name in ("bmm", "baddbmm"):
        return written.numel() <= sum(tensor.numel() for tensor in read[-2:])
    return name in ("mm", "addmm", "_grouped_mm", "convolution", "attention")


def is_of_experts(name: str, written: Tensor, read: list[Tensor], sources: list[Storage]) -> bool:
    """Whether a result is as large as the experts' weights are: their cast, or their gradient."""
    if name == "_grouped_mm":
        return all(tensor.dim() == 2 for tensor in read)
    return any(
        source.of_experts and tensor.numel() == written.numel()
        for source, tensor in zip(sources, read, strict=True)
    )


def is_result_split(name: str, role: str, backward: bool, split: bool, reads_weight: bool) -> bool:
    """Whether ranks divide the result among them; `reads_weight`: it is no gradient of a weight."""
    if name not in ("mm", "addmm") or not role:
        return split
    if role in ("column", "head"):
        return not (backward and reads_weight)
    return backward


def size_matrix(
    name: str,
    read: list[Tensor],
    role: str,
    backward: bool,
    split: list[bool],
    sources: list[Storage],
) -> Sizes:
    first = 1 if name in ("addmm", "baddbmm") else 0
    a, b = read[first], read[first + 1]
    if name in ("bmm", "baddbmm"):
        sizes = (int(a.shape[1]), int(b.shape[2]), int(a.shape[2]), int(a.shape[0]))
        return "batched", sizes, "batch" if any(split[first:]) else "", 0
    sizes = (int(a.shape[0]), int(b.shape[1]), int(a.shape[1]), 1)
    has_weight = any(s.kind in ("parameter", "weight") for s in sources[first:])
    if not role:
        return "matrix", sizes, "", 0
    if has_weight:
        columns = role in ("column", "head")
        return "matrix", sizes, "n" if columns != backward else "k", 0
    # A weight's gradient: the operand that is divided has the dimension.
    return "matrix", sizes, "m" if split[first] else "n" if split[first + 1] else "", 0


def size_convolution(x: Tensor, weight: Tensor, out: Tensor, args: tuple[Any, ...]) -> Sizes:
    """As an implicit product: places by channels out, over channels in and the window."""
    transposed, groups = bool(args[6]), int(args[8])
    moved = x.numel() + weight.numel() + out.numel()
    window = math.prod(weight.shape[2:])
    if transposed:  # the gradient of the convolution that goes the other way
        channels = int(weight.shape[1])
        places = out.numel() // (channels * groups)
        inner = _strided(int(weight.shape[0]) // groups * window, x, out)
        return "convolution", (places, channels, inner, groups), "", moved
    channels = int(weight.shape[0]) // groups
    places = out.numel() // int(weight.shape[0])
    return "convolution", (places, channels, int(weight.shape[1]) * window, groups), "", moved


def _strided(inner: int, small: Tensor, large: Tensor) -> int:
    """Of a window's elements only those meet a place that the stride leaves."""
    share = math.prod(small.shape[2:]) / max(math.prod(large.shape[2:]), 1)
    return max(1, round(inner * min(share, 1.0)))


def size_convolution_backward(written: list[Tensor], args: tuple[Any, ...]) -> Any:
    """The input's gradient and the weight's; either may not be wanted."""
    gradient, x, weight = args[0], args[1], args[2]
    transposed, groups, wanted = bool(args[7]), int(args[9]), args[10]
    window = math.prod(weight.shape[2:])
    moved = x.numel() + weight.numel() + gradient.numel()
    products = []
    if wanted[0]:
        channels = int(x.shape[1]) // groups
        places = x.numel() // int(x.shape[1])
        others = int(gradient.shape[1]) // groups * window
        inner = others if transposed else _strided(others, gradient, x)
        products.append(("convolution", (places, channels, inner, groups), "", moved))
    if wanted[1]:
        rows = int(weight.shape[0]) // groups
        columns = int(weight.shape[1]) * window
        smaller = x if transposed else gradient
        places = smaller.numel() // int(smaller.shape[1])
        products.append(("convolution", (rows, columns, places, groups), "", moved))
    return (*products, None, None)[:2]


def halo_of(name: str, read: list[Tensor], args: tuple[Any, ...]) -> tuple[int, int] | None:
    """Elements that one side of a window takes from the next tile, along rows and along columns."""
    if name == "convolution" and not args[6]:
        window, dilation = list(read[1].shape[2:]), list(args[5])
    elif name in ("max_pool2d_with_indices", "avg_pool2d", "max_pool3d_with_indices"):
        window, dilation = list(args[1]), [1] * len(args[1])
    else:
        return None
    x = read[0]
    places = list(x.shape[2:])
    if len(places) < 2 or math.prod(window) == 1:
        return None
    reach = [(size - 1) * step // 2 for size, step in zip(window, dilation, strict=False)]
    rows = x.numel() // places[-2] * reach[-2]
    columns = x.numel() // places[-1] * reach[-1]
    return (rows, columns) if rows or columns else None


def stored_attention(scores: Tensor, width: int) -> dict[str, Any]:
    """Attention whose scores are written: sizes from their shape."""
    batch = int(scores.shape[0])
    heads = int(math.prod(scores.shape[1:-2])) if scores.dim() > 3 else 1
    return {
        "batch": batch, "heads": heads, "seq": int(scores.shape[-2]), "keys": int(scores.shape[-1]),
        "width": width, "causal": False, "scores": scores.numel(), "stored": True,
    }  # fmt: skip
