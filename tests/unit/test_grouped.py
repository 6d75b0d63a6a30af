"""Products of many experts at once under autocast: in its type, like every other product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.config import load_config
from ridgeline.models.build import build_model
from ridgeline.parallel.grouped import teach_autocast
from ridgeline.parallel.precision import build_precision

ENDS = torch.tensor([3, 3, 12, 20], dtype=torch.int32)
NARROW = torch.bfloat16


def operands(k: int = 16, n: int = 24, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    a = torch.randn(20, k, generator=made, dtype=dtype, requires_grad=True)
    return a, torch.randn(4, k, n, generator=made, dtype=dtype, requires_grad=True)


def by_hand(a: Tensor, b: Tensor) -> Tensor:
    starts = [0, *ENDS.tolist()]
    return torch.cat(
        [a[first:last] @ b[e] for e, (first, last) in enumerate(zip(starts, ENDS, strict=False))]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_experts_are_in_autocast_s_type(dtype: torch.dtype) -> None:
    teach_autocast("cpu")
    teach_autocast("cpu")  # which does nothing
    a, b = operands()
    with torch.autocast("cpu", dtype=dtype):
        out = F.grouped_mm(a, b, offs=ENDS)
    assert out.dtype is dtype
    (out.float() ** 2).sum().backward()
    right = torch.autograd.grad((by_hand(a, b) ** 2).sum(), (a, b))
    for found, wanted in zip((a.grad, b.grad), right, strict=True):
        assert found.dtype is torch.float32
        assert (found - wanted).norm() < 0.01 * wanted.norm()
    assert F.grouped_mm(a, b, offs=ENDS).dtype is torch.float32  # outside of it nothing has changed


def test_what_the_kernel_would_refuse_stays_in_its_own_type() -> None:
    teach_autocast("cpu")
    with torch.autocast("cpu", dtype=NARROW):
        for k, n in ((20, 24), (16, 12)):
            a, b = operands(k, n)
            assert F.grouped_mm(a, b, offs=ENDS).dtype is torch.float32


class Products(TorchDispatchMode):
    """The types that experts are multiplied in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default:
            self.dtypes += [args[0].dtype, args[1].dtype]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mixture_of_transformers_in_bf16(compiled: bool) -> None:
    """Compiled, such a model calls an operator of its own, one expert after the other, where its weights
    are float32; with the rule it is the same product."""
    pytest.importorskip("transformers")
    sizes = (
        "{vocab_size: 64, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, "
        "num_attention_heads: 2, num_key_value_heads: 1, num_local_experts: 4, num_experts_per_tok: 2}"
    )
    recipe = ["model.name=transformers:MixtralForCausalLM", f"model.args.config={sizes}"]
    model = build_model("transformers:MixtralForCausalLM", **load_config(
        None, [*recipe, "data.source=text", "train.steps=1"]
    ).config.model.args)  # fmt: skip
    experts = model.model.layers[0].mlp.experts
    rows, chosen = torch.randn(10, 32), torch.randint(4, (10, 2))
    weigh = torch.ones(10, 2)
    call = torch.compile(experts, backend="aot_eager") if compiled else experts
    precision = build_precision("bf16", torch.device("cpu"))
    wide = experts(rows, chosen, weigh)
    with precision.autocast(), Products() as seen:
        narrow = call(rows, chosen, weigh)
    assert seen.dtypes == [NARROW] * 4
    assert (narrow.float() - wide).norm() < 0.02 * wide.norm()
    assert narrow.dtype is rows.dtype
