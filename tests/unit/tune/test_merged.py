"""Linear layers that share an input, as one product: the same numbers, fewer products."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.models.build import build_model
from ridgeline.parallel.apply import arrange
from ridgeline.parallel.blocks import find_blocks
from ridgeline.parallel.float8 import apply_float8, build_scaling, linear
from ridgeline.parallel.float8_merged import linears
from ridgeline.parallel.merged import (
    MergedFloat8Linear,
    MergedLinear,
    apply_merge,
    require_mergeable,
    try_merge,
)
from ridgeline.parallel.mesh import build_mesh, close_mesh
from ridgeline.parallel.recompute import apply_recompute
from ridgeline.parallel.siblings import Found, find_siblings
from ridgeline.tuning import TuneConfig

PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.addmm_.")


class Products(TorchDispatchMode):
    """Counts matrix products."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += str(func).startswith(PRODUCTS)
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    """As in `transformers`: three layers with biases, the input by name, views of the results."""

    def __init__(self, changes: str = "") -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, n) for n in (32, 16, 16))
        self.o_proj, self.changes, self.with_values = nn.Linear(32, 32), changes, True

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        shape = (*hidden_states.shape[:-1], -1, 8)
        q = self.q_proj(hidden_states)
        if self.changes == "output":
            q += 1
        if self.changes == "input":
            hidden_states.mul_(2)
        if self.changes == "view":
            q = q.view(hidden_states.shape[0], -1).view_as(q)
        k = self.k_proj(hidden_states)
        v = self.v_proj(hidden_states) if self.with_values else k
        q, k, v = (t.view(shape).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, changes: str = "") -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), Attention(changes)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(hidden_states=self.norm(x))


def stack(changes: str = "") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(changes) for _ in range(2)))


def llama() -> nn.Module:
    torch.manual_seed(0)
    return build_model("llama", width=32, depth=2, heads=4, kv_heads=2, ffn=64, vocab=64)


def hugging_face() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        vocab_size=64, num_key_value_heads=2, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


BUILD = {"llama": llama, "transformers": hugging_face, "stack": stack}
NUM_MERGED = {"llama": 4, "transformers": 4, "stack": 2}


def input_of(kind: str) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 16, 32) if kind == "stack" else torch.randint(0, 64, (2, 16))


def look(model: nn.Module, x: Tensor) -> Found:
    return find_siblings(model, list(find_blocks(model)), (x,), try_merge)


def results(model: nn.Module, x: Tensor, call: Any = None, narrow: bool = False) -> list[Any]:
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        out = (model if call is None else call)(x)
    out = (out if isinstance(out, Tensor) else out.logits).float()
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


def compare(found: list[Any], true: list[Any], bound: float = 1e-6) -> None:
    for one, two in zip(found, true, strict=True):
        assert one is not None
        assert one.dtype is two.dtype
        # What is zero but for rounding (a bias that softmax does not see) is held against the rest.
        scale = max(float(two.abs().max()), 1e-3 * float(true[0].abs().max()))
        assert float((one - two).abs().max()) <= bound * scale


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("narrow", [False, True])
def test_loss_and_gradients_are_the_same(kind: str, recompute: str, narrow: bool) -> None:
    model, x = BUILD[kind](), input_of(kind)
    other = copy.deepcopy(model)
    found = look(model, x)
    assert len(apply_merge(model, found.groups)) == NUM_MERGED[kind]
    for one in (model, other):
        if recompute != "none":
            apply_recompute(one, recompute)
    with Products() as merged:
        values = results(model, x, narrow=narrow)
    with Products() as apart:
        true = results(other, x, narrow=narrow)
    compare(values, true, 2e-2 if narrow else 2e-6)
    # Three become one, and two; in backward only the sums go.
    per_model = {"llama": 2 * (2 + 1), "transformers": 2 * (2 + 1), "stack": 2 * 2}[kind]
    assert apart.num - merged.num == per_model * (2 if recompute == "full" else 1)
    assert list(model.state_dict()) == list(other.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in other.named_modules()]


@pytest.mark.table(keep=6)
@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize(
    ("recompute", "narrow"),
    [("none", False), ("none", True), ("selective", False), ("full", True)],
)
def test_compiled_it_is_one_graph_with_fewer_products(
    kind: str, recompute: str, narrow: bool
) -> None:
    model, x = BUILD[kind](), input_of(kind)
    other = copy.deepcopy(model)
    found = look(model, x)
    apply_merge(model, found.groups)
    true = results(other, x, narrow=narrow)
    if recompute != "none":
        apply_recompute(model, recompute)
    counts: list[int] = []

    def count(graph: Any, _: Any) -> Any:
        counts.append(sum(str(n.target).startswith(PRODUCTS) for n in graph.graph.nodes))
        return make_boxed_func(graph)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=count, bw_compiler=count)
    values = results(model, x, torch.compile(model, fullgraph=True, backend=backend), narrow)
    compare(values, true, 2e-2 if narrow else 2e-6)
    # Of a block: qkv, o, gate and up, down; of `stack` only the first two; and the head.
    forward = {"llama": 2 * 4 + 1, "transformers": 2 * 4 + 1, "stack": 2 * 2}[kind]
    assert len(counts) == 2
    assert counts[0] == forward
    # Backward goes layer by layer.
    layers = {"llama": 2 * 7 + 1, "transformers": 2 * 7 + 1, "stack": 2 * 4}[kind]
    if recompute != "full":
        assert counts[1] == 2 * layers
    for module in model.modules():
        assert "_ridgeline_products" not in vars(module)


def test_products_are_found_and_the_model_is_left_as_it_was() -> None:
    model, x = stack(), input_of("stack")
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    kinds = [type(m) for m in model.modules()]
    generator = torch.get_rng_state()
    found = look(model, x)
    assert [g.layers for g in found.groups] == [
        tuple(f"{i}.attention.{n}_proj" for n in "qkv") for i in range(2)
    ]
    assert [(g.around, g.place) for g in found.groups] == [
        (f"{i}.attention", "hidden_states") for i in range(2)
    ]
    assert found.refused == ()
    assert kinds == [type(m) for m in model.modules()]
    assert {name: sorted(vars(m)) for name, m in model.named_modules()} == {
        name: sorted(values) for name, values in before.items()
    }
    assert torch.equal(generator, torch.get_rng_state())


@pytest.mark.parametrize("changes", ["output", "view"])
def test_code_that_needs_each_alone_is_left_alone(changes: str) -> None:
    model = stack(changes)
    found = look(model, input_of("stack"))
    assert found.groups == ()
    assert found.refused == ("Attention",)
    model(input_of("stack"))


def test_an_input_changed_between_two_layers_is_another() -> None:
    found = look(stack("input"), input_of("stack"))
    assert [g.layers for g in found.groups] == [
        tuple(f"{i}.attention.{n}_proj" for n in "kv") for i in range(2)
    ]
    # And in a model that did not do it when it was looked at.
    model, x = stack(), input_of("stack")
    apply_merge(model, look(model, x).groups)
    other = stack("input")
    for layer in model:
        layer.attention.changes = "input"
    with torch.no_grad():
        assert torch.allclose(model(x), other(x), atol=1e-6)


def test_a_layer_that_is_not_called_has_no_gradient_and_nothing_stays() -> None:
    model, x = stack(), input_of("stack")
    apply_merge(model, look(model, x).groups)
    other = stack()
    for one in (model, other):
        one[0].attention.with_values = False
        one(x).sum().backward()
    assert model[0].attention.v_proj.weight.grad is None
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        assert one.grad is None or torch.allclose(one.grad, two.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_no_tensor_outlives_the_step(with_gradients: bool) -> None:
    """Not the input of the layers, nor a product that nobody took."""
    model, x = stack(), input_of("stack")
    apply_merge(model, look(model, x).groups)
    model[0].attention.with_values = False
    seen: list[Any] = []
    group = model[0].attention._merged_groups[0]
    plain = type(group).compute

    def compute(self: Any, given: Tensor) -> Any:
        made = plain(self, given)
        seen.extend(weakref.ref(t) for t in (given, *made))
        return made

    type(group).compute = compute
    gc.disable()  # what only the collector would find is too late
    try:
        with torch.set_grad_enabled(with_gradients):
            out = model(x)
        if with_gradients:
            out.sum().backward()
        del out
        assert len(seen) == 2 * 4
        assert [ref for ref in seen if ref() is not None and ref() is not x] == []
    finally:
        gc.enable()
        type(group).compute = plain


class Odd(nn.Linear):
    pass


class Pair(nn.Module):
    """Two layers that read the argument of the module around them."""

    def __init__(self, left: nn.Module, right: nn.Module, third: nn.Module | None = None) -> None:
        super().__init__()
        self.left, self.right, self.third = left, right, third

    def forward(self, x: Tensor) -> Tensor:
        out = self.left(x) + self.right(x)
        return out if self.third is None else out + self.third(x)


def test_what_is_no_plain_product_is_left_alone() -> None:
    x = torch.randn(2, 4, 16)
    shared = nn.Linear(16, 16)
    tied = nn.Linear(16, 16)
    tied.weight = shared.weight
    hooked = nn.Linear(16, 16)
    hooked.register_forward_hook(lambda *_: None)
    for left, right in (
        (nn.Linear(16, 16), Odd(16, 16)),
        (shared, tied),
        (shared, shared),
        (nn.Linear(16, 16), hooked),
        (nn.Linear(16, 16), nn.Linear(16, 16, bias=False)),
        (nn.Linear(16, 12), nn.Linear(16, 12)),
    ):
        model = nn.Sequential(Pair(left, right))
        assert find_siblings(model, ["0"], (x,), try_merge).groups == ()
    some = Pair(nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 16))
    found = find_siblings(nn.Sequential(some), ["0"], (x,), try_merge)
    assert [g.layers for g in found.groups] == [("0.left", "0.third")]
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    assert look(encoder, x) == Found(())


def test_a_layer_called_elsewhere_or_with_another_input_computes_its_own() -> None:
    model, x = stack(), input_of("stack")
    apply_merge(model, look(model, x).groups)
    layer, plain = model[0].attention.k_proj, stack()[0].attention.k_proj
    assert type(layer) is MergedLinear
    assert torch.equal(layer(x), plain(x))
    with torch.inference_mode():
        assert torch.allclose(model(x), stack()(x), atol=1e-6)


class Sometimes(Pair):
    """Leaves the second layer out where it is told to."""

    skips = False

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if self.skips else self.left(x) + self.right(x)


def test_a_product_that_was_not_taken_is_never_taken_later() -> None:
    """The caller's own tensor carries nothing: it may be there in the next step, with other weights."""
    model, x = Sometimes(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(2, 4, 16)
    apply_merge(model, find_siblings(model, [""], (x,), try_merge).groups)
    model.skips = True
    with torch.no_grad():
        model(x)
        for parameter in model.parameters():
            parameter.zero_()
    assert vars(x) == {}
    out = model.right(x)
    assert torch.equal(out, torch.zeros_like(out))
    assert out.requires_grad


def test_copies_compute_with_their_own_layers() -> None:
    model, x = stack(), input_of("stack")
    apply_merge(model, look(model, x).groups)
    true = model(x).detach()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.allclose(copied(x), true, atol=1e-6)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        assert torch.equal(copied(x), x)
        assert torch.equal(model(x), true)


class Looks(nn.Module):
    """Cannot run on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = stack()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) if bool(x.sum() > -1e9) else x


def test_a_model_that_looks_at_values_is_watched_for_real() -> None:
    model = Looks()
    found = look(model, input_of("stack"))
    assert len(found.groups) == 2
    assert model.calls == 0


def test_it_is_a_setting_of_a_run() -> None:
    mesh = build_mesh(read_rank_env({}), Layout(), torch.device("cpu"))
    x = input_of("stack")
    built = arrange(stack(), Layout(), mesh, example=(x,), tune=TuneConfig(merge=True))
    assert built.notes == ["6 linear layers that share inputs are 2 products"]
    assert torch.allclose(built.objective(x), stack()(x), atol=1e-6)
    with pytest.raises(UsageError, match="give an example input"):
        arrange(stack(), Layout(), mesh, tune=TuneConfig(merge=True))
    with pytest.raises(UsageError, match="there are none"):
        arrange(nn.Linear(32, 8), Layout(), mesh, example=(x,), tune=TuneConfig(merge=True))
    with pytest.raises(UsageError, match="Attention needs each product alone"):
        arrange(stack("view"), Layout(), mesh, example=(x,), tune=TuneConfig(merge=True))
    # Without repeated blocks the whole model is one.
    pair = Pair(nn.Linear(32, 8), nn.Linear(32, 8))
    built = arrange(pair, Layout(), mesh, example=(x,), tune=TuneConfig(merge=True))
    assert type(pair.left) is MergedLinear
    close_mesh(mesh)


def test_layouts_that_cut_tensors_are_refused() -> None:
    for words in ("tp=2", "cp=2", "spatial=2x1"):
        with pytest.raises(UsageError, match="do not compose") as error:
            require_mergeable(Layout.parse(words))
        assert "\n" not in str(error.value)
    for words in ("dp=2", "pp=2", "dp=2,zero=3"):
        require_mergeable(Layout.parse(words))
    assert not TuneConfig().merge


def in_fp8(model: nn.Module, x: Tensor, scaling: str, merge: bool) -> nn.Module:
    made = copy.deepcopy(model)
    found = look(made, x)
    apply_float8(made, find_blocks(made), TuneConfig(fp8_scaling=scaling))
    if merge:
        apply_merge(made, found.groups)
    return made


@pytest.mark.parametrize("scaling", ["row", "mixed", "tensor", "careful"])
@pytest.mark.parametrize("kind", ["llama", "stack"])
def test_in_fp8_it_rounds_no_worse(scaling: str, kind: str) -> None:
    """As near to the exact gradients as layers apart are: each in the median of several models, because
    another scale is another throw of the same dice, up or down by a fifth."""
    ratios: list[list[float]] = []
    for seed in range(7):
        exact, x = BUILD[kind](), input_of(kind)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in exact.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.1)
        model, apart = (in_fp8(exact, x, scaling, merge) for merge in (True, False))
        num_merged = sum(isinstance(m, MergedFloat8Linear) for m in model.modules())
        assert num_merged == {"llama": 10, "stack": 6}[kind]
        assert list(model.state_dict()) == list(exact.state_dict())
        values, beside, true = (results(m, x) for m in (model, apart, exact))
        if scaling == "row":  # each row has the scale that it has apart
            assert torch.allclose(values[0], beside[0], rtol=1e-5, atol=1e-5)
        pairs = zip(values, beside, true, strict=True)
        ratios.append([float((a - c).norm() / ((b - c).norm() + 1e-9)) for a, b, c in pairs])
    assert torch.tensor(ratios).median(0).values.max() < 1.3


@pytest.mark.table(keep=4)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("compiled", [False, True])
def test_in_fp8_it_compiles_and_is_recomputed(recompute: str, compiled: bool) -> None:
    exact, x = llama(), input_of("llama")
    true = results(in_fp8(exact, x, "mixed", True), x)
    model = in_fp8(exact, x, "mixed", True)
    if recompute != "none":
        apply_recompute(model, recompute)
    torch._dynamo.reset()
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else None
    compare(results(model, x, call), true, 1e-5)


@pytest.mark.parametrize("scaling", ["row", "mixed", "tensor"])
@pytest.mark.parametrize(("gradients", "apart"), [("e5m2", 1e-4), ("e4m3", 1e-3)])
def test_small_gradients_keep_their_digits_beside_large_ones(
    scaling: str, gradients: str, apart: float
) -> None:
    torch.manual_seed(0)
    kind = build_scaling(TuneConfig(fp8_scaling=scaling, fp8_gradients=gradients))
    x, weights = torch.randn(64, 64), [torch.randn(64, 64) * 0.1 for _ in range(2)]
    grads = [torch.randn(64, 64), torch.randn(64, 64) * apart]
    alone, *both = (w.clone().requires_grad_() for w in (weights[1], *weights))
    linear(x, alone, None, kind).backward(grads[1])
    torch.autograd.backward(linears(x, both, [], kind), grads)
    exact = grads[1].t() @ x
    assert (both[1].grad - exact).norm() < 1.05 * (alone.grad - exact).norm()


def test_fp8_layers_that_are_not_called_have_no_gradient() -> None:
    model, x = stack(), input_of("stack")
    found = look(model, x)
    apply_float8(model, find_blocks(model), TuneConfig())
    apply_merge(model, found.groups)
    model[0].attention.with_values = False
    model(x).sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert without == ["0.attention.v_proj.weight", "0.attention.v_proj.bias"]
