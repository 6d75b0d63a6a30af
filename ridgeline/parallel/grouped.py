"""Autocast for products of many experts at once, which torch's own leaves as they are.

`torch.nn.functional.grouped_mm` is in none of autocast's lists (2.11 to 2.13), so that a mixture of experts
whose weights are float32 computes its largest products in float32 whatever the precision; `transformers`
falls back to an operator of its own besides, one expert after the other, where such a model is compiled.
Both get the rule that every other product has. Called by `precision.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.models.grouped import ALIGNED, is_aligned

_ATEN, _TRANSFORMERS = "aten::_grouped_mm", "transformers::grouped_mm_fallback"
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_taught: dict[tuple[str, str], torch.library.Library] = {}
"""What has been registered, by operator and kind of device; gone when the library is."""


def teach_autocast(device_type: str) -> None:
    """From now on products of experts are computed in autocast's type, wherever it is entered. A torch that
    does so itself is left alone."""
    for name, rule in ((_ATEN, _narrow), (_TRANSFORMERS, _narrow_fallback)):
        key = _KEYS.get(device_type)
        if key is None or (name, key) in _taught or not _exists(name):
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            continue
        namespace, _, operator = name.partition("::")
        library = torch.library.Library(namespace, "IMPL", key)
        library.impl(operator, rule)
        _taught[name, key] = library


def _exists(name: str) -> bool:
    namespace, _, operator = name.partition("::")
    return hasattr(getattr(torch.ops, namespace), operator)


def _narrow(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What the kernel would refuse in 16 bits stays in its own type, and so does what says which type it
    wants to have."""
    dtype = torch.get_autocast_dtype(a.device.type)
    with torch.autocast(a.device.type, enabled=False):
        if out_dtype is None and bias is None and _may_be_narrow(a, b):
            narrow = _cast(a, dtype), _cast(b, dtype)
            if all(map(_is_laid_out, narrow)):
                return torch.ops.aten._grouped_mm(*narrow, offs=offs)
        return torch.ops.aten._grouped_mm(a, b, offs=offs, bias=bias, out_dtype=out_dtype)


def _narrow_fallback(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """One product for all experts where compiled code can have one: in bf16, of aligned operands. Each for
    itself can be computed in any type."""
    dtype = torch.get_autocast_dtype(a.device.type)
    with torch.autocast(a.device.type, enabled=False):
        if torch.float64 not in (a.dtype, b.dtype):
            a, b = _cast(a, dtype), _cast(b, dtype)
        is_one = a.dtype is b.dtype is torch.bfloat16 and _may_be_narrow(a, b)
        if is_one and _is_laid_out(a) and _is_laid_out(b) and _has_kernel(a.device):
            return torch.ops.aten._grouped_mm(a, b, offs=offs)
        return torch.ops.transformers.grouped_mm_fallback(a, b, offs)  # type: ignore[no-any-return]


def _cast(operand: Tensor, dtype: torch.dtype) -> Tensor:
    """As it lies in memory: weights that come transposed are cast as they are stored. Inductor (torch 2.13)
    makes a second, uninitialised copy for backward otherwise, on CPUs with AVX512."""
    if operand.stride(-1) != 1:
        return operand.transpose(-2, -1).to(dtype).transpose(-2, -1)
    return operand.to(dtype)


def _may_be_narrow(a: Tensor, b: Tensor) -> bool:
    return is_aligned(a.shape, b.shape) and torch.float64 not in (a.dtype, b.dtype)


def _is_laid_out(operand: Tensor) -> bool:
    """Whether one of the last two dims lies dense, and every row of it begins at 16 bytes."""
    *outer, rows, columns = operand.stride()
    dense, other = (columns, rows) if columns == 1 else (rows, columns)
    return dense == 1 and not any(stride % ALIGNED for stride in (*outer, other))


def _has_kernel(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
