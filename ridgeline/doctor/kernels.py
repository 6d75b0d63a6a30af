"""Which class an op or a kernel belongs to, what it costs, and whether it runs on tensor cores.

Ops are told by torch's names, kernels by the op that launched them and, where that is hidden in compiled
code, by the names that libraries and compilers give. Pure tables; called by `trace.py`; without torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from ridgeline.doctor.measured import (
    ATTENTION,
    CONVOLUTION,
    ELEMENTWISE,
    LOSS,
    MATRIX,
    OPTIMIZER,
)

COMMUNICATION, FREE = "communication", ""
"""`FREE`: no arithmetic at all, an op that only changes how a tensor is looked at, or holds others."""

_MATRIX = re.compile(
    r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm|addmv|mv|dot|addbmm|_int_mm|mkldnn_linear|"
    r"_addmm_activation|matmul|linear)$|^mkldnn::_linear|^onednn::"
)
_ATTENTION = re.compile(r"attention|_flash_|fmha", re.IGNORECASE)
_LENGTH_FIRST = re.compile(r"^aten::_(flash|efficient)_attention_")
"""Operands of (batch, length, heads, size), as the kernels on CUDA want them; others have heads first."""
_CONVOLUTION = re.compile(r"conv(olution)?\w*", re.IGNORECASE)
_LOSS = re.compile(
    r"nll_loss|cross_entropy|log_softmax|mse_loss|l1_loss|binary_cross|smooth_l1|huber|kl_div|"
    r"LogSoftmaxBackward|NllLoss",
    re.IGNORECASE,
)
_COMMUNICATION = re.compile(
    r"^(c10d|gloo|nccl|_c10d_functional)|^ncclDevKernel|^ncclKernel|^rcclDev", re.IGNORECASE
)
_FREE = re.compile(
    r"^aten::(empty\w*|as_strided|view\w*|_unsafe_view|t|transpose|permute|detach|expand\w*|"
    r"resolve_\w+|slice|select|unsqueeze|squeeze|reshape|flatten|narrow|alias|split\w*|chunk|unbind|"
    r"result_type|lift_fresh|item|is_nonzero|_local_scalar_dense|to|contiguous|unflatten|numpy_T|"
    r"_reshape_alias|set_|resize_|record_stream|broadcast_tensors|movedim|view_as|expand_as)$"
    r"|^autograd::engine|Backward\d+$|^torch::autograd::|^detach$|^Torch-Compiled|^CompiledFunction"
)
_OPTIMIZER = re.compile(
    r"multi_tensor_apply|fused_(adam|sgd)|FusedAdam|_fused_adam|_fused_sgd|^_adamw$"
)

_KERNEL_MATRIX = re.compile(
    r"gemm|gemv|cutlass|nvjet|xmma|cublas|_s16816|splitK|triton_tem_|sgemm|dgemm|Cijk_",
    re.IGNORECASE,
)
_KERNEL_ATTENTION = re.compile(r"flash|fmha|sdpa|attention|mha_", re.IGNORECASE)
_KERNEL_CONVOLUTION = re.compile(
    r"conv|dgrad|wgrad|implicit_|cudnn.*(fprop|bprop)|winograd", re.IGNORECASE
)
_TENSOR_CORES = re.compile(
    r"tensorop|16816|1688|16832|h884|bf16|f16|tf32|wgmma|gmma|hmma|nvjet|e4m3|e5m2|mma_|_mma|"
    r"flash_fwd|flash_bwd|cudnn_generated|imma|fp8",
    re.IGNORECASE,
)
_NO_TENSOR_CORES = re.compile(r"simt|sgemm|dgemm|ffma|gemv|sgemv|gemmk1|scudnn", re.IGNORECASE)

PRECISION_OF = {
    "double": "fp64",
    "float": "fp32",
    "c10::bfloat16": "bf16",
    "c10::half": "fp16",
    "c10::float8_e4m3fn": "fp8",
    "c10::float8_e5m2": "fp8",
}
_ITEM = {
    "double": 8, "float": 4, "c10::bfloat16": 2, "c10::half": 2, "long int": 8, "int": 4, "bool": 1,
    "unsigned char": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1, "short": 2, "signed char": 1,
}  # fmt: skip


def class_of_op(name: str, in_optimizer: bool = False) -> str:
    """Of an op on the host; `FREE` where it does no arithmetic of its own."""
    if _COMMUNICATION.search(name):
        return COMMUNICATION
    if _FREE.search(name) and not name.startswith("aten::_scaled"):
        return FREE
    if in_optimizer or _OPTIMIZER.search(name):
        return OPTIMIZER
    if _LOSS.search(name):
        return LOSS
    if _MATRIX.search(name):
        return MATRIX
    if _ATTENTION.search(name):
        return ATTENTION
    if _CONVOLUTION.search(name):
        return CONVOLUTION
    return ELEMENTWISE


def class_of_kernel(kernel: str, ops: Sequence[str], in_optimizer: bool) -> str:
    """Of a kernel; `ops` are the names of those around its launch, the innermost first."""
    if _COMMUNICATION.search(kernel):
        return COMMUNICATION
    if in_optimizer or _OPTIMIZER.search(kernel):
        return OPTIMIZER
    if any(_LOSS.search(op) for op in ops) or _LOSS.search(kernel):
        return LOSS
    if _KERNEL_ATTENTION.search(kernel):
        return ATTENTION
    for op in ops:
        found = class_of_op(op)
        if found in (MATRIX, ATTENTION, CONVOLUTION):
            return found
    # Compiled code: only the kernel's name is left.
    if kernel.startswith("triton_") and not kernel.startswith("triton_tem_"):
        return ELEMENTWISE
    if _KERNEL_MATRIX.search(kernel):
        return MATRIX
    return CONVOLUTION if _KERNEL_CONVOLUTION.search(kernel) else ELEMENTWISE


def on_tensor_cores(kernel: str, precision: str) -> bool:
    """Whether a matrix kernel uses them, by its name; by its type where the name does not say."""
    if _NO_TENSOR_CORES.search(kernel):
        # cuBLAS calls some of its TF32 kernels sgemm too, and says so.
        return bool(re.search("tf32", kernel, re.IGNORECASE))
    return bool(_TENSOR_CORES.search(kernel)) or precision in ("bf16", "fp16", "fp8")


def op_cost(name: str, dims: Any, types: Any, concrete: Any) -> tuple[float, float, str]:
    """FLOPs, bytes and precision of an op from what the profiler noted of its operands."""
    types = [str(t).lower() for t in types or ()]
    precision = next((PRECISION_OF[t] for t in types if t in PRECISION_OF), "")
    item = next((_ITEM[t] for t in types if t in _ITEM), 4)
    if "tensorlist" in types:
        return 0.0, _list_bytes(name, dims or (), types), precision
    shapes = [d if isinstance(d, list) else [] for d in dims or ()]
    sizes = [_num_items(d) for d in shapes]
    read = float(sum(n * _ITEM.get(t, item) for n, t in zip(sizes, types, strict=False)))
    flops, written = 0.0, float(max(sizes, default=0)) * item
    product = _product(name, shapes)
    if product is not None:
        b, m, n, k = product
        flops, written = 2.0 * b * m * n * k, float(b * m * n * item)
    elif name in ("aten::convolution", "aten::_convolution") and len(shapes) > 1:
        flops, written = _convolution(shapes, concrete or ())
        written *= item
    elif name == "aten::convolution_backward" and len(shapes) > 2:
        weight = shapes[2]
        small = shapes[1] if _is_true(concrete, 7) else shapes[0]
        flops = 2 * 2.0 * math.prod(small) * math.prod(weight[1:])
        written = float(math.prod(shapes[1]) + math.prod(weight)) * item
    elif _ATTENTION.search(name) and shapes and len(shapes[0]) == 4:
        back = "backward" in name
        query = shapes[1] if back and len(shapes) > 1 and len(shapes[1]) == 4 else shapes[0]
        key = shapes[2 if back else 1] if len(shapes) > 2 else query
        at = 1 if _LENGTH_FIRST.search(name) else 2
        length = key[at] if len(key) == 4 else query[at]
        flops = (10.0 if back else 4.0) * math.prod(query) * length
    return flops, read + written, precision


def _list_bytes(name: str, dims: Sequence[Any], types: Sequence[str]) -> float:
    """Read and written by an op on lists of tensors, whose type the profiler does not note: float32, which
    weights and states of optimizers are. Of its lists a fused optimizer changes all but the gradients, any
    other op the first."""
    lists = [
        float(sum(_num_items(one) for one in d if isinstance(one, list)))
        for d, kind in zip(dims, types, strict=False)
        if kind == "tensorlist" and isinstance(d, list)
    ]
    largest = max(lists, default=0.0)
    whole = [n for n in lists if n > 0.5 * largest]  # the others count steps
    changed = len(whole) - 1 if "_fused_" in name else 1
    return 4.0 * (sum(lists) + max(changed, 1) * largest)


def _product(name: str, shapes: Sequence[Any]) -> tuple[int, int, int, int] | None:
    """(batch, m, n, k) of a matrix product."""
    places = {
        "aten::mm": (0, 1),
        "aten::addmm": (1, 2),
        "aten::bmm": (0, 1),
        "aten::baddbmm": (1, 2),
        "aten::_scaled_mm": (0, 1),
        "aten::_addmm_activation": (1, 2),
    }
    if name not in places or len(shapes) <= places[name][1]:
        return None
    a, b = (shapes[i] for i in places[name])
    if len(a) == 2 and len(b) == 2:
        return 1, a[0], b[1], a[1]
    if len(a) == 3 and len(b) == 3:
        return a[0], a[1], b[2], a[2]
    return None


product_of = _product


def _convolution(shapes: Sequence[Any], concrete: Sequence[Any]) -> tuple[float, float]:
    """FLOPs, and numbers in the result."""
    inputs, weight = shapes[0], shapes[1]
    if len(inputs) < 3 or len(weight) != len(inputs):
        return 0.0, 0.0
    spatial = len(inputs) - 2

    def read(place: int, fallback: int) -> list[int]:
        try:
            values = [int(v) for v in re.findall(r"-?\d+", str(concrete[place]))]
        except IndexError:
            values = []
        return (values * spatial)[:spatial] if values else [fallback] * spatial

    stride, padding, dilation = read(3, 1), read(4, 0), read(5, 1)
    if _is_true(
        concrete, 6
    ):  # transposed: each number that comes in goes into a whole kernel's worth
        extra = read(7, 0)
        size = [
            (inputs[2 + i] - 1) * stride[i]
            - 2 * padding[i]
            + dilation[i] * (weight[2 + i] - 1)
            + extra[i]
            + 1
            for i in range(spatial)
        ]
        groups = max(read(8, 1)[0], 1)
        out = float(inputs[0] * weight[1] * groups * math.prod(size))
        return 2.0 * math.prod(inputs) * math.prod(weight[1:]), out
    size = [
        (inputs[2 + i] + 2 * padding[i] - dilation[i] * (weight[2 + i] - 1) - 1)
        // max(stride[i], 1)
        + 1
        for i in range(spatial)
    ]
    out = float(inputs[0] * weight[0] * math.prod(size))
    return 2.0 * out * math.prod(weight[1:]), out


def _is_true(concrete: Any, place: int) -> bool:
    values = concrete or ()
    return len(values) > place and str(values[place]).lower() in ("true", "1")


def _num_items(dims: Any) -> int:
    """Numbers in an operand, which may be a list of tensors."""
    if not dims:
        return 0
    if isinstance(dims[0], list):
        return sum(_num_items(d) for d in dims)
    return math.prod(int(d) for d in dims)
