"""Schedules, the rules for the rate, optimizers against torch's own, and the end of a step."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.config import OptimConfig, ScheduleConfig
from ridgeline.errors import UsageError
from ridgeline.optim.build import build_optimizer, decay_groups, list_trainables
from ridgeline.optim.schedules import SCHEDULES, build_schedule, fit_warmup, scale_lr
from ridgeline.optim.update import build_update
from ridgeline.parallel.norm import _square_sum

# Schedules.


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_warm_up_rises_in_equal_steps_to_the_full_rate(name: str) -> None:
    factor = build_schedule(ScheduleConfig(name, warmup_steps=4), 20, 10)
    assert [factor(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize(
    ("name", "middle"), [("constant", 1.0), ("linear", 0.55), ("cosine", 0.55)]
)
def test_shape_after_the_warm_up(name: str, middle: float) -> None:
    factor = build_schedule(ScheduleConfig(name, warmup_steps=4, floor=0.1), 15, 10)
    last = 1.0 if name == "constant" else 0.1
    assert [factor(4), factor(9), factor(14)] == pytest.approx([1.0, middle, last])
    # A step beyond the planned end, as a resumed run may take, does not rise again.
    assert factor(40) == pytest.approx(last)


def test_a_quarter_of_a_cosine_is_not_a_line() -> None:
    factor = build_schedule(ScheduleConfig("cosine"), 101, 10)
    assert factor(25) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert factor(100) == pytest.approx(0.0)


def test_step_schedule_falls_at_the_start_of_its_epochs() -> None:
    config = ScheduleConfig("step", step_epochs=(2, 3), factor=0.1)
    factor = build_schedule(config, 50, per_epoch=10)
    found = [factor(step) for step in (0, 19, 20, 29, 30, 49)]
    assert found == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_run_of_one_step_trains_at_the_full_rate(name: str) -> None:
    assert build_schedule(ScheduleConfig(name, step_epochs=(1,)), 1, 1)(0) == 1.0


def test_wrong_schedules() -> None:
    with pytest.raises(UsageError, match=r"'cosin'.*'cosine'"):
        build_schedule(ScheduleConfig("cosin"), 10, 10)


def test_a_warm_up_longer_than_the_run_is_cut_and_said() -> None:
    config, notes = fit_warmup(ScheduleConfig(warmup_steps=10), 10)
    assert config.warmup_steps == 5
    assert notes == ["warm-up cut from 10 to 5 steps: the run has only 10"]
    assert fit_warmup(ScheduleConfig(warmup_steps=9), 10) == (ScheduleConfig(warmup_steps=9), [])
    assert fit_warmup(ScheduleConfig(), 1) == (ScheduleConfig(), [])


@pytest.mark.parametrize(
    ("rule", "reference", "rate", "said"),
    [
        ("linear", 64, 0.4, "learning rate 0.4 = 0.1 x (256/64): linear rule"),
        ("sqrt", 64, 0.2, "learning rate 0.2 = 0.1 x (256/64)^0.5: sqrt rule"),
        ("linear", 512, 0.05, "(256/512)"),
        ("none", 64, 0.1, "learning rate 0.1 as given (batch 256)"),
        ("linear", None, 0.1, "as given"),
        ("sqrt", 256, 0.1, "as given"),
    ],
)
def test_the_rate_follows_the_batch(
    rule: str, reference: int | None, rate: float, said: str
) -> None:
    found, sentence = scale_lr(0.1, 256, reference, rule)
    assert found == pytest.approx(rate)
    assert said in sentence


def test_an_unknown_rule() -> None:
    with pytest.raises(UsageError, match=r"train\.lr_rule; did you mean 'linear'"):
        scale_lr(0.1, 256, 64, "linaer")


# Optimizers.


class Net(nn.Module):
    """Matrices, biases, a norm and a scalar."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x) * self.scale
        return out


def backward(model: nn.Module, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64).to(dtype)
    (model(x).square().sum() * scale).backward()


def assert_same(a: nn.Module, b: nn.Module, rtol: float = 1e-12) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol)


PLAIN = {"fused": False, "foreach": False}
CASES = {
    "adamw": (
        OptimConfig("adamw", 0.1, betas=(0.8, 0.95), eps=1e-6),
        lambda p: torch.optim.AdamW(p, 0.05, (0.8, 0.95), 1e-6, 0.1, **PLAIN),
    ),
    "adam": (
        OptimConfig("adam", 0.1, betas=(0.8, 0.95), eps=1e-6),
        lambda p: torch.optim.Adam(p, 0.05, (0.8, 0.95), 1e-6, 0.1, **PLAIN),
    ),
    "sgd": (
        OptimConfig("sgd", 0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.1, **PLAIN),
    ),
    "nesterov": (
        OptimConfig("sgd", 0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.1, nesterov=True, **PLAIN),
    ),
    "plain sgd": (OptimConfig("sgd"), lambda p: torch.optim.SGD(p, 0.05, **PLAIN)),
}


@pytest.mark.parametrize("case", CASES)
def test_optimizers_are_torchs_step_by_step(case: str) -> None:
    config, reference = CASES[case]
    ours, theirs = Net(), Net()
    optimizer, expected = build_optimizer(ours, config, 0.05), reference(theirs.parameters())
    for step in range(6):
        for model, stepper in ((ours, optimizer), (theirs, expected)):
            backward(model, step)
            stepper.step()
            stepper.zero_grad()
        assert_same(ours, theirs)


def test_decay_spares_vectors_when_asked() -> None:
    model = Net()
    parameters = list_trainables(model)
    spared = decay_groups(parameters, OptimConfig(weight_decay=0.1, decay_norms=False))
    assert [group["weight_decay"] for group in spared] == [0.1, 0.0]
    assert [p.dim() for p in spared[0]["params"]] == [2, 2]
    assert [p.dim() for p in spared[1]["params"]] == [0, 1, 1, 1, 1]
    (whole,) = decay_groups(parameters, OptimConfig(weight_decay=0.1))
    assert whole["weight_decay"] == 0.1
    assert len(whole["params"]) == len(parameters)


def test_decay_alone_shrinks_what_it_is_for_and_nothing_else() -> None:
    model = Net()
    before = copy.deepcopy(model)
    config = OptimConfig("sgd", weight_decay=0.1, decay_norms=False)
    optimizer = build_optimizer(model, config, 0.5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(p, q * (0.95 if p.dim() > 1 else 1.0))


def test_frozen_parameters_are_left_out() -> None:
    model = Net()
    model.layers[0].requires_grad_(False)
    optimizer = build_optimizer(model, OptimConfig(), 0.1)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}
    with pytest.raises(UsageError, match="no trainable parameter"):
        build_optimizer(model.requires_grad_(False), OptimConfig(), 0.1)


def test_wrong_optimizers() -> None:
    with pytest.raises(UsageError, match=r"optim\.nesterov=true needs optim\.momentum above 0"):
        build_optimizer(Net(), OptimConfig("sgd", nesterov=True), 0.1)
    with pytest.raises(UsageError, match=r"'sdg' in optim\.name; did you mean 'sgd'"):
        build_optimizer(Net(), OptimConfig("sdg"), 0.1)


# The end of a step.


@pytest.mark.parametrize("clip", [1e-2, 1e6])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_clipping_is_torchs(name: str, clip: float) -> None:
    config = OptimConfig(name, momentum=0.9, weight_decay=0.1)
    ours, theirs = Net(), Net()
    optimizer, expected = (build_optimizer(model, config, 0.05) for model in (ours, theirs))
    update = build_update(optimizer, list(ours.parameters()), clip, None)
    for step in range(5):
        backward(ours, step)
        backward(theirs, step)
        want = torch.sqrt(sum(p.grad.square().sum() for p in theirs.parameters()))
        nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        expected.step()
        expected.zero_grad()
        norm = update()
        assert norm is not None
        torch.testing.assert_close(norm, want)
        assert_same(ours, theirs)
        assert all(p.grad is None for p in ours.parameters())


def test_without_clipping_there_is_no_norm_and_gradients_count_in_full() -> None:
    ours, before = Net(), Net()
    optimizer = build_optimizer(ours, OptimConfig("sgd"), 0.5)
    backward(ours, 0)
    backward(before, 0)
    assert build_update(optimizer, list(ours.parameters()), None, None)() is None
    for p, q in zip(ours.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(p, q - 0.5 * q.grad)
        assert p.grad is None


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_with_loss_scaling_an_overflow_skips_the_update(name: str, clip: float | None) -> None:
    model = Net(torch.float32)
    optimizer = build_optimizer(model, OptimConfig(name), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    update = build_update(optimizer, list(model.parameters()), clip, scaler)
    before = copy.deepcopy(model)
    scaler.scale(torch.zeros(()))  # the scale exists from the first use on
    backward(model, 0, scale=math.inf)
    update()
    assert_same(model, before)
    assert scaler.get_scale() == 512.0
    assert all(p.grad is None for p in model.parameters())
    backward(model, 1, scale=512.0)
    update()
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(),
                                                     strict=True))  # fmt: skip


@pytest.mark.parametrize("clip", [None, 0.5])
def test_with_loss_scaling_the_update_is_that_of_the_true_gradients(clip: float | None) -> None:
    ours, theirs = Net(torch.float32), Net(torch.float32)
    config = OptimConfig("sgd", momentum=0.9)
    optimizer, expected = (build_optimizer(model, config, 0.05) for model in (ours, theirs))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    scaled = build_update(optimizer, list(ours.parameters()), clip, scaler)
    plain = build_update(expected, list(theirs.parameters()), clip, None)
    for step in range(4):
        backward(ours, step, scale=1024.0)
        backward(theirs, step)
        norm, want = scaled(), plain()
        assert (norm is None) == (clip is None)
        if norm is not None:
            torch.testing.assert_close(norm, want)
        assert_same(ours, theirs, rtol=1e-6)


def test_many_gradients_are_summed_in_as_few_operations_as_two() -> None:
    class Count(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.num += 1
            return func(*args, **(kwargs or {}))

    def count(num: int) -> int:
        parameters = [nn.Parameter(torch.zeros(2)) for _ in range(num)]
        for parameter in parameters:
            parameter.grad = torch.ones(2)
        with Count() as mode:
            total = _square_sum(parameters, torch.float32, torch.device("cpu"))
        assert total.item() == pytest.approx(2 * num)
        return mode.num

    assert count(100) == count(2)
