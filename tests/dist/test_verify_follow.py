"""Replicas followed on one process: a step starts from all that the steps before have left behind."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ridgeline.config import RunConfig, find_recipe, load_config
from ridgeline.launch.env import RankEnv
from ridgeline.layout import Layout
from ridgeline.optim.average import Average
from ridgeline.verify.compare import compare
from ridgeline.verify.record import Tensors, of_replica
from ridgeline.verify.reference import build_reference, deals
from ridgeline.verify.run import Verifier

LAYOUTS = ("dp=2,compress=powersgd:2", "dp=2,compress=bf16", "dp=2,sync=local:2", "dp=1")


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    config = load_config(find_recipe("digits"), ["model.args.dropout=0.1"]).config
    made = Verifier(config, [Layout.parse(text) for text in LAYOUTS], steps=4)
    yield made
    made.close()


@pytest.mark.parametrize("text", LAYOUTS)
def test_who_follows_himself_finds_what_he_found(verifier: Verifier, text: str) -> None:
    layout = Layout.parse(text)
    alone = verifier._follow(layout, "float64", None)
    found = compare(alone, verifier._follow(layout, "float64", alone))
    assert found.same, found


def _overflow(env: RankEnv, config: RunConfig) -> tuple[list[float], list[Tensors]]:
    """The scales of both replicas' losses and the weights after a step that overflowed on the second."""
    reference = build_reference(config, env, Layout.parse("dp=2,sync=local:4"))
    batches = next(deals(reference.trainings[0], 2))
    _, gradients = reference.backward(batches, "plain")
    next(iter(of_replica(gradients, 1).values()))[:] = np.inf
    before = reference.trainings[0].model.state_dict()
    kept = {name: value.numpy().copy() for name, value in before.items()}
    after = reference.update(gradients)
    scales = [training.precision.scale() for training in reference.trainings]
    return scales, [kept, of_replica(after, 0), of_replica(after, 1)]


def test_where_one_replica_overflows_none_steps_and_all_scale_less(verifier: Verifier) -> None:
    config = verifier._configured(Layout(), "fp16", even=False)
    scales, (before, *after) = verifier._on(1)(_overflow, config)
    assert scales == [2.0**15, 2.0**15]
    for weights in after:
        assert all(np.array_equal(weights[name], before[name]) for name in before)


@pytest.mark.parametrize("precision", ["float64", "bf16"])
def test_replicas_that_compress_go_on_with_the_first_ones_running_statistics(
    precision: str,
) -> None:
    config = load_config(find_recipe("digits"), ["model.args.batch_norm=true"]).config
    layout = Layout.parse("dp=2,compress=bf16")
    verifier = Verifier(config, [layout], steps=2)
    try:
        row = verifier.check(layout, precision)
        assert row.verdict == "same", row
    finally:
        verifier.close()


AVERAGED = ("dp=2,zero=1", "dp=2,sync=local:2")


@pytest.fixture(scope="module")
def averaging() -> Iterator[Verifier]:
    """Of a recipe that keeps a moving average of the weights."""
    config = load_config(find_recipe("digits"), ["optim.ema=0.6"]).config
    made = Verifier(config, [Layout.parse(text) for text in AVERAGED], steps=3)
    yield made
    made.close()


@pytest.mark.parametrize("precision", ["float64", "bf16"])
@pytest.mark.parametrize("text", AVERAGED)
def test_a_wrong_average_differs(
    averaging: Verifier, monkeypatch: pytest.MonkeyPatch, text: str, precision: str
) -> None:
    layout = Layout.parse(text)
    row = averaging.check(layout, precision)
    assert row.verdict == "same", row
    right = Average.decay_of
    monkeypatch.setattr(Average, "decay_of", lambda *args: (1 - 1e-3) * right(*args))
    averaging._ranks.pop(2).close()  # forked anew with the mistake, as the one device is not
    row = averaging.check(layout, precision)
    averaging._ranks.pop(2).close()
    assert row.verdict == "differs", row
    assert row.detail.startswith("weight average/")
    assert " at step 3 by " in row.detail
