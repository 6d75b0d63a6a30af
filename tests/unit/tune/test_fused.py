"""Fused norms and rotary positions, weights rounded by chance, folded batch norms."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.config import OptimConfig
from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.models.build import build_model
from ridgeline.optim.build import build_optimizer
from ridgeline.optim.narrow import chance, round_by_chance
from ridgeline.optim.stochastic import build_stochastic_adamw, mix
from ridgeline.optim.update import build_update
from ridgeline.parallel.conv_norm import fold_conv_norms
from ridgeline.parallel.fused_norms import apply_fused_norms


def gradients(model: nn.Module, tokens: torch.Tensor, narrow: bool) -> list[torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        out = model(tokens)
        logits = (out if isinstance(out, torch.Tensor) else out.logits).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    loss.backward()
    return [logits.detach(), *(p.grad for p in model.parameters())]


def tiny_llama(of: str) -> nn.Module:
    torch.manual_seed(0)
    if of == "ours":
        return build_model("llama", width=32, depth=2, heads=2, ffn=64, vocab=64)
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        vocab_size=64, num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("of", ["ours", "transformers"])
@pytest.mark.parametrize("narrow", [False, True])
def test_fused_norms_and_rotary_are_the_same_arithmetic(of: str, narrow: bool) -> None:
    torch._dynamo.reset()
    model = tiny_llama(of)
    other = copy.deepcopy(model)
    tokens = torch.randint(0, 64, (2, 16))
    true = gradients(other, tokens, narrow)
    note = apply_fused_norms(model, Layout(), backend="aot_eager")
    # Two norms a block and one at the end; our rotary is one module for all blocks.
    assert note.startswith("6 norms" if of == "ours" else "5 norms")
    assert ("apply_rotary_pos_emb" in note) == (of == "transformers")
    assert list(model.state_dict()) == list(other.state_dict())
    for one, two in zip(gradients(model, tokens, narrow), true, strict=True):
        bound = 2e-2 if narrow else 1e-5
        assert (one - two).abs().max() <= bound * two.abs().max()


def test_every_norm_is_really_compiled() -> None:
    """One of torch's own too, which `Module.compile` would leave as it is; once for all of a kind."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    norms = nn.ModuleList(nn.RMSNorm(64) for _ in range(3))
    plain = copy.deepcopy(norms)
    x = torch.randn(8, 64).bfloat16()
    apply_fused_norms(norms, Layout(), backend="aot_eager")
    out = [norm(x) for norm in norms]
    assert counters["stats"]["unique_graphs"] == 1
    assert all(torch.equal(a, norm(x)) for a, norm in zip(out, plain, strict=True))
    assert all(isinstance(norm, nn.RMSNorm) for norm in norms)
    other = copy.deepcopy(norms[0])
    with torch.no_grad():
        other.weight.fill_(2.0)
    assert torch.allclose(other(x).float(), 2 * out[0].float())  # a copy has its own weights


def test_a_model_with_fused_norms_is_saved_whole() -> None:
    torch._dynamo.reset()
    model = tiny_llama("ours")
    apply_fused_norms(model, Layout(), backend="aot_eager")
    loaded = pickle.loads(pickle.dumps(model))
    tokens = torch.randint(0, 64, (2, 16))
    assert torch.equal(loaded(tokens), model(tokens))
    assert [type(m) for m in loaded.modules()] == [type(m) for m in model.modules()]


def test_fused_norms_are_refused_where_they_cannot_be() -> None:
    with pytest.raises(UsageError, match="compile=true fuses norms"):
        apply_fused_norms(tiny_llama("ours"), Layout(compile=True))
    with pytest.raises(UsageError, match="no RMS norm"):
        apply_fused_norms(nn.Linear(4, 4), Layout())


def test_rounding_by_chance_is_unbiased_and_to_neighbours() -> None:
    value = torch.tensor([1.0 + 3 / 1024, -2.7182818, 1e-30, 3.0e-39, -65504.0])
    num = 40_000
    found = torch.stack(
        [
            round_by_chance(v.expand(num).clone(), chance(num, mix(7, i)))
            for i, v in enumerate(value)
        ]
    ).float()
    # As bits: a process in which a library has denormals flushed takes the smallest for zeros.
    for row, true in zip(found.view(torch.int32), value.view(torch.int32), strict=True):
        raw = true
        down, up = raw & ~0xFFFF, (raw & ~0xFFFF) + 0x10000
        assert set(row.unique().tolist()) <= {int(down), int(up)}
        share = float(raw & 0xFFFF) / 65536
        # Five standard deviations of a coin that is thrown 40,000 times.
        width = 5 * (max(share * (1 - share), 1e-6) / num) ** 0.5
        assert abs(float((row == up).float().mean()) - share) <= width
    exact = torch.tensor([1.0, -0.5, 0.0, float("inf"), float("-inf")])
    bits = torch.full((5,), 0xFFFF, dtype=torch.int32)
    assert torch.equal(round_by_chance(exact, bits).float(), exact)
    assert round_by_chance(torch.tensor([float("nan")]), bits[:1]).isnan().all()


def test_chance_is_even_and_apart_for_steps_and_places() -> None:
    num = 1 << 16
    one, two = (chance(num, mix(0, 1, step)) for step in (1, 2))
    for bits in (one, two):
        assert int(bits.min()) >= 0
        assert int(bits.max()) < 1 << 16
        counts = torch.bincount(bits // 1024, minlength=64).double()
        assert (counts - 1024).abs().max() < 6 * 1024**0.5
    pair = torch.corrcoef(torch.stack([one, two]).double())[0, 1]
    neighbours = torch.corrcoef(torch.stack([one[:-1], one[1:]]).double())[0, 1]
    assert max(abs(pair), abs(neighbours)) < 5 / num**0.5
    assert torch.equal(one, chance(num, mix(0, 1, 1)))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_stochastic_weights_follow_float32_where_plain_bf16_stands_still(
    clip: float | None,
) -> None:
    """Updates far below the spacing of bf16: on average they arrive."""
    torch.manual_seed(0)
    base, config = nn.Linear(256, 64, bias=True), OptimConfig(weight_decay=0.1, decay_norms=False)
    with torch.no_grad():
        base.weight.fill_(1.0)
    moved = {}
    for narrow in (True, False):
        model = copy.deepcopy(base)
        optimizer = (
            build_stochastic_adamw(model, config, 1e-5, seed=3)
            if narrow
            else build_optimizer(model, config, 1e-5)
        )
        update = build_update(optimizer, list(model.parameters()), clip, None)
        for _ in range(100):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            update()
        moved[narrow] = model
    assert moved[True].weight.dtype is torch.bfloat16
    assert moved[True].bias.dtype is torch.float32
    assert torch.allclose(moved[True].bias, moved[False].bias)
    true = float(moved[False].weight.detach().mean() - 1)
    found = float(moved[True].weight.detach().float().mean() - 1)
    assert true < -9e-4  # less than the distance to the next bf16 number, 2^-8
    # 16,384 weights that are each off by up to 2^-8 in a sum of chances.
    assert abs(found - true) < 5 * 2**-8 * 100**0.5 / (2 * 16384**0.5)
    spread = {float(v) for v in moved[True].weight.detach().flatten()}
    assert len(spread) > 1


def test_stochastic_weights_are_for_adamw_and_repeat() -> None:
    with pytest.raises(UsageError, match=r"optim\.name=adamw, not sgd"):
        build_stochastic_adamw(nn.Linear(2, 2), OptimConfig(name="sgd"), 1e-3, 0)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        optimizer = build_stochastic_adamw(model, OptimConfig(), 1e-3, seed=1)
        before = torch.get_rng_state()
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1)
            optimizer.step()
        assert torch.equal(before, torch.get_rng_state())  # a generator of others is left alone
        found.append(model.weight.detach().clone())
    assert torch.equal(*found)


def trained(model: nn.Module, x: torch.Tensor) -> nn.Module:
    with torch.no_grad():
        for _ in range(3):
            model(x + torch.randn_like(x))
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 2.0)
                module.bias.normal_()
    return model


def test_folded_norms_are_exact() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    model = trained(build_model("resnet18", num_classes=10).double(), x)
    folded, paths = fold_conv_norms(model, (x,))
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(paths) == len(norms) == 20
    assert not [m for m in folded.modules() if isinstance(m, nn.BatchNorm2d)]
    true = model.eval()(x)
    assert (folded(x) - true).abs().max() < 1e-12 * true.abs().max()
    assert isinstance(model.get_submodule(paths[0]), nn.Conv2d)  # the model itself is as it was
    assert norms[0] in list(model.modules())


class Twice(nn.Module):
    def __init__(self, also: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.also = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), also
        self.turned, self.last = nn.ConvTranspose2d(4, 4, 2), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.conv(x)
        out = self.norm(made)
        out = out + made if self.also else out
        return self.last(self.turned(F.relu(out)))


def test_norms_are_not_folded_where_that_would_be_wrong() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    _, paths = fold_conv_norms(trained(Twice(also=False), x), (x,))
    assert paths == ["conv", "turned"]
    with pytest.raises(UsageError, match="beside the norm"):
        fold_conv_norms(trained(Twice(also=True), x), (x,))
    shared = Twice(also=False)
    shared.last = shared.norm
    _, paths = fold_conv_norms(trained(shared, x), (x,))
    assert paths == []
