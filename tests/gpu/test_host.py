"""The host runs ahead of the device: nothing in a step makes it wait. Skipped where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from ridgeline.parallel.norm import _square_sum
from ridgeline.parallel.random import build_keys
from ridgeline.parallel.zero import FlatZero

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
LONG = 2_000_000_000
"""Cycles of a device: about a second."""


@pytest.fixture
def ranks() -> Iterator[dist.ProcessGroup]:
    """This process as one of four, where nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def is_ahead() -> bool:
    """Whether the device still has to do what it was given first."""
    return not torch.cuda.current_stream().query()


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_of_zero_does_not_wait_for_the_device(ranks: dist.ProcessGroup, stage: int) -> None:
    device = torch.device("cuda")
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))).to(device)
    zero = FlatZero(model, stage, ranks, None, torch.bfloat16)
    parameters = [piece.parameter for piece in zero.pieces]
    optimizer = AdamW(parameters, fused=True)
    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16)

    def step() -> None:
        model(x).square().sum().backward()
        zero.finish_gradients()
        _square_sum(parameters, torch.float32, device)
        optimizer.step()
        zero.after_step()
        zero.clear_gradients()

    step()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    step()
    assert is_ahead()


def test_keys_of_dropout_do_not_wait_for_the_device() -> None:
    ids = torch.arange(8, device="cuda")
    build_keys(0, 0, ids, None)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    build_keys(0, 1, ids, None)
    assert is_ahead()
