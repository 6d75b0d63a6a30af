"""AdamW on weights of which some are narrow: the numbers of torch's own, whatever parameters there are."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import ridgeline.optim
from ridgeline.optim.master import MasterAdamW
from ridgeline.optim.narrow import TABLES, Kernels, Numbers, Row, can_use_kernels, list_rows
from ridgeline.optim.stochastic import StochasticAdamW

SHAPES = [(6, 1), (10,), (1,), (3, 4), (0, 4), (64, 33)]
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def run(optimizer: Optimizer, parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
    """Three steps; every second parameter has no gradient at first, so that its steps are fewer."""
    torch.manual_seed(1)
    for step in range(3):
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape).to(dtype).to(parameter.dtype)
            parameter.grad = None if step == 0 and index % 2 == 0 else gradient
        optimizer.step()


def build(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": parameters[:3], "weight_decay": 0.1}, {"params": parameters[3:]}]


@pytest.mark.parametrize("kind", [MasterAdamW, StochasticAdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_are_not_narrow_get_the_numbers_of_torch(
    kind: type[Optimizer], dtype: torch.dtype
) -> None:
    ours, theirs = build(dtype), build(dtype)
    run(kind(groups(ours), *OPTIONS.values(), {} if kind is MasterAdamW else 3), ours, dtype)
    run(AdamW(groups(theirs), **OPTIONS, weight_decay=0.0), theirs, dtype)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_masters_get_the_numbers_of_torch_and_weights_are_their_rounding() -> None:
    ours, theirs = build(torch.float32), build(torch.float32)
    masters = {p: p.detach().clone() for p in ours}
    for parameter in ours:
        parameter.data = parameter.data.bfloat16()
    optimizer = MasterAdamW(groups(ours), *OPTIONS.values(), masters)
    run(optimizer, ours, torch.bfloat16)
    run(AdamW(groups(theirs), **OPTIONS, weight_decay=0.0), theirs, torch.bfloat16)
    for one, other in zip(ours, theirs, strict=True):
        master = optimizer.state[one]["master"]
        torch.testing.assert_close(master, other.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(one, master.bfloat16())


def test_rounding_by_chance_is_right_on_average_and_the_same_again() -> None:
    start = torch.full((100_000,), 1.0)
    found = []
    for seed in (3, 3, 4):
        weight = nn.Parameter(start.bfloat16())
        optimizer = StochasticAdamW([{"params": [weight]}], 1e-3, (0.9, 0.95), 1e-8, seed)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        found.append(weight.detach().float())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    # A step of 1e-3 is a quarter of the gap between one and the bf16 number below.
    assert float(found[0].mean()) == pytest.approx(1 - 1e-3, abs=5e-5)
    assert set(found[0].unique().tolist()) == {1.0, 1 - 2**-8}


def rows_of(length: int, begin: int = 0) -> Row:
    def make(dtype: torch.dtype) -> Tensor:
        return torch.zeros(length + begin, dtype=dtype)[begin:]

    wide, narrow = torch.float32, torch.bfloat16
    return Row(make(wide), make(narrow), make(wide), make(wide), make(narrow), seed=7)


def test_the_table_of_a_kernel_has_addresses_lengths_and_seeds() -> None:
    rows = [rows_of(5), rows_of(40)]
    table, is_aligned = list_rows(rows)
    assert is_aligned
    assert table[1].tolist() == [t.data_ptr() for t in rows[1][:5]] + [40, 7]
    assert not list_rows([rows_of(40), rows_of(40, begin=1)])[1]
    assert not can_use_kernels(rows[0])  # on a CPU


def test_lists_of_tiles_are_kept_for_the_last_groups_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters without a gradient now and then make other groups in every step."""
    made: list[tuple[int, ...]] = []

    def list_tiles(lengths: tuple[int, ...], device: torch.device) -> Tensor:
        made.append(lengths)
        return torch.zeros(1, 2)

    kernels = SimpleNamespace(list_tiles=list_tiles, update=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "ridgeline.optim.kernels", kernels)
    monkeypatch.setattr(ridgeline.optim, "kernels", kernels, raising=False)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    launcher, numbers = Kernels(), Numbers(0.0, 0.1, 1.0, 0.1, 0.9, 0.1, 1e-8)
    for length in (5, 5, *range(6, 6 + TABLES), 5, 5):
        launcher.update([rows_of(length)], numbers, None)
    assert len(launcher._tiles) == TABLES
    assert made.count((5,)) == 2  # the second time it was long ago
