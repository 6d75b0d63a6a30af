"""What a sample costs, against formulas worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ridgeline.facts import ModelFacts, facts_from_dict
from ridgeline.models import build_model
from ridgeline.models.count import count_model
from ridgeline.train.counted import count_forward
from ridgeline.train.tasks import TASKS


def count(
    model: nn.Module, inputs: Tensor, task: str, targets: Tensor, **units: object
) -> ModelFacts:
    loss = TASKS[task].loss
    return count_model("m", model, inputs, targets, lambda m, x, y: loss(m(x), y), **units)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_an_mlp_costs_six_flops_a_weight_less_the_gradient_of_its_input(batch: int) -> None:
    with torch.device("meta"):
        model = build_model("mlp", in_features=20, hidden=30, depth=2, out_features=7)
        facts = count(
            model, torch.zeros(batch, 20), "classify", torch.zeros(batch, dtype=torch.int64)
        )
    first, weights = 20 * 30, 20 * 30 + 30 * 30 + 30 * 7
    assert facts.forward_flops_per_sample == 2 * weights
    assert facts.train_flops_per_sample == 6 * weights - 2 * first
    assert facts.num_parameters == facts.num_trainable == weights + 30 + 30 + 7
    assert facts.parameter_bytes == 4 * facts.num_parameters
    assert facts.flops_source == "counted"
    assert facts.sample_shape == (20,)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_llama_with_its_attention(kv_heads: int) -> None:
    width, depth, ffn, vocab, seq = 64, 3, 96, 100, 32
    with torch.device("meta"):
        model = build_model("llama", vocab=vocab, width=width, depth=depth, heads=4,
                            kv_heads=kv_heads, ffn=ffn, max_seq=seq)  # fmt: skip
        tokens = torch.zeros(2, seq, dtype=torch.int64)
        facts = count(model, tokens, "causal_lm", tokens, unit="tokens", units_per_sample=seq)
    layer = 2 * width * width + 2 * width * (kv_heads * 16) + 3 * width * ffn
    matrices = depth * layer + width * vocab
    # Scores and their use, each 2 T^2 D; causal masks are not counted as savings, as is usual.
    attention = depth * 4 * seq * seq * width
    assert facts.flops_source == "counted"
    assert facts.forward_flops_per_sample == 2 * matrices * seq + attention
    assert facts.train_flops_per_sample == 3 * (2 * matrices * seq + attention)
    assert (facts.unit, facts.units_per_sample) == ("tokens", seq)


def test_a_convolution_costs_its_kernel_at_every_output() -> None:
    with torch.device("meta"):
        model = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        facts = count(model, torch.zeros(2, 3, 16, 16), "forecast", torch.zeros(2, 8, 8, 8))
    assert facts.forward_flops_per_sample == 2 * (3 * 8 * 9) * (8 * 8)


def test_frozen_weights_cost_no_gradient() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.Linear(30, 7, bias=False))
        model[0].requires_grad_(False)
        facts = count(model, torch.zeros(2, 20), "classify", torch.zeros(2, dtype=torch.int64))
    assert facts.num_trainable == 210
    assert facts.train_flops_per_sample == 2 * (600 + 210) + 2 * 210


class Moody(nn.Module):
    """What it computes depends on the values it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(20, 7), nn.Linear(20, 7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x) if x.sum() > 0 else self.b(x)
        return out


@pytest.mark.parametrize("units", [1, 16])
def test_what_cannot_run_on_meta_is_estimated(units: int) -> None:
    with torch.device("meta"):
        targets = torch.zeros(4, dtype=torch.int64)
        facts = count(Moody(), torch.zeros(4, 20), "classify", targets, units_per_sample=units)
    assert facts.flops_source == "6N"
    assert facts.num_parameters == 294
    assert facts.train_flops_per_sample == 6 * 294 * units
    assert facts.forward_flops_per_sample == 2 * 294 * units


class Experts(nn.Module):
    """Each row goes to the expert that its largest value names; counts the rows it has seen."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(20, 20, bias=False) for _ in range(num))
        self.drop = nn.Dropout(0.5)
        self.last: Tensor | None = None
        self.register_buffer("seen", torch.zeros(num))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, : len(self.experts)].argmax(1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (rows := (chosen == number).nonzero()[:, 0]).numel():
                self.seen[number] += len(rows)
                out = out.index_add(0, rows, expert(x[rows]))
        self.last = self.drop(out)
        return self.last


def test_of_many_experts_those_that_a_sample_meets_are_counted() -> None:
    model = Experts(8)
    with torch.device("meta"):
        targets = torch.zeros(4, dtype=torch.int64)
        estimated = count(Experts(8), torch.zeros(4, 20), "classify", targets)
    assert estimated.train_flops_per_sample == 6 * 8 * 400
    state = torch.random.get_rng_state()
    facts = count_forward(estimated, model, torch.randn(4, 20, generator=torch.Generator()))
    assert facts.flops_source == "forward counted"
    assert facts.forward_flops_per_sample == 2 * 400
    assert facts.train_flops_per_sample == 6 * 400
    assert facts.num_parameters == estimated.num_parameters
    # Nothing is left of it.
    assert model.last is None
    assert not model.seen.any()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_what_does_not_run_on_the_device_either_stays_estimated() -> None:
    estimated = ModelFacts("m", 3, 3, 12, 18.0, 6.0, "6N", (3, 4))
    assert count_forward(estimated, nn.Linear(7, 2), torch.zeros(2, 20)) == estimated
    assert count_forward(estimated, nn.Identity(), torch.zeros(2, 20)) == estimated


@torch.library.custom_op("ridgeline_tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def test_products_in_an_operator_that_nobody_knows_are_not_counted_as_none() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(20, 20))
            self.head = nn.Linear(20, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(product(x, self.weight))

    estimated = ModelFacts("m", 3, 3, 12, 18.0, 6.0, "6N", (20,))
    assert count_forward(estimated, Own(), torch.zeros(2, 20)) == estimated


def test_experts_side_by_side_and_attention_on_a_cpu_are_counted() -> None:
    """Mixtral of transformers, against the formula: two of its eight experts a token."""
    transformers = pytest.importorskip("transformers")
    width, ffn, depth, vocab, seq = 32, 48, 2, 64, 16
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=vocab, hidden_size=width, intermediate_size=ffn, num_hidden_layers=depth,
            num_attention_heads=2, num_key_value_heads=1, num_local_experts=8,
            num_experts_per_tok=2, max_position_embeddings=seq,
        )
    )  # fmt: skip
    estimated = ModelFacts("m", 3, 3, 12, 18.0, 6.0, "6N", (seq,))
    facts = count_forward(estimated, model, torch.zeros(3, seq, dtype=torch.int64))
    layer = 2 * width * width + width * width + 8 * width + 2 * 3 * width * ffn
    products = 2 * seq * (width * vocab + depth * layer)
    assert facts.forward_flops_per_sample == products + depth * 4 * seq * seq * width


def test_facts_come_back_from_json() -> None:
    facts = ModelFacts("m", 3, 3, 12, 18.0, 6.0, "6N", (3, 4), 5, "tokens")
    values = {**facts.to_dict(), "sample_shape": [3, 4], "of a newer version": 1}
    assert facts_from_dict(ModelFacts, values) == facts
