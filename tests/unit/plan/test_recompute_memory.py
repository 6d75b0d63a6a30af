"""What recompute leaves of a traced module's memory, against steps that are counted on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.layout import Layout
from ridgeline.plan.general import module_job
from ridgeline.plan.general_memory import module_stage_memory
from ridgeline.plan.machine import load_machine

torch = pytest.importorskip("torch")

SIDE, SAMPLES = 32, 8


def _layers(wide: int, out: int, count: int) -> list[Any]:
    nn = torch.nn
    found: list[Any] = []
    for index in range(count):
        found += [nn.Conv2d(wide if index == 0 else out, out, 3, padding=1, bias=False)]
        found += [nn.BatchNorm2d(out), nn.ReLU()]
    return found


class Skips(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A small U-Net without repeated blocks: its layers stand in `Sequential`s."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.down = nn.Sequential(*_layers(3, 16, 3))
        self.inner = nn.Sequential(nn.MaxPool2d(2), *_layers(16, 32, 3))
        self.up = nn.Upsample(scale_factor=2)
        self.out = nn.Sequential(*_layers(48, 16, 3), nn.Conv2d(16, 1, 1))

    def forward(self, x: Any) -> Any:
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(self.inner(skip))], 1))


class Chain(torch.nn.Module):  # type: ignore[misc,name-defined]
    """One long `Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*_layers(3, 16, 9), torch.nn.Conv2d(16, 1, 1))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class Attends(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Blocks whose attention is spelled out: its scores are most of what they keep."""

    class Block(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            nn = torch.nn
            self.norm, self.qkv, self.join = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            scores = torch.bmm(q, k.transpose(1, 2)) / 6.0
            return x + self.join(torch.bmm(scores.softmax(-1), v))

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.embed = nn.Conv2d(3, 32, 2, 2)
        self.blocks = nn.ModuleList([self.Block() for _ in range(6)])
        self.head = nn.Linear(32, 1)

    def forward(self, x: Any) -> Any:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _loss(out: Any, target: Any) -> Any:
    return (out - target).square().mean()


def counted(make: Any, how: str) -> float:
    """Bytes that a step of it makes at most, its gradients left out."""
    from ridgeline.parallel.recompute import apply_recompute
    from ridgeline.scaling.watch import StepWatch

    torch.manual_seed(0)
    model = make()
    if how != "none":
        assert apply_recompute(model, how)
    x = torch.randn(SAMPLES, 3, SIDE, SIDE)
    target = torch.zeros_like(model(x)).detach()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    watch = StepWatch(lambda: "")
    with watch:
        _loss(model(x), target).backward()
    return float(watch.peak_bytes)


def planned(make: Any, how: str) -> float:
    from ridgeline.models.trace import trace_module

    def batch(n: int) -> Any:
        x = torch.randn(n, 3, SIDE, SIDE)
        return (x,), torch.zeros_like(make()(x))

    facts = trace_module(
        "net", make, batch, _loss, [f"3x{SIDE}x{SIDE}"], "samples", 1, wide_rms_norm=False
    )
    layout = Layout.parse("dp=1" if how == "none" else f"recompute={how}", "test")
    memory = module_stage_memory(module_job(facts, load_machine("h200"), layout, SAMPLES), 0)
    return memory.activations + memory.logits + memory.working


@pytest.mark.parametrize("make", [Skips, Chain, Attends], ids=lambda make: make.__name__)
def test_memory_with_recompute_is_what_a_step_takes(make: Any) -> None:
    there = {how: counted(make, how) for how in ("none", "selective", "full")}
    said = {how: planned(make, how) for how in there}
    errors = {how: said[how] / there[how] - 1 for how in there}
    for how, error in errors.items():
        print(
            f"{make.__name__} {how}: {said[how] / 1e6:.2f} MB, {error:+.1%} of {there[how] / 1e6:.2f}"
        )
    for how, error in errors.items():
        assert abs(error) <= 0.18, (how, error)
    if there["selective"] < 0.9 * there["none"]:
        assert said["selective"] < said["none"]
