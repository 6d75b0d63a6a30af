"""Autocast for products of many experts at once, which torch's own leaves as they are.

`torch.nn.functional.grouped_mm` is in none of autocast's lists (2.11 to 2.13), so that a mixture of experts
whose weights are float32 computes its largest products in float32 whatever the precision; `transformers`
falls back to an operator of its own besides, where such a model is compiled. Both get the rule that every
other product has. Called by `precision.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.models.grouped import is_aligned

_TRANSFORMERS = "transformers::grouped_mm_fallback"
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_taught: dict[tuple[str, str], torch.library.Library] = {}
"""What has been registered, by operator and kind of device; gone when the library is."""


def teach_autocast(device_type: str) -> None:
    """From now on products of experts are computed in autocast's type, wherever it is entered. A torch that
    does so itself is left alone."""
    for name in ("aten::_grouped_mm", _TRANSFORMERS):
        key = _KEYS.get(device_type)
        if key is None or (name, key) in _taught or not _exists(name):
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            continue
        namespace, _, operator = name.partition("::")
        library = torch.library.Library(namespace, "IMPL", key)
        library.impl(operator, _narrow)
        _taught[name, key] = library


def _exists(name: str) -> bool:
    namespace, _, operator = name.partition("::")
    return hasattr(getattr(torch.ops, namespace), operator)


def _narrow(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: Any = None,
) -> Tensor:
    dtype = torch.get_autocast_dtype(a.device.type)
    with torch.autocast(a.device.type, enabled=False):
        if is_aligned(a.shape, b.shape) and torch.float64 not in (a.dtype, b.dtype):
            a, b = a.to(dtype), b.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return torch.ops.aten._grouped_mm(a, b, offs=offs, bias=bias, out_dtype=out_dtype)
