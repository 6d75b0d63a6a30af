"""Out of memory is told as a budget with layouts that would fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ridgeline.config import load_config
from ridgeline.errors import RunError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout, check_layout
from ridgeline.rundir import RunDir
from ridgeline.train.memory import Budget, is_out_of_memory, suggest
from ridgeline.train.run import run_training

GB = 1e9
# Llama 8B in float32 on one of 8 devices of 80 GB: 32 + 32 + 64, and 20 of activations.
LARGE = Budget(32 * GB, 32 * GB, 64 * GB, 20 * GB, 1 * GB, 80 * GB)
# State that is small, activations that are not.
WIDE = Budget(4 * GB, 4 * GB, 8 * GB, 90 * GB, 1 * GB, 80 * GB)


def names(layout: str, budget: Budget, samples: int = 8) -> list[str]:
    found = suggest(Layout.parse(layout), budget, samples)
    assert all(not check_layout(other) for other, _ in found)
    return [str(other) for other, _ in found]


def test_state_that_is_too_large_is_sharded() -> None:
    # Stage 1 leaves 92 GB, stage 2 64, stage 3 a part in eight of everything and the activations.
    found = {str(other): need for other, need in suggest(Layout.parse("dp=8"), LARGE, 8)}
    assert list(found)[:2] == ["dp=8,zero=2", "dp=8,zero=3"]
    assert found["dp=8,zero=2"] == pytest.approx(64 * GB)
    assert found["dp=8,zero=3"] == pytest.approx(128 * GB / 8 + 20 * GB)


def test_activations_that_are_too_large_are_cut_or_made_again() -> None:
    found = names("dp=2", WIDE)
    assert found[0] == "dp=2,accumulate=2"
    assert "dp=2,recompute=full" in found


def test_what_is_used_already_is_not_suggested() -> None:
    for text in names("dp=2,zero=3,recompute=full,precision=bf16", WIDE, samples=1):
        assert text.count("zero=3") <= 1
        assert text != "dp=2,zero=3,recompute=full,precision=bf16"


def test_the_number_of_ranks_stays() -> None:
    for budget in (LARGE, WIDE):
        for other, _ in suggest(Layout.parse("dp=8"), budget, 8):
            assert other.world_size == 8


@pytest.mark.parametrize(
    ("error", "yes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("shapes do not fit"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, yes: bool) -> None:
    assert is_out_of_memory(error) is yes


def test_a_run_that_runs_out_says_where_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real refusal of the allocator: a layer of half a terabyte's output."""
    (tmp_path / "huge_net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(64, 10)\n"
        "    def forward(self, x):\n"
        "        y = self.layer(x.flatten(1))\n"
        "        return y + torch.empty(10 ** 15, device=x.device)[:10] if len(x) > 2 else y\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config(
        None,
        ("model={name: 'huge_net:Net'}", "data.source=digits", "train.steps=2", "device=cpu",
         "log.tensorboard=no"),
    ).config  # fmt: skip
    with pytest.raises(RunError) as caught:
        run_training(config, read_rank_env({}), RunDir.at(tmp_path / "run"))
    text = str(caught.value)
    assert text.startswith("rank 0 is out of memory on cpu in layout dp=1: ")
    for word in ("weights", "gradients", "optimizer state", "activations", "fragmentation"):
        assert f"  {word}" in text
    # What was asked for and refused is what there is too much of.
    (line,) = [x for x in text.splitlines() if "activations" in x]
    assert float(line.split()[-2]) == pytest.approx(4e6, rel=0.01)
    assert text.count("try layout=") == 3
