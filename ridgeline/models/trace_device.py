"""What an accelerator does with a step that the meta device does not: autocast, and kernels in one piece.

On the meta device autocast is unknown, attention and RMS norm fall apart into their arithmetic, and
dropout keeps a mask of floats. `as_on_device` puts all of that right while it is entered, by functions on a
dispatch key that no tensor there has (the autocast key of a device that torch no longer builds for): so
every call comes by, from Python or from inside torch, above autograd, and nothing outside is touched.
Called by `trace.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgeline.models.grouped import grouped_shape, is_aligned

_KEY = "AutocastIPU"
_DEVICE = "ipu"

_LOWER = (
    *("_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d"),
    *("conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv"),
    *(
        "addr",
        "matmul",
        "einsum",
        "mm",
        "mv",
        "linalg_vecdot",
        "linear",
        "addbmm",
        "baddbmm",
        "bmm",
    ),
    *(
        "chain_matmul",
        "linalg_multi_dot",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
    ),
)
"""What CUDA's autocast computes in 16 bits."""
_WIDE = (
    *("layer_norm", "group_norm", "native_layer_norm", "nll_loss", "nll_loss2d", "mse_loss"),
    *("l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy_with_logits"),
    *("cosine_similarity", "cosine_embedding_loss", "poisson_nll_loss", "hinge_embedding_loss"),
    *("margin_ranking_loss", "multilabel_margin_loss", "multi_margin_loss", "soft_margin_loss"),
    *("triplet_margin_loss", "exp", "expm1", "log", "log10", "log1p", "log2", "logsumexp", "rsqrt"),
    *("reciprocal", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "sinh"),
    *("cosh", "tan", "acos", "asin", "erfinv", "dist", "cdist", "pdist", "renorm"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d"),
    *("upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
)
"""What it computes in float32."""
_WIDE_RESULT = ("sum", "sum.dim_IntList", "prod", "prod.dim_int", "cumsum", "cumprod")
"""What it sums up in float32, reading 16 bits."""


class Watcher(Protocol):
    """Hears of kernels that are not in torch's list of operators on the meta device."""

    def note_kernel(
        self, name: str, reads: list[Tensor], writes: list[Tensor], **facts: Any
    ) -> None: ...

    def note_weight(self, copy: Tensor, of: Tensor) -> None:
        """`copy` is a parameter in another type."""
        ...


@contextmanager
def as_on_device(
    watcher: Watcher, dtype: torch.dtype | None, wide_rms_norm: bool | None = None
) -> Iterator[None]:
    """Run what is inside as CUDA would, under autocast to `dtype` (None: without). Newer releases of torch
    compute RMS norms in float32 under autocast, older ones in what they are given; `wide_rms_norm` says
    which (None: as the torch that is here)."""
    libraries = [torch.library.Library("_", "IMPL", _KEY)]
    libraries[0].fallback(torch.library.fallthrough_kernel, _KEY)
    table = torch.library.Library("aten", "IMPL", _KEY)
    libraries.append(table)
    cast = _Cast(watcher, dtype)
    widens = wide_rms_norm
    if widens is None:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        widens = has_kernel("aten::rms_norm", "AutocastCUDA")
    for name, function in _functions(watcher, cast, dtype, widens).items():
        table.impl(name, _outside(function))
    before = torch.is_autocast_enabled(_DEVICE)
    torch.set_autocast_enabled(_DEVICE, True)
    try:
        with torch._C._IncludeDispatchKeyGuard(_key()):
            yield
    finally:
        torch.set_autocast_enabled(_DEVICE, before)
        cast.copies.clear()
        for library in libraries:
            library._destroy()


def _key() -> Any:
    return getattr(torch._C.DispatchKey, _KEY)


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without coming by here again from inside."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_key())):
            return function(*args, **kwargs)

    return call


class _Cast:
    """Casts arguments, parameters once."""

    def __init__(self, watcher: Watcher, dtype: torch.dtype | None) -> None:
        self.watcher, self.dtype = watcher, dtype
        self.copies: dict[int, Tensor] = {}

    def lower(self, value: Any) -> Any:
        if self.dtype is None:
            return value
        return _each(value, lambda t: self._one(t, self.dtype))

    def wide(self, value: Any) -> Any:
        if self.dtype is None:
            return value
        return _each(value, lambda t: t.float() if t.dtype in _SHORT else t)

    def _one(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        if dtype is None or not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        if tensor.dtype == torch.float64:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32):
            return tensor.to(dtype)
        if id(tensor) not in self.copies:
            self.copies[id(tensor)] = tensor.to(dtype)
            self.watcher.note_weight(self.copies[id(tensor)], tensor)
        return self.copies[id(tensor)]


_SHORT = (torch.bfloat16, torch.float16)


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_each(item, change) for item in value)
    return value


def _functions(
    watcher: Watcher, cast: _Cast, dtype: torch.dtype | None, widens_rms_norm: bool
) -> dict[str, Callable[..., Any]]:
    """By operator: what to do in its place."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        query, key, value = (cast.lower(t) for t in (query, key, value))
        if attn_mask is not None and not attn_mask.is_floating_point():
            attn_mask = attn_mask.to(query.dtype)
        if query.dim() == 3:
            parts = (t.unsqueeze(1) for t in (query, key, value))
            return _Attention.apply(watcher, *parts, attn_mask, is_causal).squeeze(1)  # type: ignore[no-any-return, no-untyped-call]
        return _Attention.apply(watcher, query, key, value, attn_mask, is_causal)  # type: ignore[no-any-return, no-untyped-call]

    def rms_norm(
        x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if widens_rms_norm:
            x, weight = cast.wide(x), cast.wide(weight)
        return _RmsNorm.apply(watcher, x, weight, len(shape))  # type: ignore[no-any-return, no-untyped-call]

    def dropout(x: Tensor, p: float, train: bool) -> Tensor:
        if not train or p == 0.0:
            return x
        return torch.ops.aten.native_dropout(x, p, train)[0]  # type: ignore[no-any-return]

    def softmax(operator: Any, log: bool) -> Callable[..., Tensor]:
        def call(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
            wanted = dtype or (torch.float32 if cast.dtype is not None else None)
            if wanted == torch.float32 and x.dtype in _SHORT:
                return _Softmax.apply(watcher, x, log)  # type: ignore[no-any-return, no-untyped-call]
            return operator(x, dim, dtype)  # type: ignore[no-any-return]

        return call

    def grouped(
        a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        if is_aligned(a.shape, b.shape) and bias is None and out_dtype is None:
            a, b = cast.lower(a), cast.lower(b)
        groups = len(offs) if offs is not None else max(a.shape[0], b.shape[0])
        return _Grouped.apply(watcher, a, b, groups)  # type: ignore[no-any-return, no-untyped-call]

    aten = torch.ops.aten
    functions: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": attention,
        "rms_norm": rms_norm,
        "dropout": dropout,
        "softmax.int": softmax(aten.softmax.int, False),
        "log_softmax.int": softmax(aten.log_softmax.int, True),
        "_grouped_mm": grouped,
    }
    functions = {name: function for name, function in functions.items() if _exists(name)}
    return functions if dtype is None else functions | _autocast(cast)


def _autocast(cast: _Cast) -> dict[str, Callable[..., Any]]:
    """By operator of its lists: the same in another type."""
    aten = torch.ops.aten

    def casting(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(aten, packet), overload or "default")

        def call(*args: Any, **kwargs: Any) -> Any:
            changed = {key: change(value) for key, value in kwargs.items()}
            return operator(*(change(value) for value in args), **changed)

        return call

    def summing(name: str) -> Callable[..., Any]:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(aten, packet), overload or "default")

        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dtype") is None and x.dtype in _SHORT:
                kwargs["dtype"] = torch.float32
            return operator(x, *args, **kwargs)

        return call

    functions = {name: casting(name, cast.lower) for name in _LOWER if _exists(name)}
    functions |= {name: casting(name, cast.wide) for name in _WIDE if _exists(name)}
    functions |= {name: summing(name) for name in _WIDE_RESULT if _exists(name)}
    return functions


def _exists(name: str) -> bool:
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return found is not None and (overload or "default") in found.overloads()


class _Attention(torch.autograd.Function):
    """Fused attention, as FlashAttention: keeps its inputs, the result and the softmax's sums."""

    @staticmethod
    def forward(
        ctx: Any, watcher: Watcher, query: Tensor, key: Tensor, value: Tensor,
        mask: Tensor | None, causal: bool,
    ) -> Tensor:  # fmt: skip
        batch, heads, seq, _ = query.shape
        width = value.shape[-1]
        out = query.new_empty(batch, seq, heads, width).transpose(1, 2)
        sums = query.new_empty(batch, heads, seq, dtype=torch.float32)
        reads = [query, key, value] + ([mask] if mask is not None else [])
        ctx.watcher, ctx.causal = watcher, causal
        ctx.save_for_backward(*reads, out, sums)
        watcher.note_kernel("attention", reads, [out, sums], causal=causal, backward=False)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        *reads, out, sums = ctx.saved_tensors
        gradients = [torch.empty_like(t) for t in reads[:3]]
        ctx.watcher.note_kernel(
            "attention", [*reads, out, sums, gradient], gradients, causal=ctx.causal, backward=True
        )
        return (None, *gradients, None, None)


class _Grouped(torch.autograd.Function):
    """Rows sorted by their matrix, each group of them times its own; or any other of its four forms."""

    @staticmethod
    def forward(ctx: Any, watcher: Watcher, a: Tensor, b: Tensor, groups: int) -> Tensor:
        ctx.watcher, ctx.groups = watcher, groups
        ctx.save_for_backward(a, b)
        return _multiply(watcher, a, b, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        a, b = ctx.saved_tensors
        of_a = of_b = None
        if ctx.needs_input_grad[1]:
            of_a = _multiply(ctx.watcher, gradient, b.transpose(-2, -1), ctx.groups)
        if ctx.needs_input_grad[2]:
            of_b = _multiply(ctx.watcher, a.transpose(-2, -1), gradient, ctx.groups)
        return None, of_a, of_b, None


def _multiply(watcher: Watcher, a: Tensor, b: Tensor, groups: int) -> Tensor:
    out = a.new_empty(grouped_shape(a.shape, b.shape, groups))
    watcher.note_kernel("_grouped_mm", [a, b], [out], groups=groups)
    return out


class _RmsNorm(torch.autograd.Function):
    """One kernel each way; keeps its input and a number a row."""

    @staticmethod
    def forward(ctx: Any, watcher: Watcher, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        out = torch.empty_like(x)
        rows = x.new_empty(x.shape[:-dims], dtype=torch.float32)
        reads = [x] + ([weight] if weight is not None else [])
        ctx.watcher = watcher
        ctx.save_for_backward(*reads, rows)
        watcher.note_kernel("rms_norm", reads, [out, rows])
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        *reads, rows = ctx.saved_tensors
        gradients = [torch.empty_like(t) for t in reads]
        ctx.watcher.note_kernel("rms_norm_backward", [*reads, rows, gradient], gradients)
        return (None, *gradients, *([None] * (2 - len(gradients))), None)


class _Softmax(torch.autograd.Function):
    """Reads 16 bits and writes float32."""

    @staticmethod
    def forward(ctx: Any, watcher: Watcher, x: Tensor, log: bool) -> Tensor:
        out = torch.empty_like(x, dtype=torch.float32)
        ctx.watcher, ctx.dtype = watcher, x.dtype
        ctx.save_for_backward(out)
        watcher.note_kernel("_log_softmax" if log else "_softmax", [x], [out])
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (out,) = ctx.saved_tensors
        result = torch.empty_like(out, dtype=ctx.dtype)
        ctx.watcher.note_kernel("_softmax_backward_data", [out, gradient], [result])
        return None, result, None
