"""Updates of several parameters in one call: the same numbers, far fewer calls, one function a kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.optim.master import MasterAdamW
from ridgeline.optim.stochastic import StochasticAdamW
from ridgeline.optim.together import AT_ONCE, Row, Together

LENGTHS = [6] * (2 * AT_ONCE + 3) + [10] * AT_ONCE + [1] * AT_ONCE


def build(kind: str, compiles: bool) -> Optimizer:
    torch.manual_seed(0)
    narrow = [nn.Parameter(torch.randn(length, 1)) for length in LENGTHS]
    wide = [nn.Parameter(torch.randn(length)) for length in LENGTHS]
    masters = {parameter: parameter.detach().clone() for parameter in narrow}
    for parameter in narrow:
        parameter.data = parameter.data.bfloat16()
    groups = [{"params": narrow, "weight_decay": 0.1}, {"params": wide}]
    if kind == "bf16":
        return MasterAdamW(groups, 1e-2, (0.9, 0.95), 1e-8, masters, compiles)
    return StochasticAdamW(groups, 1e-2, (0.9, 0.95), 1e-8, 3, compiles)


def after_steps(optimizer: Optimizer) -> list[Tensor]:
    """Weights and state; every fifth parameter has no gradient at first, so that its steps are fewer."""
    torch.manual_seed(1)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(3):
        for index, parameter in enumerate(parameters):
            gradient = torch.randn_like(parameter)
            parameter.grad = None if step == 0 and index % 5 == 0 else gradient
        optimizer.step()
    state = [value for p in parameters for value in optimizer.state[p].values()]
    return [*(p.detach() for p in parameters), *state]


@pytest.mark.parametrize("kind", ["bf16", "stochastic"])
def test_several_at_once_have_the_same_numbers_in_fewer_calls(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    plain = after_steps(build(kind, compiles=False))
    calls: Counter[str] = Counter()

    def compiled(function: Callable[..., None], **_: Any) -> Callable[..., None]:
        def call(*args: Any) -> None:
            calls[function.__name__] += 1
            function(*args)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    found = after_steps(build(kind, compiles=True))
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    # Of a step of all, in two groups: 2 and 1 lists; 3 left over, and those of one element.
    whole = {"several": 2 * 3, "_update": 2 * (3 + AT_ONCE)}
    optimizer = build(kind, compiles=True)
    calls.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert calls == whole


def test_what_is_compiled_serves_every_length() -> None:
    """A model has many lengths, and compiling for each would take minutes."""

    def update(own: Tensor, other: Tensor | None, rate: Tensor) -> None:
        own.copy_(own - rate * (own if other is None else other.float()))

    def rows(length: int) -> list[Row]:
        return [(torch.ones(length), torch.ones(length).bfloat16()) for _ in range(2 * AT_ONCE)]

    together, rate = Together(update, compiles=True), torch.tensor(0.25)
    together(rows(6), rate)
    with torch._dynamo.config.patch(error_on_recompile=True):
        given = [*rows(7), *rows(300)]
        together(given, rate)
    assert all(torch.equal(own, torch.full_like(own, 0.75)) for own, _ in given)
