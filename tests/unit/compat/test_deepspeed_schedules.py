"""The schedules that configurations of DeepSpeed name: rate by rate what DeepSpeed 0.19.8 gives."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ridgeline.compat.deepspeed.schedules import build_schedule
from ridgeline.errors import UsageError

GOLDEN = Path(__file__).parents[2] / "golden"
THEIRS = json.loads((GOLDEN / "deepspeed_schedules.json").read_text())


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("schedules", GOLDEN / "deepspeed_schedules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load()


@pytest.mark.parametrize("number", range(len(SCRIPT.CASES)))
def test_rates_are_those_of_deepspeed(number: int) -> None:
    name, params = SCRIPT.CASES[number]
    ours = SCRIPT.follow(lambda optimizer: build_schedule(name, params, optimizer))
    for step, (mine, its) in enumerate(zip(ours, THEIRS[number], strict=True)):
        for group, (a, b) in enumerate(zip(mine, its, strict=True)):
            assert a == pytest.approx(b, rel=1e-12, abs=1e-15), (step, group)


def test_goes_on_where_it_was() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = build_schedule(
        "WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 3}, optimizer
    )
    for _ in range(5):
        schedule.step()
    kept, rate = schedule.state_dict(), schedule.get_last_lr()
    again = build_schedule(
        "WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 3}, optimizer
    )
    assert again.get_last_lr() != rate
    again.load_state_dict(kept)
    assert again.get_last_lr() == rate == again.get_lr()


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        ("WarmupLR", {"warmup_max_lr": [0.1, 0.2, 0.3]}, "has 3 values for 1 groups"),
        ("WarmupLR", {"warmup_num_steps": 0}, "it is 1 or more"),
        ("WarmupLR", {"warmup_type": "cubic"}, "unknown kind of warm-up 'cubic'"),
        ("WarmupDecayLR", {}, "total_num_steps"),
        (
            "OneCycle",
            {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0},
            "first is above 0",
        ),
    ],
)
def test_refusals(name: str, params: dict[str, object], text: str) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(UsageError, match=text):
        build_schedule(name, params, optimizer)
