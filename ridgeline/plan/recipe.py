"""A recipe's own plan: its model, batch and precision on a machine, without torch.

The one place where a recipe becomes something that the planner can express: `auto.py` and
`ridgeline plan simulate` ask here. A model that it cannot express is a `UsageError` with the reason.
"""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.errors import UsageError
from ridgeline.layout import Layout, read_auto
from ridgeline.plan.job import job_from_layout
from ridgeline.plan.known import model_of_recipe
from ridgeline.plan.machine import Machine
from ridgeline.plan.memory import StepMemory, stage_memory
from ridgeline.plan.predict import predict
from ridgeline.plan.search import Found, Planned, search
from ridgeline.plan.time import rank_alone_s
from ridgeline.plan.transformer import Transformer


def recipe_model(config: RunConfig) -> Transformer:
    """What the planner knows of a recipe's model."""
    args = config.data.args
    length = args.get("seq_len") or (args.get("shape") or [None])[0]
    return model_of_recipe(config.model.name, config.model.args, length)


def plan_recipe(config: RunConfig, machine: Machine, num_devices: int, top: int = 10) -> Found:
    """The best layouts of a recipe on so many devices, with its batch and the precision it states."""
    said = read_auto(config.layout, "layout") or Layout.parse(config.layout, "layout")
    return search(
        recipe_model(config), machine, num_devices, config.train.batch, said.precision, top
    )


def predict_recipe(config: RunConfig, machine: Machine, layout: Layout) -> Planned:
    """What a recipe takes in one layout; `dp` is the one of the whole job."""
    model = recipe_model(config)
    if layout.pp * layout.virtual > model.layers:
        raise UsageError(
            f"{layout.pp * layout.virtual} stages of {str(layout)!r} are more than the {model.layers} "
            f"layers of {model.name}; use pp={model.layers} or less"
        )
    for name, left in (("spatial", layout.spatial != (1, 1)), ("ep", layout.ep > 1)):
        if left:
            raise UsageError(f"the planner has no model of {name} in {str(layout)!r}; leave it out")
    job = job_from_layout(model, machine, layout, config.train.batch)
    predicted = predict(job)
    return Planned(layout, job, predicted.time, predicted.memory)


def predict_alone_s(planned: Planned, stage: int) -> float:
    """A step of one rank that waits for nobody and sends nothing."""
    return rank_alone_s(planned.job, stage)


def predict_stage(planned: Planned, stage: int) -> StepMemory:
    """Memory of a rank in one place of the pipeline."""
    return stage_memory(planned.job, stage)
