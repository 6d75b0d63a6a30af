"""DeepSpeed's configurations as layouts, and what is refused or told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.compat.deepspeed.config import read_config, read_source
from ridgeline.errors import UsageError

MICRO = {"train_micro_batch_size_per_gpu": 4}
LAYOUTS: list[tuple[dict[str, Any], int, int, str]] = [
    ({}, 8, 1, "dp=8"),
    ({"gradient_accumulation_steps": 3}, 2, 1, "dp=2,accumulate=3"),
    (
        {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
        4,
        1,
        "dp=4,zero=2,precision=bf16",
    ),
    ({"zero_optimization": True, "fp16": {"enabled": True}}, 4, 1, "dp=4,zero=1,precision=fp16"),
    (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        2,
        1,
        "dp=2,zero=1,offload=optimizer",
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        2,
        1,
        "dp=2,zero=3,offload=params",
    ),
    ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, 4, 1, "dp=4,zero=3,shard=2"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}, 2, 1, "dp=2,zero=3"),
    ({"tensor_parallel": {"autotp_size": 2}}, 4, 1, "dp=2,tp=2"),
    ({"sequence_parallel_size": 2, "zero_optimization": {"stage": 3}}, 4, 1, "dp=2,zero=3,cp=2"),
    ({"gradient_accumulation_steps": 4}, 4, 2, "dp=2,pp=2,microbatches=4"),
    ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, 1, 1, "precision=bf16"),
    ({"ridgeline": {"layout": "tp=2,recompute=full"}}, 4, 1, "dp=2,tp=2,recompute=full"),
    (
        {"ridgeline": {"layout": "schedule=gpipe"}, "gradient_accumulation_steps": 2},
        2,
        2,
        "pp=2,schedule=gpipe,microbatches=2",
    ),
]


@pytest.mark.parametrize(("config", "ranks", "stages", "layout"), LAYOUTS)
def test_layouts(config: dict[str, Any], ranks: int, stages: int, layout: str) -> None:
    asked = read_config(MICRO | config, ranks, stages)
    assert str(asked.layout) == layout
    assert asked.batch == 4 * asked.parts * asked.layout.dp


@pytest.mark.parametrize(
    ("config", "micro", "parts"),
    [
        ({"train_batch_size": 32}, 16, 1),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, 4, 4),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, 4, 4),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}, 4,
        4), ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 4, 2),
    ],
)  # fmt: skip
def test_batches(config: dict[str, Any], micro: int, parts: int) -> None:
    asked = read_config(config, 2)
    assert (asked.micro_batch, asked.parts) == (micro, parts)


def test_what_is_there_by_default_and_what_is_said() -> None:
    asked = read_config(MICRO, 1)
    assert asked.clip == 1.0  # DeepSpeed's own default
    assert read_config(MICRO | {"gradient_clipping": 0}, 1).clip is None
    asked = read_config(
        MICRO
        | {
            "comment": "mine",
            "zero_optimization": {"stage": 2, "overlap_comm": True},
            "wandb": {"enabled": True},
            "tensorboard": {"enabled": False},
        },
        2,
    )
    assert asked.notes == (
        "without a meaning here: comment, zero_optimization.overlap_comm",
        "wandb is not written; see `ridgeline track`",
    )


def test_loss_scale() -> None:
    def scale(**fp16: Any) -> dict[str, float]:
        return read_config(MICRO | {"fp16": {"enabled": True, **fp16}}, 1).loss_scale

    assert scale() == {"init_scale": 65536.0, "growth_interval": 1000}
    assert scale(initial_scale_power=8, loss_scale_window=50) == {
        "init_scale": 256.0, "growth_interval": 50
    }  # fmt: skip
    assert scale(loss_scale=128) == {"fixed": 128.0}


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({}, 1, "neither train_batch_size nor"),
    ({"train_batch_size": 6}, 4, "make it a multiple of 4"),
    ({"train_batch_size": 6, "train_micro_batch_size_per_gpu": 4}, 1, "make it a multiple of 4"),
    ({"train_batch_size": 9, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 1,
     "= 8;"),
    ({"train_batch_size": "auto"}, 1, "only the Trainer of transformers"),
    (MICRO | {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, 1, "optimizer.params.lr"),
    (MICRO | {"train_batch_size": 0}, 1, "it is 1 or more"),
    (MICRO | {"gradient_clipping": -1}, 1, "0 or more"),
    (MICRO | {"zero_optimization": {"stage": 4}}, 1, "it is 0, 1, 2 or 3"),
    (MICRO | {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, 2, "'nvme'"),
    (MICRO | {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, 2, "gathered as"),
    (MICRO | {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, 1, "leave one of them out"),
    (MICRO | {"compression_training": {"weight_quantization": {}}}, 1, "prunes and quantizes"),
    (MICRO | {"tensor_parallel": {"autotp_size": 2}}, 3, "start a multiple of 2"),
    (MICRO | {"ridgeline": {"layout": "zero=3"}}, 1, "its own settings"),
    (MICRO | {"ridgeline": {"tune": 1}}, 1, "ridgeline.tune"),
    (MICRO | {"ridgeline": {"layout": "tp=2"}, "tensor_parallel": {"autotp_size": 2}}, 2, "leave one out"),
    (MICRO | {"optimizer": {"params": {}}}, 1, "optimizer.type"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "ranks", "text"), REFUSED)
def test_refusals_name_the_place_and_the_remedy(config: Any, ranks: int, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        read_config(config, ranks)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(MICRO))
    assert read_source(str(path)) == MICRO
    path.write_text("{")
    with pytest.raises(UsageError, match="is no JSON"):
        read_source(path)
    with pytest.raises(UsageError, match="No such file"):
        read_source(tmp_path / "other.json")
    with pytest.raises(UsageError, match="is a int"):
        read_source(3)
