"""The heart of the matter: 1, 2 and 4 ranks train the same model to the same numbers.

Real sources and models in float64, 50 steps through `build_training` and `train_loop`, so that an
error of a formula cannot hide in rounding: the bound is 1e-9 relative, on each loss and each weight.
`pytest tests/dist/test_parity.py -rP` prints the largest difference of each case.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.config import load_config
from ridgeline.launch.env import read_rank_env
from ridgeline.train.evaluate import evaluate
from ridgeline.train.loop import train_loop
from ridgeline.train.setup import Training, build_training

BOUND = 1e-9
STEPS = 50

BASE = ("device=cpu", "threads=1", "model.dtype=float64", "data.prefetch=0", f"train.steps={STEPS}")
DIGITS = (
    "model.name=cifar_cnn",
    "model.args={in_channels: 1, image_size: 8, width: 4}",
    "data.source=digits",
)
BATCH_NORM = ("model.args.batch_norm=true", "ddp.sync_batch_norm=true")
ADAMW = ("optim.name=adamw", "optim.weight_decay=0.01", "train.lr=0.003")
SGD = ("optim.name=sgd", "optim.momentum=0.9", "train.lr=0.02")
TEXT = (  # 322 training windows: 20 batches of 16 and one of 2, of which two of four ranks get none
    "model.name=llama",
    "model.args={vocab: 256, width: 16, depth: 2, heads: 2, kv_heads: 1, ffn: 32, max_seq: 32}",
    "data.source=text",
    f"data.args={{path: {argparse.__file__}, seq_len: 32, max_bytes: 10860}}",
)
TINY = (  # 65 samples: the last batch of 16 is a single sample
    "model.name=mlp",
    "model.args={in_features: 12, hidden: 16, out_features: 5}",
    "data.source=synthetic",
    "data.args={shape: [12], classes: 5, samples: 65, distinct: 65, eval_samples: 37}",
)

# Digits has 1442 training samples: batches of 64 leave 34, batches of 96 leave 2.
CASES: dict[str, tuple[str, ...]] = {
    "cnn": (*DIGITS, *ADAMW, "train.batch=64", "train.clip=0.5"),
    "cnn-sgd": (*DIGITS, *SGD, "optim.nesterov=true", "train.batch=64", "schedule.name=cosine"),
    "cnn-batchnorm": (*DIGITS, *BATCH_NORM, *ADAMW, "train.batch=64", "train.clip=1.0"),
    "cnn-batchnorm-sgd": (*DIGITS, *BATCH_NORM, *SGD, "train.batch=96"),
    "llama": (*TEXT, *ADAMW, "train.batch=16", "train.clip=1.0"),
    "mlp-one-left": (*TINY, *ADAMW, "train.batch=16", "train.clip=0.1"),
}


def build(overrides: tuple[str, ...]) -> Training:
    return build_training(load_config(None, [*BASE, *overrides]).config, read_rank_env())


def run(overrides: tuple[str, ...]) -> dict[str, Any]:
    """Train; returns the losses of the global batches and the final state."""
    training = build(overrides)
    results = list(train_loop(training))
    shares = torch.stack([result.loss_share for result in results])
    losses = training.mesh.sum_over_data(shares).tolist()
    state = {name: value.numpy() for name, value in training.model.state_dict().items()}
    sizes = [result.num_samples for result in results]
    return {"losses": losses, "state": state, "sizes": sizes}


_DONE: dict[tuple[Any, ...], dict[str, Any]] = {}


def train(ranks: Any, num_ranks: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Rank 0's account of a run, after a look that all ranks end with the same bits; kept."""
    key = (num_ranks, overrides)
    if key not in _DONE:
        everyone = ranks(num_ranks, run, overrides)
        for other in everyone[1:]:
            assert_same_bits(everyone[0], other)
        _DONE[key] = everyone[0]
    return _DONE[key]


def assert_same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert one["state"].keys() == other["state"].keys()
    for name, value in one["state"].items():
        assert np.array_equal(value, other["state"][name]), name


def loss_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest relative difference of a loss."""
    assert all(map(math.isfinite, one["losses"] + other["losses"]))
    pairs = zip(one["losses"], other["losses"], strict=True)
    return max(abs(a - b) / abs(a) for a, b in pairs)


def weight_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest difference of a weight, relative to the largest of its tensor."""
    assert one["state"].keys() == other["state"].keys()
    worst = 0.0
    for name, value in one["state"].items():
        gap = np.abs(value - other["state"][name]).max()
        worst = max(worst, float(gap / max(np.abs(value).max(), 1e-30)))
    return worst


def check(label: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    losses, weights = loss_difference(one, other), weight_difference(one, other)
    print(f"parity {label}: loss {losses:.1e}, weights {weights:.1e} (relative, {STEPS} steps)")
    assert losses < BOUND
    assert weights < BOUND


@pytest.mark.table(keep=6)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_like_one(ranks: Any, case: str, num_ranks: int) -> None:
    one = train(ranks, 1, CASES[case])
    many = train(ranks, num_ranks, CASES[case])
    assert many["sizes"] == one["sizes"]
    assert min(one["sizes"]) < max(one["sizes"]), "the case is meant to hold uneven batches"
    assert np.mean(one["losses"][-5:]) < np.mean(one["losses"][:5]), "the model is meant to learn"
    check(f"{case} on {num_ranks}", one, many)


def test_the_comparison_can_fail(ranks: Any) -> None:
    """Batch norm over each rank's own samples is another training, and is seen to be."""
    short = (*CASES["cnn-batchnorm"], "train.steps=4")
    one = train(ranks, 1, short)
    many = ranks(2, run, (*short, "ddp.sync_batch_norm=false"))[0]
    assert loss_difference(one, many) > 1e-4


@pytest.mark.parametrize(
    ("case", "num_ranks", "accumulate"),
    [("cnn", 1, 4), ("cnn", 2, 2), ("mlp-one-left", 1, 2), ("mlp-one-left", 4, 2)],
    ids=str,
)
def test_accumulation_changes_nothing(
    ranks: Any, case: str, num_ranks: int, accumulate: int
) -> None:
    one = train(ranks, 1, CASES[case])
    parts = train(ranks, num_ranks, (*CASES[case], f"layout=accumulate={accumulate}"))
    check(f"{case} on {num_ranks} accumulate {accumulate}", one, parts)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_batch_norm_over_a_microbatch_nobody_has_samples_of(ranks: Any, num_ranks: int) -> None:
    """The last batch is one sample, in the first microbatch; the second is all borrowed."""
    layout = ("layout=accumulate=2", "train.steps=12", "train.batch=16")
    images = "data.args={shape: [1, 8, 8], samples: 65, distinct: 65}"
    overrides = (*DIGITS, *BATCH_NORM, *SGD, "data.source=synthetic", images, *layout)
    result = train(ranks, num_ranks, overrides)
    assert 1 in result["sizes"]
    assert all(map(math.isfinite, result["losses"]))
    for name, value in result["state"].items():
        assert np.isfinite(value).all(), name


@pytest.mark.parametrize(
    ("case", "num_ranks"), [("cnn-batchnorm", 2), ("llama", 2), ("cnn", 4)], ids=str
)
def test_twice_is_the_same_to_the_bit(ranks: Any, case: str, num_ranks: int) -> None:
    first = train(ranks, num_ranks, CASES[case])
    again = ranks(num_ranks, run, CASES[case])[0]
    assert_same_bits(first, again)


def run_eval(overrides: tuple[str, ...]) -> tuple[int, dict[str, float]]:
    training = build(overrides)
    for _ in train_loop(training):
        pass
    assert training.eval_loader is not None
    record = evaluate(
        training.arranged,
        training.task,
        training.eval_loader,
        training.precision,
        training.to_device,
        step=1,
        epoch=0,
    )
    assert training.model.training
    return record.num_samples, record.metrics


FORECAST = (
    "model.name=mlp",
    "model.args={in_features: 6, hidden: 8, out_features: 6}",
    "data.source=synthetic",
    "data.args={task: forecast, shape: [6], samples: 64, eval_samples: 37, distinct: 64}",
)
EVAL_CASES = {
    "classify": (*DIGITS, *SGD, "train.batch=64"),  # 355 held out: the last batch is 35
    "classify-batchnorm": (*DIGITS, *BATCH_NORM, *SGD, "train.batch=64"),
    "causal_lm": (*TEXT, *SGD, "train.batch=16"),  # 16 held out
    "two-samples": (*TINY, *SGD, "train.batch=16", "train.eval_samples=2"),
    "forecast": (*FORECAST, *SGD, "train.batch=12"),
}


@pytest.mark.parametrize("case", EVAL_CASES)
def test_evaluation_is_exact_over_uneven_shards(ranks: Any, case: str) -> None:
    overrides = (*EVAL_CASES[case], "train.steps=3")
    (num_one, one), *_ = ranks(1, run_eval, overrides)
    for num_ranks in (2, 4):
        for num_many, many in ranks(num_ranks, run_eval, overrides):
            assert num_many == num_one
            assert many.keys() == one.keys()
            for name, value in one.items():
                assert many[name] == pytest.approx(value, rel=1e-12, abs=0), name
