"""What full recompute computes again: the trace says it, and a step on the CPU does it."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.layout import Layout
from ridgeline.plan.general import again_of, cost_of, module_job
from ridgeline.plan.job import job_from_layout
from ridgeline.plan.kernels import gemm_s
from ridgeline.plan.known import model_of_recipe
from ridgeline.plan.layer import layer_cost
from ridgeline.plan.machine import load_machine
from ridgeline.plan.module import ModuleFacts
from ridgeline.plan.own import own_layer, own_recompute

torch = pytest.importorskip("torch")


class Ends(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Two alike blocks whose last operation is, or is not, needed in backward."""

    class Block(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, norm: bool) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
            self.norm = torch.nn.LayerNorm(32) if norm else torch.nn.Identity()

        def forward(self, x: Any) -> Any:
            return x + self.norm(self.b(torch.relu(self.a(x))))

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Ends.Block(norm) for _ in range(2))
        self.head = torch.nn.Linear(32, 4)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _loss(out: Any, target: Any) -> Any:
    return torch.nn.functional.cross_entropy(out, target)


def _batch(samples: int) -> Any:
    return (torch.zeros(samples, 32),), torch.zeros(samples, dtype=torch.long)


def _trace(norm: bool) -> ModuleFacts:
    from ridgeline.models.trace import trace_module

    return trace_module("ends", lambda: Ends(norm), _batch, _loss, ["32"], "samples", 1)


def _num_products(norm: bool, recompute: str) -> int:
    """Of a step, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from ridgeline.parallel.recompute import apply_recompute

    class Counting(TorchDispatchMode):  # type: ignore[misc]
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Counting.count += func._schema.name in ("aten::mm", "aten::addmm")
            return func(*args, **(kwargs or {}))

    model = Ends(norm)
    if recompute != "none":
        apply_recompute(model, recompute)
    (x,), target = _batch(4)
    with Counting():
        _loss(model(x.requires_grad_()), target).backward()
    return Counting.count


@pytest.mark.parametrize(("norm", "left_out"), [(False, 1), (True, 0)])
def test_the_last_product_is_left_out_where_nothing_needs_it(norm: bool, left_out: int) -> None:
    """A norm keeps its input, so that the product before it is computed again, too."""
    blocks = [b for b in _trace(norm).blocks if b.recompute == "block"]
    for block in blocks:
        costs = block.costs["wide"]
        assert sum(p.count for p in costs.forward.products) == 2
        assert sum(p.count for p in costs.last.products) == left_out
    again = _num_products(norm, "full") - _num_products(norm, "none")
    assert again == sum(b.count for b in blocks) * (2 - left_out)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("tp", [1, 2])
def test_sizes_and_trace_leave_out_the_same(precision: str, tp: int) -> None:
    """A product in 8 bits is done again in eager mode: it keeps its inputs after it has computed."""
    machine = load_machine("h200")
    model = model_of_recipe("llama", {"size": "124m"}, 1024)
    layout = Layout.parse(f"tp={tp},recompute=full,precision={precision}")
    job = job_from_layout(model, machine, layout, 8)
    layer = own_layer(machine, job.model, job.part, False, False, job.tp_group())
    again = own_recompute("full", layer, compiled=False)
    tokens, inner = 8 * 1024, model.ffn // tp
    product = gemm_s(machine.device, tokens, model.hidden, inner, 1, precision)
    left_out = layer.forward.products - again.products
    assert left_out == pytest.approx(0.0 if precision == "fp8" else product)
    assert again.elementwise < layer.forward.elementwise
    summed = layer.forward.communication / 2
    assert layer.forward.communication - again.communication == pytest.approx(summed)
    compiled = layer_cost(machine, job.model, job.part, job.software, job.tp_group())
    assert compiled.last.products == pytest.approx(product)


def test_a_traced_block_leaves_it_out_of_its_time() -> None:
    facts = _trace(norm=False)
    index = next(i for i, b in enumerate(facts.blocks) if b.recompute == "block")
    for precision, leaves_out in (("bf16", True), ("fp8", False)):
        job = module_job(
            facts, load_machine("h200"), Layout.parse(f"recompute=full,precision={precision}"), 8
        )
        cost, again = cost_of(job, index), again_of(job, index)
        assert (again.products < cost.forward.products) is leaves_out
        assert again.elementwise < cost.forward.elementwise
