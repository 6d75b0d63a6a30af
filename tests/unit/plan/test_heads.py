"""Heads that tensor-parallel ranks do not divide: the planner prices what training does with them."""

from __future__ import annotations

import math

import pytest
import torch
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.layout import Layout
from ridgeline.models.llama import Llama
from ridgeline.parallel.tensor.plan import plan_tensor
from ridgeline.plan.job import job_from_layout
from ridgeline.plan.known import model_of_recipe
from ridgeline.plan.machine import load_machine
from ridgeline.plan.predict import predict
from ridgeline.plan.time import parameters_of

H200 = load_machine("h200")


def held(model: Llama, tp: int) -> int:
    """Parameters of the first of `tp` ranks as training cuts them."""
    plan = plan_tensor(model, tp, (torch.zeros(2, 8, dtype=torch.int64),))
    count = 0
    for name, parameter in model.named_parameters():
        path, _, own = name.rpartition(".")
        split = plan.layers[path].splits.get(own) if path in plan.layers else None
        shape = list(parameter.shape if split is None else split.padded_shape)
        if split is not None:
            shape[split.dim] = math.ceil(shape[split.dim] / tp)
        count += math.prod(shape)
    return count


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "said"),
    [
        (4, 4, 2, ""),
        (3, 3, 2, "filled up to 4"),
        (6, 2, 4, "every rank computes all of the attention"),
        (4, 2, 4, "every rank has all of them"),
    ],
)
def test_a_rank_holds_what_training_gives_it(heads: int, kv_heads: int, tp: int, said: str) -> None:
    args = {
        "size": "1m", "width": 48, "depth": 2, "heads": heads, "kv_heads": kv_heads, "vocab": 128,
        "ffn": 96, "max_seq": 16,
    }  # fmt: skip
    job = job_from_layout(model_of_recipe("llama", args, 16), H200, Layout.parse(f"tp={tp}"), 4)
    assert parameters_of(job, 0) == held(Llama(**args), tp)
    found = CliRunner().invoke(
        app, ["plan", "llama-text", *(f"model.args.{k}={v}" for k, v in args.items()), "--machine", "h200",
              "--what-if", f"devices_per_node={tp}", "--explain", f"tp={tp}"],
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert said in found.output
    assert ("divide" in found.output) is bool(said)


def test_an_attention_left_whole_takes_longer_and_sends_less() -> None:
    args = {"size": "1m", "width": 1024, "heads": 16, "kv_heads": 8, "vocab": 1024}
    whole = predict(
        job_from_layout(
            model_of_recipe("llama", {**args, "heads": 18, "kv_heads": 9, "width": 1152}, 512),
            H200, Layout.parse("tp=4"), 8,
        )
    )  # fmt: skip
    split = predict(
        job_from_layout(model_of_recipe("llama", args, 512), H200, Layout.parse("tp=4"), 8)
    )
    assert whole.time.attention > 3 * split.time.attention
    assert whole.time.tensor_parallel < split.time.tensor_parallel
    assert whole.memory.weights > split.memory.weights


def test_a_traced_module_is_planned_with_the_larger_share() -> None:
    found = CliRunner().invoke(
        app,
        ["plan", "vit-fields", "model.args.heads=3", "model.args.width=48", "--machine", "h200",
         "--explain", "tp=2,dp=4"],
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "planned as 2 of them on a rank" in found.output
