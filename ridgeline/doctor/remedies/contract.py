"""What a remedy is: when it helps, by how much, what it changes, and what it does to the numbers.

A remedy knows a step by its parts (`Step`) and a training by its recipe, and answers in overrides of that
recipe. Predictions are Amdahl's: the seconds that a part takes, times the share of them that would go;
they only decide in which order `climb.py` tries things, and it believes what it measures. Imports without
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ridgeline.config import RunConfig
from ridgeline.layout import Layout

MATRIX, ATTENTION, CONVOLUTION = "matrix", "attention", "convolution"
ELEMENTWISE, OPTIMIZER, LOSS = "norm and element-wise", "optimizer", "loss"
LEAST_FREE = 0.1
"""Of the device's memory: where less is free while a layout saves some, that cannot all come back."""
LEAST_WAIT_FOR_RANKS = 0.02
"""Share of the step below which nobody would notice."""


class ClassSeconds(Protocol):
    @property
    def seconds(self) -> float: ...


class Step(Protocol):
    """The parts of a measured step, in seconds; `doctor/measured.py` and `Parts` below are such."""

    @property
    def step_s(self) -> float: ...
    @property
    def data_s(self) -> float: ...
    @property
    def comm_exposed_s(self) -> float: ...
    @property
    def launch_s(self) -> float: ...
    @property
    def device_kind(self) -> str: ...
    def of_class(self, name: str) -> ClassSeconds: ...


@dataclass(frozen=True)
class Seconds:
    seconds: float = 0.0


@dataclass(frozen=True)
class Parts:
    """A step as the run's own clock sees it: no classes of kernels but the optimizer's."""

    step_s: float
    data_s: float = 0.0
    launch_s: float = 0.0
    comm_exposed_s: float = 0.0
    """Communication that nothing hides."""
    device_kind: str = "cpu"
    classes: dict[str, float] = field(default_factory=dict)
    free_bytes: float = 0.0
    """Of the device's memory, at the step's peak; 0 where that is not known."""
    capacity_bytes: float = 0.0
    """All of it; 0 where that is not known."""
    has_bf16: bool = True
    has_fp8: bool = True
    bf16_rate: float = 0.0
    """On a CPU, how many times as fast products are in bf16 as in float32; 0 where that is not known."""

    def of_class(self, name: str) -> Seconds:
        return Seconds(self.classes.get(name, 0.0))


@dataclass(frozen=True)
class Remedy:
    name: str
    applies: Callable[[Step, RunConfig], str | None]
    """Why it may help here, as a clause; None when it cannot or is there already."""
    predicted_gain: Callable[[Step, RunConfig], float]
    """Throughput with it over throughput without."""
    change: Callable[[RunConfig], list[str]]
    """Overrides of the recipe; none for one that is advice."""
    risk: str
    """none: the same numbers; order: sums in another order; rounding: fewer digits somewhere."""
    advice: str = ""
    """What to do by hand, for one that the recipe cannot be changed for."""
    line: str = ""
    """What it is in a loop of plain torch, for one that can be written there."""
    repeats: bool = False
    """Whether it may be tried again after it was kept."""
    slow: bool = False
    """Whether a state with it takes minutes to start, so that others come first."""
    feeds: bool = False
    """Whether it brings data sooner, and so lets others show their gain."""
    members: tuple[str, ...] = ()
    """Names of the remedies that it is made of, for one of many together."""
    of_ranks: bool = False
    """Whether what it saves is communication, and no kernel."""
    settles: str = ""
    """Name of one that needs no try once this was kept, since it would undo it."""

    @property
    def costs_digits(self) -> bool:
        return self.risk == "rounding"


def amdahl(step: Step, saved_s: float) -> float:
    """The factor that saving so many seconds of the step is."""
    return step.step_s / max(step.step_s - saved_s, 0.05 * step.step_s)


def seconds(step: Step, *names: str) -> float:
    return sum(step.of_class(name).seconds for name in names)


def products_s(step: Step) -> float:
    """Seconds of matrix products, convolutions and attention; all that is not known where kernels were
    not told apart."""
    found = seconds(step, MATRIX, ATTENTION, CONVOLUTION)
    if found or seconds(step, ELEMENTWISE):
        return found
    return max(step.step_s - step.data_s - step.launch_s - seconds(step, OPTIMIZER), 0.0) * 0.7


def elementwise_s(step: Step) -> float:
    found = seconds(step, ELEMENTWISE)
    if found or seconds(step, MATRIX, ATTENTION, CONVOLUTION):
        return found
    return max(step.step_s - step.data_s - step.launch_s - seconds(step, OPTIMIZER), 0.0) * 0.3


def free_share(step: Step) -> float | None:
    """Of the device's memory, at the step's peak; None where that is not known."""
    if isinstance(step, Parts):
        return step.free_bytes / step.capacity_bytes if step.capacity_bytes else None
    memory = getattr(step, "memory", None)
    return 1.0 - memory.fill if memory is not None else None


def room_for(step: Step) -> str | None:
    """What is said of the memory that what a layout saves could go into; None where that is next to none,
    and nothing where it is not known."""
    free = free_share(step)
    if free is None:
        return ""
    return f", and {free:.0%} of the memory is free" if free >= LEAST_FREE else None


def exchange_s(step: Step) -> float:
    """Of communication that nothing hides, but for waiting for other stages of a pipeline."""
    pipeline = getattr(step, "pipeline", None)
    bubble_s = pipeline.bubble_s if pipeline is not None else 0.0
    return max(step.comm_exposed_s - bubble_s, 0.0)


def waits_for_ranks(step: Step) -> str | None:
    """In a clause, where a step has communication that nothing hides."""
    share = exchange_s(step) / step.step_s if step.step_s > 0 else 0.0
    if share < LEAST_WAIT_FOR_RANKS:
        return None
    return f"{share:.0%} of the step is communication that nothing hides"


def layout_of(config: RunConfig) -> Layout:
    return Layout.parse(config.layout)


def on_cuda(step: Step) -> bool:
    return step.device_kind == "cuda"


def has_bf16(step: Step) -> bool:
    """Whether the device multiplies bf16; a step that does not say is taken to be of one that does."""
    return bool(getattr(step, "has_bf16", True))


def bf16_rate(step: Step) -> float:
    """On a CPU: what was measured of it; nearly none that has no unit for it is faster in 16 bits."""
    return float(getattr(step, "bf16_rate", 0.0))


def has_fp8(step: Step) -> bool:
    return bool(getattr(step, "has_fp8", True))


def is_narrow(config: RunConfig) -> bool:
    return layout_of(config).precision in ("bf16", "fp8")
