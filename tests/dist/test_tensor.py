"""Tensor parallelism computes what one process computes, for models that have never heard of it."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.models.bert import Bert
from ridgeline.models.llama import Llama
from ridgeline.models.mlp import MLP
from ridgeline.models.vit import ViT
from ridgeline.parallel.apply import arrange
from ridgeline.parallel.blocks import find_blocks
from ridgeline.parallel.dropout import apply_keyed_dropout
from ridgeline.parallel.mesh import build_mesh
from ridgeline.parallel.random import Randomness
from ridgeline.parallel.tensor import (
    GlobalView,
    Split,
    TensorPlan,
    cut_layers,
    cut_local,
    enter_view,
    gather_full,
    plan_tensor,
    use_randomness,
)
from ridgeline.parallel.tensor.backends import as_written
from ridgeline.parallel.tensor.compiled import Programs
from ridgeline.parallel.tensor.runs import follow_cut
from ridgeline.parallel.tensor.split import chunk_sizes, join_pieces
from ridgeline.train.objective import Objective
from ridgeline.train.tasks import TASKS, main_output

BOUND = 1e-9
LONG_S = 240.0
"""For what traces or compiles."""


@functools.cache
def mesh(cp: int, tp: int) -> DeviceMesh:
    """One mesh a shape and process, because each makes groups that stay."""
    ranks = torch.arange(cp * tp).view(cp, tp)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("cp", "tp"))


def apply_tensor(model: nn.Module, mesh2d: DeviceMesh, sp: bool, plan: TensorPlan) -> GlobalView:
    """`model` split and in a view, with the model inside it, as an evaluation calls it."""
    view = GlobalView(mesh2d, sp)
    cut_layers(view, model, plan)
    enter_view(view, model)
    if isinstance(getattr(model, "model", None), nn.Module):
        enter_view(view, model.model)
    return view


# Models


def tokens(num: int, length: int) -> tuple[Tensor, Tensor]:
    both = torch.randint(0, num, (2, length + 1))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def llama(**options: Any) -> tuple[nn.Module, str, Tensor, Tensor]:
    defaults = {"vocab": 257, "width": 24, "depth": 2, "heads": 4, "max_seq": 64, "ffn": 37}
    return Llama("1m", **{**defaults, **options}), "causal_lm", *tokens(257, 33)


def vit(**options: Any) -> tuple[nn.Module, str, Tensor, Tensor]:
    defaults = {"image_size": 12, "patch": 4, "width": 24, "depth": 2, "heads": 4, "in_channels": 2}
    model = ViT(**{**defaults, **options})
    images = torch.randn(3, 2, 12, 12, dtype=torch.float64)
    if options.get("task") == "forecast":
        return model, "forecast", images, torch.randn(3, 4, 12, 12, dtype=torch.float64)
    return model, "classify", images, torch.randint(0, 70, (3,))


def bert() -> tuple[nn.Module, str, Tensor, Tensor]:
    inputs, targets = tokens(131, 11)
    targets = torch.where(torch.rand(targets.shape) < 0.6, targets, -100)
    return Bert(131, 24, 2, 4, max_seq=16, dropout=0.0), "masked_lm", inputs, targets


def mlp() -> tuple[nn.Module, str, Tensor, Tensor]:
    inputs = torch.randn(5, 3, 4, dtype=torch.float64)
    return MLP(12, 19, 3, 10), "classify", inputs, torch.randint(0, 10, (5,))


class HF(nn.Module):
    """A model of `transformers` under a task: tokens in, its output out."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        kind = getattr(transformers, name)
        self.inner = kind(kind.config_class(**options))
        for path, module in self.inner.named_modules():
            if type(module).__name__ == "LlamaRMSNorm":  # it rounds to float32
                norm = nn.RMSNorm(module.weight.shape[0], eps=module.variance_epsilon)
                self.inner.set_submodule(path, norm)

    def forward(self, tokens: Tensor) -> Any:
        return self.inner(tokens, use_cache=False)


def hf_llama(**options: Any) -> tuple[nn.Module, str, Tensor, Tensor]:
    model = HF(
        "LlamaForCausalLM", vocab_size=131, hidden_size=24, intermediate_size=40, head_dim=6,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, **options,
    )  # fmt: skip
    return model, "causal_lm", *tokens(131, 13)


def hf_gpt2(pdrop: float = 0.0, **options: Any) -> tuple[nn.Module, str, Tensor, Tensor]:
    model = HF(
        "GPT2LMHeadModel", vocab_size=131, n_positions=32, n_embd=24, n_layer=2, n_head=4,
        resid_pdrop=pdrop, embd_pdrop=pdrop, attn_pdrop=pdrop, **options,
    )  # fmt: skip
    return model, "causal_lm", *tokens(131, 13)


def hf_bert(**options: Any) -> tuple[nn.Module, str, Tensor, Tensor]:
    model = HF(
        "BertForMaskedLM", vocab_size=131, hidden_size=24, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=40, max_position_embeddings=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    inputs, targets = tokens(131, 11)
    targets = torch.where(torch.rand(targets.shape) < 0.6, targets, -100)
    return model, "masked_lm", inputs, targets


class FusedAttention(nn.Module):
    """As timm writes it: one projection for queries, keys and values, unbound after a view."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.Identity()
        self.proj = nn.Linear(width, width)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0)
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(B, N, C)))


class FusedBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = FusedAttention(width, heads)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 50), nn.GELU(), nn.Linear(50, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma * self.attn(self.norm1(x))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class FusedViT(nn.Module):
    def __init__(self, width: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(2, width, 4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 10, width))
        self.blocks = nn.Sequential(FusedBlock(width, heads), FusedBlock(width, heads))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 70)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x += self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def fused_vit(heads: int = 4) -> tuple[nn.Module, str, Tensor, Tensor]:
    images = torch.randn(3, 2, 12, 12, dtype=torch.float64)
    return FusedViT(24, heads), "classify", images, torch.randint(0, 70, (3,))


class Stranger(nn.Module):
    """None of the usual words: einsum and softmax attention, a gate by halves, changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Linear(24, 24, bias=False)
        self.beta = nn.Linear(24, 24)
        self.gamma = nn.Linear(24, 24)
        self.delta = nn.Linear(24, 24)
        self.both = nn.Linear(24, 2 * 36)
        self.back = nn.Linear(36, 24)
        self.mix = nn.Parameter(torch.randn(7, 7))
        self.slopes = nn.Parameter(torch.randn(4))
        self.out = nn.Linear(24, 5)
        self.register_buffer("mask", torch.ones(7, 7).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q = self.alpha(x).view(b, t, 4, 6)
        k = self.beta(x).view(b, t, 4, 6)
        v = self.gamma(x).view(b, t, 4, 6).permute(0, 2, 1, 3)
        scores = torch.einsum("bthc,bshc->bhts", q, k) / 6**0.5
        scores = scores + self.slopes[None, :, None, None] * self.mix[:t, :t]
        scores = scores.masked_fill(~self.mask[:t, :t], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        y = (weights @ v).transpose(1, 2).contiguous().view(b, t, d)
        x = x + self.delta(y)
        a, g = self.both(x).chunk(2, dim=-1)
        h = F.relu(a) * torch.sigmoid(g)
        h.mul_(0.5)
        x = x + self.back(h)
        x = torch.cumsum(x, dim=1) + torch.fft.rfft(x, dim=1).abs().mean()
        return self.out(x.roll(1, 1)).mean(1)


def stranger() -> tuple[nn.Module, str, Tensor, Tensor]:
    inputs = torch.randn(3, 7, 24, dtype=torch.float64)
    return Stranger(), "classify", inputs, torch.randint(0, 5, (3,))


class _Tripled(torch.autograd.Function):
    """A function of the user's own, whose gradient is not what torch would derive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3.0


def _count(module: nn.Module, gave: Any, took: Any) -> None:
    module.fired = getattr(module, "fired", 0) + 1


def _double(grad: Tensor) -> None:
    grad.mul_(2.0)


class Watched(nn.Module):
    """Looks at gradients on their way: hooks on activations and on modules, a function of its own, and
    gradients inside forward. Each counts what it sees as much as the others."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 48)
        self.down = nn.Linear(48, 24)
        self.act = nn.GELU()
        self.qkv = nn.Linear(24, 72)
        self.out = nn.Linear(24, 5)
        self.down.register_full_backward_hook(lambda module, gave, took: (gave[0] * 0.5,))
        self.act.register_backward_hook(_count)
        self.seen: Counter[str] = Counter()

    def note(self, what: str) -> None:
        self.seen[what] += 1

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        h = self.act(self.up(x))
        both = h * 2.0  # a use before the hook is there
        watches = h.requires_grad and torch.is_grad_enabled()
        if watches:
            h.register_hook(lambda grad: grad * 1.25)
            h.grad_fn.register_hook(lambda gave, took: self.note("node"))
            torch.autograd.graph.register_multi_grad_hook(
                [both], lambda grads: self.note("several")
            )
            energy = (h * h * both).sum()
            (force,) = torch.autograd.grad(energy, h, retain_graph=True)
            both = both + force.detach()
        else:
            both = both + (h * both * 2 + h * h * 2).detach() * 1.25
        x = x + self.down(both + h)
        qkv = self.qkv(x)  # cut in three runs
        flat = (x * 1.0).view(b * t, d)  # and along a sequence, in as many runs as samples
        if watches:
            qkv.register_hook(lambda grad: grad.clamp(-1e9, 1e9) * 0.75)
            flat.register_hook(_double)
        q, k, v = (y.view(b, t, 4, 6).transpose(1, 2) for y in qkv.chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = _Tripled.apply(y + flat.sin().view(b, t, d))
        return self.out(x * x).mean(1)


def watched() -> tuple[nn.Module, str, Tensor, Tensor]:
    inputs = torch.randn(3, 8, 24, dtype=torch.float64)
    return Watched(), "classify", inputs, torch.randint(0, 5, (3,))


CASES: dict[str, Callable[[], tuple[nn.Module, str, Tensor, Tensor]]] = {
    "llama": llama,
    "llama_grouped": functools.partial(llama, kv_heads=2),
    "llama_3_heads": functools.partial(llama, heads=3, width=18, tie_embeddings=True),
    "vit_cls": functools.partial(vit, pool="cls", num_classes=70),
    "vit_mean": functools.partial(vit, num_classes=70),
    "vit_forecast": functools.partial(vit, task="forecast", out_channels=4),
    "bert": bert,
    "mlp": mlp,
    "hf_llama": hf_llama,
    "hf_llama_grouped": functools.partial(
        hf_llama, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "hf_gpt2": hf_gpt2,
    "hf_bert": hf_bert,
    "fused_vit": fused_vit,
    "fused_vit_3_heads": functools.partial(fused_vit, 3),
    "stranger": stranger,
    "watched": watched,
}


def build(name: str) -> tuple[nn.Module, str, Tensor, Tensor]:
    torch.manual_seed(7)
    model, task, inputs, targets = CASES[name]()
    with torch.no_grad():
        for parameter in model.parameters():  # no zeros and ones that hide a mistake
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().train(), task, inputs, targets


def relative(found: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=least))


def compare(name: str, cp: int, tp: int, *streams: bool) -> list[dict[str, float]]:
    """Relative differences between one process and the split model, by what was compared.

    Once for each of `streams`: whether the residual stream is cut along the sequence.
    """
    model, task, inputs, targets = build(name)
    if inputs.is_floating_point():
        inputs.requires_grad_()
    alone = Objective(copy.deepcopy(model), TASKS[task].loss)
    expected = alone(inputs, targets)
    expected.backward()
    with torch.no_grad():
        output = main_output(alone.model(inputs))
    wanted = {key: parameter.grad for key, parameter in alone.named_parameters()}
    # Some gradients are zero but for rounding: softmax does not see a bias of the keys.
    least = 1e-6 * max(float(gradient.abs().max()) for gradient in wanted.values())
    input_gradient = inputs.grad
    plan = plan_tensor(Objective(model, TASKS[task].loss), tp, (inputs, targets))
    results = []
    for sp in streams:
        inputs.grad = None
        objective = Objective(copy.deepcopy(model), TASKS[task].loss)
        view = apply_tensor(objective, mesh(cp, tp), sp, plan)
        loss = objective(inputs, targets)
        loss.backward()
        worst = {"loss": relative(loss.detach(), expected.detach())}
        with torch.no_grad():
            worst["output"] = relative(main_output(objective.model(inputs)), output)
        if input_gradient is not None:
            worst["input"] = relative(inputs.grad, input_gradient)
        if isinstance(model, Watched):
            assert objective.model.seen == alone.model.seen
            assert {"node", "several"} == set(alone.model.seen)
            assert objective.model.act.fired == alone.model.act.fired
        for key, parameter in objective.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, key
            assert type(gradient) is Tensor
            assert gradient.shape == parameter.shape
            if key in view.splits:
                group = mesh(cp, tp).get_group("tp")
                gradient = gather_full(key, gradient, view.splits[key], group)
            if cp > 1:
                dist.all_reduce(gradient, group=mesh(cp, tp).get_group("cp"))
            worst[key] = relative(gradient, wanted[key], least)
        results.append(worst)
    return results


def check(results: list[list[dict[str, float]]]) -> None:
    for streams in results:
        for worst in streams:
            wrong = {key: value for key, value in worst.items() if not value <= BOUND}
            assert not wrong, wrong
            assert len(worst) > 3


@pytest.mark.table(keep=14)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_same_as_one_process(ranks: Any, name: str, tp: int) -> None:
    """Loss, outputs, gradients of inputs and of every parameter; the stream whole and cut."""
    check(ranks(tp, compare, name, 1, tp, False, True))


@pytest.mark.parametrize(
    "name", ["llama_grouped", "bert", "hf_gpt2", "vit_cls", "stranger", "watched", "flattened"]
)
def test_same_with_a_context_axis(ranks: Any, name: str) -> None:
    """Gradients are complete over tp and sum to the right ones over cp."""
    check(ranks(4, compare, name, 2, 2, False, True))


@pytest.mark.parametrize("name", ["llama", "flattened"])
def test_context_axis_alone(ranks: Any, name: str) -> None:
    check(ranks(2, compare, name, 2, 1, False))


# What it costs


class Collectives(TorchDispatchMode):
    """Counts communication by kind, point to point and functional collectives alike."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = str(func).partition(".")
        name = name.partition(".")[0].rstrip("_")
        if "c10d" in namespace and "wait" not in name and "wrap" not in name:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(depth: int, sp: bool) -> tuple[dict[str, int], dict[str, int]]:
    torch.manual_seed(0)
    model, task, inputs, targets = llama(depth=depth)
    objective = Objective(model, TASKS[task].loss)
    view = apply_tensor(objective, mesh(1, 2), sp, plan_tensor(objective, 2, (inputs, targets)))
    with Collectives() as forward:
        loss = objective(inputs, targets)
    with Collectives() as backward:
        loss.backward()
    assert not view.fallbacks.found
    return dict(forward.counts), dict(backward.counts)


def test_a_block_sends_as_little_as_it_can(ranks: Any) -> None:
    """What one more Llama block adds: two reductions each way, or their halves along the stream."""
    for sp, wanted in (
        (False, ({"all_reduce": 2}, {"all_reduce": 2})),
        (
            True,
            (
                {"reduce_scatter_tensor": 2, "all_gather_into_tensor": 2},
                # The two norms see part of the sequence: their weights' gradients are summed.
                {"reduce_scatter_tensor": 2, "all_gather_into_tensor": 2, "all_reduce": 2},
            ),
        ),
    ):
        one, two = ranks(2, count_collectives, 1, sp)[0], ranks(2, count_collectives, 2, sp)[0]
        added = tuple(
            {k: b[k] - a.get(k, 0) for k in b if b[k] != a.get(k, 0)}
            for a, b in zip(one, two, strict=True)
        )
        assert added == wanted


def held_bytes(name: str, tp: int) -> tuple[int, int, int]:
    """Bytes of the split parameters on this rank and in all, and of what is left whole."""
    model, task, inputs, targets = build(name)
    full = sum(p.numel() * p.element_size() for p in model.parameters())
    objective = Objective(model, TASKS[task].loss)
    view = apply_tensor(
        objective, mesh(1, tp), False, plan_tensor(objective, tp, (inputs, targets))
    )
    sizes = {k: p.numel() * p.element_size() for k, p in objective.named_parameters()}
    here = sum(size for key, size in sizes.items() if key in view.splits)
    whole = sum(size for key, size in sizes.items() if key not in view.splits)
    return here, full - whole, whole


@pytest.mark.parametrize("name", ["llama", "hf_gpt2", "bert", "fused_vit"])
def test_each_rank_holds_its_share(ranks: Any, name: str) -> None:
    results = ranks(4, held_bytes, name, 4)
    total = results[0][1]
    assert sum(here for here, _, _ in results) == total
    assert max(here for here, _, _ in results) < total / 4 * 1.1
    assert results[0][2] < 0.35 * (total + results[0][2])


# A sequence that is cut stays cut


def flowing(name: str, layout: str) -> tuple[dict[str, float], list[str], int]:
    """Which share of every layer's input is on a rank, what ran whole, and gathers in forward."""
    asked = Layout.parse(layout)
    model, task, inputs, targets = build(name)
    objective = Objective(model, TASKS[task].loss)
    built = arrange(
        objective,
        asked,
        build_mesh(read_rank_env(), asked, torch.device("cpu")),
        model=model,
        loss=objective.loss,
        example=(inputs,),
    )
    shares: dict[str, float] = {}

    def look(module: nn.Module, args: Any) -> None:
        if isinstance(args[0], DTensor):  # positions, which are constants, are plain and whole
            shares[names[module]] = args[0].to_local().numel() / args[0].numel()

    names = {m: n for n, m in model.named_modules() if not list(m.children())}
    for module in names:
        module.register_forward_pre_hook(look)
    with Collectives() as seen:
        built.objective(inputs, targets)
    assert built.view is not None
    return shares, built.view.fallbacks.functions, seen.counts["all_gather_into_tensor"]


@pytest.mark.parametrize("name", ["hf_gpt2", "llama", "bert", "flattened"])
def test_a_cut_sequence_stays_cut(ranks: Any, name: str) -> None:
    """Each rank works on half of every activation, and logits are not put together for the loss."""
    for shares, fallbacks, num_gathers in ranks(2, flowing, name, "cp=2"):
        assert len(shares) > 8
        assert max(shares.values()) < 0.55, shares
        assert fallbacks == []
        assert num_gathers == 0


@pytest.mark.parametrize("layout", ["dp=2,zero=3,cp=2", "dp=2,zero=3,tp=2,sp=true"])
def test_sharded_blocks_get_cut_inputs(ranks: Any, layout: str) -> None:
    for shares, fallbacks, _ in ranks(4, flowing, "hf_gpt2", layout):
        norms = [share for key, share in shares.items() if ".ln_" in key]
        assert len(norms) == 5
        assert max(norms) < 0.55, shares
        assert fallbacks == []


def held_by(shape: tuple[int, ...], dim: int, runs: int, num: int, rank: int) -> Tensor:
    """The elements of a tensor of `shape` that a rank has when each run of `dim` is cut, by number."""
    apart = torch.arange(math.prod(shape)).view(*shape[:dim], runs, -1, *shape[dim + 1 :])
    pieces = apart.split(chunk_sizes(apart.shape[dim + 1], num), dim + 1)
    return pieces[rank].flatten()


def test_views_of_a_cut_dim_hold_the_same_elements() -> None:
    """Every pair of shapes of 24 elements, every cut: what is found is right, and plain cuts are."""
    shapes = [
        s for n in (1, 2, 3, 4) for s in itertools.product((1, 2, 3, 4, 6, 8, 12, 24), repeat=n)
    ]
    shapes = [s for s in shapes if math.prod(s) == 24 and s.count(1) < 2]
    num_found = 0
    for before, after in itertools.product(shapes, repeat=2):
        for dim, runs, num in itertools.product(range(len(before)), (1, 2, 3), (2, 3)):
            if before[dim] % runs or before[dim] == runs:
                continue
            found = follow_cut(before, after, dim, runs, num)
            if found is None:
                continue
            num_found += 1
            for rank in range(num):
                assert torch.equal(
                    held_by(before, dim, runs, num, rank), held_by(after, *found, num, rank)
                ), (before, after, dim, runs, num, found)
    assert num_found > 10_000
    assert follow_cut((2, 6, 12), (12, 12), 1, 1, 4) == (0, 2)  # uneven, but the same pieces
    assert follow_cut((2, 6, 12), (2, 72), 1, 1, 4) is None


class Flattened(nn.Module):
    """Code that works on (batch * sequence, features) from the first to the last layer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(131, 24)
        self.norm = nn.LayerNorm(24)
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
        self.gate = nn.Linear(24, 3)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(24, 131)

    def forward(self, tokens: Tensor) -> Tensor:
        b, t = tokens.shape
        x = self.drop(self.embed(tokens.reshape(-1)))
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (y.view(b, t, 4, 6).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b * t, 24))
        weights = self.gate(x).softmax(-1)
        z = torch.stack([self.down(F.gelu(self.up(x))), x.tanh(), x.data], -1)
        x = (z * weights.unsqueeze(1)).sum(-1) + x.view_as(z[..., 0])
        return self.head(self.drop(x)).view(b, t, -1)


def flattened() -> tuple[nn.Module, str, Tensor, Tensor]:
    return Flattened(), "causal_lm", *tokens(131, 13)


CASES["flattened"] = flattened


def keyed_flattened(cp: int, tp: int) -> float:
    """How far flattened activations with dropout are from one process."""
    torch.manual_seed(0)
    inputs, _ = tokens(131, 13)
    model = Flattened(0.3).double()
    found = []
    for is_cut in (False, True):
        module, randomness = copy.deepcopy(model), Randomness(1)
        apply_keyed_dropout(module, randomness)
        randomness.begin(0, torch.tensor([4, 8]))
        if is_cut:
            view = apply_tensor(module, mesh(cp, tp), tp > 1, plan_tensor(model, tp, (inputs,)))
            use_randomness(view, randomness)
        found.append(module(inputs))
    return relative(found[1], found[0])


def test_dropout_of_flattened_activations(ranks: Any) -> None:
    assert max(ranks(2, keyed_flattened, 2, 1)) < BOUND
    assert max(ranks(4, keyed_flattened, 2, 2)) < BOUND


# The loss


def compare_loss(shape: tuple[int, ...], options: dict[str, Any]) -> list[float]:
    """Loss and gradient of cross-entropy with the classes cut, against torch's."""
    torch.manual_seed(3)
    full = (3 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]))
    target[0] = 5
    if options.pop("weights", False):
        options["weight"] = torch.rand(shape[1], dtype=torch.float64)
    expected = F.cross_entropy(full, target, **options)
    weigh = torch.rand_like(expected)
    (expected * weigh).sum().backward()
    view = GlobalView(mesh(1, dist.get_world_size()), False)
    logits = full.detach().clone().requires_grad_()

    def run(logits: Tensor, target: Tensor) -> Tensor:
        cut = view.move(logits, view.placements(tp=Shard(1)))
        return F.cross_entropy(cut, target, **options)

    with Collectives() as seen:
        found = view.run(run, logits, target)
    assert bool(options.get("weight") is not None) == bool(view.fallbacks.found)
    assert view.fallbacks.found or "all_gather_into_tensor" not in seen.counts
    (found * weigh).sum().backward()
    return [relative(found.detach(), expected.detach()), relative(logits.grad, full.grad)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"ignore_index": 5},
        {"label_smoothing": 0.2, "ignore_index": 5},
        {"weights": True},
    ],
    ids=str,
)
def test_vocabulary_parallel_loss(ranks: Any, options: dict[str, Any]) -> None:
    for shape in ((6, 257), (2, 257, 7), (2, 5 + 1, 3, 2)):
        for found in ranks(4, compare_loss, shape, options):
            assert max(found) < 1e-12


# Splits


@pytest.mark.parametrize(
    "split",
    [
        Split(0, (7, 4)),
        Split(1, (3, 9)),
        Split(0, (6, 4), 3, (0, 1, 2, -1)),
        Split(0, (12, 4), 12, (0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11)),
    ],
)
def test_pieces_become_the_whole_again(split: Split) -> None:
    full = torch.randn(split.global_shape)
    for size in (1, 2, 4):
        pieces = [cut_local(full, split, rank, size) for rank in range(size)]
        assert torch.equal(join_pieces(pieces, split), full)
        assert sum(p.shape[split.dim] for p in pieces) == split.padded_shape[split.dim]


# Inside the view


def boundary(cp: int, tp: int, sp: bool) -> list[float]:
    """A two-stage pipeline by hand: leave and enter are each other's inverse, gradients too."""
    torch.manual_seed(0)
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    weigh = torch.randn(2, 7, 6, dtype=torch.float64)
    ((x.exp() * 2).sin() * weigh).sum().backward()
    expected, x.grad = x.grad, None
    view = GlobalView(mesh(cp, tp), sp)
    sent: list[Tensor] = []
    shapes = []

    def first(x: Tensor) -> Tensor:
        y = x.exp() * 2
        shapes.append(tuple(y.shape))
        sent.append(view.leave(y))
        return y.sum()

    view.run(first, x)
    assert type(sent[0]) is Tensor
    received = sent[0].detach().requires_grad_()

    def second(part: Tensor, weigh: Tensor) -> Tensor:
        return (part.sin() * weigh).sum()

    view.run(second, view.enter(received, shapes[0]), weigh).backward()
    assert received.grad is not None
    assert received.grad.shape == received.shape
    sent[0].backward(received.grad)
    return [relative(x.grad, expected), received.numel() / x.numel()]


@pytest.mark.parametrize("sp", [False, True])
def test_pipeline_boundary(ranks: Any, sp: bool) -> None:
    for cp, tp in ((1, 2), (2, 2)):
        results = ranks(cp * tp, boundary, cp, tp, sp)
        assert max(found for found, _ in results) < 1e-12
        pieces = cp * (tp if sp else 1)
        assert sum(size for _, size in results) == pytest.approx(cp * tp / pieces)


def dropout_losses() -> list[float]:
    """BERT with dropout on one process and split, both ways, from the same generator state."""
    losses = []
    for sp in (None, False, True):
        torch.manual_seed(1)
        inputs, targets = tokens(131, 11)
        objective = Objective(
            Bert(131, 24, 2, 4, max_seq=16, dropout=0.3).double(), TASKS["masked_lm"].loss
        )
        if sp is not None:
            apply_tensor(objective, mesh(1, 2), sp, plan_tensor(objective, 2, (inputs, targets)))
        torch.manual_seed(2)
        losses.append(float(objective(inputs, targets).detach()))
    return losses


def test_dropout_is_that_of_one_process(ranks: Any) -> None:
    for losses in ranks(2, dropout_losses):
        assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-12)


def recomputed(sp: bool) -> float:
    """The largest difference of a gradient when blocks are computed again in backward."""
    found = []
    for again in (False, True):
        model, task, inputs, targets = build("llama")
        objective = Objective(model, TASKS[task].loss)
        view = apply_tensor(objective, mesh(1, 2), sp, plan_tensor(objective, 2, (inputs, targets)))
        if again:
            for block in model.layers:
                block.forward = functools.partial(
                    checkpoint, block.forward, use_reentrant=False,
                    context_fn=lambda view=view: (nullcontext(), view.active()),
                )  # fmt: skip
        objective(inputs, targets).backward()
        found.append([p.grad for p in objective.parameters()])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("sp", [False, True])
def test_recompute_enters_the_view_again(ranks: Any, sp: bool) -> None:
    assert ranks(2, recomputed, sp) == [0.0, 0.0]


def in_place(kind: str, axis: str = "tp") -> float:
    view = GlobalView(mesh(1, 2) if axis == "tp" else mesh(2, 1), False)

    def run(x: Tensor) -> Tensor:
        y = view.move(x * 1, view.placements(tp=Shard(0))) if isinstance(x, DTensor) else x * 1
        if kind == "direct":
            y.mul_(2).add_(1)
            y += x
            F.relu(y, inplace=True)
            y = y * 3
            y[1] = 0.5
            return (y * y).sum()
        part = y[0]
        part.add_(1)
        return y.sum() + part.sum()

    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    dist.broadcast(x.data, 0)
    run(x).backward()
    expected, x.grad = x.grad, None
    view.run(run, x).backward()
    return relative(x.grad, expected)


def test_changes_in_place(ranks: Any) -> None:
    assert max(ranks(2, in_place, "direct")) < 1e-12
    with pytest.raises(ranks.Failure, match="add_ changes in place a tensor that others are views"):
        ranks(2, in_place, "view")
    with pytest.raises(ranks.Failure, match="which a model under cp cannot do"):
        ranks(2, in_place, "view", "cp")


def low_precision() -> list[float]:
    losses = []
    for split in (False, True):
        model, task, inputs, targets = build("llama")
        objective = Objective(model.float(), TASKS[task].loss)
        if split:
            apply_tensor(objective, mesh(1, 2), True, plan_tensor(objective, 2, (inputs, targets)))
        with torch.autocast("cpu", torch.bfloat16):
            loss = objective(inputs, targets)
        loss.backward()
        assert loss.dtype == torch.float32
        assert all(p.grad.dtype == torch.float32 for p in objective.parameters())
        losses.append(float(loss.detach()))
    return losses


def test_autocast(ranks: Any) -> None:
    for alone, split in ranks(2, low_precision):
        assert split == pytest.approx(alone, rel=2e-2)


# The plan


class Keeps(Watched):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.tanh(self.up(x))
        if self.kept.requires_grad:
            self.kept.retain_grad()
            self.kept.retain_grad()  # once is enough
            assert self.kept.retains_grad
        return self.out(self.down(self.kept)).mean(1)


def keeping(tp: int) -> tuple[Objective, Objective, Tensor, Tensor]:
    """One process's and the split model, with what goes into them."""
    torch.manual_seed(3)
    model, inputs = Keeps().double(), torch.randn(3, 7, 24, dtype=torch.float64)
    targets = torch.randint(0, 5, (3,))
    alone = Objective(copy.deepcopy(model), TASKS["classify"].loss)
    plan = plan_tensor(Objective(model, TASKS["classify"].loss), tp, (inputs, targets))
    objective = Objective(model, TASKS["classify"].loss)
    apply_tensor(objective, mesh(1, tp), False, plan)
    return alone, objective, inputs, targets


def retained(tp: int) -> float:
    """How far an activation's gradient that the model keeps is from one process's; two passes add up."""
    alone, objective, inputs, targets = keeping(tp)
    for one in (alone, objective):
        loss = one(inputs, targets)
        loss.backward(retain_graph=True)
        loss.backward()
    return relative(objective.model.kept.grad.full_tensor(), alone.model.kept.grad)


def test_a_kept_gradient_is_that_of_one_process(ranks: Any) -> None:
    assert max(ranks(2, retained, 2)) <= BOUND


def differentiated_twice(tp: int) -> str:
    _, objective, inputs, targets = keeping(tp)
    loss = objective(inputs.requires_grad_(), targets)
    (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
    try:
        gradient.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_second_derivatives_are_refused_and_not_wrong(ranks: Any) -> None:
    for said in ranks(2, differentiated_twice, 2):
        assert "differentiate twice" in said


class Tied(nn.Module):
    """Ties its head by using the embedding's weight in code; the planner may not cut that."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return F.linear(x + self.down(self.up(x).relu()), self.embed.weight)


def test_a_weight_used_by_other_code_stays_whole() -> None:
    plan = plan_tensor(Tied(), 2, (torch.zeros(2, 3, dtype=torch.int64),))
    assert list(plan.layers) == ["up", "down"]
    assert "left whole: embed (linear uses its weight directly)" in plan.report


class Convolved(nn.Module):
    """Attention whose heads the model counts itself, behind a convolution along the sequence."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, width = heads, 16 * heads
        self.embed = nn.Linear(8, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.conv(x.mT).mT
        q, k, v = (
            layer(x).view(*x.shape[:2], self.heads, 16).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(self.up(x).relu())
        return F.layer_norm(x, x.shape[-1:])


def test_what_stays_whole_is_said_with_its_own_reason() -> None:
    plan = plan_tensor(Convolved(3), 2, (torch.zeros(2, 5, 8),))
    assert set(plan.layers) == {"up", "down"}
    # Its own features never go into the convolution: those that they are added to do.
    heads = "3 heads or parts do not divide over 2 ranks"
    assert {plan.whole[name] for name in "qkvo"} == {heads}
    assert plan.whole["embed"] == "its features go into conv1d"


class Looked(nn.Module):
    """A projection that is added to features which a convolution has read before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.side, self.next = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).relu())
        first = self.embed(x)
        x = self.conv(first.mT).mT + self.next((first + self.side(x)).relu())
        return F.layer_norm(x, x.shape[-1:])


def test_features_that_are_added_to_others_are_told_from_those() -> None:
    plan = plan_tensor(Looked(), 2, (torch.zeros(2, 5, 8),))
    assert set(plan.layers) == {"up", "down"}
    assert plan.whole["embed"] == "its features go into conv1d"
    assert plan.whole["side"] == "its features are added to others that go into conv1d"


def test_heads_that_the_model_counts_itself_stay_whole() -> None:
    model, _, inputs, _ = fused_vit(3)
    plan = plan_tensor(model.double(), 2, (inputs,))
    assert "blocks.0.attn.qkv" not in plan.layers
    assert "blocks.0.fc1" in plan.layers
    assert "left whole: blocks.*.attn.qkv, blocks.*.attn.proj (3 heads" in plan.report


def test_a_models_own_plan_comes_first() -> None:
    model, _, inputs, _ = hf_llama()
    plan = plan_tensor(model, 2, (inputs,))
    assert plan.layers["inner.model.layers.0.mlp.gate_proj"].style == "column"
    model.inner._tp_plan = {
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "model.layers.*.self_attn.q_proj": "sideways",
    }
    plan = plan_tensor(model, 2, (inputs,))
    assert {path.rsplit(".", 1)[-1] for path in plan.layers} == {
        "gate_proj", "up_proj", "down_proj", "embed_tokens",
    }  # fmt: skip
    assert "its own plan says 'sideways'" in plan.report


def test_planning_changes_nothing() -> None:
    model, _, inputs, _ = llama()
    before = {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    state = torch.random.get_rng_state()
    assert plan_tensor(model, 2, (inputs,)) == plan_tensor(model, 2, (inputs,))
    assert before == {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    assert torch.equal(state, torch.random.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_nothing_to_split_is_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(5))
    model(torch.zeros(1, 3, 5, 5))
    with pytest.raises(UsageError, match=r"nothing in Sequential can be split.*only 5 outputs"):
        plan_tensor(model, 2, (torch.zeros(1, 3, 5, 5),))
    # A model that does not run on one device either is not blamed on the layout.
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        plan_tensor(llama()[0], 2, ())


def test_a_plan_is_for_its_number_of_ranks(ranks: Any) -> None:
    with pytest.raises(ranks.Failure, match="a tensor plan for tp=3 was applied on 2 ranks"):
        ranks(2, wrong_size)


def wrong_size() -> None:
    model, _, inputs, _ = build("mlp")
    apply_tensor(model, mesh(1, 2), False, plan_tensor(model, 3, (inputs,)))


def timm_vit() -> tuple[nn.Module, str, Tensor, Tensor]:
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24, num_heads=4,
        num_classes=70,
    )  # fmt: skip
    return model, "classify", torch.randn(2, 3, 32, 32).double(), torch.randint(0, 70, (2,))


def test_timm(ranks: Any) -> None:
    pytest.importorskip("timm")
    check(ranks(2, compare_timm))


def compare_timm() -> list[dict[str, float]]:
    CASES["timm_vit"] = timm_vit
    return compare("timm_vit", 1, 2, False, True)


# Blocks as programs


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    return {path: model.get_submodule(path) for path in find_blocks(model)}


def twice(
    make: Callable[[], tuple[nn.Module, str, Tensor, Tensor]],
    use: Callable[[Objective, Tensor, Tensor], list[Any]],
    sp: bool = False,
    backend: Any = as_written,
) -> tuple[Programs, list[Any], list[Any]]:
    """What `use` makes of a model split in two: its blocks in the view, and as programs."""
    found = []
    for as_program in (False, True):
        model, task, inputs, targets = make()
        objective = Objective(model, TASKS[task].loss)
        view = GlobalView(mesh(1, 2), sp)
        cut_layers(view, objective, plan_tensor(objective, 2, (inputs, targets)))
        programs = Programs(view, None, backend)
        if as_program:
            programs.add(blocks_of(model))
        enter_view(view, objective)
        enter_view(view, model)
        found.append(use(objective, inputs, targets))
    return programs, found[0], found[1]


def first_loss(objective: Objective, inputs: Tensor, targets: Tensor) -> list[float]:
    return [float(objective(inputs, targets).detach())]


def train_and_evaluate(objective: Objective, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    for size in (len(inputs), 1, len(inputs)):  # a last batch is smaller
        objective.zero_grad()
        loss = objective(inputs[:size], targets[:size])
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in objective.parameters())]
    with torch.no_grad():
        objective.model.eval()
        seen.append(main_output(objective.model(inputs)))
    return seen


def programmed(name: str, sp: bool) -> tuple[dict[str, str], int, float]:
    """Three steps and an evaluation in the view and as programs: why blocks are not, how many of them there
    are, and the largest difference of a loss, an output or a weight's gradient."""
    programs, alone, split = twice(lambda: build(name), train_and_evaluate, sp)
    worst = max(float((a - b).abs().max()) for a, b in zip(alone, split, strict=True))
    return programs.refused, programs.num_made, worst


WITH_BLOCKS = [
    "llama", "llama_grouped", "llama_3_heads", "vit_cls", "bert", "hf_llama_grouped", "hf_gpt2", "hf_bert",
]  # fmt: skip


@pytest.mark.table(keep=6)
@pytest.mark.parametrize("name", WITH_BLOCKS)
@pytest.mark.parametrize("sp", [False, True])
def test_programs_compute_the_same(ranks: Any, name: str, sp: bool) -> None:
    """Bit for bit where no compiler rewrites them; with grad at two sizes, and without."""
    for refused, num_made, worst in ranks(2, programmed, name, sp, timeout=LONG_S):
        assert refused == {}
        assert num_made >= 3
        assert worst == 0.0


class Fickle(nn.Module):
    """A block with a habit that a program could not have."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24)
        self.habit, self.calls, self.scale = habit, 0, 1.0
        self.config, self.cache = SimpleNamespace(scale=1.0, calls=0), {}
        self.register_buffer("times", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        if self.habit == "counts":
            self.calls += 1
            return x + self.down(self.act(self.up(x))) * self.calls
        if self.habit == "counts elsewhere":
            self.config.calls += 1
            return x + self.down(self.act(self.up(x))) * self.config.calls
        if self.habit == "new buffer":
            self.times = self.times + 1
            return x + self.down(self.act(self.up(x))) * self.times
        if self.habit == "cache":
            if "shift" not in self.cache:
                self.cache["shift"] = torch.arange(24, dtype=torch.float64)
            x = x + self.cache["shift"]
        if self.habit == "sends":
            sent = torch.ones(24, dtype=torch.float64)
            dist.all_reduce(sent)
            x = x + sent
        if self.habit == "in place":
            x += self.down(self.act(self.up(x)))
            return x
        if self.habit == "looks" and x.sum() > 1e9:
            return x
        if self.habit == "draws":
            x = x + 0 * torch.rand_like(x)
        if self.habit == "watches" and x.requires_grad:
            x = x + 0
            x.register_hook(lambda g: g * 2)
        if self.habit == "view":
            y = x + self.down(self.act(self.up(x)))
            return x.view(x.shape), y
        return x + self.down(self.act(self.up(x))) * self.scale * self.config.scale


class Fickles(nn.Module):
    def __init__(self, habit: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Fickle(habit) for _ in range(2))
        self.scale, self.out = nn.Parameter(torch.ones(24)), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
            x = x[1] if isinstance(x, tuple) else x
        return self.out(x).mean(1)


def fickles(habit: str = "") -> tuple[nn.Module, str, Tensor, Tensor]:
    torch.manual_seed(5)
    model = Fickles(habit).double()
    inputs = torch.randn(3, 7, 24, dtype=torch.float64)
    return model, "classify", inputs, torch.randint(0, 5, (3,))


def doubled(module: nn.Module, args: Any, out: Any) -> Any:
    return out * 2 if isinstance(module, nn.Tanh) else None


def change(layers: nn.ModuleList, habit: str, step: int) -> Any:
    """What the loop does to blocks before a step; what undoes it, if anything has to."""
    for layer in layers:
        if habit == "set":
            layer.scale = 1.0 + step
        if habit == "set in config":
            layer.config.scale = 1.0 + step
        if habit == "replace" and step == 1:
            layer.act = nn.ReLU()
        if habit == "forward" and step == 1:
            layer.act.forward = torch.relu
        if habit == "hook" and step == 1:
            layer.act.register_forward_hook(doubled)
    if habit == "hook everywhere" and step == 1:
        return nn.modules.module.register_module_forward_hook(doubled)
    return None


def fickle(habit: str, change_to: str = "") -> tuple[dict[str, str], int, list[float], list[float]]:
    def use(objective: Objective, inputs: Tensor, targets: Tensor) -> list[float]:
        layers, found, undo = objective.model.layers, [], []
        for layer in layers:  # planning has called them
            layer.calls, layer.config.calls = 0, 0
            layer.times.zero_()
            layer.cache.clear()
        try:
            for step in range(3):
                undo.append(change(layers, change_to, step))
                loss = objective(inputs, targets)
                loss.backward()
                up = layers[0].up.weight
                found += [float(loss.detach()), float(up.grad.sum()) if up.grad is not None else 0]
                found.append(float(layers[1].times))
                objective.zero_grad()
        finally:
            for handle in filter(None, undo):
                handle.remove()
        return found

    programs, alone, split = twice(lambda: fickles(habit), use)
    return programs.refused, programs.num_made, alone, split


@pytest.mark.table(keep=5)
@pytest.mark.parametrize(
    ("habit", "why"),
    [
        ("counts", "it keeps something of one call for the next"),
        ("counts elsewhere", "it keeps something of one call for the next"),
        ("new buffer", "it keeps something of one call for the next"),
        ("cache", "it keeps something of one call for the next"),
        ("sends", "is waited for by other code"),
        ("in place", "it changes its input in place"),
        ("looks", "DataDependent"),
        ("draws", "draws from torch's generator"),
        ("watches", "it uses register_hook"),
        ("view", "it returns its input, or a view of it"),
    ],
)
def test_a_block_that_no_program_can_stand_for_runs_in_the_view(
    ranks: Any, habit: str, why: str
) -> None:
    for refused, num_made, alone, split in ranks(2, fickle, habit, timeout=LONG_S):
        assert num_made == 0
        assert set(refused) == {"layers.0", "layers.1"}
        assert all(why in reason for reason in refused.values()), refused
        assert split == alone


@pytest.mark.parametrize("change_to", ["set", "set in config"])
def test_a_setting_that_changes_is_another_program(ranks: Any, change_to: str) -> None:
    for refused, num_made, alone, split in ranks(2, fickle, "", change_to, timeout=LONG_S):
        # A configuration that each block has for itself is another one.
        assert (refused, num_made) == ({}, 6)
        assert split == alone
        assert len(set(split[::3])) == 3


@pytest.mark.parametrize(
    ("change_to", "why"),
    [
        ("replace", "its modules are not those that it had"),
        ("forward", "its modules are not those that it had"),
        ("hook", "there are hooks on act"),
        ("hook everywhere", "there are hooks on all modules"),
    ],
)
def test_what_is_put_into_a_block_later_takes_part(ranks: Any, change_to: str, why: str) -> None:
    for refused, num_made, alone, split in ranks(2, fickle, "", change_to, timeout=LONG_S):
        assert num_made == 2
        assert refused == {"layers.0": why, "layers.1": why}
        assert split == alone
        assert split[0] != split[3] == split[6]


def outlived() -> list[int]:
    """How many of the tensors that blocks were given are there after a step, in both ways."""

    def use(objective: Objective, inputs: Tensor, targets: Tensor) -> list[int]:
        given: list[Any] = []
        for layer in objective.model.layers:
            layer.register_forward_pre_hook(lambda _, args: given.append(weakref.ref(args[0])))
        for _ in range(2):
            objective(inputs, targets).backward()
        objective.zero_grad()
        gc.collect()
        assert len(given) == 4
        return [sum(one() is not None for one in given)]

    programs, alone, split = twice(fickles, use)
    assert programs.num_made == 2
    return alone + split


def test_a_program_keeps_nothing_of_what_it_was_given(ranks: Any) -> None:
    assert ranks(2, outlived, timeout=LONG_S) == [[0, 0], [0, 0]]


def disagreeing() -> tuple[dict[str, str], int, bool]:
    """The compiler fails on one rank only; whether the loss is that of the view."""

    def backend(trace: Any, check: Any, when_ready: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("no compiler here")
        return as_written(trace, check, when_ready)

    programs, alone, split = twice(lambda: build("llama"), first_loss, backend=backend)
    return programs.refused, programs.num_made, alone == split


def test_ranks_have_a_program_together_or_not_at_all(ranks: Any) -> None:
    other, own = ranks(2, disagreeing, timeout=LONG_S)
    assert {*other[0].values()} == {"it cannot be one on another rank"}
    assert {*own[0].values()} == {"RuntimeError: no compiler here"}
    assert other[1:] == own[1:] == (0, True)


class OneOfTwo(nn.Module):
    """Blocks of one class, of which one has a factor and the other a shift of the same shape."""

    def __init__(self, scales: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
        self.register_parameter("factor", nn.Parameter(torch.full((24,), 2.0)) if scales else None)
        self.register_parameter("shift", None if scales else nn.Parameter(torch.full((24,), 3.0)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x * self.factor if self.factor is not None else x + self.shift


def one_of_two() -> tuple[list[float], list[float], int]:
    def make() -> tuple[nn.Module, str, Tensor, Tensor]:
        model, *rest = fickles()
        model.layers = nn.ModuleList(OneOfTwo(bool(i)) for i in range(2)).double()
        return model, *rest

    programs, alone, split = twice(make, first_loss)
    return alone, split, programs.num_made


def test_blocks_with_other_parameters_have_other_programs(ranks: Any) -> None:
    for alone, split, num_made in ranks(2, one_of_two, timeout=LONG_S):
        assert alone == split
        assert num_made == 2


def keyed(
    sp: bool, functional: bool, shares: bool = False, again: bool = False
) -> tuple[list[float], list[float], int]:
    """Losses with dropout of three steps, whose samples differ: in the view, and as programs."""
    losses: list[list[float]] = []
    for as_program in (False, True):
        torch.manual_seed(1)
        inputs, targets = tokens(131, 11)
        if functional:
            model, _, inputs, targets = hf_gpt2(pdrop=0.2)
            model = model.double()
        else:
            model = Bert(131, 24, 2, 4, max_seq=16, dropout=0.3).double()
        if shares:  # one module in both blocks
            first, second = (m for m in model.modules() if type(m) is type(model.layers[0]))
            name = next(n for n, m in first.named_modules() if isinstance(m, nn.Dropout))
            second.set_submodule(name, first.get_submodule(name))
        objective = Objective(model, TASKS["causal_lm" if functional else "masked_lm"].loss)
        randomness = Randomness(3)
        plan = plan_tensor(objective, 2, (inputs, targets))
        apply_keyed_dropout(model, randomness)
        view = GlobalView(mesh(1, 2), sp)
        use_randomness(view, randomness)
        cut_layers(view, objective, plan)
        programs = Programs(view, randomness, as_written)
        if as_program:
            programs.add(blocks_of(model))
        if again:
            for block in blocks_of(model).values():
                block.forward = functools.partial(
                    checkpoint, block.forward, use_reentrant=False,
                    context_fn=lambda view=view, r=randomness: (nullcontext(), both(view, r)),
                )  # fmt: skip
        enter_view(view, objective)
        losses.append([])
        for step in range(3):
            randomness.begin(step, torch.tensor([step, step + 5]))
            loss = objective(inputs, targets)
            loss.backward()
            losses[-1].append(float(loss.detach()))
        norm = sum(float(p.grad.square().sum()) for p in objective.parameters())
        losses[-1].append(norm)
    assert shares == bool(programs.refused), programs.refused
    return losses[0], losses[1], programs.num_made


@contextmanager
def both(view: GlobalView, randomness: Randomness) -> Iterator[None]:
    with view.active(), randomness.replay()[1]:
        yield


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("functional", [False, True])
def test_dropout_of_programs_is_that_of_the_view(ranks: Any, sp: bool, functional: bool) -> None:
    """One program serves every block and every step, and yet each drops what is its own."""
    for alone, split, num_made in ranks(2, keyed, sp, functional, timeout=LONG_S):
        assert split == alone
        assert len(set(split)) == len(split)
        assert num_made == (2 if functional else 1)  # transformers numbers its blocks


def compiled_steps(layout: str) -> tuple[list[float], list[float], list[str]]:
    """Three steps of a Llama arranged with the compiler and without, on the same ranks."""
    losses: list[list[float]] = []
    for compiles in (False, True):
        model, task, inputs, targets = build("llama")
        wanted = Layout.parse(layout).replace(compile=compiles)
        built = arrange(
            Objective(model, TASKS[task].loss), wanted,
            build_mesh(read_rank_env(), wanted, torch.device("cpu")),
            model=model, loss=TASKS[task].loss, example=(inputs,), randomness=Randomness(1),
        )  # fmt: skip
        optimizer = torch.optim.SGD(built.objective.parameters(), 0.1)
        losses.append([])
        for _ in range(3):
            loss = built.objective(inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))
    assert built.programs is not None
    return losses[0], losses[1], built.uncompiled()


@pytest.mark.slow
def test_a_compiled_split_model_trains_the_same(ranks: Any) -> None:
    """With torch's compiler, and blocks computed again in backward."""
    for alone, compiled, left in ranks(
        2, compiled_steps, "tp=2,sp=true,recompute=full", timeout=LONG_S
    ):
        assert left == []
        assert compiled == pytest.approx(alone, rel=1e-9)
        assert len(set(compiled)) == 3


def test_dropout_of_programs_that_are_computed_again(ranks: Any) -> None:
    for alone, split, num_made in ranks(2, keyed, True, False, False, True, timeout=LONG_S):
        assert split == alone
        assert num_made == 1


def test_blocks_that_share_dropout_run_in_the_view(ranks: Any) -> None:
    """How often it was called is nothing that one of them knows."""
    for alone, split, num_made in ranks(2, keyed, False, False, True, timeout=LONG_S):
        assert split == alone
        assert num_made == 0


class Counts(nn.Module):
    """Keeps things in Python: a number of calls, a list, and a mask made at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.calls, self.seen, self.mask = 0, [1.0], None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(2.0)
        self.size = len(x)
        if self.mask is None:
            self.mask = torch.ones(4)
        return self.down(self.up(x * self.mask).relu()) / self.calls


def test_planning_leaves_what_a_model_keeps() -> None:
    model = Counts()
    seen = model.seen
    assert plan_tensor(model, 2, (torch.zeros(2, 4),)).layers
    assert (model.calls, model.mask, hasattr(model, "size")) == (0, None, False)
    assert model.seen is seen
    assert seen == [1.0]
