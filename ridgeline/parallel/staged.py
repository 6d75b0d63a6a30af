"""The pipeline of an arranged model: its stages on this rank, and what drives them.

`cut_into_stages` is the first technique to be applied, because a stage is a copy of the model's
structure and the others change instances: they are put on each stage in turn. The cuts are balanced by
the measured time of the model's blocks where the model can be run, by FLOPs otherwise. Called by
`apply.py`; `train/objective.py` and evaluation drive it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.models.inputs import call_arguments
from ridgeline.parallel.blocks import find_blocks
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.pipeline import Pipeline, StagePlan, Timeline, build_stages, plan_stages
from ridgeline.parallel.pipeline.plan import Cut
from ridgeline.parallel.pipeline.structure import shared_copy
from ridgeline.parallel.pipeline.timeline import Mark, no_mark
from ridgeline.parallel.precision import AUTOCAST

if TYPE_CHECKING:
    from ridgeline.parallel.arranged import Arranged

_MEASURED_PASSES = 5
_LARGEST_DIFFERENTIATED = 100_000_000


@dataclass
class Staged:
    """The stages of this rank and their pipeline."""

    stages: list[nn.Module]
    plan: StagePlan
    mesh: Mesh
    loss: Callable[[Any, Any], Tensor]
    inside: Callable[[], AbstractContextManager[Any]]
    """The context in which losses of a stage's outputs are taken."""
    _pipeline: Pipeline | None = None

    @property
    def pipeline(self) -> Pipeline:
        """Made when it is first needed, on every rank at once: the stages are finished then."""
        if self._pipeline is None:
            layout, group = self.mesh.layout, self.mesh.group("pp")
            assert group is not None
            self._pipeline = Pipeline(
                self.stages,
                self.plan,
                self.loss,
                layout.schedule,
                layout.microbatches,
                layout.virtual,
                group,
                self.mesh.device,
                inside=self.inside,
            )
        return self._pipeline

    @property
    def counted_elsewhere(self) -> frozenset[str]:
        """Parameters of this rank that another rank of the pipeline holds too, and counts."""
        num_ranks, rank = self.mesh.axis_size("pp"), self.mesh.axis_rank("pp")
        return frozenset(
            tied.name
            for tied in self.plan.tied
            if min(self.plan.rank_of(stage, num_ranks) for stage in tied.stages) != rank
        )

    @property
    def tied_here(self) -> frozenset[str]:
        """Parameters of this rank that another stage holds too."""
        num_ranks, rank = self.mesh.axis_size("pp"), self.mesh.axis_rank("pp")
        return frozenset(
            tied.name
            for tied in self.plan.tied
            if rank in {self.plan.rank_of(stage, num_ranks) for stage in tied.stages}
        )

    def forward_backward(
        self,
        inputs: list[Any],
        targets: list[Any],
        counts: tuple[int, ...],
        weights: list[float],
        prepare: Callable[[int], None],
        mark: Mark = no_mark,
    ) -> Tensor:
        """All microbatches; the sum of weight times loss, the same on every stage.

        `prepare` is called with a microbatch's number before each of its forward passes; `mark` splits the
        step's time into pieces of work and what is between them.
        """
        return self.pipeline.forward_backward(inputs, targets, counts, weights, prepare, mark)

    def predict(self, inputs: Any) -> Any:
        """The model's outputs on the rank of the last stage, None on the others."""
        outputs = self.pipeline.forward([inputs])
        return None if outputs is None else outputs[0]

    def sum_tied_gradients(self) -> None:
        self.pipeline.sum_tied_gradients()

    def record_next_step(self) -> None:
        self.pipeline.record_next_step()

    def timeline(self) -> Timeline:
        return self.pipeline.timeline()


def cut_into_stages(built: Arranged) -> None:
    """Plan the cuts on every rank alike and keep this rank's stages."""
    layout, mesh = built.layout, built.mesh
    example = built.require_example("a pipeline")
    costs = built.block_costs
    if costs is None:
        costs = _measure(built.model, example)
    costs = built.block_costs = _agree(costs, mesh)
    num_stages = layout.pp * layout.virtual

    def plan_with(carries: bool) -> StagePlan:
        return plan_stages(
            built.model,
            num_stages,
            example,
            costs,
            device=mesh.device,
            autocast_dtype=AUTOCAST.get(layout.precision),
            carries=carries,
        )

    plan = plan_with(True)
    carries = any(item.made is not None for cut in plan.cuts for item in cut.sent)
    if carries and (told := _tell_difference(built, plan, example)):
        built.notes.append(
            f"what modules returned stays in its stage, since sent on it came out otherwise ({told})"
        )
        plan = plan_with(False)
        if told := _tell_difference(built, plan, example):
            raise UsageError(
                f"{type(built.model).__name__} cut into stages computes something else ({told}): what its "
                "forward keeps aside does not reach other stages; use pp=1 with dp, zero or recompute"
            )
    _check_stages(built.model, plan, layout)
    sent = _local_plan(plan, mesh)
    indices = plan.indices_of(mesh.axis_rank("pp"), layout.pp)

    def enter(cut: int, tensor: Tensor) -> Tensor:
        if built.view is None:
            return tensor
        return built.view.enter(tensor, _global_shape(plan.cuts[cut], sent.cuts[cut], tensor))

    def leave(cut: int, tensor: Tensor) -> Tensor:
        return tensor if built.view is None else built.view.leave(tensor)

    stages = build_stages(built.model, sent, indices, enter, leave)
    take = built.loss
    if take is None:
        raise UsageError("a pipeline takes the loss itself: give arrange(..., loss=...)")

    def loss(outputs: Any, targets: Any) -> Tensor:
        return built.plain(take(outputs, targets))  # type: ignore[no-any-return]

    built.staged = Staged(list(stages), sent, mesh, loss, built.inside)
    built.model = built.objective = stages[0]  # lets go of the weights of all other stages
    built.notes += plan.describe().splitlines()


def _tell_difference(
    built: Arranged, plan: StagePlan, example: tuple[Any, ...] | dict[str, Any]
) -> str:
    """Where a plan sends on what modules returned long ago: what any rank found wrong with that. A model
    that is too large to hold its gradients here as well is compared by its outputs."""
    model, mesh = built.model, built.mesh
    is_alone = dist.get_backend(mesh.world_group) == "fake"
    if is_alone or any(p.is_meta for p in model.parameters()):
        return ""
    from ridgeline.parallel.pipeline.prove import tell_difference

    size = sum(p.numel() for p in model.parameters())
    found: list[str] = [""] * dist.get_world_size(mesh.world_group)
    mine = tell_difference(model, plan, example, size < _LARGEST_DIFFERENTIATED)
    dist.all_gather_object(found, mine, group=mesh.world_group)
    return next(filter(None, found), "")


def _check_stages(model: nn.Module, plan: StagePlan, layout: Layout) -> None:
    """What one rank alone would stumble over is refused on all of them."""
    num_ranks = layout.pp
    # Both make copies of what a stage has, and the copies of one weight would go apart.
    apart = [f"zero={layout.zero}"] * (layout.zero == 3) + [f"sync={layout.sync}"] * (
        layout.sync != "every"
    )
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    for rank in range(num_ranks):
        held = [n for i in plan.indices_of(rank, num_ranks) for n in plan.stages[i].parameters]
        if not trainable & set(held):
            raise UsageError(
                f"the stages of pipeline rank {rank} have no trainable parameter; use fewer stages "
                f"than pp={num_ranks}"
            )
        twice = sorted({name for name in held if held.count(name) > 1})
        if twice and apart:
            raise UsageError(
                f"{twice[0]} is in two stages of one rank, which {apart[0]} cannot keep as one weight; "
                f"leave {apart[0]} out, use virtual=1, or do not tie it"
            )


def _global_shape(whole: Cut, local: Cut, tensor: Tensor) -> tuple[int, ...]:
    """The shape of the activation of which this rank received a part."""
    for outer, inner in zip(whole.sent, local.sent, strict=True):
        if inner.spec.shape(tensor.shape[0]) == tuple(tensor.shape):
            return outer.spec.shape(tensor.shape[0])
    raise ValueError(f"a tensor of {list(tensor.shape)} crosses no cut before {whole.path}")


def _local_plan(plan: StagePlan, mesh: Mesh) -> StagePlan:
    """The plan with the lengths that this rank sends: its part of the sequence."""
    layout = mesh.layout
    if layout.cp == 1 and not layout.sp:
        return plan
    from ridgeline.parallel.tensor.split import chunk_sizes

    def shorten(cut: Cut) -> Cut:
        found = []
        for item in cut.sent:
            dims = list(item.spec.dims)
            if len(dims) >= 3 and dims[1][0] == 0:
                length = chunk_sizes(dims[1][1], layout.cp)[mesh.axis_rank("cp")]
                if layout.sp:
                    length = chunk_sizes(length, layout.tp)[mesh.axis_rank("tp")]
                dims[1] = (0, length)
            found.append(replace(item, spec=replace(item.spec, dims=tuple(dims))))
        return replace(cut, sent=tuple(found))

    return replace(plan, cuts=tuple(shorten(cut) for cut in plan.cuts))


@torch.no_grad()
def _measure(
    model: nn.Module, example: tuple[Any, ...] | dict[str, Any]
) -> dict[str, float] | None:
    """Seconds of each block and of what is beside the blocks; None where the model cannot be run."""
    if any(p.is_meta for p in model.parameters()):
        return None
    args, kwargs = call_arguments(example)
    model = shared_copy(model)
    timed = _side_by_side(model)
    times: dict[str, list[float]] = {}
    spent: dict[str, float] = {}
    starts: dict[str, float] = {}

    def now() -> float:
        if any(isinstance(x, Tensor) and x.is_cuda for x in (*args, *kwargs.values())):
            torch.cuda.synchronize()
        return time.perf_counter()

    def before(path: str) -> Callable[..., None]:
        return lambda *_: starts.__setitem__(path, now())

    def after(path: str) -> Callable[..., None]:
        # A module that runs twice in a pass takes the time of both.
        return lambda *_: spent.__setitem__(path, spent.get(path, 0.0) + now() - starts[path])

    hooks = [module.register_forward_pre_hook(before(path)) for path, module in timed.items()]
    hooks += [module.register_forward_hook(after(path)) for path, module in timed.items()]
    model.eval()
    try:
        for number in range(_MEASURED_PASSES + 1):
            spent.clear()
            model(*args, **kwargs)
            for path, seconds in spent.items() if number else ():  # the first one warms up
                times.setdefault(path, []).append(seconds)
    finally:
        for hook in hooks:
            hook.remove()
    # The quickest: other ranks of the node measure at the same time.
    return {path: min(found) for path, found in times.items()}


def _side_by_side(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold all parameters between them, none inside another: blocks, else leaves."""
    blocks = find_blocks(model)
    found: dict[str, nn.Module] = {}

    def look(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            place = f"{path}.{name}" if path else name
            if place in blocks or next(child.children(), None) is None:
                found[place] = child
            else:
                look(child, place)

    look(model, "")
    return found


def _agree(costs: dict[str, float] | None, mesh: Mesh) -> dict[str, float] | None:
    """Rank 0's, measured or given: every rank has to cut at the same places. Where others are only stood
    in for, all have been given the same."""
    if dist.get_backend(mesh.world_group) == "fake":
        return costs
    box = [costs]
    dist.broadcast_object_list(box, group_src=0, group=mesh.world_group)
    return box[0]
