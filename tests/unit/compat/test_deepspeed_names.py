"""What scripts import from DeepSpeed's inside: it works, or one sentence says what to use instead."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
from torch import nn

import ridgeline.compat.deepspeed as deepspeed
import ridgeline.compat.horovod as hvd
from ridgeline.compat.missing import Missing, MissingModule
from ridgeline.errors import UsageError

HERE = "ridgeline.compat.deepspeed"


def test_what_stands_in_works() -> None:
    from ridgeline.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from ridgeline.compat.deepspeed.runtime.engine import DeepSpeedEngine
    from ridgeline.compat.deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR
    from ridgeline.compat.deepspeed.utils import log_dist, logger

    model = nn.Linear(2, 2)
    adam = FusedAdam(model.parameters(), lr=0.1, weight_decay=0.5)
    assert type(adam) is torch.optim.AdamW
    assert adam.param_groups[0]["weight_decay"] == 0.5
    assert type(DeepSpeedCPUAdam(model.parameters(), adamw_mode=False)) is torch.optim.Adam
    assert deepspeed.ops.adam.FusedAdam is FusedAdam
    assert DeepSpeedEngine is deepspeed.DeepSpeedEngine
    assert isinstance(logger, logging.Logger)
    assert callable(log_dist)
    linear = WarmupLR(adam, 0.0, 0.2, 4, "linear")
    linear.step()
    linear.step()
    assert linear.get_last_lr() == [pytest.approx(0.05)]
    later = WarmupDecayLR(adam, 10, warmup_max_lr=0.2, warmup_num_steps=2, last_batch_iteration=5)
    assert later.get_last_lr() == [pytest.approx(0.125)]


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("runtime.zero.stage_1_and_2", "X", "zero_optimization"),
        ("runtime.zero.partition_parameters", "ZeroParamStatus", "zero_optimization"),
        ("runtime.pipe.topology", "X", "PipelineModule"),
        ("runtime.utils", "see_memory_usage", "deepspeed.runtime.utils is not in"),
        ("moe.layer", "MoE", "ep=n"),
        ("ops.lamb", "FusedLamb", "lamb"),
        ("utils.zero_to_fp32", "X", "save_16bit_model"),
        ("utils.groups", "X", "dp_world_size"),
        ("profiling.flops_profiler", "FlopsProfiler", "ridgeline doctor"),
        ("inference.engine", "X", "ridgeline export"),
        ("monitor.monitor", "X", "ridgeline track"),
    ],
)
def test_what_is_not_here_is_one_sentence(module: str, name: str, words: str) -> None:
    with pytest.raises(MissingModule) as error:
        exec(f"from {HERE}.{module} import {name}")
    assert isinstance(error.value, UsageError)
    assert isinstance(error.value, ImportError)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("package", "name", "words"),
    [
        (HERE, "InferenceEngine", "ridgeline export"),
        (HERE, "init_inference", "ridgeline export"),
        (HERE, "PipelineEngine", "DeepSpeedEngine for pipelines"),
        (hvd.__name__, "elastic", "is not in"),
    ],
)
def test_a_name_that_is_imported_from_a_package_is_one_sentence(
    package: str, name: str, words: str
) -> None:
    assert not hasattr(sys.modules[package], name)
    with pytest.raises(MissingModule, match=words):
        exec(f"from {package} import {name}")
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec(f"from {package} import nonsense")


@pytest.mark.parametrize("found", [deepspeed, hvd, deepspeed.ops, deepspeed.runtime])
def test_names_that_are_not_here_are_told(found: Any) -> None:
    known = {
        deepspeed: "moe",
        hvd: "elastic",
        deepspeed.ops: "op_builder",
        deepspeed.runtime: "fp16",
    }
    name = known[found]
    if f"{found.__name__}.{name}" not in sys.modules:
        assert not hasattr(found, name)
        with pytest.raises(Missing, match=f"{name} is not in ridgeline"):
            getattr(found, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = found.nonsense
