"""What the planner says of experts that are spread over ranks, beside what ranks really hold and send."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.config import RunConfig, load_config
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.plan.experts import INDEX_BYTES, ROUTE_KERNELS, WEIGHT_BYTES, travel_bytes
from ridgeline.plan.general import ModuleJob, cost_of, module_job
from ridgeline.plan.general_memory import kept_bytes, module_stage_memory
from ridgeline.plan.machine import load_machine
from ridgeline.plan.memory import fits
from ridgeline.plan.module import ModuleFacts, facts_from_dict
from ridgeline.plan.search import layouts
from ridgeline.train.setup import build_training
from ridgeline.train.traced import trace_recipe

WIDTH, EXPERTS, CHOSEN, LENGTH, BATCH = 32, 8, 2, 64, 8


class Stack(nn.Module):
    """Rows in the order of their experts, and one product for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(0.2 * torch.randn(EXPERTS, WIDTH, 48))
        self.down = nn.Parameter(0.2 * torch.randn(EXPERTS, 48, WIDTH))

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        number, order = index.flatten().sort()
        known = torch.arange(self.num_experts, device=x.device)
        ends = (number[:, None] == known).sum(0).cumsum(0).to(torch.int32)
        token = order // index.shape[1]
        hidden = F.silu(F.grouped_mm(x[token], self.up, offs=ends))
        out = F.grouped_mm(hidden, self.down, offs=ends) * weight.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, out.to(x.dtype))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = Stack()

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weight, index = self.gate(flat).softmax(-1).topk(CHOSEN, dim=-1)
        return x + self.experts(flat, index, weight).unflatten(0, x.shape[:2])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.classes = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.classes(x.mean(1))


def config_of(layout: str) -> RunConfig:
    return load_config(
        None,
        [
            f"model.name={__name__}:Net",
            "data.source=synthetic",
            f"data.args={{shape: [{LENGTH}, 16], classes: 5, samples: 64}}",
            f"train={{batch: {BATCH}, steps: 2, lr: 0.01}}",
            "device=cpu",
            "threads=1",
            f"layout={layout}",
        ],
    ).config


class Counted(TorchDispatchMode):
    """Calls that do something, by whether a block's experts are at work."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_view = func._schema.returns and func._schema.returns[0].alias_info is not None
        name = func._schema.name.partition("::")[2]
        self.num += not (is_view and not func._schema.is_mutable) and "empty" not in name
        return out


def measure(layout: str) -> dict[str, float]:
    """Of one rank: bytes kept for backward, sent, held in experts and for them, and calls."""
    training = build_training(config_of(layout), read_rank_env())
    arranged, model = training.arranged, training.model
    found: Counter[str] = Counter()
    send = dist.all_to_all_single

    def noted(out: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        found[direction] += rows.numel() * rows.element_size()
        return send(out, rows, *args, **kwargs)

    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}
    held = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor.detach())
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(BATCH // dist.get_world_size(), LENGTH, 16)
    direction = "sent_forward"
    forward, backward = Counted(), Counted()
    dist.all_to_all_single = noted
    try:
        saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with saving, training.precision.autocast(), forward:
            loss = F.cross_entropy(model(x).float(), torch.zeros(len(x), dtype=torch.int64))
        direction = "sent_backward"
        with backward:
            loss.backward()
    finally:
        dist.all_to_all_single = send
    names = arranged.experts.names if arranged.experts is not None else frozenset()
    mine = [p for name, p in model.named_parameters() if name in names]
    found["kept"] = sum(seen.values())
    found["updated"] = sum(t.parameter.numel() for t in arranged.trainables())
    found["experts"] = sum(p.numel() for p in mine)
    found["weights"] = sum(p.numel() * p.element_size() for p in model.parameters())
    found["forward"], found["backward"] = forward.num, backward.num
    training.close_loaders()
    return dict(found)


@cache
def facts() -> ModuleFacts:
    return trace_recipe(config_of("dp=1"))


def job_of(layout: str) -> ModuleJob:
    return module_job(facts(), load_machine("h200"), Layout.parse(layout), BATCH)


@pytest.mark.parametrize("layout", ["dp=2,ep=2", "dp=4,ep=4", "dp=4,ep=2"])
def test_a_rank_keeps_sends_and_calls_what_is_predicted(ranks: Any, layout: str) -> None:
    job = job_of(layout)
    found = ranks(job.dp, measure, layout)
    plain = ranks(2, measure, "dp=2")[0]
    mean = {key: sum(one[key] for one in found) / len(found) for key in found[0]}
    blocks = job.model.blocks
    kept = sum(block.count * kept_bytes(job, block) for block in blocks)
    assert kept == pytest.approx(mean["kept"], rel=0.02)
    assert kept > 1.02 * sum(b.count * kept_bytes(job.replace(ep=1), b) for b in blocks)
    there, errands, back = map(
        sum,
        zip(
            *(
                travel_bytes(e, job.samples, job.mode, job.ep)
                for b in blocks
                for e in b.experts * b.count
            ),
            strict=True,
        ),
    )
    # Of 384 to 768 tokens drawn by chance, a few more or fewer go to another rank than in the mean.
    assert there + errands + back == pytest.approx(mean["sent_forward"], rel=0.06)
    weights = errands * WEIGHT_BYTES / (2 * INDEX_BYTES + WEIGHT_BYTES)
    assert there + weights + back == pytest.approx(mean["sent_backward"], rel=0.06)
    layers = sum(len(b.experts) * b.count for b in blocks)
    assert layers == 3
    for direction, predicted in zip(("forward", "backward"), ROUTE_KERNELS, strict=True):
        assert (mean[direction] - plain[direction]) / layers == pytest.approx(predicted, abs=2)


@pytest.mark.parametrize(
    "layout", ["dp=2,ep=2", "dp=4,ep=2", "dp=4,zero=1,ep=2", "dp=4,zero=2,ep=4,precision=bf16"]
)
def test_a_rank_holds_what_is_predicted(ranks: Any, layout: str) -> None:
    job = job_of(layout)
    found = ranks(job.dp, measure, layout)
    memory = module_stage_memory(job, 0)
    assert {one["experts"] for one in found} == {3 * EXPERTS * 2 * WIDTH * 48 / job.ep}
    # In 16 bits norms keep the float32 that they were given.
    assert memory.weights == pytest.approx(found[0]["weights"], rel=0.01)
    moments = 8.0 if job.precision == "fp32" else 12.0  # and the weights in float32
    updated = sum(one["updated"] for one in found) / len(found)
    assert memory.optimizer == pytest.approx(moments * updated, rel=1e-6)
    if job.zero < 2:
        assert memory.gradients == pytest.approx(memory.weights)


def test_a_step_waits_for_tokens_on_their_way() -> None:
    """More bytes between nodes than within one, twice there and twice back; as many products."""
    job = job_of("dp=16,ep=8")
    apart = job_of("dp=16,ep=2")
    far = job.replace(machine=job.machine.replace(devices_per_node=1))
    key = 1
    costs = {name: cost_of(one, key) for name, one in (("node", job), ("far", far), ("two", apart))}
    assert cost_of(job.replace(ep=1), key).forward.communication == 0.0
    assert costs["far"].forward.communication > 2 * costs["node"].forward.communication > 0
    assert costs["node"].forward.communication > costs["two"].forward.communication
    alone = cost_of(job.replace(ep=1), key)
    assert costs["node"].forward.kernels == alone.forward.kernels + ROUTE_KERNELS[0]
    assert costs["node"].backward.communication > 0
    # The same rows for fewer experts are never slower products.
    assert costs["node"].forward.products <= alone.forward.products


def test_a_search_spreads_experts_where_they_do_not_fit() -> None:
    model, machine = facts(), load_machine("h200")
    whole = module_stage_memory(job_of("dp=8"), 0)
    parts = module_stage_memory(job_of("dp=8,ep=8"), 0)
    room = (whole.device + parts.device) / 2
    small = machine.replace(device=replace(machine.device, memory_bytes=room / 0.96))
    seen = {layout.ep for layout, _ in layouts(model, machine, 8, BATCH, "fp32")}
    assert seen == {1, 2, 4, 8}
    assert fits(job_of("dp=8,ep=8").replace(machine=small), parts)
    assert not fits(job_of("dp=8").replace(machine=small), whole)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("dp=6,ep=3", "does not divide the 8 experts"),
        ("dp=16,ep=16", "does not divide the 8 experts"),
    ],
)
def test_experts_that_cannot_be_divided_are_named(layout: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        job_of(layout)


def test_a_module_without_experts_is_told_so() -> None:
    model = replace(facts(), blocks=tuple(replace(b, experts=()) for b in facts().blocks))
    with pytest.raises(UsageError, match="found no module with stacked weights"):
        module_job(model, load_machine("h200"), Layout.parse("dp=2,ep=2"), BATCH)


def test_facts_with_experts_go_through_a_file() -> None:
    written = facts().to_dict()
    assert facts_from_dict(json.loads(json.dumps(written)), "there").to_dict() == written
