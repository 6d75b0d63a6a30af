"""`job.engine`: a loop of the user's own in every layout, and the weights are those of one device."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import ridgeline
from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.parallel.gather import full_state
from ridgeline.parallel.precision import Scaler
from ridgeline.train import misused

SAMPLES, LENGTH, VOCAB, BATCH = 20, 8, 11, 8
"""An epoch has two full batches and one of four."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.heads, self.drop = heads, nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.qkv(self.norm(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = (parts[:, :, i].transpose(1, 2) for i in range(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Writer(nn.Module):
    """A small language model that has never heard of any of this."""

    def __init__(self, width: int = 8, heads: int = 2, depth: int = 4, drop: float = 0.2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block(width, heads, drop) for _ in range(depth))
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, stride=2, padding=1),
        )
        self.last = nn.Linear(4, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.second(F.relu(self.first(x)))).mean((-1, -2)))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def data(kind: str) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(7)
    if kind == "text":
        ids = torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=generator)
        return TensorDataset(ids[:, :-1], ids[:, 1:])
    images = torch.randn(SAMPLES, 1, 8, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(images, torch.randint(VOCAB, (SAMPLES,), generator=generator))


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = (Writer() if kind == "text" else Picture()).double()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-2}]
    return model, torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


def epochs(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def train(layout: str, kind: str, clip: float | None = 0.5) -> dict[str, Any]:
    job = ridgeline.start(layout, seed=3)
    model, optimizer = build(kind)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    dataset = data(kind)
    loader = job.loader(dataset, batch_size=BATCH)
    with contextlib.redirect_stderr(io.StringIO()):
        engine = job.engine(
            model, optimizer, clip=clip, loss=loss_of, example_input=dataset[0:2][0]
        )
    batches, losses, norms = epochs(loader), [], []
    while engine.num_steps < 6:  # two epochs
        if job.layout.pp > 1 or engine.num_steps == 4:
            losses.append(float(engine.train_batch(batches)))
        else:
            total = 0.0
            for _ in range(engine.parts):
                inputs, targets = next(batches)
                loss = loss_of(engine(inputs), targets)
                engine.backward(loss)
                engine.step()
                total += job.mean(loss) / engine.parts
            losses.append(total)
        norms.append(float(engine.grad_norm) if engine.grad_norm is not None else None)
        schedule.step()
    held_out = float(engine.eval_batch(epochs(loader)))
    outputs = None
    if job.layout.pp == 1:
        with torch.no_grad():
            outputs = engine.eval()(dataset[0:3][0].to(job.device))
    weights = {k: v.detach().clone() for k, v in full_state(engine.arranged).items()}
    job.close()
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights,
        "outputs": outputs,
        "held out": held_out,
    }


_alone: dict[str, dict[str, Any]] = {}


def alone(kind: str) -> dict[str, Any]:
    """The same without an engine: plain torch, but for the dropout, which is by sample."""
    if kind not in _alone:
        _alone[kind] = train("", kind)
    return _alone[kind]


LAYOUTS = [
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=2,accumulate=2",
    "dp=2,zero=3",
    "accumulate=4",
    "tp=2",
    "dp=2,zero=1,tp=2",
    "tp=2,sp=true",
    "cp=2",
    "pp=2,microbatches=4",
    "dp=2,zero=2,pp=2,microbatches=2",
    "pp=2,schedule=interleaved,virtual=2,microbatches=2",
    "dp=2,recompute=full,accumulate=2",
    "offload=optimizer",
    "dp=2,zero=3,shard=1,recompute=selective",
    "dp=2,cp=2",
    "dp=2,tp=2,zero=3",
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.table(keep=6)
def test_weights_are_those_of_one_device(ranks: Any, layout: str) -> None:
    compare(ranks, layout, "text")


@pytest.mark.parametrize("layout", ["spatial=2", "dp=2,spatial=2,zero=1"])
def test_images_in_tiles(ranks: Any, layout: str) -> None:
    compare(ranks, layout, "image")


def compare(ranks: Any, layout: str, kind: str) -> None:
    expected = alone(kind)
    found = ranks(Layout.parse(layout).world_size, train, layout, kind)
    for rank, one in enumerate(found):
        for name in ("losses", "norms", "held out", "outputs"):
            if one[name] is not None:
                torch.testing.assert_close(
                    torch.as_tensor(one[name]),
                    torch.as_tensor(expected[name]),
                    rtol=1e-9,
                    atol=1e-9,
                    msg=lambda text, name=name, rank=rank: f"{name} of rank {rank}: {text}",
                )
    assert found[0]["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found[0]["weights"][name], value, rtol=1e-9, atol=1e-9, msg=name)


def plainly(clip: float) -> list[float]:
    """One device and no word of ours but the loader's order: no dropout."""
    job = ridgeline.start(seed=3)
    torch.manual_seed(3)
    model = Writer(drop=0.0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in job.loader(data("text"), batch_size=BATCH):
        loss = loss_of(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def engined(clip: float, layout: str) -> list[float]:
    job = ridgeline.start(layout, seed=3)
    torch.manual_seed(3 + job.rank)  # weights are the first rank's, whatever the others have
    model = Writer(drop=0.0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = job.loader(data("text"), batch_size=BATCH)
    engine = job.engine(
        model, optimizer, clip=clip, loss=loss_of, example_input=data("text")[0:2][0]
    )
    batches = epochs(loader)
    return [float(engine.train_batch(batches)) for _ in range(3)]


@pytest.mark.parametrize("layout", ["dp=2,zero=3", "tp=2", "pp=2,microbatches=2"])
def test_an_ordinary_loop_has_the_same_losses(ranks: Any, layout: str) -> None:
    expected = plainly(0.3)
    for found in ranks(2, engined, 0.3, layout):
        assert found == pytest.approx(expected, rel=1e-10)


def cleared(layout: str, clears: str) -> list[float]:
    """A loop that clears gradients where loops of plain torch do."""
    job = ridgeline.start(layout, seed=3)
    torch.manual_seed(3)
    model = Writer(drop=0.0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = job.engine(model, optimizer)
    losses = []
    for x, y in job.loader(data("text"), batch_size=BATCH):
        if clears == "before":
            optimizer.zero_grad()
        loss = loss_of(engine(x), y)
        engine.backward(loss)
        engine.step()
        if clears == "after":
            optimizer.zero_grad()
        losses.append(job.mean(loss))
    return losses


@pytest.mark.parametrize("layout", ["dp=2,accumulate=2", "dp=2,zero=2,accumulate=2"])
def test_clearing_gradients_in_a_step_drops_no_microbatch(ranks: Any, layout: str) -> None:
    kept = ranks(2, cleared, layout, "")[0]
    for clears in ("before", "after"):
        assert ranks(2, cleared, layout, clears)[0] == kept


def test_gradients_of_others_in_a_step_cannot_be_cleared_by_themselves() -> None:
    """A generator's backward goes through the discriminator, which is in the middle of its step."""
    job = ridgeline.start("accumulate=2")
    judges, makes = nn.Linear(4, 1), nn.Linear(4, 4)
    of_judges = torch.optim.SGD(judges.parameters(), lr=0.1)
    engine = job.engine(judges, of_judges)
    x = torch.ones(2, 4)
    engine.backward(engine(x).mean())
    engine.step()
    of_judges.zero_grad()  # its own stay, and nothing else is there
    judges(makes(x)).mean().backward()
    with pytest.raises(UsageError, match=r"zero_grad\(\) after 1 of 2 microbatches: the gradients"):
        of_judges.zero_grad()


def polluted(layout: str) -> str:
    """A generator's backward through the discriminator in the middle of its step."""
    job = ridgeline.start(layout)
    judges, makes = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), nn.Linear(4, 4)
    of_judges = torch.optim.SGD(judges.parameters(), lr=0.1)
    engine = job.engine(judges, of_judges)
    x = torch.ones(2, 4)
    engine.backward(engine(x).mean())
    engine.step()
    of_judges.zero_grad()
    engine(makes(x)).mean().backward()
    try:
        engine(x)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("zero", ["", ",zero=1", ",zero=2", ",zero=3"])
def test_gradients_of_others_are_noticed_in_every_layout(ranks: Any, zero: str) -> None:
    for told in ranks(2, polluted, f"dp=2,accumulate=2{zero}"):
        assert "engine(...) after 1 of 2 microbatches: the gradients" in told


def test_gradients_that_wait_for_their_step_are_not_cleared() -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = ridgeline.start().engine(net, optimizer)
    before = net.weight.detach().clone()
    engine.backward(engine(torch.ones(2, 4)).mean())
    for clear in (optimizer.zero_grad, engine.zero_grad):
        with pytest.raises(UsageError, match=r"between engine\.backward and engine\.step"):
            clear()
    engine.step()
    engine.zero_grad()
    assert not torch.equal(net.weight, before)
    engine.backward(engine(torch.ones(2, 4)).mean())
    engine.forget()  # leaves the step out
    optimizer.zero_grad()


@pytest.mark.parametrize("how", ["clears", "clips"])
def test_what_loops_do_to_gradients_in_a_step_is_told(how: str) -> None:
    job = ridgeline.start("accumulate=2")
    net = nn.Linear(4, 4)
    engine = job.engine(net, torch.optim.SGD(net.parameters(), lr=0.1))
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    if how == "clears":
        engine.module.zero_grad()
    else:
        nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
    with pytest.raises(UsageError, match=r"let engine\.step\(\) clear them, clip by job\.engine"):
        engine(torch.ones(2, 4))


def test_a_forward_pass_between_backward_and_step_hinders_nothing() -> None:
    """A metric, or a generator's loss."""
    job = ridgeline.start()
    judges, makes = nn.Linear(4, 1), nn.Linear(4, 4)
    nets = (judges, makes)
    first, second = (job.engine(n, torch.optim.SGD(n.parameters(), lr=0.1)) for n in nets)
    before = [net.weight.detach().clone() for net in nets]
    x = torch.ones(2, 4)
    made = second(x)
    first.backward((first(x) - first(made.detach())).mean())
    first.module.requires_grad_(False)
    second.backward(first(made).mean())
    first.module.requires_grad_(True)
    first.step()
    second.step()
    assert not any(torch.equal(net.weight, old) for net, old in zip(nets, before, strict=True))


def test_steps_past_the_engine_are_refused_whatever_they_have() -> None:
    job = ridgeline.start("accumulate=2")
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = job.engine(net, optimizer)
    optimizer.step()  # with nothing, as those do that restore a checkpoint
    engine.backward(engine(torch.ones(2, 4)).mean())
    engine.step()  # half of a step
    with pytest.raises(UsageError, match="of this rank alone, or of a part of a step"):
        optimizer.step()
    engine.forget()
    net(torch.ones(2, 4)).mean().backward()
    with pytest.raises(UsageError, match="of this rank alone, or of a part of a step"):
        optimizer.step()


class Duck:
    """An optimizer of somebody's own, with what a loop needs."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": 0.1}]
        self.state: dict[Any, Any] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter -= self.param_groups[0]["lr"] * parameter.grad


def test_an_optimizer_that_is_none_of_torchs_is_taken() -> None:
    net = nn.Linear(4, 4)
    engine = ridgeline.start().engine(net, Duck(net.parameters()))  # type: ignore[arg-type]
    before = net.weight.detach().clone()
    engine.backward(engine(torch.ones(2, 4)).mean())
    engine.step()
    assert not torch.equal(net.weight, before)


def copied_and_averaged(layout: str) -> list[float]:
    """A copy of the model, what a load does to the average, and an evaluation that is broken off."""
    job = ridgeline.start(layout)
    torch.manual_seed(2)
    net = nn.Linear(4, 4)
    engine = job.engine(net, torch.optim.SGD(net.parameters(), lr=0.1), ema=0.9, ema_warmup=False)
    copy.deepcopy(engine.module)
    with torch.no_grad():
        there = {n: torch.full_like(p, 5.0) for n, p in engine.module.named_parameters()}
    engine.module.load_state_dict(there)
    found, x = [], torch.ones(1, 4)
    with engine.averaged(), torch.no_grad():
        found.append(float(engine(x).sum()))
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).mean())
        engine.step()
    with torch.no_grad():
        found.append(float(engine(x).sum()))
    with contextlib.suppress(RuntimeError), engine.averaged():
        raise RuntimeError("no room for it")
    found.append(float(engine(x).detach().sum()))
    return found


@pytest.mark.parametrize("more", ["", ",precision=bf16", ",offload=optimizer"])
def test_averages_follow_loads_and_leave_when_an_evaluation_fails(ranks: Any, more: str) -> None:
    for found in ranks(2, copied_and_averaged, f"dp=2,zero=1{more}"):
        assert found[0] == pytest.approx(100.0)  # 4 times 5 four times, and a bias of 5 each
        assert found[1] == pytest.approx(found[2], rel=1e-2 if "bf16" in more else 1e-6)
        assert found[1] < 99.9


def test_engines_of_one_after_another_do_not_hinder_each_other() -> None:
    job = ridgeline.start("accumulate=2")
    for _ in range(2):
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        engine = job.engine(net, optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            engine.backward(engine(torch.ones(2, 4)).mean())
            engine.step()
        assert engine.num_steps == 2


def own_batches(layout: str, shares: bool) -> list[float]:
    """Dealt by hand; `shares`: by what the job says, else by the rank."""
    job = ridgeline.start(layout, seed=1)
    model = Writer(drop=0.5).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = data("text")
    engine = job.engine(model, optimizer, loss=loss_of, example_input=dataset[0:2][0])
    place, size = (job.data_rank, job.data_size) if shares else (job.rank, job.world_size)
    losses = []
    for step in range(4):
        x, y = dataset[step * 4 : step * 4 + 4]
        part = slice(place * 4 // size, (place + 1) * 4 // size)
        if job.layout.pp > 1:
            halves = zip(x.chunk(2), y.chunk(2), strict=True)
            losses.append(float(engine.train_batch(halves)))
            continue
        loss = loss_of(engine(x[part]), y[part])
        engine.backward(loss)
        engine.step()
        losses.append(job.mean(loss))
    return losses


@pytest.mark.parametrize(
    "layout", ["dp=2,zero=1", "tp=2", "cp=2", "dp=2,recompute=full", "pp=2,microbatches=2"]
)
def test_loaders_of_ones_own_and_dropout_by_place(ranks: Any, layout: str) -> None:
    expected = own_batches("", True)
    for found in ranks(2, own_batches, layout, True):
        assert found == pytest.approx(expected, rel=1e-10)


def test_ranks_with_parts_of_one_model_need_the_same_samples(ranks: Any) -> None:
    with pytest.raises(
        Exception, match=r"ranks 0 and 1 hold parts of one model in tp=2.*job\.data_rank \(0"
    ):
        ranks(2, own_batches, "tp=2", False)


def same_for_all() -> list[str]:
    job = ridgeline.start("dp=2")
    model = Picture().double()
    engine = job.engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine(data("image")[0:2][0])
        engine(data("image")[0:2][0])
    return [str(one.message) for one in told if "replicas" in str(one.message)]


def test_replicas_with_the_same_samples_are_told(ranks: Any) -> None:
    first, second = ranks(2, same_for_all)
    assert len(first) == 1
    assert "all 2 replicas were given the same first batch" in first[0]
    assert not second


def some_frozen(layout: str) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    job = ridgeline.start(layout)
    torch.manual_seed(1)
    model = Writer(drop=0.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(list(model.blocks[-1].parameters()), lr=0.1)
    engine = job.engine(model, optimizer, clip=1.0)
    batches = epochs(job.loader(data("text"), batch_size=4))
    for _ in range(2):
        x, y = next(batches)
        engine.backward(loss_of(engine(x), y))
        engine.step()
    return engine.notes, before, dict(full_state(engine.arranged))


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=2"])
def test_what_the_optimizer_has_not_stays_and_is_named(ranks: Any, layout: str) -> None:
    notes, before, after = ranks(2, some_frozen, layout)[0]
    assert "the optimizer has them not: embed.weight" in notes[0]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(name.startswith("blocks.3.") for name in moved)


class Same(torch.optim.SGD):
    """Somebody's own name for torch's."""


class Odd(torch.optim.SGD):
    """An optimizer of somebody's own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def odd(layout: str, promises: bool, kind: Any = Odd) -> list[float]:
    job = ridgeline.start(layout, seed=3)
    model = Writer(drop=0.0).double()
    engine = job.engine(
        model,
        kind(model.parameters(), lr=0.1),
        loss=loss_of,
        elementwise=promises,
        example_input=data("text")[0:2][0],
    )
    batches = epochs(job.loader(data("text"), batch_size=BATCH))
    return [float(engine.train_batch(batches)) for _ in range(2)]


def test_an_unknown_optimizer_gets_whole_parameters_or_a_promise(ranks: Any) -> None:
    expected = odd("", False)
    assert ranks(2, odd, "dp=2", False)[0] == pytest.approx(expected, rel=1e-10)
    assert ranks(2, odd, "dp=2,zero=2", True)[1] == pytest.approx(expected, rel=1e-10)
    assert ranks(2, odd, "dp=2,zero=2", False, Same)[1] == pytest.approx(expected, rel=1e-10)
    for layout in ("dp=2,zero=1", "tp=2", "dp=2,zero=3"):
        with pytest.raises(Exception, match=r"Odd is given parts of parameters.*elementwise=True"):
            ranks(2, odd, layout, False)


def overflowing(fixed: float) -> tuple[list[bool], int, int, float]:
    job = ridgeline.start("precision=fp16")
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    scaler = Scaler("cpu", fixed=fixed) if fixed else None
    engine = job.engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler, clip=10.0
    )
    moved = []
    for factor in (1.0, math.inf, 1.0):
        engine.backward(engine(torch.ones(2, 4)).mean() * factor)
        engine.step()
        moved.append(not torch.equal(before, model.weight))
        before = model.weight.detach().clone()
    assert scaler is None or scaler.get_scale() == fixed
    return moved, engine.num_steps, engine.num_skipped, float(engine._precision.scale())


@pytest.mark.parametrize(("fixed", "scale"), [(0.0, 32768.0), (8.0, 8.0)])
def test_an_overflow_leaves_the_update_out(fixed: float, scale: float) -> None:
    assert overflowing(fixed) == ([True, False, True], 2, 1, scale)


def halves(layout: str, directory: str, steps: int) -> dict[str, Any]:
    job = ridgeline.start(layout, seed=2)
    model, optimizer = build("text")
    loader = job.loader(data("text"), batch_size=BATCH)
    engine = job.engine(
        model, optimizer, clip=0.5, loss=loss_of, example_input=data("text")[0:2][0]
    )
    saves = job.checkpoints(directory, engine, optimizer, loader, every=100)
    for _ in saves.epochs(3):
        batches = iter(loader)
        while saves.num_steps < steps:
            if job.layout.pp > 1:
                try:
                    engine.train_batch(batches)
                except UsageError:  # the epoch is over
                    break
            else:
                x, y = next(batches, (None, None))
                if x is None:
                    break
                engine.backward(loss_of(engine(x), y))
                engine.step()
            saves.step()
        if saves.num_steps == steps:
            saves.save(wait=True)
            saves.close()
            break
    assert engine.num_steps == saves.num_steps == steps
    return dict(full_state(engine.arranged))


def test_goes_on_in_another_layout(ranks: Any, tmp_path: Path) -> None:
    expected = halves("", str(tmp_path / "whole"), 7)
    ranks(2, halves, "dp=2,zero=2,accumulate=2", str(tmp_path / "parts"), 2)
    ranks(2, halves, "tp=2", str(tmp_path / "parts"), 5)
    found = ranks(2, halves, "pp=2,microbatches=2", str(tmp_path / "parts"), 7)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


class Answers(nn.Module):
    """Takes its targets, and gives its loss among other things, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Writer(drop=0.0)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(input_ids)
        return {"logits": logits} | ({} if labels is None else {"loss": loss_of(logits, labels)})


def answers(layout: str) -> list[float]:
    job = ridgeline.start(layout, seed=3)
    model = Answers().double()
    x, y = data("text")[0:2]
    engine = job.engine(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        example_input={"input_ids": x, "labels": y},
    )
    losses = []
    for x, y in job.loader(data("text"), batch_size=4):
        out = engine(input_ids=x, labels=y)
        engine.backward(out["loss"])
        engine.step()
        losses.append(job.mean(out["loss"]))
    return losses


@pytest.mark.parametrize("layout", ["tp=2", "dp=2,zero=3", "cp=2"])
def test_a_model_that_takes_its_own_loss(ranks: Any, layout: str) -> None:
    expected = answers("")
    assert ranks(2, answers, layout)[1] == pytest.approx(expected, rel=1e-10)


def in_bf16(layout: str) -> tuple[list[float], str]:
    job = ridgeline.start(layout + ",precision=bf16", seed=3)
    model = Writer(drop=0.0, width=16)
    engine = job.engine(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=loss_of,
        clip=1.0,
        example_input=data("text")[0:2][0],
    )
    batches = epochs(job.loader(data("text"), batch_size=BATCH))
    losses = [float(engine.train_batch(batches)) for _ in range(6)]
    kind = "" if job.layout.pp > 1 else str(engine(data("text")[0:2][0].to(job.device)).dtype)
    return losses, kind


@pytest.mark.parametrize("layout", ["dp=2,zero=2", "tp=2", "pp=2,microbatches=2", "dp=2,zero=3"])
@pytest.mark.table(keep=2)
def test_in_bf16(ranks: Any, layout: str) -> None:
    expected, kind = in_bf16("dp=1")
    assert kind == "torch.float32"
    losses, kind = ranks(2, in_bf16, layout)[0]
    assert losses == pytest.approx(expected, rel=2e-2)
    assert kind in ("", "torch.float32")


def refuse(layout: str, what: str) -> None:
    job = ridgeline.start(layout)
    model = Picture()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "pipeline":
        job.engine(model, optimizer)
    if what == "clip":
        job.engine(model, optimizer, clip=0.0)
    if what == "closure":
        job.engine(model, torch.optim.LBFGS(model.parameters()))
    if what == "strange":
        job.engine(model, torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))
    if what == "used":
        model(torch.randn(2, 1, 8, 8)).sum().backward()
        adam = torch.optim.Adam(model.parameters())
        adam.step()
        job.engine(model, adam)
    engine = job.engine(model, optimizer)
    images = torch.randn(2, 1, 8, 8)
    if what == "step":
        engine.step()
    if what == "own step":
        engine.backward(engine(images).mean())
        optimizer.step()
    if what == "own backward":
        engine(images).mean().backward()
        optimizer.step()
    if what == "vector":
        engine.backward(engine(images).sum(0))
    if what == "twice":
        engine.backward(engine(images).sum())
        engine.backward(engine(images).sum())
    if what == "no loss":
        engine.train_batch(iter([(images, None)]))
    if what == "beside":
        engine.backward(model(images).sum())
    if what == "again":
        job.engine(model, optimizer)
    if what == "parallelize":
        job.parallelize(model)
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize(
    ("what", "layout", "text"),
    [
        ("clip", "", r"clip=0\.0"),
        ("closure", "", r"LBFGS runs the model several times"),
        ("strange", "", r"shape \[3\] that is not the model's"),
        ("used", "", r"done steps already"),
        ("step", "", r"no gradients yet"),
        ("own step", "", r"in place of engine\.step\(\)"),
        ("own backward", "", r"call engine\.backward\(loss\)"),
        ("vector", "", r"shape \[11\]; give the mean loss"),
        ("twice", "", r"called twice without"),
        ("beside", "", r"no forward pass went through engine"),
        ("again", "", r"called on this model before"),
        ("no loss", "", r"job\.engine\(\.\.\., loss=function\)"),
        ("parallelize", "accumulate=2", r"accumulate=2 needs an engine"),
        ("parallelize", "precision=fp16", r"needs loss scaling, which an engine does"),
    ],
)
def test_refusals(what: str, layout: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        refuse(layout, what)


def adversaries(layout: str) -> list[float]:
    """Two engines in one job; the generator's backward goes through the discriminator."""
    job = ridgeline.start(layout, seed=5)
    torch.manual_seed(5)
    makes, judges = nn.Linear(4, 6).double(), nn.Linear(6, 1).double()
    of_makes = torch.optim.Adam(makes.parameters(), lr=0.05)
    of_judges = torch.optim.Adam(judges.parameters(), lr=0.05)
    first = job.engine(makes, of_makes, example_input=torch.ones(2, 4).double())
    second = job.engine(judges, of_judges, example_input=torch.ones(2, 6).double())
    generator = torch.Generator().manual_seed(1)
    real = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    noise = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    losses = []
    for x, z in job.loader(TensorDataset(real, noise), batch_size=4):
        made = first(z)
        judged = -(second(x).sigmoid().log() + (1 - second(made.detach()).sigmoid()).log()).mean()
        second.backward(judged)
        second.step()
        fooled = -second(made).sigmoid().log().mean()
        first.backward(fooled)
        first.step()
        of_judges.zero_grad()
        losses += [job.mean(judged), job.mean(fooled)]
    return losses


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"])
def test_two_engines_and_a_backward_through_both(ranks: Any, layout: str) -> None:
    expected = adversaries("")
    assert ranks(2, adversaries, layout)[1] == pytest.approx(expected, rel=1e-10)


def test_each_pass_drops_other_elements_and_a_backward_begins_anew() -> None:
    job = ridgeline.start(seed=1)
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5))
    engine = job.engine(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.ones(3, 6)
    first, second = engine(x), engine(x)
    assert not torch.equal(first, second)
    engine.backward((first + second).mean())
    engine.step()
    with torch.no_grad():
        drawn = torch.stack([engine(x) for _ in range(4)])
    assert drawn.var(0).max() > 0
    assert torch.equal(engine.eval()(x), engine(x))


def loaded_later(layout: str) -> list[float]:
    """Weights before and after a step that changes next to nothing."""
    job = ridgeline.start(layout)
    model = nn.Linear(64, 3, bias=False)
    engine = job.engine(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    x = torch.ones(2, 64, device=job.device)
    found = []
    for value in (0.5, 0.25):
        model.load_state_dict({"weight": torch.full((3, 64), value)})
        found.append(float(engine.weights().get("weight", torch.tensor(value)).float().mean()))
        engine.backward(engine(x).mean())
        engine.step()
        found.append(float(model.weight.detach().float().mean()))
    return found


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=1,precision=bf16", "offload=optimizer"])
def test_weights_that_are_loaded_later_stay(ranks: Any, layout: str) -> None:
    for found in ranks(2 if "dp=2" in layout else 1, loaded_later, layout):
        assert found == pytest.approx([0.5, 0.5, 0.25, 0.25], rel=1e-3)


def uneven() -> list[str]:
    job = ridgeline.start("dp=2")
    model = nn.Linear(2, 2)
    engine = job.engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    out = engine(torch.ones(2, 2))

    def gone(_: Tensor) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1")

    out.register_hook(gone)
    try:
        engine.backward(out.mean())
    except RuntimeError as error:
        return error.__notes__
    return []


def test_a_rank_that_the_others_have_left_says_why_that_may_be(ranks: Any) -> None:
    for rank, notes in enumerate(ranks(2, uneven)):
        assert len(notes) == 1
        assert notes[0].startswith(f"ridgeline: rank {rank} was in step 1,")
        assert "fewer batches" in notes[0]


def test_weights_are_whole_for_whoever_saves_them(ranks: Any) -> None:
    for layout in ("tp=2", "dp=2,zero=3"):
        shapes, nothing = ranks(2, shapes_of, layout)
        assert shapes == {name: list(value.shape) for name, value in Writer().state_dict().items()}
        assert not nothing


def shapes_of(layout: str) -> dict[str, list[int]]:
    job = ridgeline.start(layout)
    model = Writer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = job.engine(model, optimizer, example_input=data("text")[0:2][0])
    return {name: list(value.shape) for name, value in engine.weights().items()}


def alone_in_weights(layout: str) -> None:
    job = ridgeline.start(layout)
    model = Writer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = data("text")[0:2][0]
    engine = job.engine(model, optimizer, example_input=inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(misused, "MEETING", timedelta(seconds=2))
        if job.is_main:
            engine.weights()
    try:
        engine.backward(engine(inputs).square().mean())
        engine.step()
    except RuntimeError:
        time.sleep(1)  # the first rank has a sentence, which came with this
        raise


@pytest.mark.parametrize("layout", ["tp=2", "dp=2,zero=1", "dp=2,zero=3"])
def test_weights_that_one_rank_alone_asks_for_are_told(ranks: Any, layout: str) -> None:
    """Its exchange would meet that of the others' step."""
    with pytest.raises(Exception, match=r"within 2 s not on rank 1; under (tp=2|dp=2,zero)"):
        ranks(2, alone_in_weights, layout)


def test_replicas_have_all_weights_and_one_may_ask_alone(ranks: Any) -> None:
    ranks(2, alone_in_weights, "dp=2")


def test_a_pipeline_without_a_loss_is_refused(ranks: Any) -> None:
    with pytest.raises(Exception, match="a pipeline takes the loss itself"):
        ranks(2, refuse, "pp=2,microbatches=2", "pipeline")


def test_batches_that_end_in_a_step_are_refused() -> None:
    job = ridgeline.start("accumulate=3")
    model = Picture().double()
    engine = job.engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss_of)
    with pytest.raises(UsageError, match="ended after 2 microbatches of a step of 3"):
        engine.train_batch(iter([data("image")[0:2]] * 2))
    with pytest.raises(UsageError, match="in the middle of a step"):
        engine.train_batch(iter([data("image")[0:2]] * 3))
    engine.forget()
    assert torch.isfinite(engine.train_batch(iter([data("image")[0:2]] * 3)))


def test_a_loader_that_would_begin_anew_is_refused() -> None:
    job = ridgeline.start()
    model = Picture().double()
    engine = job.engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss_of)
    with pytest.raises(
        UsageError, match=r"given a JobLoader .* begin anew in each step; give iter\("
    ):
        engine.train_batch(job.loader(data("image"), batch_size=4))


def test_batch_sizes_name_replicas_and_microbatches() -> None:
    job = ridgeline.start("accumulate=3")
    with pytest.raises(
        UsageError, match="1 replicas with 3 microbatches each; the nearest that are: 6 or 9"
    ):
        job.loader(data("text"), batch_size=8)
