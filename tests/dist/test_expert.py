"""Expert parallelism: modules that know nothing of it, in every layout the same as on one device."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline import rundir
from ridgeline.config import RunConfig, dump_config, load_config
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.parallel.expert import apply_experts, find_experts
from ridgeline.parallel.expert.exchange import Counts, exchange, tie
from ridgeline.parallel.mesh import build_mesh
from ridgeline.rundir import RunDir
from ridgeline.train.run import run_training
from ridgeline.train.setup import build_training
from ridgeline.verify.run import Verifier

WIDTH = 12


class FeedForward(nn.Module):
    def __init__(self, out: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Routed(nn.Module):
    """Chooses two of `num` experts for each row; the last is never chosen, the first one often."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, num)
        with torch.no_grad():
            self.gate.bias[-1], self.gate.bias[0] = -1e3, 3.0

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate(x).softmax(-1).topk(2, dim=-1)


class Listed(Routed):
    """A loop over those that have rows; with `all_called` over all of them, with none for some."""

    def __init__(self, num: int, all_called: bool = False) -> None:
        super().__init__(num)
        self.all_called = all_called
        self.experts = nn.ModuleList(FeedForward() for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.choose(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slot = (index == number).nonzero(as_tuple=True)
            if len(rows) or self.all_called:
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, slot, None])
        return out


class Stack(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.num_experts = num
        self.up = nn.Parameter(0.3 * torch.randn(num, WIDTH, 20))
        self.bias = nn.Parameter(torch.zeros(num, 20))
        self.down = nn.Parameter(0.3 * torch.randn(num, 20, WIDTH))

    def forward(self, tokens: Tensor, *, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            rows, slot = (chosen == number).nonzero(as_tuple=True)
            hidden = F.gelu(tokens[rows] @ self.up[number] + self.bias[number])
            out = out.index_add(0, rows, hidden @ self.down[number] * weights[rows, slot, None])
        return out


class Stacked(Routed):
    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.experts = Stack(num)

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.choose(x)
        return self.experts(x, chosen=index, weights=weight)


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


KINDS: dict[str, Any] = {
    "listed": Listed,
    "called": lambda num: Listed(num, all_called=True),
    "stacked": Stacked,
}


class Net(nn.Module):
    def __init__(self, kind: str = "listed", experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block(KINDS[kind](experts)) for _ in range(4))
        self.classes = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.classes(x)


def config_of(kind: str, layout: str, *overrides: str) -> RunConfig:
    return load_config(
        None,
        [
            f"model.name={__name__}:Net",
            f"model.args={{kind: {kind}}}",
            "data.source=synthetic",
            "data.args={shape: [8], classes: 5, samples: 37, distinct: 37, eval_samples: 7}",
            "optim={name: adamw, weight_decay: 0.1}",
            "train={batch: 8, steps: 5, lr: 0.02, clip: 0.5, eval_samples: 7}",
            "log.tensorboard=no",
            "device=cpu",
            "threads=1",
            f"layout={layout}",
            *overrides,
        ],
    ).config


# The same as one device: uneven batches, an expert without rows, ranks without rows for a layer

LAYOUTS = (
    "dp=2,ep=2",
    "dp=4,ep=4",
    "dp=4,zero=1,ep=2",
    "dp=4,zero=2,ep=2",
    "dp=4,zero=3,ep=2",
    "dp=4,zero=2,shard=2,ep=4",
    "dp=4,zero=1,shard=2,ep=2",
    "dp=2,ep=2,offload=optimizer",
    "dp=2,ep=2,recompute=full",
    "dp=2,ep=2,recompute=selective",
    "dp=2,ep=2,accumulate=2",
    "dp=2,zero=2,pp=2,microbatches=2,ep=2",
    "dp=2,pp=2,microbatches=4,schedule=zerobubble,virtual=2,ep=2",
)


@pytest.fixture(scope="module", params=list(KINDS))
def verifier(request: pytest.FixtureRequest) -> Any:
    layouts = [Layout.parse(text) for text in LAYOUTS]
    made = Verifier(config_of(request.param, "dp=1"), layouts, steps=3)
    yield made
    made.close()


@pytest.mark.table(keep=18)
@pytest.mark.parametrize("text", LAYOUTS)
def test_proved(verifier: Verifier, text: str) -> None:
    row = verifier.check(Layout.parse(text))
    if (
        "pp" in text and row.refused
    ):  # as without experts spread: stages are cut where all modules run
        assert verifier.config.model.args["kind"] == "listed"
        assert "which modules run depends on the data" in row.refused
        return
    assert row.verdict == "same", row


@pytest.mark.parametrize("kind", ["listed", "stacked"])
def test_proved_with_the_norms_of_single_parameters_and_in_bf16(kind: str) -> None:
    layouts = [Layout.parse(text) for text in ("dp=4,zero=1,ep=2", "dp=4,ep=2", "dp=4,zero=3,ep=2")]
    made = Verifier(config_of(kind, "dp=1", "optim={name: lamb, weight_decay: 0.01}"), layouts, 3)
    try:
        for layout in layouts:
            row = made.check(layout)
            assert row.verdict == "same", row
        row = made.check(layouts[0], "bf16")
        assert row.verdict == "same", row
    finally:
        made.close()


class Busy(Listed):
    """Counts in buffers, old and new, and in a number; looks at an expert's type; changes what an expert
    gives in place; and has an expert for all beside the others."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.everyone = FeedForward()
        self.calls = 0
        self.register_buffer("usage", torch.zeros(num))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.experts[0].up.weight.dtype)
        gate = self.gate(x) - 0.01 * self.usage / (1 + self.steps).sqrt()
        weight, index = gate.softmax(-1).topk(2, dim=-1)
        if self.training:
            self.usage += torch.arange(len(self.usage))  # the same whatever a rank's samples are
            self.steps = self.steps + 1
            self.calls += 1
        out = self.everyone(x)
        for number in index.unique().tolist():
            rows, slot = (index == number).nonzero(as_tuple=True)
            done = self.experts[number](x[rows])
            done *= weight[rows, slot, None]
            out = out.index_add(0, rows, done)
        return out


class Deep(Listed):
    """Experts that are mixtures themselves."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.experts = nn.ModuleList(Listed(2) for _ in range(num))


class Skewed(Listed):
    """All rows go to the first two; nothing before the experts has a gradient."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        with torch.no_grad():
            self.gate.bias[2:] = -1e3
        self.gate.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class Sequences(Routed):
    """Each sample goes to one expert whole, which looks along it and begins with zeros."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.experts = nn.ModuleList(Along() for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None] * torch.arange(1, 4, dtype=x.dtype)[:, None]
        weight, index = self.choose(x.mean(1))
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (index[:, 0] == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, 0, None, None])
        return out.mean(1)


class Along(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.relu(self.inner(x)).mean(1, keepdim=True))


KINDS |= {"busy": Busy, "deep": Deep, "skewed": Skewed, "sequences": Sequences}


@pytest.mark.parametrize("kind", ["busy", "deep", "skewed", "sequences"])
def test_proved_as_people_write_them(kind: str) -> None:
    layouts = [Layout.parse(text) for text in ("dp=2,ep=2", "dp=2,zero=1,ep=2,recompute=full")]
    made = Verifier(config_of(kind, "dp=1"), layouts, 3)
    try:
        for layout in layouts:
            row = made.check(layout)
            assert row.verdict == "same", row
    finally:
        made.close()


class Noise(FeedForward):
    drawn: ClassVar[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.drawn.append(float(torch.rand(())))
        return super().forward(x)


def draws() -> tuple[list[float], list[float], dict[str, Any], dict[str, Any]]:
    """What experts and what comes after them draw; and the state of a model before it was looked at, and
    after."""
    from torch import distributed as dist

    Noise.drawn.clear()
    torch.manual_seed(0)
    net = Net("busy")
    for block in net.blocks:
        block.inner.experts = nn.ModuleList(Noise() for _ in range(4))
    before = {k: v.clone() for k, v in net.state_dict().items()} | {"calls": 0}
    plan = find_experts(net, (torch.zeros(2, 8),), 2)
    after = {k: v.clone() for k, v in net.state_dict().items()} | {
        "calls": net.blocks[0].inner.calls
    }
    Noise.drawn.clear()
    env = read_rank_env()
    mesh = build_mesh(env, Layout(dp=2, ep=2), torch.device("cpu"))
    assert mesh.experts is not None
    assert mesh.data_group is not None
    apply_experts([net], plan, mesh.experts, mesh.data_group, lambda: nullcontext)
    x, later = torch.randn(32, 8, generator=torch.Generator().manual_seed(dist.get_rank())), []
    for _ in range(2):
        net(x)
        later.append(float(torch.rand(())))
    return list(Noise.drawn), later, before, after


def test_experts_draw_numbers_of_their_own_and_the_look_at_a_model_leaves_it_alone(
    ranks: Any,
) -> None:
    for drawn, later, before, after in ranks(2, draws):
        assert len(set(drawn)) == len(drawn) >= 8
        assert len({*drawn, *later}) == len(drawn) + len(later)
        for name, value in before.items():
            assert torch.equal(torch.as_tensor(after[name]), torch.as_tensor(value)), name


# What is on a rank


def sizes(kind: str, layout: str) -> tuple[int, int, int]:
    """Numbers in experts, in the rest of the model, and in what the optimizer updates."""
    arranged = build_training(config_of(kind, layout), read_rank_env()).arranged
    assert arranged.experts is not None
    named = dict(arranged.model.named_parameters())
    inside = sum(p.numel() for name, p in named.items() if name in arranged.experts.names)
    outside = sum(p.numel() for name, p in named.items() if name not in arranged.experts.names)
    return inside, outside, sum(t.parameter.numel() for t in arranged.trainables())


@pytest.mark.parametrize("kind", ["listed", "stacked"])
def test_each_rank_has_its_experts_and_no_others(ranks: Any, kind: str) -> None:
    whole = Net(kind)
    total = sum(p.numel() for n, p in whole.named_parameters() if ".experts." in n)
    rest = sum(p.numel() for p in whole.parameters()) - total
    assert set(ranks(4, sizes, kind, "dp=4,ep=4")) == {(total // 4, rest, total // 4 + rest)}
    found = ranks(4, sizes, kind, "dp=4,zero=1,ep=2")
    assert {(inside, outside) for inside, outside, _ in found} == {(total // 2, rest)}
    # Padding to whole cache lines belongs to nobody.
    assert sum(updated for *_, updated in found) == total + rest


# Checkpoints


def train(path: Path, steps: int, kind: str, layout: str) -> dict[str, Tensor] | None:
    config = config_of(kind, layout, f"train.steps={steps}", "model.dtype=float64")
    run, env = RunDir(path), read_rank_env()
    if env.rank == 0 and not run.file(rundir.CONFIG).exists():
        run.write_text(rundir.CONFIG, dump_config(config))
    run_training(config, env, run)
    return load_file(run.file(rundir.WEIGHTS)) if env.rank == 0 else None


@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [
        ("listed", "dp=4,zero=1,ep=2", ""),
        ("listed", "dp=4,zero=3,ep=2", "dp=4,ep=4"),
        ("stacked", "dp=4,zero=2,ep=2", "dp=2,pp=2,microbatches=2,ep=2"),
        ("stacked", "", "dp=4,zero=1,ep=4"),
    ],
)
def test_saved_and_gone_on_from(
    ranks: Any, tmp_path: Path, kind: str, first: str, then: str
) -> None:
    for part in ("parts", "whole"):
        (tmp_path / part / rundir.LOGS).mkdir(parents=True)
    world = [Layout.parse(text).world_size for text in (first, then)]
    ranks(world[0], train, tmp_path / "parts", 2, kind, first)
    found = ranks(world[1], train, tmp_path / "parts", 4, kind, then)[0]
    expected = ranks(1, train, tmp_path / "whole", 4, kind, "")[0]
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=1e-9, atol=1e-12), key


# The way there and back


def send(rank_of_rows: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows to the ranks that each rank's list says; what came, what came back, and the gradient."""
    from torch import distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    goes = rank_of_rows[rank]
    rows = torch.arange(len(goes), dtype=torch.float64)[:, None] + 10 * rank
    rows.requires_grad_()
    counts = Counts(
        [goes.count(r) for r in range(size)], [other.count(rank) for other in rank_of_rows]
    )
    (came,), anchor = exchange([rows], [counts], dist.group.WORLD)
    # A rank without rows leaves no path in the graph but the anchor.
    done = came * (rank + 2) if len(came) else came.detach()
    (back,), anchor = exchange([done], [counts.back()], dist.group.WORLD, anchor)
    tie(back.sum() * 1.0 if len(back) else torch.zeros(()), anchor).backward()
    grad = rows.grad if rows.grad is not None else torch.zeros_like(rows)
    return came.detach(), back.detach(), grad


def test_rows_go_and_come_back_with_their_gradients(ranks: Any) -> None:
    # Nothing comes to rank 1, and rank 2 sends nothing.
    found = ranks(3, send, [[0, 0, 2], [0, 2], []])
    assert [came.flatten().tolist() for came, _, _ in found] == [[0, 1, 10], [], [2, 11]]
    assert [back.flatten().tolist() for _, back, _ in found] == [[0, 2, 8], [20, 44], []]
    assert [grad.flatten().tolist() for _, _, grad in found] == [[2, 2, 4], [2, 4], []]


# What cannot be


class Cascade(Listed):
    """Each expert is chosen by what the one before answered."""

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            rows = (x[:, 0] > 0).nonzero()[:, 0]
            x = x.index_add(0, rows, expert(x[rows]) * 30.0)
        return x


class Impatient(Listed):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return super().forward(x)


class Sharing(Listed):
    def __init__(self, num: int) -> None:
        super().__init__(num)
        for expert in self.experts:
            expert.up.weight = self.experts[0].up.weight


class Talkative(Listed):
    """Its experts want more than their rows."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.experts = nn.ModuleList(Scaled() for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.choose(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slot = (index == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows], weight[rows, slot, None]))
        return out


class Scaled(FeedForward):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


class Shouted(Stack):
    """Looks at all rows, so that parts of it are something else."""

    def forward(self, tokens: Tensor, *, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens / tokens.norm(), chosen=chosen, weights=weights)


class Loud(Stacked):
    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.experts = Shouted(num)


class Registered(Listed):
    """One of its experts is also the one for all."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.everyone = self.experts[0]


class Counting(Listed):
    """Experts with statistics of their own."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        for expert in self.experts:
            expert.register_buffer("seen", torch.zeros(()))


class Unnamed(Talkative):
    """The same in a list of another name."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.ffns = self.experts
        del self.experts

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["experts"] = self.ffns
        return super().forward(x)


class Plain(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.experts = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x)


KINDS |= {
    "cascade": Cascade,
    "impatient": Impatient,
    "sharing": Sharing,
    "talkative": Talkative,
    "loud": Loud,
    "plain": Plain,
    "registered": Registered,
    "counting": Counting,
    "unnamed": Unnamed,
}


def refusal(kind: str, layout: str, experts: int = 4) -> str:
    try:
        build_training(config_of(kind, layout, f"model.args.experts={experts}"), read_rank_env())
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "experts", "said"),
    [
        ("cascade", 4, "its choice depends on what experts answered"),
        ("impatient", 4, "changes its inputs in place"),
        ("sharing", 4, "is a weight of other modules too"),
        ("talkative", 4, "with more than one tensor of rows"),
        ("loud", 4, "its parts do not give what it gives whole"),
        ("plain", 4, "found no experts in Net"),
        ("listed", 3, "ep=2 does not divide the 3 experts of blocks.0.inner.experts; use ep=3"),
        ("stacked", 6, ""),
        ("registered", 4, "is a weight of other modules too"),
        ("counting", 4, "they hold buffers"),
        ("unnamed", 4, "blocks.0.inner.ffns: "),
    ],
)
def test_what_cannot_be_spread_is_said(ranks: Any, kind: str, experts: int, said: str) -> None:
    for found in ranks(2, refusal, kind, "dp=2,ep=2", experts):
        assert (said in found) if said else not found, found
