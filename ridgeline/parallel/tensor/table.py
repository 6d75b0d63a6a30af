"""Which rule a torch function goes by, found by its name; used by `view.py` and `trace.py`.

Names are those that torch's override protocol gives: a method, a function of `torch` and one of
`torch.nn.functional` that do the same have the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ridgeline.parallel.tensor import rules, views
from ridgeline.parallel.tensor.attention import attention
from ridgeline.parallel.tensor.loss import cross_entropy
from ridgeline.parallel.tensor.move import enter
from ridgeline.parallel.tensor.rules import Rule

if TYPE_CHECKING:
    from ridgeline.parallel.tensor.view import GlobalView


def _words(text: str) -> list[str]:
    return text.split()


def dropout(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    names = ("input", "p", "training") if func.__module__ != "torch" else ("input", "p", "train")
    given = dict(zip(names, args, strict=False)) | kwargs
    x, p = given["input"], given.get("p", 0.5)
    if not given.get("training", given.get("train", True)) or p == 0 or not isinstance(x, DTensor):
        return x
    x = view.in_order(view.settle(x))
    local = view.dropout(view.own(x), p, view.part(x))
    return enter(local, view.mesh, x.placements, x.shape)


ELEMENTWISE = frozenset(
    _words("""abs neg __neg__ positive __pos__ exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square sin cos
    tan tanh sinh cosh asin acos atan atan2 erf erfc sigmoid logsigmoid relu relu6 gelu silu mish elu
    selu celu leaky_relu prelu hardtanh hardswish hardsigmoid softplus softsign tanhshrink softshrink
    hardshrink threshold reciprocal floor ceil round trunc frac sign sgn logit nan_to_num clamp clip
    clamp_min clamp_max add __add__ __radd__ sub __sub__ __rsub__ rsub subtract mul __mul__ __rmul__
    multiply div __div__ __truediv__ __rtruediv__ divide true_divide __rdiv__ floor_divide
    __floordiv__ __rfloordiv__ fmod remainder __mod__ pow __pow__ __rpow__ float_power maximum minimum
    fmax fmin lerp addcmul addcdiv where masked_fill eq __eq__ ne __ne__ lt __lt__ le __le__ gt __gt__
    ge __ge__ logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not
    bitwise_xor __and__ __or__ __xor__ __invert__ __rand__ __ror__ isnan isinf isfinite to type float
    double half bfloat16 int long bool type_as contiguous clone detach zeros_like ones_like full_like
    real conj hypot copysign xlogy __lshift__ __rshift__ cpu cuda data""")
)
VIEWS = frozenset(("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"))
REARRANGED = frozenset(
    _words("""transpose permute swapaxes swapdims movedim moveaxis t T mT unsqueeze squeeze unbind select
    narrow adjoint mH H expand broadcast_to""")
)
PARTS = frozenset(("chunk", "split", "tensor_split"))
REDUCED = frozenset(_words("sum mean amax amin argmax argmin logsumexp any all"))
LOSSES = frozenset(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"))
MATMULS = frozenset(("matmul", "__matmul__", "__rmatmul__", "bmm", "mm"))
NORMS = frozenset(("layer_norm", "rms_norm"))
DROPOUTS = frozenset(("dropout", "feature_dropout"))

NATIVE = frozenset(
    _words("""shape device dtype is_leaf requires_grad grad grad_fn layout ndim is_cuda is_meta is_cpu
    is_sparse is_quantized is_mkldnn is_nested itemsize nbytes names is_mps is_xpu is_complex
    is_floating_point is_signed is_same_size size dim ndimension numel nelement stride __len__
    element_size storage_offset is_contiguous requires_grad_ retain_grad register_hook backward
    get_device __hash__ __repr__ __str__ __format__ to_local full_tensor redistribute placements
    device_mesh is_tensor is_inference retains_grad output_nr _version _base is_pinned
    register_post_accumulate_grad_hook __set__ _is_view __delete__""")
)
CREATE = frozenset(("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"))
TO_PYTHON = frozenset(
    _words("""item tolist numpy __bool__ __int__ __float__ __index__ __contains__ allclose equal is_nonzero
    __complex__ __array__""")
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, rules.elementwise),
    **dict.fromkeys(VIEWS, views.reshape),
    **dict.fromkeys(REARRANGED, views.rearrange),
    **dict.fromkeys(PARTS, views.part),
    **dict.fromkeys(REDUCED, rules.reduction),
    **dict.fromkeys(LOSSES, rules.pointwise_loss),
    **dict.fromkeys(MATMULS, rules.matmul),
    **dict.fromkeys(("addmm", "baddbmm"), rules.addmm),
    **dict.fromkeys(NORMS, rules.normalise),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax"), rules.along_dim(1, None)),
    "cumsum": rules.along_dim(1, None),
    "linear": rules.linear,
    "einsum": rules.einsum,
    **dict.fromkeys(("cat", "concat", "concatenate"), rules.cat),
    "stack": rules.stack,
    "__getitem__": views.getitem,
    "embedding": views.embedding,
    "dropout": dropout,
    "scaled_dot_product_attention": attention,
    "cross_entropy": cross_entropy,
}

KNOWS_RUNS = frozenset(RULES) - {"scaled_dot_product_attention"}
"""Functions whose rule takes tensors that are cut in runs (`runs.py`) as they are."""


def name_of(func: Any) -> str:
    """The name of a function; of a property, that of the property."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", name)
    return str(name)


_OPERATORS = frozenset(
    f"__i{n}__" for n in _words("add sub mul truediv pow mod and or xor floordiv div")
)


def in_place_target(name: str, args: Any, kwargs: Any) -> Any:
    """The tensor a call would change, or None."""
    changes = (
        name in _OPERATORS
        or name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or kwargs.get("inplace") is True
    )
    if not changes:
        return None
    return args[0] if args else kwargs.get("input")


def out_of_place(name: str, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Arguments and function of the same call as one that changes nothing, if torch has one."""
    if kwargs.get("inplace") is True:
        import torch.nn.functional as F

        return args, {k: v for k, v in kwargs.items() if k != "inplace"}, getattr(F, name, None)
    if name in _OPERATORS:
        return args, kwargs, getattr(Tensor, f"__{name[3:]}", None)
    if name != "__setitem__" and name[:-1] in RULES:
        return args, kwargs, getattr(Tensor, name[:-1], getattr(torch, name[:-1], None))
    return args, kwargs, None
