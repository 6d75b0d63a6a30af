"""`parallelize(model, layout)`: put every technique a layout asks for on a module, in order.

The order is spatial and context rewrites, tensor, pipeline, recompute, compile, sharding, replication;
each technique is one entry of `ORDER`, and a test holds the entries against `layout.AVAILABLE`. The
module knows nothing of any of it. Called by `train/setup.py` and `ridgeline.start`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ridgeline.config import DdpConfig
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout, check_available, require_layout
from ridgeline.parallel.batchnorm import apply_sync_batch_norm
from ridgeline.parallel.ddp import apply_ddp
from ridgeline.parallel.mesh import Mesh, build_mesh, choose_device
from ridgeline.parallel.share import Share


@dataclass(frozen=True)
class Plan:
    """What a technique gets besides the model."""

    mesh: Mesh
    layout: Layout
    share: Share
    ddp: DdpConfig
    example_input: Any = None


def _sync_batch_norm(model: nn.Module, plan: Plan) -> nn.Module:
    if plan.ddp.sync_batch_norm and plan.mesh.data_group is not None:
        return apply_sync_batch_norm(model, plan.mesh.data_group, plan.share)
    return model


def _compile(model: nn.Module, plan: Plan) -> nn.Module:
    if plan.layout.graphs and plan.mesh.device.type != "cuda":
        raise UsageError(
            f"layout graphs=true captures CUDA graphs, but the device is {plan.mesh.device}; "
            "leave graphs out"
        )
    if plan.layout.compile:
        # One compiled graph a shape: with dynamic shapes an uneven last batch would leave a slower
        # one behind that then serves the full batches too.
        mode = "reduce-overhead" if plan.layout.graphs else "default"
        model.compile(dynamic=False, mode=mode)
    return model


def _replicate(model: nn.Module, plan: Plan) -> nn.Module:
    if plan.mesh.data_group is None:
        return model
    ddp = plan.ddp
    return apply_ddp(model, plan.mesh, plan.share, ddp.bucket_mb, ddp.find_unused)


ORDER: dict[str, Callable[[nn.Module, Plan], nn.Module]] = {
    "sync_batch_norm": _sync_batch_norm,
    "compile": _compile,
    "dp": _replicate,
}


def parallelize(
    model: nn.Module,
    layout: Layout,
    example_input: Any = None,
    *,
    mesh: Mesh | None = None,
    share: Share | None = None,
    ddp: DdpConfig | None = None,
) -> nn.Module:
    """The same computation as `model`, arranged as `layout` says over the ranks of `mesh`.

    Without a mesh, joins the job that torchrun set up and moves the model to this rank's device.
    `example_input` is for techniques that have to trace the module; data parallelism needs none.
    """
    require_layout(layout, "layout")
    missing = check_available(layout)
    if missing:
        raise UsageError(str(missing[0]))
    if mesh is None:
        env = read_rank_env()
        mesh = build_mesh(env, layout, choose_device("auto", env))
        model = model.to(mesh.device)
    plan = Plan(mesh, layout, share or Share(), ddp or DdpConfig(), example_input)
    for apply in ORDER.values():
        model = apply(model, plan)
    return model
