"""Pipelines of models that do odd things with what their modules return: the same numbers, or no cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.models.build import build_model
from ridgeline.parallel.apply import arrange
from ridgeline.parallel.gather import full_gradients
from ridgeline.parallel.mesh import build_mesh
from ridgeline.parallel.pipeline import build_stages, plan_stages
from ridgeline.parallel.pipeline.prove import tell_difference
from ridgeline.train.objective import Objective

WIDTH = 8


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Levels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for layer in self.layers:
            x = layer(x).tanh()
            found.append(x)
        return found


class Nested(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.last = shared, linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shared(x))


class Keeps(nn.Module):
    """Returns what it also keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = linear(), None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.layer(x)
        return self.kept


class Pair(nn.Module):
    """Two things in training, one in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor) -> Any:
        return (self.a(x), self.b(x)) if self.training else self.a(x)


class Odd(nn.Module):
    """Modules, and a forward that is given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second, self.head = linear(), linear(), linear()
        self.middle = nn.Sequential(linear(), linear(), linear(), linear())
        self.levels, self.keeps, self.pair = Levels(), Keeps(), Pair()
        self.shared = linear()
        self.nested = Nested(self.shared)
        self.before = nn.Sequential(nn.ReLU(inplace=True), linear())
        self.flat = nn.Flatten()
        self.unflatten = nn.Unflatten(1, (2, WIDTH // 2))
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, x: Tensor) -> Any:
        return FORWARDS[self.kind](self, x)


def popped(m: Odd, x: Tensor) -> Tensor:
    levels = m.levels(x)
    y = m.middle(levels.pop())
    return m.head(y + levels[-1])


def reversed_(m: Odd, x: Tensor) -> Tensor:
    levels = m.levels(x)
    levels.reverse()
    return m.head(m.middle(levels[0]) + levels[2])


def inserted(m: Odd, x: Tensor) -> Tensor:
    levels = m.levels(x)
    levels.insert(0, x)
    return m.head(m.middle(levels[3]) + levels[1])


def through_data(m: Odd, x: Tensor) -> Tensor:
    f = m.first(x)
    f.data.mul_(2)
    return m.head(m.middle(m.second(f)) + f)


def through_detach(m: Odd, x: Tensor) -> Tensor:
    f = m.first(x)
    with torch.no_grad():
        f.detach().mul_(2)
    return m.head(m.middle(m.second(f)) + f)


def two_views(m: Odd, x: Tensor) -> Tensor:
    f = m.first(x)
    return m.head(m.middle(m.before(f.view(-1, WIDTH))) + f)


def changed_later(m: Odd, x: Tensor) -> Tensor:
    f = m.first(x)
    v = m.unflatten(f)
    f += m.middle(m.second(x))
    return m.head(v.flatten(1) + f)


def through_a_view(m: Odd, x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], WIDTH)
    out[:, :4].copy_(m.first(x)[:, :4])
    return m.head(m.middle(m.second(x)) + out)


def with_a_weight(m: Odd, x: Tensor) -> Tensor:
    f = m.first(x) * m.gain.to(x.dtype)
    return m.head(m.middle(m.second(f)) + f)


def drawn(m: Odd, x: Tensor) -> Tensor:
    f = m.first(x)
    k = f * (torch.rand(f.shape, dtype=f.dtype) > 0.5)
    return m.head(m.middle(m.second(k)) + k)


def given_twice(m: Odd, x: Tensor) -> Tensor:
    """The same tensor to a module that gives it back as it is, and to one that is called again."""
    f = m.second(m.first(x))
    v = m.flat(f)
    return m.head(v + m.middle(m.head(f)))


def watched(m: Odd, x: Tensor) -> Tensor:
    f = m.first(x)
    if f.requires_grad:
        f.register_hook(lambda gradient: 2 * gradient)
    return m.head(m.middle(m.second(f)) + f)


def nested(m: Odd, x: Tensor) -> Tensor:
    k = m.shared(m.nested(x))
    return m.head(m.middle(k) + k)


def gated(m: Odd, x: Tensor) -> Tensor:
    f = m.first(x)
    k = f * torch.sigmoid(f) + (f + f)
    return m.head(m.middle(m.second(f)) + k)


def detached(m: Odd, x: Tensor) -> Tensor:
    f = m.first(x)
    return m.head(m.middle(m.second(f)) + f.detach())


def beside(m: Odd, x: Tensor) -> dict[str, Tensor]:
    f = m.first(x)
    return {"logits": m.head(m.middle(m.second(f))), "features": f}


def many(m: Odd, x: Tensor) -> Tensor:
    parts = [m.first(x) + number for number in range(7)]
    joined = sum(m.second(part) for part in parts)
    return m.head(m.middle(joined) + sum(parts))


def deep(m: Odd, x: Tensor) -> Tensor:
    f = m.first(x)
    for _ in range(1500):
        f = f + 1e-4
    return m.head(m.middle(m.second(f)) + f)


def kept(m: Odd, x: Tensor) -> Tensor:
    y = m.middle(m.keeps(x))
    return m.head(y + m.keeps.kept)


def pair(m: Odd, x: Tensor) -> Tensor:
    found = m.pair(x)
    a = found[0] if m.training else found
    return m.head(m.middle(m.second(a)) + a)


def in_the_graph(m: Odd, x: Tensor) -> Tensor:
    f = m.first(x)
    if f.grad_fn is not None:
        f.grad_fn.register_prehook(lambda gradients: (2 * gradients[0],))
    return m.head(m.middle(m.second(f)) + f)


FORWARDS: dict[str, Callable[[Odd, Tensor], Any]] = {
    f.__name__: f
    for f in (
        *(popped, reversed_, inserted, through_data, through_detach, two_views, changed_later),
        *(
            through_a_view,
            with_a_weight,
            drawn,
            watched,
            nested,
            gated,
            detached,
            beside,
            many,
            deep,
            given_twice,
        ),
        *(kept, pair, in_the_graph),
    )
}
CAUGHT = {"in_the_graph", "kept", "pair"}
"""What the forward pass does not show; such plans are tried, and not believed."""


def build(kind: str) -> Odd:
    torch.manual_seed(3)
    return Odd(kind).double()


def leaf(outputs: Any) -> Tensor:
    return outputs["logits"] if isinstance(outputs, dict) else outputs


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("kind", [kind for kind in FORWARDS if kind not in CAUGHT])
def test_stages_compute_what_the_model_does(kind: str, num_stages: int) -> None:
    model = build(kind)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    try:
        plan = plan_stages(model, num_stages, x)
    except UsageError:
        return  # no such number of stages is right
    for training in (True, False):
        torch.manual_seed(5)
        expected = leaf(model.train(training)(x))
        stages = [stage.train(training) for stage in build_stages(model, plan, range(num_stages))]
        torch.manual_seed(5)
        sent: Any = ()
        for stage in stages:
            sent = stage(*sent, inputs=x)
        torch.testing.assert_close(leaf(sent), expected, rtol=1e-12, atol=1e-12)
        parameters = list(model.parameters())
        pairs = zip(
            torch.autograd.grad(leaf(sent).square().sum(), parameters, allow_unused=True),
            torch.autograd.grad(expected.square().sum(), parameters, allow_unused=True),
            strict=True,
        )
        for found, wanted in pairs:
            assert (found is None) == (wanted is None)
            if wanted is not None:
                torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    assert not tell_difference(model, plan, x, gradients=True)


def test_what_is_sound_is_cut_evenly() -> None:
    """What is refused is refused where it has to be."""
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    for kind in ("popped", "reversed_", "inserted", "nested", "gated", "detached", "beside"):
        plan = plan_stages(build(kind), 2, x)
        costs = [stage.cost for stage in plan.stages]
        assert max(costs) < 0.6 * sum(costs), kind


@pytest.mark.parametrize("kind", ["unet2d", *(kind for kind in FORWARDS if kind not in CAUGHT)])
def test_wherever_it_is_cut(kind: str) -> None:
    """At places that chance takes, as measured costs do."""
    if kind == "unet2d":
        model, x = build_model(kind, width=4, depth=3, norm="group"), torch.randn(2, 3, 16, 16)
    else:
        model, x = build(kind), torch.randn(3, WIDTH, dtype=torch.float64)
    leaves = [path for path, module in model.named_modules() if not list(module.children())]
    chance, seen = random.Random(2), set()
    for _ in range(24 if kind == "unet2d" else 6):
        costs = {path: chance.random() ** 3 for path in leaves}
        try:
            plan = plan_stages(model, chance.choice([2, 3, 4]), x, costs)
        except UsageError:
            continue
        places = tuple(cut.path for cut in plan.cuts)
        if places not in seen:
            seen.add(places)
            assert not tell_difference(model, plan, x, gradients=True), places
    assert kind != "unet2d" or len(seen) > 8


@pytest.mark.parametrize("kind", sorted(CAUGHT))
def test_what_cannot_be_seen_is_found_out_by_trying(kind: str) -> None:
    model = build(kind)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert tell_difference(model, plan_stages(model, 2, x), x, gradients=True)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert model.keeps.kept is None


def step(kind: str, sizes: list[int]) -> tuple[list[str], dict[str, Tensor], float] | str:
    """Through the pipeline of a layout, from microbatches of these sizes."""
    layout = Layout.parse("pp=2,microbatches=4")
    mesh = build_mesh(read_rank_env(), layout, torch.device("cpu"))
    model = build(kind)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return F.mse_loss(leaf(outputs), targets)

    x, y, counts, weights = samples(sizes)
    try:
        built = arrange(
            Objective(model, loss),
            layout,
            mesh,
            model=model,
            loss=loss,
            example=(x[0][:1].repeat(2, 1),),
        )
    except UsageError as error:
        return str(error)
    built.train(True)
    assert built.staged is not None
    total = built.staged.forward_backward(x, y, counts, weights, lambda index: None)
    built.finish_gradients()
    return built.notes, full_gradients(built), float(total)


def samples(sizes: list[int]) -> tuple[list[Tensor], list[Tensor], tuple[int, ...], list[float]]:
    generator = torch.Generator().manual_seed(4)
    x = [torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in sizes]
    y = [torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in sizes]
    return x, y, tuple(sizes), [n / sum(sizes) for n in sizes]


@pytest.mark.parametrize("kind", ["gated", "detached", "beside", "popped", "in_the_graph"])
@pytest.mark.parametrize("sizes", [[3, 3, 3, 1], [1, 3, 2, 2]])
def test_uneven_microbatches_and_what_has_no_gradient(
    ranks: Any, kind: str, sizes: list[int]
) -> None:
    model = build(kind)
    x, y, _, weights = samples(sizes)
    total = sum(
        weight * F.mse_loss(leaf(model(a)), b) for a, b, weight in zip(x, y, weights, strict=True)
    )
    total.backward()
    notes, gradients, found = ranks(2, step, kind, sizes)[0]
    assert found == pytest.approx(float(total.detach()), rel=1e-12)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(
                gradients[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name
            )
    assert any("what modules returned stays in its stage" in note for note in notes) == (
        kind == "in_the_graph"
    )


@pytest.mark.parametrize("kind", ["kept", "pair"])
def test_what_no_cut_can_give_is_refused_in_a_sentence(ranks: Any, kind: str) -> None:
    told = ranks(2, step, kind, [2, 2, 2, 2])
    assert all("keeps aside does not reach other stages; use pp=1" in text for text in told)
