"""Parts of an export that need no compiler: names, bounds, what is in the package's text, in the wheel."""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ridgeline.augmenting import AugmentConfig
from ridgeline.data.augment.apply import build_augment
from ridgeline.data.source import SourceInfo
from ridgeline.errors import RunError, UsageError
from ridgeline.export.check import compare, difference, exact_outputs, find_bounds
from ridgeline.export.deployed import Deployed, flatten_outputs, input_names
from ridgeline.export.described import Described, port
from ridgeline.export.native import FILES, SOURCES
from ridgeline.export.request import default_out
from ridgeline.export.trace import trace, varying_dims

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Answer:
    mean: Tensor
    spread: Tensor | None
    more: dict[str, Tensor]


def test_outputs_of_every_kind_have_names() -> None:
    one = torch.ones(2)
    assert list(flatten_outputs(one)[0]) == ["output"]
    assert list(flatten_outputs((one, [one, None]))[0]) == ["output_0", "1.0"]
    assert list(flatten_outputs(Answer(one, None, {"a": one}))[0]) == ["mean", "more.a"]
    assert list(flatten_outputs(namedtuple("P", "x y")(one, one))[0]) == ["x", "y"]
    assert flatten_outputs({"a": one, "b": 3, "c": object()})[1] == ["b (int)", "c (object)"]
    with pytest.raises(UsageError, match="no tensor in it"):
        flatten_outputs({"a": 1})


def test_outputs_of_transformers() -> None:
    """A dataclass that is a dictionary, and a cache in it that is no tensor; any number of samples."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    inputs = {"input_ids": torch.randint(32, (3, 6)), "attention_mask": torch.ones(3, 6).long()}
    deployed = Deployed(model, lambda x: x, inputs, widen=True).eval()
    with torch.no_grad():
        found, left_out = deployed.look(*inputs.values())
    assert list(found) == ["logits"]
    assert left_out == ["past_key_values (DynamicCache)"]
    assert input_names(model, inputs) == ["input_ids", "attention_mask"]
    program, _ = trace(deployed, list(inputs.values()), [True, True])
    assert varying_dims(program) == [[True, False, False]]
    more = torch.randint(32, (7, 6))
    with torch.no_grad():
        expected = model(input_ids=more, attention_mask=torch.ones(7, 6).long()).logits
        (given,) = program.module()(more, torch.ones(7, 6).long())
    assert difference(given, expected) < 1e-5


def test_bounds_follow_the_type_and_find_what_is_not_rounding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).eval()
    x = torch.randn(5, 64)
    most = {}
    for dtype in (torch.float32, torch.bfloat16):
        deployed = Deployed(model.to(dtype), lambda x: x, x, widen=False)
        with torch.no_grad():
            outputs = deployed.named(x.to(dtype))
        bounds = find_bounds(outputs, exact_outputs(deployed, [x.to(dtype)]), dtype)
        most[dtype] = bounds["output"].most / bounds["output"].largest
        unmeasured = find_bounds(outputs, None, dtype)
        assert unmeasured["output"].most > bounds["output"].most > 0
    assert most[torch.float32] < 1e-5 < most[torch.bfloat16] < 0.1
    model.float()
    deployed = Deployed(model, lambda x: x, x, widen=False)
    with torch.no_grad():
        outputs = deployed.named(x)
    bounds = find_bounds(outputs, exact_outputs(deployed, [x]), torch.float32)
    with pytest.raises(RunError, match=r"output output .* in a batch of 5"):
        compare(deployed, lambda t: [model(*t) * 1.001], [[x]], [5], bounds)
    with pytest.raises(RunError, match="shape"):
        compare(deployed, lambda t: [model(*t)[:4]], [[x]], [5], bounds)


def test_what_is_no_number_is_a_difference_unless_in_both() -> None:
    nan, inf = torch.tensor([math.nan, 1.0]), torch.tensor([math.inf, 1.0])
    assert difference(nan, nan) == difference(inf, inf) == 0.0
    assert difference(nan, torch.ones(2)) == difference(inf, -inf) == math.inf
    assert difference(torch.tensor([3]), torch.tensor([5])) == 2.0
    assert difference(torch.empty(0), torch.empty(0)) == 0.0
    assert difference(torch.tensor([1j]), torch.tensor([1 + 1j])) == 1.0


@pytest.mark.parametrize("crop", ["none", "centre", "padded", "resized"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float32])
def test_inputs_alone_are_prepared_as_in_evaluation(crop: str, dtype: torch.dtype) -> None:
    """Bit for bit, for any number of samples, and with nothing in the tables that depends on it."""
    config = AugmentConfig(
        crop=crop,
        size=(6, 5) if crop != "none" else (),
        mean=(0.4, 0.1),
        std=(0.2,),
        flip_vertical=0.5,
    )
    info = SourceInfo((2, 9, 8), dtype, (), torch.int64, 3, "classify")
    augment = build_augment(config, info, seed=0, train=False)
    assert augment is not None
    alone = augment.alone()
    for count in (1, 4):
        stored = (torch.rand(count, 2, 9, 8) * 255).to(dtype)
        rows = np.arange(count)
        expected, _ = augment(stored, torch.zeros(count).long(), rows, 0, rows, rows)
        assert torch.equal(alone(stored), expected)
    program, _ = trace(Deployed(nn.Flatten(), alone, stored, widen=True), [stored], [True])
    assert varying_dims(program) == [[True, False]]
    fewer = stored[:3].clone()
    assert torch.equal(program.module()(fewer)[0], alone(fewer).flatten(1))


def test_text_form() -> None:
    ports = (port("a b", torch.zeros(2, 3), [True, False]), port("c", torch.tensor(1), []))
    assert Described.lines(ports) == "a_b float32 *,3\nc int64 -"
    with pytest.raises(UsageError, match="float8"):
        port("x", torch.zeros(1).to(torch.float8_e4m3fn), [False])


def test_out_is_in_the_run() -> None:
    assert default_out(Path("runs/a/checkpoints/step-00000002")) == Path("runs/a/export")
    assert default_out(Path("moved/step-00000002")) == Path("moved/export")


def test_cpp_sources_are_in_the_package() -> None:
    assert {path.name for path in SOURCES.iterdir()} == set(FILES)
    assert '"export/cpp/*"' in (ROOT / "pyproject.toml").read_text()


class _Kernels(nn.Module):
    """Chooses by the number of samples, as torch does for GPUs between its own kernels and cuDNN's."""

    def __init__(self, most: int, values: int) -> None:
        super().__init__()
        self.most, self.values = most, values

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1 if x.shape[0] <= self.most else x.sign() + 1
        return y if y.numel() <= self.values else y.abs()


@pytest.mark.parametrize(
    ("most", "values", "found"),
    [
        (880801, 2**40, 880801),
        (2**40, 2**31 - 1, 174762),
        (880801, 2**31 - 1, 174762),
        (4, 2**40, None),
    ],
)
def test_kernels_that_count_so_far_and_no_further(
    most: int, values: int, found: int | None
) -> None:
    x = torch.randn(5, 3, 64, 64)
    deployed = Deployed(_Kernels(most, values), lambda x: x, x, widen=False).eval()
    if most == 4:  # five are more than that, and any number is then not
        with pytest.raises(RunError, match="made for batches of one size"):
            trace(deployed, [x], [True])
        return
    program, limit = trace(deployed, [x], [True])
    assert limit == found
    assert torch.equal(program.module()(x[:2])[0], x[:2] + 1)
