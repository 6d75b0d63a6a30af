"""Chunked losses, padded layers, masters and attention back ends: the same numbers, another way."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.config import OptimConfig, load_config
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.models.build import build_model
from ridgeline.optim.build import build_optimizer
from ridgeline.optim.master import build_master_adamw
from ridgeline.optim.update import build_update
from ridgeline.parallel.linear_loss import DeferredLinear, linear_cross_entropy
from ridgeline.parallel.mesh import close_mesh
from ridgeline.parallel.tuned import (
    PaddedLinear,
    apply_padding,
    compile_module,
    prefer_attention,
)
from ridgeline.train.chunked import choose_loss
from ridgeline.train.setup import build_training
from ridgeline.train.tasks import TASKS
from ridgeline.tuning import TuneConfig


@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_chunked_loss_is_the_full_one(
    chunk: int, bias: bool, dtype: torch.dtype, bound: float
) -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(37, 24, dtype=dtype), nn.Linear(24, 101, bias, dtype=dtype)
    targets = torch.randint(0, 101, (37,))
    targets[::5] = -100
    found = []
    for chunked in (True, False):
        one, leaf = copy.deepcopy(layer), x.clone().requires_grad_()
        if chunked:
            counted = targets >= 0
            shares = counted.to(dtype) / counted.sum()
            index = torch.where(counted, targets, 0)
            loss = linear_cross_entropy(leaf, one.weight, one.bias, index, shares, chunk)
        else:
            loss = F.cross_entropy(one(leaf), targets)
        (loss * 3).backward()
        found.append([loss.detach(), leaf.grad, *(p.grad for p in one.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= bound * other.abs().max()


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm"])
@pytest.mark.parametrize("empty", [False, True])
def test_tasks_have_the_same_loss_in_chunks(task: str, empty: bool) -> None:
    torch.manual_seed(0)
    model = build_model("llama", width=32, depth=1, heads=2, ffn=64, vocab=60)
    other = copy.deepcopy(model)
    tokens = torch.randint(0, 60, (3, 8))
    targets = torch.randint(0, 60, (3, 8))
    targets[0, :5] = -100
    targets[1] = -100
    if empty:
        targets[:] = -100
    tune = TuneConfig(loss="chunked", loss_chunk=5)
    loss = choose_loss(model, TASKS[task], tune, Layout(), (tokens[:2],))
    found, true = loss(model(tokens), targets), TASKS[task].loss(other(tokens), targets)
    assert torch.allclose(found, true, rtol=1e-6, atol=1e-7)
    found.backward()
    true.backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one.grad, two.grad, rtol=1e-4, atol=1e-7)
    model.eval()  # an evaluation wants the logits
    assert torch.equal(model(tokens), other(tokens))
    assert torch.equal(loss(model(tokens), targets), TASKS[task].loss(other(tokens), targets))


class Capped(nn.Module):
    """Does something to its logits."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.embed, self.head, self.after = nn.Embedding(20, 8), nn.Linear(8, 20), after

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(tokens))
        return torch.tanh(logits) if self.after else logits


def test_the_head_is_found_or_refused() -> None:
    tokens = torch.randint(0, 20, (2, 4))
    tune = TuneConfig(loss="chunked")
    model = Capped(False)
    choose_loss(model, TASKS["causal_lm"], tune, Layout(), (tokens,))
    assert type(model.head) is DeferredLinear
    assert model.training
    with pytest.raises(UsageError, match="no layer's are"):
        choose_loss(Capped(True), TASKS["causal_lm"], tune, Layout(), (tokens,))
    with pytest.raises(UsageError, match="this is forecast"):
        choose_loss(Capped(False), TASKS["forecast"], tune, Layout(), (tokens,))
    with pytest.raises(UsageError, match="tp=2"):
        choose_loss(Capped(False), TASKS["causal_lm"], tune, Layout(tp=2), (tokens,))


def test_padded_layers_are_exact() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 32), nn.Linear(32, 32), nn.Linear(32, 3))
    other = copy.deepcopy(model)
    assert apply_padding(model, 16) == ["0", "1"]  # one fits already, one is too small to gain
    assert isinstance(model[0], PaddedLinear)
    assert list(model.state_dict()) == list(other.state_dict())
    x = torch.randn(5, 40)
    for one in (model, other):
        one(x).square().sum().backward()
    assert torch.allclose(model(x), other(x), rtol=1e-6)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one.grad, two.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_masters_are_autocast_with_adamw(clip: float | None) -> None:
    """The same weights after ten steps, bit for bit in the first and to rounding after that."""
    torch.manual_seed(0)
    base = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LayerNorm(8 * 36), nn.Linear(8 * 36, 10)
    ).to(memory_format=torch.channels_last)
    batches = [(torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))) for _ in range(10)]
    config = OptimConfig(weight_decay=0.1, decay_norms=False)
    weights = []
    for narrow in (True, False):
        model = copy.deepcopy(base)
        optimizer = (
            build_master_adamw(model, config, 1e-3)
            if narrow
            else build_optimizer(model, config, 1e-3)
        )
        update = build_update(optimizer, list(model.parameters()), clip, None)
        for x, y in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            update()
        if narrow:
            assert model[3].weight.dtype is model[0].weight.dtype is torch.bfloat16
            assert model[2].weight.dtype is model[3].bias.dtype is torch.float32
        weights.append(
            [optimizer.state[p].get("master", p.detach()).clone() for p in model.parameters()]
        )
    for one, two in zip(*weights, strict=True):
        assert one.dtype is two.dtype is torch.float32
        # An update is 1e-3; masters in bf16 would be off by as much as that.
        assert (one - two).abs().max() < 2e-5


def test_masters_are_for_one_device() -> None:
    for layout in ("precision=fp32", "precision=bf16,accumulate=2"):
        with pytest.raises(UsageError, match=r"tune\.weights=bf16 is for one device"):
            build(f"layout={layout}", "tune.weights=bf16")
    with pytest.raises(UsageError, match=r"optim.name=adamw, not sgd"):
        build("layout=precision=bf16", "tune.weights=bf16", "optim.name=sgd")


def build(*overrides: str) -> list[str]:
    """The notes of a training so configured."""
    settings = (
        "model.name=llama",
        "model.args={width: 32, depth: 2, heads: 2, ffn: 64, vocab: 256, max_seq: 16}",
        "data.source=text",
        "data.args={seq_len: 16}",
        "train.batch=4",
        "train.steps=1",
        "device=cpu",
        "threads=1",
    )
    training = build_training(load_config(None, [*settings, *overrides]).config, read_rank_env({}))
    training.close_loaders()
    close_mesh(training.mesh)
    return training.notes


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(UsageError, match="precision=bf16 or fp8, not fp32"):
        build("tune.residual=bf16")
    with pytest.raises(UsageError, match="did you mean 'cudnn'"):
        build("tune.attention=cudn")
    with pytest.raises(UsageError, match="found no linear layer"):
        build("layout=precision=fp8", "tune.fp8_keep=[layers]")
    with pytest.raises(UsageError, match="too small"):
        build("tune.loss_chunk=0")
    with pytest.raises(UsageError, match="for compile=true on CUDA, and here compile is False"):
        build("tune.search_tiles=true")


@pytest.mark.parametrize("mode", ["autotune", "regional"])
def test_a_way_to_compile_without_compiling_is_told(mode: str) -> None:
    """Not refused: `ridgeline verify --layout` puts other layouts under the same settings."""
    (note,) = [n for n in build(f"tune.compile_mode={mode}") if "compile" in n]
    assert note.startswith(f"tune.compile_mode={mode} does nothing")
    assert "add compile=true to the layout" in note
    compiled = build("layout=compile=true", f"tune.compile_mode={mode}")
    for notes in (build(), compiled):
        assert not [n for n in notes if "compile" in n]


def test_attention_back_ends_are_tried_in_order() -> None:
    before = torch._C._get_sdp_priority_order()
    try:
        prefer_attention("auto")
        assert torch._C._get_sdp_priority_order() == before
        prefer_attention("cudnn")
        order = torch._C._get_sdp_priority_order()
        assert order[0] == int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)
        assert len(set(order)) >= 4  # the others stay, for what the first refuses
    finally:
        torch._C._set_sdp_priority_order(before)


def test_blocks_of_torchs_own_classes_are_really_compiled() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    blocks = nn.ModuleList(
        nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in "abc"
    )
    x = torch.randn(2, 4, 16)
    true = [block(x) for block in blocks]
    for block in blocks:
        compile_module(block, dynamic=False, backend="aot_eager")
    for block, wanted in zip(blocks, true, strict=True):
        assert torch.allclose(block(x), wanted, atol=1e-6)
    assert counters["stats"]["unique_graphs"] >= 1
    assert copy.deepcopy(blocks[0])(x).shape == x.shape
