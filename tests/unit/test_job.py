"""Loops of a user's own on one device: what a job keeps, and what it does not."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ridgeline.errors import UsageError
from ridgeline.train.job import start


@pytest.mark.parametrize("has_engine", [True, False])
def test_a_job_keeps_no_model_that_nobody_else_has(has_engine: bool) -> None:
    """Fold after fold of a validation, each with a model of its own."""
    job = start(device="cpu")
    model: nn.Module | None = nn.Linear(4, 2)
    seen = weakref.ref(model)
    made: object = None
    if has_engine:
        engine = job.engine(model, torch.optim.Adam(model.parameters()), ema=0.9)
        engine.backward(engine(torch.ones(3, 4)).mean())
        engine.step()
        made, engine = engine, None
    else:
        made = job.parallelize(model)
    model = None
    gc.collect()
    assert seen() is not None
    del made
    gc.collect()
    assert seen() is None


def test_a_copy_of_a_model_is_not_what_was_arranged(tmp_path: Path) -> None:
    job = start(device="cpu")
    model = job.parallelize(nn.Linear(4, 2))
    loader = job.loader(TensorDataset(torch.ones(8, 4)), 4)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(model), copy.copy(model), read, nn.Linear(4, 2), 3):
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(UsageError, match=r"is not what job\.parallelize"):
            job.checkpoints(tmp_path, other, optimizer, loader, every=1)
    job.checkpoints(tmp_path, model, torch.optim.SGD(model.parameters()), loader, every=1).close()
    assert b"ridgeline" not in file.getvalue().replace(b"_ridgeline_arranged", b"")


def test_weights_are_not_put_in_place_of_arranged_ones() -> None:
    job = start(device="cpu")
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    engine = job.engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    held = list(model.parameters())
    for module, part in ((model, state), (model[0], {k[2:]: v for k, v in state.items()})):
        with pytest.raises(UsageError, match=r"assign=True\) would put .* leave assign out"):
            module.load_state_dict(part, assign=True)
    assert all(p is old for p, old in zip(model.parameters(), held, strict=True))
    model.load_state_dict(state)
    assert bool((engine.weights()["0.weight"] == 1).all())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.load_state_dict(state, assign=True)
        assert next(other.parameters()).data_ptr() == state["0.weight"].data_ptr()
    assert b"ridgeline" not in file.getvalue()
    del engine
    gc.collect()
    model.load_state_dict(state, assign=True)
