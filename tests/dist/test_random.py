"""Dropout is the same in any layout: it is a function of seed, step, sample and position."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from ridgeline.errors import UsageError
from ridgeline.parallel.context import use_ring
from ridgeline.parallel.dropout import apply_keyed_dropout
from ridgeline.parallel.random import (
    Keys,
    Randomness,
    attention_keep,
    build_keys,
    keyed_attention,
    keyed_bits,
    keyed_dropout,
    keyed_mask,
)
from ridgeline.parallel.ring import ring_attention
from ridgeline.parallel.sample_dims import learn_sample_dims
from ridgeline.parallel.tensor import (
    GlobalView,
    cut_layers,
    enter_view,
    plan_tensor,
    use_randomness,
)


def keys_for(ids: list[int], seed: int = 0, step: int = 0) -> Any:
    return build_keys(seed, step, torch.tensor(ids), None)


# The hash


def test_bits_are_uniform_and_independent() -> None:
    """Every bit is set half of the time, bytes are equidistributed, and what lies beside each other
    in position, sample, site, step or seed is uncorrelated."""
    shape = (64, 4096)
    num = math.prod(shape)
    indices = [torch.arange(n) for n in shape]

    def bits(ids: range = range(64), seed: int = 0, step: int = 0, site: int = 7) -> Tensor:
        return keyed_bits(shape, keys_for(list(ids), seed, step), site, indices)

    first = bits()
    tolerance = 5 / (2 * math.sqrt(num))  # five standard deviations
    for bit in range(64):
        assert abs(((first >> bit) & 1).double().mean() - 0.5) < tolerance, bit
    for byte in range(8):
        counts = torch.bincount(((first >> (8 * byte)) & 255).flatten(), minlength=256).double()
        chi = ((counts - num / 256).square() / (num / 256)).sum()
        assert abs(chi - 255) < 6 * math.sqrt(2 * 255)
    assert first.unique().numel() == num

    def as_signs(x: Tensor) -> Tensor:
        return torch.stack([(x >> b & 1).double() * 2 - 1 for b in (0, 17, 31, 45, 63)])

    others = [
        first.roll(1, 1),
        first.roll(64, 1),
        first.roll(1, 0),
        bits(site=8),
        bits(step=1),
        bits(seed=1),
    ]
    mine = as_signs(first).flatten(1)
    for other in others:
        correlation = (mine @ as_signs(other).flatten(1).mT / num).abs().max()
        assert correlation < 6 / math.sqrt(num)


def test_one_bit_of_the_input_changes_half_of_the_output() -> None:
    start = torch.randint(-(2**62), 2**62, (2000,), generator=torch.Generator().manual_seed(0))
    base = keyed_bits((2000,), build_keys(0, 0, start, None), 0, [torch.arange(2000)])
    for bit in (0, 1, 13, 32, 50):
        ids = start ^ (1 << bit)
        flipped = keyed_bits((2000,), build_keys(0, 0, ids, None), 0, [torch.arange(2000)])
        changed = base ^ flipped
        share = sum(((changed >> b) & 1).double().mean() for b in range(64)) / 64
        assert 0.49 < share < 0.51


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_and_scale(p: float) -> None:
    randomness = Randomness(3)
    randomness.begin(0, torch.arange(8))
    x = torch.ones(8, 50_000, dtype=torch.float64, requires_grad=True)
    y = keyed_dropout(x, p, randomness, 1)
    kept = y.ne(0)
    assert abs(kept.double().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / x.numel())
    assert torch.equal(y[kept], torch.full_like(y[kept], 1 / (1 - p)))
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # the gradient goes through the same mask
    rows = kept.double().mean(1)
    assert (rows - (1 - p)).abs().max() < 5 * math.sqrt(p * (1 - p) / 50_000)


def test_known_values() -> None:
    """The hash is part of what a run means, so it must not change from version to version."""
    bits = keyed_bits((2, 2), keys_for([5, 6], 1, 2), 3, [torch.arange(2)] * 2)
    assert bits.tolist() == KNOWN


KNOWN = [[-5160510086141431101, 3947279430255505467], [-3289581186505530881, -8072030724635638837]]


def test_extremes_are_torch_own() -> None:
    randomness = Randomness(0)
    x = torch.randn(4, 4)
    assert torch.equal(keyed_dropout(x, 0.0, randomness, 0), x)
    assert torch.equal(keyed_dropout(x, 1.0, randomness, 0), torch.zeros(4, 4))
    with pytest.raises(ValueError, match="probability"):
        keyed_dropout(x, 1.5, randomness, 0)


# Which dim is the sample


def test_samples_are_found_where_they_are() -> None:
    four, two = keys_for([10, 11, 12, 13]), keys_for([12, 13])

    def mask(shape: tuple[int, ...], keys: Any) -> Tensor:
        return keyed_mask(shape, 0.5, keys, 1)

    for rest in ((), (9,), (3, 5)):
        assert torch.equal(mask((4, *rest), four)[2:], mask((2, *rest), two))
    # Three heads folded into the batch, also the same numbers as with heads in a dim of their own.
    folded = mask((12, 5, 5), four)
    assert torch.equal(folded[6:], mask((6, 5, 5), two))
    assert torch.equal(folded, mask((4, 3, 5, 5), four).flatten(0, 1))
    # Only another dim has the size.
    assert torch.equal(mask((7, 4, 9), four)[:, 2:], mask((7, 2, 9), two))
    # No dim has it: by position.
    assert torch.equal(mask((7, 9), four), mask((7, 9), keys_for([1, 2, 3, 4, 5])))
    # Said by the caller, for a sequence whose length happens to be a multiple.
    first, second = (
        keyed_mask((8, n, 9), 0.5, build_keys(0, 0, torch.tensor(ids), 1), 1)
        for n, ids in ((4, [10, 11, 12, 13]), (2, [12, 13]))
    )
    assert torch.equal(first[:, 2:], second)


def test_a_part_has_the_mask_of_its_place() -> None:
    keys = keys_for([1, 2])
    whole = keyed_mask((2, 7, 10), 0.3, keys, 1)
    part = keyed_mask((2, 3, 4), 0.3, keys, 1, (0, 4, 5), (2, 7, 10))
    assert torch.equal(part, whole[:, 4:7, 5:9])


# Any module


class Block(nn.Module):
    """A module dropout called twice, a functional one, and stochastic depth."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(rate)
        self.rate = rate
        self.drop_prob = rate

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.first(x)) + self.drop(self.second(x))
        y = F.dropout(y, self.rate, self.training)
        if self.training:
            alive = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(1 - self.drop_prob)
            y = y * alive
        return x + y


class Net(nn.Module):
    def __init__(self, rate: float = 0.3, num: int = 3, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, rate) for _ in range(num))
        self.attention = nn.MultiheadAttention(8, 2, dropout=rate, batch_first=True)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        x = x + self.attention(x, x, x)[0]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x)


def build_net(**options: Any) -> tuple[Net, Randomness]:
    torch.manual_seed(0)
    model = Net(**options).double()
    randomness = Randomness(11)
    apply_keyed_dropout(model, randomness)
    return model, randomness


def samples(num: int = 8) -> Tensor:
    return torch.randn(num, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients_of(
    model: nn.Module, randomness: Randomness, parts: list[Tensor], step: int = 0
) -> Any:
    """Outputs and gradients of a loss that is a sum over samples, part by part."""
    model.zero_grad()
    x = samples()
    outputs = []
    for ids in parts:
        randomness.begin(step, ids)
        out = model(x[ids])
        out.square().sum().backward()
        outputs.append(out.detach())
    return torch.cat(outputs), [p.grad.clone() for p in model.parameters()]


def same(one: Any, other: Any, bound: float = 1e-12) -> bool:
    pairs = [(one[0], other[0]), *zip(one[1], other[1], strict=True)]
    return all((a - b).abs().max() <= bound * b.abs().max() for a, b in pairs)


def test_microbatches_and_steps() -> None:
    model, randomness = build_net()
    whole = gradients_of(model, randomness, [torch.arange(8)])
    assert same(gradients_of(model, randomness, [torch.arange(8)]), whole, 0.0)
    assert same(gradients_of(model, randomness, list(torch.arange(8).split(2))), whole)
    assert same(gradients_of(model, randomness, list(torch.arange(8).split(3))), whole)
    shuffled = torch.tensor([3, 1, 7, 5, 0, 2, 6, 4])
    other = gradients_of(model, randomness, [shuffled])
    assert same((other[0][shuffled.argsort()], other[1]), whole)
    assert not same(gradients_of(model, randomness, [torch.arange(8)], step=1), whole, 1e-3)


def test_recompute_repeats_the_masks() -> None:
    model, randomness = build_net()
    plain = gradients_of(model, randomness, [torch.arange(8)])
    model.recompute = True
    assert same(gradients_of(model, randomness, [torch.arange(8)]), plain)


def dp_gradients() -> Any:
    model, randomness = build_net()
    ids = torch.arange(8).chunk(dist.get_world_size())[dist.get_rank()]
    out, grads = gradients_of(model, randomness, [ids])
    for grad in grads:
        dist.all_reduce(grad)
    return out, grads


@pytest.mark.parametrize("size", [2, 4])
def test_data_split(ranks: Any, size: int) -> None:
    whole = gradients_of(*build_net(), [torch.arange(8)])
    found = ranks(size, dp_gradients)
    assert same((torch.cat([out for out, _ in found]), found[0][1]), whole)


def test_every_call_has_its_own_mask() -> None:
    """Two modules, a module called twice, two functions, two calls of a block, two forward passes."""
    seen: list[Tensor] = []

    class Leaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.other = nn.Dropout(0.5), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> None:
            seen.extend([self.drop(x), self.drop(x), self.other(x)])
            seen.extend(
                [F.dropout(x, 0.5), F.dropout(x, 0.5), F.dropout1d(x[..., None], 0.5)[..., 0]]
            )

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf, self.last = Leaf(), Leaf()

        def forward(self, x: Tensor) -> None:
            for leaf in (self.leaf, self.leaf, self.last):
                leaf(x)

    model, randomness = Root(), Randomness(0)
    apply_keyed_dropout(model, randomness)
    randomness.begin(0, torch.arange(4))
    x = torch.ones(4, 64)
    model(x)
    model(x)
    assert len(seen) == 36
    for index, one in enumerate(seen):
        assert not any(torch.equal(one, other) for other in seen[:index])
    again = list(seen)
    seen.clear()
    randomness.begin(0, torch.arange(4))
    model(x)
    model(x)
    assert all(torch.equal(a, b) for a, b in zip(again, seen, strict=True))


def test_part_of_a_model_has_the_masks_of_the_whole() -> None:
    """A pipeline stage runs blocks of a model whose root it never calls."""
    model, randomness = build_net()
    x = samples()
    kept: list[Tensor] = []
    hook = model.blocks[1].register_forward_hook(lambda *_: kept.append(_[2]))
    inputs: list[Tensor] = []
    pre = model.blocks[1].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    randomness.begin(0, torch.arange(8))
    model(x)
    hook.remove()
    pre.remove()
    for _ in range(2):
        randomness.begin(0, torch.arange(8))
        assert torch.equal(model.blocks[1](inputs[0]), kept[0])
    twin = copy.deepcopy(model.blocks[1])  # as stages are cut out
    randomness.begin(0, torch.arange(8))
    assert torch.equal(twin(inputs[0]), kept[0])


class Shared(nn.Module):
    """One block used three times, and recomputed from outside or inside of it."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(Block(8, 0.3), Block(8, 0.3))
        self.inside = inside
        self.recompute: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            if self.inside:
                for part in self.block:
                    x = self.recompute(part, x) if self.recompute else part(x)
            else:
                x = self.recompute(self.block, x) if self.recompute else self.block(x)
        return x


@pytest.mark.parametrize("replays", [True, False])
def test_recompute_of_a_module_that_runs_several_times(replays: bool) -> None:
    torch.manual_seed(0)
    model, randomness = Shared(inside=replays).double(), Randomness(1)
    apply_keyed_dropout(model, randomness)
    plain = gradients_of(model, randomness, [torch.arange(8)])
    options = {"context_fn": randomness.replay} if replays else {}
    model.recompute = lambda f, x: checkpoint(f, x, use_reentrant=False, **options)
    assert same(gradients_of(model, randomness, [torch.arange(8)]), plain)


def test_recompute_after_other_microbatches_ran() -> None:
    """As in a pipeline: forward, forward, backward, backward; and of a function, not a module."""
    torch.manual_seed(0)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)
            self.recompute = False

        def part(self, x: Tensor) -> Tensor:
            return F.dropout(self.drop(self.layer(x)).tanh(), 0.3)

        def forward(self, x: Tensor) -> Tensor:
            if self.recompute:
                return checkpoint(self.part, x, use_reentrant=False, context_fn=randomness.replay)
            return self.part(x)

    model, randomness = Plain().double(), Randomness(1)
    apply_keyed_dropout(model, randomness)
    plain = gradients_of(model, randomness, [torch.arange(8)])
    model.recompute = True
    model.zero_grad()
    outputs = []
    for ids in torch.arange(8).split(4):
        randomness.begin(0, ids)
        outputs.append(model(samples()[ids]))
    for out in outputs:
        out.square().sum().backward()
    assert same((torch.cat(outputs).detach(), [p.grad for p in model.parameters()]), plain)


def test_ambiguous_recompute_is_refused() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block(8, 0.3)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = Outer()

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(self.outer(x))

    model, randomness = Twice().double(), Randomness(0)
    apply_keyed_dropout(model, randomness)
    randomness.begin(0, torch.arange(8))
    with pytest.raises(UsageError, match=r"'outer.inner' is recomputed.*context_fn"):
        model(samples()).sum().backward()


# What is touched and what is not


def test_a_model_without_dropout_is_not_touched() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.ReLU())
    randomness = Randomness(0)
    before = [dict(vars(m)) for m in model.modules()]
    assert apply_keyed_dropout(model, randomness) == type(apply_keyed_dropout(model, randomness))()
    assert [dict(vars(m)) for m in model.modules()] == before
    assert not randomness._nodes


def test_eval_is_not_touched() -> None:
    model, randomness = build_net()
    plain = Net().double()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(samples()), plain.eval()(samples()))
    assert not randomness._watching
    model.train()
    model.head[1].p = 0.0
    assert list(model.state_dict()) == list(plain.state_dict())
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)


def test_modules_alone_are_not_watched_for_functions() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5)))
    model.append(nn.LSTM(4, 4, 2, dropout=0.2))
    report = apply_keyed_dropout(model, Randomness(0))
    assert report.modules == ("1.0",)
    assert report.watched == ()
    assert report.left_alone == ("1.1", "2")
    assert "_keyed" not in vars(model[0])
    with pytest.raises(UsageError, match="keyed already"):
        apply_keyed_dropout(model, Randomness(0))


class Literal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return hidden_function(self.norm(x))


def hidden_function(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def test_an_example_shows_what_attributes_do_not() -> None:
    model = Literal()
    assert apply_keyed_dropout(model, Randomness(0)).watched == ()
    state = torch.get_rng_state()
    report = apply_keyed_dropout(model, Randomness(0), (torch.randn(3, 4),))
    assert report.watched == ("",)
    assert model.norm.num_batches_tracked == 0  # the example left no trace
    assert torch.equal(model.norm.running_mean, torch.zeros(4))
    torch.set_rng_state(state)

    class Configured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout_rate = 0.1
            self.drop = nn.Dropout(self.dropout_rate)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x)

    assert apply_keyed_dropout(Configured(), Randomness(0)).watched == ("",)
    assert apply_keyed_dropout(Configured(), Randomness(0), torch.ones(2)).watched == ()


def test_an_example_on_a_model_without_weights() -> None:
    with torch.device("meta"):
        model = Net()
    assert apply_keyed_dropout(model, Randomness(0), samples().float()).watched


class Tiled(Tensor):
    """A tensor of some technique that splits it, and knows its parts."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.dropout:
            return super().__torch_function__(func, types, args, kwargs or {})
        part = args[0].as_subclass(Tensor)
        randomness = Tiled.randomness
        return keyed_dropout(part, kwargs["p"], randomness, randomness.next_site(), (8, 9), (0, 5))


@pytest.mark.parametrize("functional", [True, False])
def test_other_types_of_tensors_draw_for_themselves(functional: bool) -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop_rate = 0.5

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, self.drop_rate, self.training)

    model = nn.Sequential(Caller() if functional else nn.Dropout(0.5))
    Tiled.randomness = randomness = Randomness(0)
    assert not randomness.is_used
    apply_keyed_dropout(model, randomness)
    assert randomness.is_used
    randomness.begin(0, torch.arange(8))
    whole = model(torch.ones(8, 9))
    randomness.begin(0, torch.arange(8))
    assert torch.equal(model(torch.ones(8, 4).as_subclass(Tiled)), whole[:, 5:])


@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_whole_channels(kind: Any) -> None:
    dims = {nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}[kind]
    model, randomness = nn.Sequential(kind(0.5)), Randomness(0)
    apply_keyed_dropout(model, randomness)
    randomness.begin(0, torch.arange(4))
    y = model(torch.ones(4, 64, *[3] * dims))
    channels = y.flatten(2)
    assert (channels == channels[..., :1]).all()
    assert 0.3 < channels[..., 0].ne(0).double().mean() < 0.7
    randomness.begin(0, torch.arange(2, 4))
    assert torch.equal(model(torch.ones(2, 64, *[3] * dims)), y[2:])
    inplace = nn.Sequential(kind(0.5, inplace=True))
    apply_keyed_dropout(inplace, randomness)
    randomness.begin(0, torch.arange(4))
    x = torch.ones(4, 64, *[3] * dims)
    assert inplace(x) is x
    assert torch.equal(x, y)


def test_random_numbers_of_a_forward_pass() -> None:
    """`torch.rand` and its like, as stochastic depth of several libraries draws them."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop_prob = 0.5

        def forward(self, x: Tensor) -> list[Tensor]:
            n = x.shape[0]
            made = [torch.rand(n, 7), torch.rand((n, 2, 3), dtype=x.dtype)]
            return [*made, torch.empty(n, 1).bernoulli_(0.3)]

    model, randomness = Masked(), Randomness(0)
    apply_keyed_dropout(model, randomness)
    randomness.begin(0, torch.arange(400))
    whole = model(torch.zeros(400, 9, dtype=torch.float64))
    for drawn in whole[:2]:
        assert 0 <= drawn.min() < 0.01 < 0.99 < drawn.max() < 1
        assert abs(drawn.mean() - 0.5) < 5 / math.sqrt(12 * drawn.numel())
    assert [x.dtype for x in whole[:2]] == [torch.float32, torch.float64]
    assert abs(whole[2].mean() - 0.3) < 0.12
    randomness.begin(0, torch.arange(100, 200))
    part = model(torch.zeros(100, 9, dtype=torch.float64))
    assert all(torch.equal(a[100:200], b) for a, b in zip(whole, part, strict=True))


# Attention


def test_attention_with_dropout_is_torch_own_but_for_the_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 5, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    k = torch.randn(2, 2, 5, 8, dtype=torch.float64, generator=generator)
    randomness = Randomness(0)
    randomness.begin(0, torch.arange(2))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[2] = False
    bias = torch.randn(5, 5, dtype=torch.float64, generator=generator)
    for options in (
        {"is_causal": True},
        {"attn_mask": mask},
        {"attn_mask": bias, "scale": 0.2},
    ):
        tiny = 1e-18  # the written-out path, and nothing dropped
        out = keyed_attention(q, k, k, tiny, randomness, 0, enable_gqa=True, **options)
        expected = F.scaled_dot_product_attention(q, k, k, enable_gqa=True, **options)
        torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-14)
        grads = [torch.autograd.grad(y.square().sum(), q)[0] for y in (out, expected)]
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-13)


def test_part_of_heads_and_rows_by_their_place() -> None:
    x = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0)).double()
    randomness = Randomness(0)
    randomness.begin(0, torch.arange(2))
    whole = keyed_attention(x, x, x, 0.4, randomness, 1, is_causal=True)
    q, kv = x[:, 1:3, 4:], x[:, 1:3]
    place = (x.shape, (0, 1, 4, 0))
    part = keyed_attention(q, kv, kv, 0.4, randomness, 1, is_causal=True, place=place)
    torch.testing.assert_close(part, whole[:, 1:3, 4:], rtol=1e-13, atol=1e-14)


def ring_dropout(lengths: list[int]) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, sum(lengths), 8, dtype=torch.float64, generator=generator)
    randomness = Randomness(0)
    randomness.begin(0, torch.tensor([7, 9]))
    whole = x.clone().requires_grad_()
    expected = keyed_attention(whole, whole, whole, 0.4, randomness, 3, is_causal=True)
    expected.square().sum().backward()
    part = x.split(lengths, 2)[dist.get_rank()].clone().requires_grad_()
    keep = attention_keep(0.4, randomness, 3, (2, 4, sum(lengths), sum(lengths)), x.dtype)
    group = dist.new_group(list(range(dist.get_world_size())))
    out = ring_attention(part, part, part, group, is_causal=True, lengths=lengths, keep=keep)
    out.square().sum().backward()
    pairs = ((out, expected), (part.grad, whole.grad))
    return max(
        (mine - right.split(lengths, 2)[dist.get_rank()]).abs().max().item()
        for mine, right in pairs
    )


def test_ring_attention_drops_what_one_device_drops(ranks: Any) -> None:
    assert max(ranks(3, ring_dropout, [5, 5, 2])) < 1e-12


class Attending(nn.Module):
    """Attention with dropout and nothing else; `num_keys` heads of keys, 0: heads in the batch."""

    def __init__(self, num_keys: int, is_causal: bool, bias: int | None = None) -> None:
        super().__init__()
        self.num_keys, self.is_causal, self.drop_rate = num_keys, is_causal, 0.4
        heads = () if bias is None else (bias, 11, 11)
        self.bias = nn.Parameter(torch.randn(heads)) if heads else None
        self.q, self.k, self.v = (nn.Linear(24, 6 * n) for n in (4, num_keys or 4, num_keys or 4))
        self.out = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        num, length = x.shape[:2]
        q, k, v = (
            layer(x).view(num, length, -1, 6).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        if not self.num_keys:
            q, k, v = (t.reshape(num * 4, length, 6) for t in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, self.bias, dropout_p=self.drop_rate, is_causal=self.is_causal,
            enable_gqa=self.num_keys in (1, 2),
        )  # fmt: skip
        return self.out(y.view(num, 4, length, 6).transpose(1, 2).reshape(num, length, 24))


def cut_attention(
    cp: int, tp: int, num_keys: int, is_causal: bool, bias: int | None = None
) -> list[float]:
    """Distances of outputs and gradients between one process and heads and positions that are cut."""
    torch.manual_seed(0)
    model = Attending(num_keys, is_causal, bias).double()
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    results = []
    for is_cut in (False, True):
        module, randomness = copy.deepcopy(model), Randomness(3)
        apply_keyed_dropout(module, randomness)
        randomness.begin(1, torch.tensor([7, 9]))
        if is_cut:
            mesh = dist.device_mesh.init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
            view = GlobalView(mesh, sp=False)
            cut_layers(view, module, plan_tensor(model, tp, (x,)))
            enter_view(view, module)
            if cp > 1:
                use_ring(view, mesh.get_group("cp"))
            use_randomness(view, randomness)
        given = x.clone().requires_grad_()
        out = module(given)
        out.square().sum().backward()
        results.append((out.detach(), given.grad))
        if bias is not None:
            if is_cut and cp > 1:  # complete over tp, partial over cp
                dist.all_reduce(module.bias.grad, group=mesh.get_group("cp"))
            results[-1] += (module.bias.grad,)
    assert (results[0][0] - model.eval()(x)).abs().max() > 0.01
    return [(a - b).abs().max().item() for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize(
    ("cp", "tp", "num_keys"), [(2, 1, 0), (2, 1, 2), (2, 2, 1), (2, 2, 2), (2, 2, 4)]
)
def test_attention_that_is_cut_drops_what_one_device_drops(
    ranks: Any, cp: int, tp: int, num_keys: int
) -> None:
    for is_causal in (False, True):
        for found in ranks(cp * tp, cut_attention, cp, tp, num_keys, is_causal):
            assert max(found) < 1e-10, found


@pytest.mark.parametrize(("cp", "tp", "num_keys"), [(1, 2, 1), (1, 2, 4), (2, 2, 4)])
def test_a_mask_or_bias_of_attention_is_cut_with_its_heads(
    ranks: Any, cp: int, tp: int, num_keys: int
) -> None:
    """One of every head's own, and one for all, which gets a gradient from each rank's heads."""
    for bias in (None, 1, 4):
        for found in ranks(cp * tp, cut_attention, cp, tp, num_keys, False, bias):
            assert max(found) < 1e-10, (bias, found)


# Split tensors


def split_dropout() -> list[bool]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    randomness = Randomness(0)
    randomness.begin(0, torch.tensor([4, 2]))
    x = samples(2).repeat(1, 1, 1)[..., :7].contiguous()  # 2 x 5 x 7: uneven in both dims
    checks = []
    whole = x.clone().requires_grad_()
    expected = keyed_dropout(whole, 0.4, randomness, 1)
    (expected * x).sum().backward()
    for placement in (Shard(1), Shard(2), Replicate()):
        part = distribute_tensor(x, mesh, [placement]).requires_grad_()
        model = nn.Sequential(nn.Dropout(0.4))
        apply_keyed_dropout(model, randomness)
        out = keyed_dropout(part, 0.4, randomness, 1)
        assert isinstance(out, DTensor)
        assert out.placements == (placement,)
        (out * distribute_tensor(x, mesh, [placement])).sum().backward()
        checks.append(torch.equal(out.full_tensor(), expected))
        checks.append(torch.equal(part.grad.full_tensor(), whole.grad))
        randomness.begin(0, torch.tensor([4, 2]))
        by_module = model(part).full_tensor()
        randomness.begin(0, torch.tensor([4, 2]))
        checks.append(torch.equal(by_module, model(x)))
    return checks


def test_split_tensors_get_their_part_of_the_mask(ranks: Any) -> None:
    for checks in ranks(2, split_dropout):
        assert all(checks), checks


# A model that has never heard of any of this


def build_gpt2(attention: str) -> tuple[nn.Module, Randomness, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=3, attn_implementation=attention
    )
    model = GPT2LMHeadModel(config).double().train()
    randomness = Randomness(5)
    report = apply_keyed_dropout(model, randomness)
    return model, randomness, report


def gpt2_loss(attention: str, recompute: bool = False) -> tuple[float, float, float]:
    model, randomness, _ = build_gpt2(attention)
    if recompute:
        model.gradient_checkpointing_enable()
    tokens = torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(2))
    size = dist.get_world_size() if dist.is_initialized() else 1
    ids = torch.arange(4).chunk(size)[dist.get_rank() if size > 1 else 0]

    def loss_of(step: int) -> Tensor:
        randomness.begin(step, ids)
        logits = model(tokens[ids]).logits  # its own loss is computed in float32
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[ids, 1:].flatten())
        model.zero_grad()
        loss.backward()
        norm = [p.grad / size for p in model.parameters()]
        both = torch.stack([loss.detach() / size])
        if size > 1:
            for x in (both, *norm):
                dist.all_reduce(x)
        return torch.cat([both, torch.stack([x.square().sum() for x in norm]).sum().view(1)])

    first, second = loss_of(0), loss_of(1)
    return first[0].item(), first[1].item(), second[0].item()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_of_transformers(ranks: Any, attention: str) -> None:
    loss, norm, second = gpt2_loss(attention)
    assert abs(loss - second) > 1e-4  # another step, other masks
    for found in ranks(2, gpt2_loss, attention):
        assert found == pytest.approx((loss, norm, second), rel=1e-12)
    assert gpt2_loss(attention, recompute=True) == pytest.approx((loss, norm, second), rel=1e-12)
    report = build_gpt2(attention)[2]
    assert "transformer.h.1.mlp.dropout" in report.modules
    assert report.watched


def test_attention_dropout_is_part_of_it() -> None:
    """The two ways in which `transformers` computes attention drop the same weights."""
    assert gpt2_loss("sdpa") == pytest.approx(gpt2_loss("eager"), rel=1e-12)


# Compiled


def test_compiled_masks_are_the_same() -> None:
    model, randomness = build_net(num=1)
    randomness.begin(0, torch.arange(8))
    expected = model(samples())
    graphs: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    for step in (0, 1, 2, 0):
        randomness.begin(step, torch.arange(8))
        out = compiled(samples())
    assert torch.equal(out, expected)
    assert len(graphs) <= 2, len(
        graphs
    )  # neither a step nor other ids are a reason to compile again


class SequenceFirst(nn.Module):
    """(length, samples, width), and something that is the same for all samples."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.looks = looks
        self.drop, self.places = nn.Dropout(0.5), nn.Dropout(0.5)
        self.register_buffer("table", torch.ones(4, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        if self.looks:
            assert float(x.sum()) > -1e9
        x = self.drop(x) + self.places(self.table)
        return F.dropout(x, 0.5, self.training).transpose(0, 1)


@pytest.mark.parametrize("looks", [False, True], ids=["fake", "real"])
def test_samples_of_a_model_are_found_where_they_are(looks: bool) -> None:
    """A length that is a multiple of the batch is not taken for samples."""
    model, x = SequenceFirst(looks), torch.ones(4, 4, 8)
    randomness = Randomness(0)
    randomness.sample_dims = learn_sample_dims(model, (x[:2],), True)
    assert randomness.sample_dims == {"": {(1, 3): 1}, "drop": {(1, 3): 1}, "places": {(1, 3): -1}}
    apply_keyed_dropout(model, randomness, (x[:2],))
    parts = []
    for ids in (torch.arange(4), torch.arange(2), torch.arange(2, 4)):
        randomness.begin(0, ids)
        parts.append(model(x[ids]))
    assert torch.equal(parts[0], torch.cat(parts[1:]))


class _Rated(nn.Module):
    """Attention whose rate has a name that says nothing, and no dropout module."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.qkv = p, nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        rate = self.p if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=rate)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_rate_of_attention_is_seen_in_its_code(rate: float) -> None:
    """Stages of a pipeline and large models are not run to see what they draw."""
    found = apply_keyed_dropout(nn.Sequential(_Rated(rate), nn.Linear(8, 8)), Randomness(0))
    assert found.watched == (("0",) if rate else ())


def test_a_compiled_mask_of_an_odd_width_is_the_same() -> None:
    """g++ took the product of a loop's counter and a large constant for a promise, and wrote over ends."""

    def drop(x: torch.Tensor, keys: Keys) -> torch.Tensor:
        return torch.where(keyed_mask(x.shape, 0.1, keys, 7), x * 1.25, 0.0)

    keys = build_keys(0, 3, torch.arange(32), 0)
    compiled = torch.compile(drop, dynamic=False)
    for _ in range(5):
        x = torch.randn(32, 13, 33)
        assert torch.equal(compiled(x, keys), drop(x, keys))
