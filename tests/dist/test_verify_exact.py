"""Proofs in float64 of models that are not the same to 1e-9 by themselves, and of mistakes in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ridgeline.config import find_recipe, load_config
from ridgeline.layout import Layout
from ridgeline.parallel.arranged import Arranged
from ridgeline.train.setup import Training
from ridgeline.verify.run import Row, Verifier

MODELS = """
import torch
import torch.nn.functional as F
from torch import nn

class Keys(nn.Module):
    '''Attention of the rows of an image: the gradient of the keys' bias is zero but for rounding.'''
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(8, 16), nn.Linear(16, 10)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        nn.init.zeros_(self.key.bias)

    def forward(self, x):
        x = 10 * self.embed(x.flatten(1).unflatten(1, (8, 8)))
        x = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.out(x.mean(1))

class Casts(nn.Module):
    '''Its norm computes in float32, whatever it is given.'''
    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(64, 32), nn.Linear(32, 10)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x):
        x = self.first(x.flatten(1))
        y = F.layer_norm(x.float(), (32,)) * self.scale.float()
        return self.out(y.to(x.dtype).relu())

class Narrow(Casts):
    '''Has a kernel that is not there in float64.'''
    def forward(self, x):
        if x.dtype == torch.float64:
            raise RuntimeError("expected Float32, got Double")
        return super().forward(x)
"""


class Proofs:
    """One verifier for a model; its one device is asked before a mistake is planted in the ranks."""

    def __init__(self, *settings: str) -> None:
        settings = (*settings, "optim.name=adamw", "optim.weight_decay=0.01")
        config = load_config(find_recipe("digits"), settings).config
        self.layout = Layout.parse("dp=2,zero=1")
        self.verifier = Verifier(config, [self.layout], steps=3)
        self.right = self.verdict()

    def verdict(self) -> Row:
        try:
            return self.verifier.check(self.layout)
        finally:  # the next ranks are forked anew, with a mistake or none
            self.verifier._ranks.pop(2).close()


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Proofs]]:
    folder: Path = tmp_path_factory.mktemp("models")
    (folder / "inexact_models.py").write_text(MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        names = ("Keys", "Casts", "Narrow")
        made = {name: Proofs(f"model={{name: inexact_models:{name}}}") for name in names}
        made["norms"] = Proofs("model.args.batch_norm=true")
        yield made
        for proof in made.values():
            proof.verifier.close()


def test_rounding_that_adam_makes_a_step_of_is_no_difference(proofs: dict[str, Proofs]) -> None:
    row = proofs["Keys"].right
    assert row.verdict == "same", row
    assert row.detail.startswith("step by step; in all, rounding")
    assert "weight key.bias at step " in row.detail


def test_a_model_that_casts_to_float32_is_held_to_what_that_costs_one_device(
    proofs: dict[str, Proofs],
) -> None:
    row = proofs["Casts"].right
    assert row.verdict == "same", row
    assert "computes in less than float64 by itself" in row.detail
    assert row.comparison is not None
    assert row.comparison.sizes.gradient > 1e-9
    assert row.comparison.bounds.gradient < 1e-5
    assert row.comparison.bounds.weight == 1e-9


def _wrong_rate(training: Training, step: int) -> None:
    for group in training.optimizer.param_groups:
        group["lr"] *= 1 + 1e-6


def _no_decay(training: Training, step: int) -> None:
    for group in training.optimizer.param_groups:
        group["weight_decay"] = 0.0


def _lost_moment(training: Training, step: int) -> None:
    for state in training.optimizer.state.values():
        state["exp_avg"].zero_()


@pytest.mark.parametrize("model", ["Keys", "Casts"])
@pytest.mark.parametrize(("plant", "step"), [(_wrong_rate, 1), (_no_decay, 1), (_lost_moment, 2)])
def test_a_wrong_update_is_found_beside_rounding(
    proofs: dict[str, Proofs],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    plant: Callable[[Training, int], None],
    step: int,
) -> None:
    right = Training.set_lr

    def set_lr(training: Training, step: int) -> float:
        rate = right(training, step)
        plant(training, step)
        return rate

    monkeypatch.setattr(Training, "set_lr", set_lr)
    row = proofs[model].verdict()
    assert row.verdict == "differs", row
    assert row.detail.startswith("weight ")
    assert f" at step {step} by " in row.detail


def test_a_wrong_gradient_is_found_beside_what_casts_cost(
    proofs: dict[str, Proofs], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Arranged.weight_of
    monkeypatch.setattr(Arranged, "weight_of", lambda *args: (1 + 1e-5) * right(*args))
    row = proofs["Casts"].verdict()
    assert row.verdict == "differs", row
    assert row.detail.startswith("gradient ")


def test_a_model_that_cannot_run_in_float64_is_proved_in_fp32(
    proofs: dict[str, Proofs], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = proofs["Narrow"].right
    assert (row.verdict, row.precision) == ("same", "fp32"), row
    assert row.detail.startswith(
        "to rounding of fp32, since float64 is what this model cannot do ("
    )
    assert "expected Float32, got Double" in row.detail
    assert "\n" not in row.detail
    right = Arranged.weight_of
    monkeypatch.setattr(Arranged, "weight_of", lambda *args: (1 + 1e-4) * right(*args))
    row = proofs["Narrow"].verdict()
    assert (row.verdict, row.precision) == ("differs", "fp32"), row


def test_batch_norms_that_part_ranks_are_told_with_a_remedy(proofs: dict[str, Proofs]) -> None:
    row = proofs["norms"].right
    assert row.verdict == "differs", row
    assert row.detail.endswith(
        "; batch norms see the samples of their own rank, unless ddp.sync_batch_norm=true"
    )
