"""Rates and betas of DeepSpeed's schedules, by DeepSpeed itself: run with a Python that has it, this writes
the file beside it, against which `tests/unit/compat` holds ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 5}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_max_lr": [0.1, 0.2], "warmup_min_lr": 0.01}),
    ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 0.3}),
    ("WarmupDecayLR", {"warmup_num_steps": 3, "total_num_steps": 8}),
    ("WarmupDecayLR", {"warmup_num_steps": 3, "total_num_steps": 2, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"warmup_num_steps": 3, "total_num_steps": 9, "warmup_min_ratio": 0.1}),
    ("WarmupCosineLR", {
        "warmup_num_steps": 4, "total_num_steps": 6, "cos_min_ratio": 0.2, "warmup_type": "linear",
    }),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3}),
    ("LRRangeTest", {
        "lr_range_test_step_size": 2, "lr_range_test_step_rate": 0.5, "lr_range_test_staircase": True,
    }),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3}),
    ("OneCycle", {
        "cycle_min_lr": 0.01, "cycle_max_lr": [0.1, 0.3], "cycle_first_step_size": 4,
        "cycle_second_step_size": 3, "decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01,
    }),
    ("OneCycle", {
        "cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 6,
        "cycle_first_stair_count": 2, "cycle_momentum": False,
    }),
]  # fmt: skip
STEPS = 12


def follow(build: Any, optimizer_class: Any = torch.optim.AdamW) -> list[list[list[float]]]:
    """The rate and both betas of two groups, at the beginning and after each update."""
    one, two = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = optimizer_class([{"params": [one], "lr": 0.02}, {"params": [two], "lr": 0.05}])
    schedule, found = build(optimizer), []
    for _ in range(STEPS):
        found.append([[float(g["lr"]), *map(float, g["betas"])] for g in optimizer.param_groups])
        schedule.step()
    return found


if __name__ == "__main__":
    from deepspeed.runtime import lr_schedules

    rows = []
    for name, params in CASES:
        kind = getattr(lr_schedules, name)
        rows.append(follow(lambda optimizer, kind=kind, params=params: kind(optimizer, **params)))
    Path(__file__).with_suffix(".json").write_text(json.dumps(rows) + "\n")
