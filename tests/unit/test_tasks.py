"""Losses that survive any split of the batch, metrics as exact sums, and losses of the user's own."""

from __future__ import annotations

import math
import re
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.errors import UsageError
from ridgeline.train.tasks import TASKS, build_task, check_target, main_output


def example(task: str) -> tuple[Tensor, Tensor]:
    """Outputs and targets of seven samples."""
    torch.manual_seed(0)
    double = {"dtype": torch.float64}
    if task == "classify":
        return torch.randn(7, 5, **double), torch.randint(5, (7,))
    if task == "segment":
        return torch.randn(7, 5, 4, 3, **double), torch.randint(5, (7, 4, 3))
    if task == "forecast":
        return torch.randn(7, 2, 4, 3, **double), torch.randn(7, 2, 4, 3, **double)
    logits, targets = torch.randn(7, 6, 11, **double), torch.randint(11, (7, 6))
    if task == "masked_lm":
        # Each sample has another number of masked positions, and one has none.
        targets[torch.arange(6)[None] >= torch.arange(7)[:, None]] = -100
    return logits, targets


SPLITS = [(7,), (1, 6), (3, 4), (2, 1, 4), (1,) * 7]


@pytest.mark.parametrize("task", sorted(TASKS))
def test_an_uneven_split_weighed_by_samples_is_the_whole(task: str) -> None:
    outputs, targets = example(task)
    outputs.requires_grad_()
    loss = TASKS[task].loss
    whole = loss(outputs, targets)
    assert whole.dim() == 0
    (whole_grad,) = torch.autograd.grad(whole, outputs)
    for split in SPLITS:
        parts = zip(outputs.split(split), targets.split(split), split, strict=True)
        total = sum(loss(o, t) * n / 7 for o, t, n in parts)
        torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)
        (grad,) = torch.autograd.grad(total, outputs)
        torch.testing.assert_close(grad, whole_grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_sums_over_parts_are_the_sums_of_the_whole(task: str) -> None:
    outputs, targets = example(task)
    whole = TASKS[task].sums(outputs, targets)
    for split in SPLITS:
        parts = [
            TASKS[task].sums(o, t)
            for o, t in zip(outputs.split(split), targets.split(split), strict=True)
        ]
        for name, (total, count) in whole.items():
            assert float(sum(p[name][0] for p in parts)) == pytest.approx(float(total), rel=1e-12)
            assert float(sum(p[name][1] for p in parts)) == float(count)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_an_evaluation_gives_the_metrics_that_a_target_may_name(task: str) -> None:
    outputs, targets = example(task)
    sums = TASKS[task].sums(outputs, targets)
    means = {name: float(total / count) for name, (total, count) in sums.items()}
    finished = TASKS[task].finish({"loss": 0.5, **means})
    assert set(finished) == set(TASKS[task].metrics)
    assert TASKS[task].higher_is_better <= set(finished)


def mean(task: str, metric: str, outputs: Tensor, targets: Tensor) -> float:
    total, count = TASKS[task].sums(outputs, targets)[metric]
    return TASKS[task].finish({"loss": 0.0, metric: float(total / count)})[metric]


def test_metrics_of_known_answers() -> None:
    targets = torch.tensor([0, 1, 2, 2])
    logits = torch.eye(3)[torch.tensor([0, 1, 2, 0])]
    assert mean("classify", "accuracy", logits, targets) == 0.75
    pixels = targets.view(1, 2, 2)
    assert mean("segment", "pixel_accuracy", logits.T.reshape(1, 3, 2, 2), pixels) == 0.75
    assert mean("causal_lm", "token_accuracy", logits[None], targets[None]) == 0.75
    masked = torch.tensor([[0, -100, -100, 2]])
    assert mean("masked_lm", "token_accuracy", logits[None], masked) == 0.5
    assert mean("forecast", "rmse", torch.zeros(2, 2), torch.tensor([[3.0, 3], [3, 3]])) == 3.0


def test_shares_of_classes_are_targets_too() -> None:
    logits, labels = example("classify")
    one_hot = torch.eye(5, dtype=torch.float64)[labels]
    loss = TASKS["classify"].loss
    torch.testing.assert_close(loss(logits, one_hot), loss(logits, labels))
    mixed = 0.7 * one_hot + 0.3 * one_hot.roll(1, 0)
    wanted = 0.7 * loss(logits, labels) + 0.3 * loss(logits, labels.roll(1))
    torch.testing.assert_close(loss(logits, mixed), wanted)
    parts = [loss(logits[a:b], mixed[a:b]) * (b - a) / 7 for a, b in ((0, 3), (3, 7))]
    torch.testing.assert_close(sum(parts), wanted)
    accuracy = mean("classify", "accuracy", logits, labels)
    assert mean("classify", "accuracy", logits, one_hot) == accuracy
    with pytest.raises(UsageError, match="or \\[samples, classes\\] for both"):
        loss(logits, one_hot[:, :4])


def test_half_precision_outputs_are_summed_in_double() -> None:
    outputs = torch.full((1, 70_000), 1.0, dtype=torch.float16)
    total, count = TASKS["forecast"].sums(outputs, torch.zeros_like(outputs))["rmse"]
    assert (float(total), float(count)) == (70_000, 70_000)


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    for task in ("causal_lm", "masked_lm"):
        finish = TASKS[task].finish
        assert finish({"loss": math.log(7)})["perplexity"] == pytest.approx(7)
        assert finish({"loss": 1e4})["perplexity"] == math.inf


TENSOR = torch.ones(2)
Output = namedtuple("Output", ["loss", "logits"])


def model_output(**fields: Any) -> Any:
    return pytest.importorskip("transformers.modeling_outputs").CausalLMOutput(**fields)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TENSOR,
        lambda: {"loss": torch.zeros(1), "logits": TENSOR},
        lambda: (TENSOR, torch.zeros(1)),
        lambda: [TENSOR],
        lambda: Output(torch.zeros(1), TENSOR),
        lambda: model_output(logits=TENSOR),
    ],
    ids=["tensor", "dict", "tuple", "list", "namedtuple", "ModelOutput"],
)
def test_the_tensor_a_loss_is_taken_of(make: Any) -> None:
    assert main_output(make()) is TENSOR


@pytest.mark.parametrize("outputs", [None, {}, {"last": TENSOR}, (), ("a", TENSOR), 3.0])
def test_an_output_without_such_a_tensor_is_refused(outputs: Any) -> None:
    with pytest.raises(UsageError, match=f"returned {type(outputs).__name__}.*module:function"):
        main_output(outputs)


def test_auto_is_what_the_source_is_for() -> None:
    assert build_task("auto", "forecast") is TASKS["forecast"]
    assert build_task("classify", "forecast") is TASKS["classify"]


def test_a_loss_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text(
        "def l1(outputs, targets):\n    return (outputs['a'] - targets).abs().mean()\nwidth = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = build_task("my_losses:l1", "classify")
    assert float(task.loss({"a": torch.ones(2)}, torch.full((2,), 4.0))) == 3.0
    assert task.sums(None, TENSOR) == {}
    check_target({"loss": 0.1}, task)
    with pytest.raises(UsageError, match=r"train\.task=my_losses:width is not a function"):
        build_task("my_losses:width", "classify")


@pytest.mark.parametrize("name", ["no_such_module:f", "math:no_such", ":f", "math:", ".math:f"])
def test_a_loss_that_is_not_there(name: str) -> None:
    with pytest.raises(UsageError, match=f"train.task {name!r}"):
        build_task(name, "classify")


def test_unknown_tasks_and_metrics() -> None:
    with pytest.raises(UsageError, match=r"'clasify' in train\.task; did you mean 'classify'"):
        build_task("clasify", "classify")
    with pytest.raises(UsageError, match=r"'acuracy' in train\.target; did you mean 'accuracy'"):
        check_target({"loss": 1.0, "acuracy": 0.9}, TASKS["classify"])


@pytest.mark.parametrize(
    ("task", "outputs", "targets"),
    [
        ("forecast", torch.ones(4, 1), torch.ones(4)),  # would broadcast to 4 x 4
        ("segment", torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)),
        ("classify", torch.ones(4, 3, 2), torch.zeros(4, 2, dtype=torch.int64)),
    ],
)
def test_shapes_that_do_not_belong_together(task: str, outputs: Any, targets: Any) -> None:
    with pytest.raises(
        UsageError, match=rf"task {task} wants .*{re.escape(str(list(outputs.shape)))}"
    ):
        build_task(task, "").loss(outputs, targets)


@pytest.mark.parametrize("value", ["outputs", "None", "1.0"])
def test_a_loss_of_ones_own_has_to_be_one_number(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_losses.py").write_text(f"def odd(outputs, targets):\n    return {value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_losses", raising=False)
    with pytest.raises(UsageError, match="should return one number as a tensor"):
        build_task("odd_losses:odd", "").loss(torch.ones(2), torch.ones(2))


@pytest.mark.parametrize(
    ("function", "line", "reason"),
    [
        ("one(outputs)", 3, "too many positional arguments"),
        ("three(outputs, targets, mask)", 6, "missing a required argument: 'mask'"),
        ("named(outputs, *, targets)", 10, "too many positional arguments"),
        ("Loss(weight)", 14, "too many positional arguments"),
        ("part(outputs, targets)", 3, ""),
    ],
)
def test_a_loss_of_ones_own_that_cannot_be_called(
    function: str, line: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setting, function, its place, what it is called with and what to do, before any step."""
    (tmp_path / "wrong_losses.py").write_text(
        "import functools\n\n"
        "def one(outputs):\n    return outputs.mean()\n\n"
        "@functools.cache\n"
        "def three(outputs, targets, mask):\n    return outputs.mean()\n\n"
        "def named(outputs, *, targets):\n    return outputs.mean()\n\n\n"
        "class Loss:\n    def __init__(self, weight):\n        self.weight = weight\n\n"
        "part = functools.partial(one)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wrong_losses", raising=False)
    word = function.partition("(")[0]
    with pytest.raises(UsageError) as told:
        build_task(f"wrong_losses:{word}", "classify")
    text = str(told.value)
    assert f"train.task=wrong_losses:{word} is called as {word}(outputs, targets)" in text
    assert f"wrong_losses.py:{line} " in text
    assert reason in text
    assert "two positional arguments" in text
    assert "\n" not in text


def test_losses_that_can_be_called_are_left_alone() -> None:
    for name in ("torch.nn.functional:cross_entropy", "torch:dist", "math:hypot"):
        assert build_task(name, "classify").name == name
