"""Traced facts against torch's own counter, against what a real step on the CPU keeps, and hard modules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.config import find_recipe, load_config
from ridgeline.errors import UsageError
from ridgeline.models.build import build_model
from ridgeline.models.trace import Batch, trace_module
from ridgeline.parallel.grouped import teach_autocast
from ridgeline.plan.module import ModuleFacts
from ridgeline.train.traced import trace_recipe


def images(*shape: int) -> Callable[[int], Batch]:
    return lambda n: ((torch.zeros(n, *shape),), torch.zeros(n, dtype=torch.long))


def fields(*shape: int) -> Callable[[int], Batch]:
    return lambda n: ((torch.zeros(n, *shape),), torch.zeros(n, *shape))


def tokens(length: int) -> Callable[[int], Batch]:
    def batch(n: int) -> Batch:
        return (torch.zeros(n, length, dtype=torch.long),), torch.zeros(n, length, dtype=torch.long)

    return batch


def token_loss(output: Any, targets: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def named(name: str, **args: Any) -> Callable[[], nn.Module]:
    return lambda: build_model(name, **args)


CONVOLUTIONAL: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], Any]] = {
    "mlp": (named("mlp"), images(64), F.cross_entropy),
    "cnn": (named("cifar_cnn", image_size=16), images(3, 16, 16), F.cross_entropy),
    "alexnet": (
        named("alexnet", in_channels=1, num_classes=10, image_size=16), images(1, 16, 16),
        F.cross_entropy,
    ),
    "resnet18": (named("resnet18", num_classes=10), images(3, 32, 32), F.cross_entropy),
    "unet": (
        named("unet2d", in_channels=2, out_channels=2, width=8, depth=2, norm="group"),
        fields(2, 16, 16), F.mse_loss,
    ),
}  # fmt: skip
ATTENTIVE = {
    "llama": (named("llama", size="1m", vocab=2048, depth=2), tokens(64), token_loss),
    "bert": (named("bert", vocab=2048, width=64, depth=2, heads=4, max_seq=64), tokens(64), token_loss),
    "vit": (
        named("vit", task="forecast", image_size=[16, 16], in_channels=2, patch=4, width=32, depth=2,
              heads=4),
        fields(2, 16, 16), F.mse_loss,
    ),
}  # fmt: skip
ALL = {**CONVOLUTIONAL, **ATTENTIVE}


@pytest.fixture(scope="module")
def facts() -> dict[str, ModuleFacts]:
    return {name: trace_module(name, *case) for name, case in ALL.items()}


@pytest.mark.parametrize("name", ALL)
def test_flops_and_parameters_are_torchs(name: str, facts: dict[str, ModuleFacts]) -> None:
    build, batch, loss = ALL[name]
    with torch.device("meta"):
        model = build()
        inputs, targets = batch(3)
    with FlopCounterMode(display=False) as counter:
        result = loss(model(*inputs), targets)
        forward = counter.get_total_flops()
        result.backward()
        backward = counter.get_total_flops() - forward
    ours = facts[name].flops(3)
    assert ours[0] == forward
    # Fused attention computes its scores once more in backward: one product of five; the counter sees
    # the four of the arithmetic that the meta device takes attention apart into.
    again = sum(
        2.0 * a.scores.at(3) * a.width * a.count * block.count
        for block in facts[name].blocks
        for a in block.costs["wide"].forward.attention
    )
    assert ours[1] == pytest.approx(backward + again, rel=1e-12)
    assert facts[name].num_parameters == sum(p.numel() for p in model.parameters())
    leaves = sum(b.count * leaf.parameters for b in facts[name].blocks for leaf in b.leaves)
    assert leaves == facts[name].num_parameters


def kept_on_cpu(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes of distinct storages that autograd keeps in a real step, but for parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}
    held = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor.detach())  # so that no address is used twice
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(seen.values())


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet18", "unet", "vit"])
def test_kept_bytes_are_those_of_a_real_step(name: str, facts: dict[str, ModuleFacts]) -> None:
    build, batch, loss = ALL[name]
    torch.manual_seed(0)
    model, (inputs, targets) = build(), batch(5)
    real = kept_on_cpu(model, lambda: loss(model(*inputs), targets))
    assert facts[name].saved_bytes(5) == pytest.approx(real, rel=0.002)


def test_kept_bytes_under_autocast_are_those_of_a_real_step() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)
        )

    found = trace_module("plain", build, lambda n: ((torch.zeros(n, 32),), None), _mean)
    model = build()

    def run() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return _mean(model(torch.zeros(40, 32)), None)

    assert found.saved_bytes(40, "cast") == pytest.approx(kept_on_cpu(model, run), rel=0.002)
    casts = sum(b.count * b.costs["cast"].casts.total.at(40) for b in found.blocks)
    # The first weight is not needed for a gradient of the inputs, which nobody asks for.
    assert casts == 2 * (64 * 64 + 64 * 8)


def _mean(output: Tensor, targets: Any) -> Tensor:
    return output.float().mean()


class Experts(nn.Module):
    """Rows in equal shares through four experts that are stored side by side."""

    def __init__(self, wide: int = 24) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, wide, 16) / 4)
        self.down = nn.Parameter(torch.randn(4, wide, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(1, 5, dtype=torch.int32, device=x.device) * (len(x) // 4)
        x = F.grouped_mm(x, self.up.transpose(1, 2), offs=ends)
        return F.grouped_mm(F.silu(x), self.down, offs=ends)


def _experts() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), Experts())


def _rows(n: int) -> Batch:
    return (torch.zeros(20 * n, 16),), None


@pytest.mark.parametrize("mode", ["wide", "cast"])
def test_experts_side_by_side_are_products_and_keep_what_a_real_step_keeps(mode: str) -> None:
    found = trace_module("experts", _experts, _rows, _mean)
    linear, one = 2 * 16 * 16, 2 * 16 * 24  # FLOPs of a row
    assert found.flops(3) == (60 * (linear + 2 * one), 60 * (linear + 4 * one))
    products = [
        p for b in found.blocks for p in b.costs["wide"].forward.products if p.kind == "grouped"
    ]
    assert sorted((p.m.at(3), p.n.at(3), p.k.at(3), p.batch.at(3)) for p in products) == [
        (15, 16, 24, 4), (15, 24, 16, 4),
    ]  # fmt: skip
    selective = sum(b.costs["wide"].saved_selective.total.at(3) for b in found.blocks)
    assert selective >= 60 * (24 + 16) * 4  # results of both products among it
    torch.manual_seed(0)
    model, (inputs, targets) = _experts(), _rows(20)
    teach_autocast("cpu")

    def run() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "cast"):
            return _mean(model(*inputs), targets)

    ends = 2 * 4 * 4  # four numbers, kept by each product
    real = kept_on_cpu(model, run) - ends
    assert found.saved_bytes(20, mode) == pytest.approx(real, rel=0.002)


def test_experts_with_odd_sides_stay_in_their_own_type() -> None:
    found = trace_module("odd", lambda: Experts(wide=20), _rows, _mean)
    kept = {mode: found.saved_bytes(20, mode) for mode in ("wide", "cast")}
    assert kept["wide"] == kept["cast"]


def test_a_mixture_of_transformers_is_traced() -> None:
    """Two experts of four for each token, and four layers of them."""
    pytest.importorskip("transformers")
    found = trace_recipe(load_config(find_recipe("mixtral-text")).config)
    tokens, width, wide = 128, 96, 160
    routed = 4 * 2 * tokens * (2 * width * 2 * wide + 2 * wide * width)
    products = sum(
        b.count * p.flops(1)
        for b in found.blocks
        for p in b.costs["wide"].forward.products
        if (p.batch.at(1), p.k.at(1)) in ((4, 96), (4, 160))
    )
    assert products == routed
    assert found.flops(1)[0] == 154_533_888  # as `count_forward` sees a real one (test_count.py)


def _five_layers() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.GELU())))


GROWTH = """
import gc, psutil, torch
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.GELU())))
x = torch.randn(32768, 64)
model(x).sum().backward()  # libraries take their own memory with the first call
gc.collect()
before = psutil.Process().memory_info().rss
result = model(x).float().mean()
print(psutil.Process().memory_info().rss - before)
"""


def test_real_memory_grows_by_what_is_said_to_be_kept() -> None:
    """In a process of its own whose allocator gives everything back, so that all of it is seen."""
    found = trace_module("plain", _five_layers, lambda n: ((torch.zeros(n, 64),), None), _mean)
    variables = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True, env=variables
    )
    expected = found.saved_bytes(32768) - 32768 * 64 * 4  # the input was there before
    assert expected > 70e6
    assert float(done.stdout) == pytest.approx(expected, rel=0.15)


def test_leaves_share_what_their_block_keeps(facts: dict[str, ModuleFacts]) -> None:
    for found in facts.values():
        for block in found.blocks:
            cost = block.costs["wide"]
            assert sum(leaf.saved.at(4) for leaf in block.leaves) == cost.saved.total.at(4)
            assert sum(leaf.flops_forward.at(4) for leaf in block.leaves) == cost.forward.flops.at(
                4
            )
            assert sum(leaf.kernels_backward for leaf in block.leaves) <= cost.backward.kernels


def test_blocks_are_grouped_and_named(facts: dict[str, ModuleFacts]) -> None:
    llama = facts["llama"]
    assert [block.names for block in llama.blocks] == [
        ("embed",), ("layers.0", "layers.1"), ("norm, head, loss",),
    ]  # fmt: skip
    block = llama.blocks[1]
    roles = {leaf.name: leaf.role for leaf in block.leaves if leaf.role}
    assert roles == {
        "attention.wq": "column", "attention.wk": "column", "attention.wv": "column",
        "attention.wo": "row", "feed_forward.w1": "column", "feed_forward.w3": "column",
        "feed_forward.w2": "row",
    }  # fmt: skip
    assert (llama.splits, block.reductions_forward, block.reductions_backward) == (4, 2, 2)
    # A pipeline sends the residual stream, and that is what full recompute keeps.
    assert block.costs["wide"].output.total.per_sample == 4 * 64 * 128
    assert block.costs["half"].output.total.per_sample == 2 * 64 * 128
    assert block.costs["cast"].saved_full.total.per_sample == 4 * 64 * 128
    assert [block.kind for block in facts["resnet18"].blocks if block.count > 1] == []
    assert "linear layers feeds another" in facts["resnet18"].whole
    assert facts["resnet18"].splits == 1
    assert "no linear layers" in facts["unet"].whole


def test_modes_keep_less_in_16_bits(facts: dict[str, ModuleFacts]) -> None:
    for found in facts.values():
        for block in found.blocks:
            for cost in block.costs.values():
                full = cost.saved_full.total.at(2)
                assert full <= cost.saved_selective.total.at(2)
                assert cost.peak_backward.total.at(2) <= cost.peak_gradients.total.at(2)
    # Norms, resizing and losses are in float32 under autocast: a U-Net, or a small model with a large
    # vocabulary, keeps no less for being narrow.
    for name in ("mlp", "cnn", "resnet18", "vit"):
        found = facts[name]
        per_sample = [
            sum(b.count * b.costs[mode].saved.total.per_sample for b in found.blocks)
            for mode in ("half", "wide")
        ]
        assert per_sample[0] < per_sample[1]


def test_fused_attention_keeps_no_scores(facts: dict[str, ModuleFacts]) -> None:
    block = facts["vit"].blocks[1]
    leaf = next(leaf for leaf in block.leaves if leaf.name == "attention")
    (attention,) = leaf.attention
    assert (attention.kind, attention.heads, attention.seq, attention.width) == ("fused", 4, 16, 8)
    assert attention.scores.per_sample == 4 * 16 * 16
    # The result and a sum a row; queries, keys and values are kept by the same call.
    assert leaf.saved.per_sample == 4 * (4 * 16 * 32) + 4 * 4 * 16


class Stored(nn.Module):
    """Attention written out, with dropout on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = self.drop((q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1))
        return (weights @ v).transpose(1, 2).flatten(2)


def test_stored_scores_and_dropout_masks_are_seen() -> None:
    found = trace_module("stored", Stored, lambda n: ((torch.zeros(n, 24, 32),), None))
    (block,) = found.blocks
    (attention,) = block.costs["wide"].forward.attention
    assert (attention.kind, attention.seq, attention.keys, attention.width) == ("stored", 24, 24, 8)
    scores = 4 * 24 * 24
    assert attention.scores.per_sample == scores
    mask = sum(leaf.dropout_mask.per_sample for leaf in block.leaves)
    assert mask == scores  # a byte each
    assert block.costs["wide"].saved.total.per_sample > 2 * 4 * scores


def test_tied_parameters_and_kept_views_count_once() -> None:
    gpt = build_model("bert", vocab=300, width=32, depth=1, heads=2, max_seq=16)
    build, batch = named("bert", vocab=300, width=32, depth=1, heads=2, max_seq=16), tokens(16)
    found = trace_module("bert", build, batch, token_loss)
    assert found.tied == ("head.decoder.weight",)
    assert found.num_parameters == sum(p.numel() for p in gpt.parameters())

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scale  # keeps x
            return (
                y * y.view(-1, 4, 8).flatten(1)
            ) * y.t().t()  # keeps y three times, and a product

    found = trace_module("twice", Twice, lambda n: ((torch.zeros(n, 32),), None))
    assert found.saved_bytes(1) == 4 * 32 * 3


def test_convolutions_are_implicit_products(facts: dict[str, ModuleFacts]) -> None:
    found = facts["resnet18"]
    stem = found.blocks[0].costs["wide"]
    (forward,) = stem.forward.products
    assert (forward.kind, forward.m.at(2), forward.n.at(2), forward.k.at(2)) == (
        "convolution", 2 * 16 * 16, 64, 3 * 7 * 7,
    )  # fmt: skip
    # The images need no gradient: there is the weights' alone.
    (backward,) = stem.backward.products
    assert (backward.m.at(2), backward.n.at(2), backward.k.at(2)) == (64, 147, 2 * 16 * 16)
    for block in found.blocks:
        for work in (block.costs["wide"].forward, block.costs["wide"].backward):
            assert sum(p.flops(2) for p in work.products) == pytest.approx(
                work.flops.at(2), rel=0.02
            )
    halo = found.blocks[0].halos[0]
    assert halo.rows.per_sample == 3 * 3 * 32  # three rows of three channels


class Branches(nn.Module):
    """Python control flow on shapes and on its own settings."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 10)
        self.deep = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        if self.deep and x.shape[-1] > 4:
            x = F.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


class Gate(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        if self.how == "item":
            return x * x.sum().item()
        if self.how == "branch":
            return x * 2 if x.sum() > 0 else x
        return x * 2 if x.shape[0] > 3 else x


def test_python_branches_on_shapes_are_no_hindrance() -> None:
    found = trace_module("branches", Branches, images(3, 16, 16), F.cross_entropy)
    assert found.num_parameters == sum(p.numel() for p in Branches().parameters())
    assert found.blocks[0].recompute == "stretch"


@pytest.mark.parametrize("how", ["item", "branch"])
def test_what_cannot_run_there_is_named(how: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"gate": Gate(how)})["gate"])

    with pytest.raises(UsageError, match=r"net cannot run on the meta device.*module '1' \(Gate\)"):
        trace_module("net", build, lambda n: ((torch.zeros(n, 4),), None))


def test_other_work_for_other_batches_is_refused() -> None:
    with pytest.raises(UsageError, match="other work for 4 samples than for 2"):
        trace_module("net", lambda: Gate("batch"), lambda n: ((torch.zeros(n, 4),), None))


def test_a_wrong_input_is_no_matter_of_the_meta_device() -> None:
    with pytest.raises(UsageError, match="does not run on the inputs it was given"):
        trace_module("net", lambda: nn.Linear(4, 4), lambda n: ((torch.zeros(n, 5),), None))


def test_nothing_is_left_behind_and_nothing_is_allocated() -> None:
    before = psutil.Process().memory_info().rss
    found = trace_module("wide", lambda: nn.Sequential(nn.Linear(40000, 40000), nn.Linear(40000, 8)),
                         lambda n: ((torch.zeros(n, 40000),), None))  # fmt: skip
    assert found.parameter_bytes > 6.4e9
    assert psutil.Process().memory_info().rss - before < 200e6
    assert F.linear(torch.zeros(2, 4), torch.zeros(3, 4)).dtype == torch.float32
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    assert F.scaled_dot_product_attention(q, q, q).abs().sum() > 0


TRANSFORMERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "llama": ("LlamaForCausalLM", {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048}, False),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 2048,
             "bos_token_id": 1, "eos_token_id": 1}, False),
    "bert": ("BertForMaskedLM", {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
             "num_attention_heads": 4, "vocab_size": 2048}, False),
    "t5": ("T5ForConditionalGeneration", {"d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4,
           "d_kv": 16, "vocab_size": 2048}, True),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    kind, config, both = TRANSFORMERS[name]
    build = named(f"transformers:{kind}", config=config)

    def pairs(n: int) -> Batch:
        ids, others = (torch.zeros(n, length, dtype=torch.long) for length in (32, 16))
        return ({"input_ids": ids, "decoder_input_ids": others},), None

    found = trace_module(name, build, pairs if both else tokens(32), None if both else token_loss)
    with torch.device("meta"):
        model = build()
    assert found.num_parameters == sum(p.numel() for p in model.parameters())
    assert found.splits > 1
    assert found.flops()[1] > 1.9 * found.flops()[0]
    assert any(block.recompute == "block" for block in found.blocks)


def test_a_model_of_timm() -> None:
    pytest.importorskip("timm")
    build = named("timm:vit_tiny_patch16_224", depth=2)
    found = trace_module("vit", build, images(3, 224, 224), F.cross_entropy)
    with torch.device("meta"):
        assert found.num_parameters == sum(p.numel() for p in build().parameters())
    assert found.splits == 3
