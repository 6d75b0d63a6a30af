"""A recipe's own plan: its model, batch and precision on a machine, without torch.

The one place where a recipe becomes something that the planner can express: `auto.py` and
`ridgeline plan simulate` ask here. A Llama is its sizes; any other model is what `trace` makes of it, which
needs torch and is given by the caller. One that cannot be expressed is a `UsageError` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ridgeline.config import RunConfig
from ridgeline.errors import UsageError
from ridgeline.layout import Layout, check_available, read_auto
from ridgeline.plan.kinds import Model, kind_of
from ridgeline.plan.known import model_of_recipe
from ridgeline.plan.machine import Machine
from ridgeline.plan.memory import StepMemory
from ridgeline.plan.module import ModuleFacts
from ridgeline.plan.predict import predict
from ridgeline.plan.search import Found, Planned, search
from ridgeline.plan.software import own_program
from ridgeline.plan.transformer import Transformer

Trace = Callable[[RunConfig], ModuleFacts]


def optimizer_slots(config: RunConfig) -> int:
    """Tensors of optimizer state a parameter; a moving average of it lies where that does."""
    averages = 1 if config.optim.ema is not None else 0
    if config.optim.name in ("sgd", "lars"):
        return averages + (1 if config.optim.momentum > 0 else 0)
    return averages + 2


def recipe_model(config: RunConfig, trace: Trace | None = None, seq: int | None = None) -> Model:
    """What the planner knows of a recipe's model; `seq`: in place of its own length."""
    if config.model.name == "llama":
        args = config.data.args
        length = seq or args.get("seq_len") or (args.get("shape") or [None])[0]
        sizes = model_of_recipe(config.model.name, config.model.args, length)
        return replace(sizes, optimizer_slots=optimizer_slots(config))
    if trace is None:
        raise UsageError(f"model {config.model.name} has to be traced, which needs torch")
    return trace(config)


def plan_recipe(
    config: RunConfig,
    machine: Machine,
    num_devices: int,
    top: int = 10,
    trace: Trace | None = None,
) -> Found:
    """The best layouts of a recipe on so many devices, with its batch and the precision it states."""
    said = read_auto(config.layout, "layout") or Layout.parse(config.layout, "layout")
    model = recipe_model(config, trace)
    return search(model, machine, num_devices, config.train.batch, said.precision, top)


def require_known(model: Model, machine: Machine, layout: Layout) -> None:
    """Refuse what the planner could only price as if it were not there."""
    text = str(layout)
    choices = kind_of(model).choices(model, machine)
    if layout.pp * layout.virtual > choices.most_stages:
        raise UsageError(
            f"{layout.pp * layout.virtual} stages of {text!r} are more than the {choices.most_stages} "
            f"layers of {model.name}; use pp={choices.most_stages} or less"
        )
    for name, left in (
        ("spatial", layout.spatial != (1, 1) and choices.spatial == ((1, 1),)),
        ("ep", layout.ep > 1 and isinstance(model, Transformer)),
        ("sync=async", layout.sync == "async"),
    ):
        if left:
            raise UsageError(f"the planner has no model of {name} in {text!r}; leave it out")
    # What a module of one's own can be split into, its own job says, with the reason.
    if isinstance(model, Transformer) and model.seq % layout.cp:
        raise UsageError(
            f"cp={layout.cp} of {text!r} does not divide a sequence of {model.seq} tokens; use another"
        )
    for finding in check_available(layout):
        raise UsageError(str(finding))


def predict_recipe(
    config: RunConfig, machine: Machine, layout: Layout, trace: Trace | None = None
) -> Planned:
    """What a recipe takes in one layout; `dp` is the one of the whole job."""
    model = recipe_model(config, trace)
    require_known(model, machine, layout)
    kind = kind_of(model)
    job = kind.arrange(model, machine, layout, config.train.batch, own_program(machine))
    predicted = predict(job)
    return Planned(layout, job, predicted.time, predicted.memory)


def predict_alone_s(planned: Planned, stage: int) -> float:
    """A step of one rank that waits for nobody and sends nothing."""
    return kind_of(planned.job.model).alone_s(planned.job, stage)


def predict_stage(planned: Planned, stage: int) -> StepMemory:
    """Memory of a rank in one place of the pipeline."""
    return kind_of(planned.job.model).stage_memory(planned.job, stage)
