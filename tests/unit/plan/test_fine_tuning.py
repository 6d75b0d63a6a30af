"""Modules of which a part is frozen, and adapters beside its layers: planned as they are trained."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.layout import Layout
from ridgeline.plan.general import module_job
from ridgeline.plan.general_memory import module_memory
from ridgeline.plan.general_time import module_time
from ridgeline.plan.machine import load_machine
from ridgeline.plan.module import ModuleFacts

torch = pytest.importorskip("torch")

WIDTH, RANK, DEPTH = 512, 8, 4
MATRICES = 8 * WIDTH * WIDTH  # of a block's two layers
H200 = load_machine("h200")


def trace(adapters: bool, frozen: bool) -> ModuleFacts:
    from torch import nn

    from ridgeline.models.trace import trace_module

    class Layer(nn.Module):
        def __init__(self, inner: int, outer: int) -> None:
            super().__init__()
            self.base = nn.Linear(inner, outer, bias=False)
            self.base.requires_grad_(not frozen)
            self.down = nn.Linear(inner, RANK, bias=False) if adapters else None
            self.up = nn.Linear(RANK, outer, bias=False) if adapters else None

        def forward(self, x: Any) -> Any:
            return self.base(x) + self.up(self.down(x)) if self.up is not None else self.base(x)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.first, self.second = Layer(WIDTH, 4 * WIDTH), Layer(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            return x + self.second(torch.relu(self.first(self.norm(x))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
            self.head = nn.Linear(WIDTH, 10)

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def batch(n: int) -> Any:
        return (torch.zeros(n, WIDTH),), torch.zeros(n, dtype=torch.long)

    return trace_module("net", Net, batch, torch.nn.functional.cross_entropy, [f"{WIDTH}"])


def memory(facts: ModuleFacts, layout: str) -> Any:
    return module_memory(module_job(facts, H200, Layout.parse(layout), 64))


@pytest.mark.parametrize("layout", ["dp=8", "dp=8,zero=1", "dp=8,zero=2", "dp=8,zero=3", "dp=1"])
def test_frozen_weights_have_no_gradients(layout: str) -> None:
    whole, frozen = trace(False, False), trace(False, True)
    assert frozen.num_trainable < 0.01 * whole.num_trainable
    assert frozen.num_parameters == whole.num_parameters
    held, less = memory(whole, layout), memory(frozen, layout)
    assert less.weights <= held.weights
    # Neither where they are kept nor where the step is largest.
    gradients = 4.0 * DEPTH * MATRICES / (8 if "zero=2" in layout or "zero=3" in layout else 1)
    assert less.allocated < held.allocated - 0.9 * gradients
    times = [module_time(module_job(f, H200, Layout.parse(layout), 64)) for f in (whole, frozen)]
    assert times[1].gradients + times[1].gathers <= times[0].gradients + times[0].gathers
    assert times[1].seconds < times[0].seconds


def test_layers_with_adapters_are_cut_as_they_are_without() -> None:
    plain, adapted = trace(False, True), trace(True, True)
    assert plain.splits == adapted.splits == 4 * WIDTH
    weights = [memory(facts, "tp=8").weights for facts in (plain, adapted)]
    adapters = 4.0 * DEPTH * 2 * RANK * 5 * WIDTH
    assert weights[0] < 4.0 * DEPTH * MATRICES / 7
    assert weights[0] < weights[1] < weights[0] + adapters


def test_a_bottleneck_alone_is_cut_where_it_is() -> None:
    from torch import nn

    from ridgeline.models.trace import trace_module

    def build() -> Any:
        return nn.Sequential(
            nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 512), nn.LayerNorm(512), nn.Linear(512, 4)
        )

    def batch(n: int) -> Any:
        return (torch.zeros(n, 512),), torch.zeros(n, dtype=torch.long)

    facts = trace_module("net", build, batch, torch.nn.functional.cross_entropy, ["512"])
    assert facts.splits == 32
