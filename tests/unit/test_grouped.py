"""Products of many experts at once under autocast: in its type, like every other product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
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


@pytest.mark.parametrize("how", ["a type is asked for", "columns lie together", "float64"])
def test_what_says_its_type_or_lies_otherwise_is_computed_as_it_was(how: str) -> None:
    teach_autocast("cpu")
    a, b = operands(dtype=torch.float64 if how == "float64" else torch.float32)
    options = {"out_dtype": torch.float32} if how == "a type is asked for" else {}
    if how == "columns lie together":
        a = a.detach().t().contiguous().t()  # 20 rows are no multiple of 8
    if how == "float64":
        with torch.autocast("cpu", dtype=NARROW), pytest.raises(RuntimeError):
            F.grouped_mm(a, b, offs=ENDS)  # which torch has no kernel for, with or without autocast
        return
    expected = F.grouped_mm(a, b, offs=ENDS, **options)
    with torch.autocast("cpu", dtype=NARROW):
        assert torch.equal(F.grouped_mm(a, b, offs=ENDS, **options), expected)


class Products(TorchDispatchMode):
    """The types that experts are multiplied in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default:
            self.dtypes += [args[0].dtype, args[1].dtype]
        return func(*args, **(kwargs or {}))


def mixture(width: int = 32, wide: int = 48) -> nn.Module:
    pytest.importorskip("transformers")
    sizes = (
        f"{{vocab_size: 64, hidden_size: {width}, intermediate_size: {wide}, num_hidden_layers: 1, "
        "num_attention_heads: 2, num_key_value_heads: 1, num_local_experts: 4, num_experts_per_tok: 2}"
    )
    recipe = ["model.name=transformers:MixtralForCausalLM", f"model.args.config={sizes}"]
    model = build_model("transformers:MixtralForCausalLM", **load_config(
        None, [*recipe, "data.source=text", "train.steps=1"]
    ).config.model.args)  # fmt: skip
    return model.model.layers[0].mlp.experts


def test_a_mixture_of_transformers_in_bf16() -> None:
    experts = mixture()
    rows, chosen, weigh = torch.randn(10, 32), torch.randint(4, (10, 2)), torch.ones(10, 2)
    wide = experts(rows, chosen, weigh)
    precision = build_precision("bf16", torch.device("cpu"))
    with precision.autocast(), Products() as seen:
        narrow = experts(rows, chosen, weigh)
    assert seen.dtypes == [NARROW] * 4
    assert (narrow.float() - wide).norm() < 0.02 * wide.norm()
    assert narrow.dtype is rows.dtype


@pytest.mark.parametrize(
    ("name", "width", "wide"), [("bf16", 32, 48), ("bf16", 36, 52), ("fp16", 32, 48)]
)
def test_a_compiled_mixture_is_in_16_bits(name: str, width: int, wide: int) -> None:
    """Compiled, such a model calls an operator of its own, one expert after the other; with the rule it is
    one product where that can be compiled (in bf16, of aligned operands), and in 16 bits elsewhere."""
    experts = mixture(width, wide)
    rows, chosen = torch.randn(10, width, requires_grad=True), torch.randint(4, (10, 2))
    weigh = torch.ones(10, 2)
    graphs: list[torch.fx.GraphModule] = []

    def look(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    call = torch.compile(
        experts, backend=aot_autograd(fw_compiler=look, bw_compiler=lambda g, _: g)
    )
    expected = experts(rows, chosen, weigh)
    wanted = torch.autograd.grad(expected.square().sum(), rows)[0]
    with build_precision(name, torch.device("cpu")).autocast():
        narrow = call(rows, chosen, weigh)
    gradient = torch.autograd.grad(narrow.float().square().sum(), rows)[0]
    for found, right in ((narrow.float(), expected), (gradient, wanted)):
        assert 1e-4 * right.norm() < (found - right).norm() < 0.03 * right.norm()
    assert graphs
    products = [n for g in graphs for n in g.graph.nodes if "_grouped_mm" in str(n.target)]
    types = [one.meta["val"].dtype for node in products for one in node.args[:2]]
    assert types == ([NARROW] * 4 if (name, width) == ("bf16", 32) else [])
    for node in products:
        # Weights are cast as they are stored: of a cast of what was transposed before, inductor's copy for
        # backward was filled with what it found in memory.
        assert "transpose" in str(node.args[1].target)
