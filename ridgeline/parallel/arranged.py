"""A module as a layout has arranged it: what each technique left behind, and what a step asks of it.

Techniques fill it one after the other (`apply.py`); `train/`, `verify/` and later `checkpoint/` read it.
Everything that differs between layouts when gradients are finished, measured, gathered or forgotten is
answered here, so that the step has no word on techniques.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ridgeline.config import DdpConfig
from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.models.inputs import call_arguments
from ridgeline.optim.average import Average
from ridgeline.optim.build import Trainable, list_trainables
from ridgeline.optim.update import Care
from ridgeline.parallel.blocks import find_blocks
from ridgeline.parallel.ddp import skip_reduction
from ridgeline.parallel.fallbacks import Gathered, group_fallbacks, merge_gathered
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.random import Randomness
from ridgeline.parallel.share import Share
from ridgeline.tuning import TuneConfig

if TYPE_CHECKING:
    from ridgeline.parallel.compress import Compression
    from ridgeline.parallel.expert import ExpertPlan, SpreadExperts
    from ridgeline.parallel.localsync import LocalSync
    from ridgeline.parallel.siblings import Found
    from ridgeline.parallel.spatial import TileGrid
    from ridgeline.parallel.staged import Staged
    from ridgeline.parallel.tensor import GlobalView, TensorPlan
    from ridgeline.parallel.tensor.compiled import Programs
    from ridgeline.parallel.zero import FlatZero


@dataclass
class Arranged:
    """Mutable while techniques are applied, and left alone after that."""

    objective: nn.Module
    """What is called: the model with its loss, or the model alone in a loop of the user's own."""
    model: nn.Module
    """The user's module inside `objective`."""
    loss: Callable[[Any, Any], Tensor] | None
    layout: Layout
    mesh: Mesh
    share: Share
    ddp: DdpConfig
    randomness: Randomness | None
    """None in a loop of the user's own, where dropout is torch's."""
    example: tuple[Any, ...] | dict[str, Any] | None = None
    tune: TuneConfig = field(default_factory=TuneConfig)
    block_costs: dict[str, float] | None = None
    """Seconds of the blocks that a pipeline is balanced by: measured where they are not given."""
    state_names: dict[str, str] = field(default_factory=dict)
    """Every key of the model's state dict, and the first name of the tensor it stands for."""
    siblings: Found | None = None
    """Linear layers that share an input, where `tune.merge` asks for them."""
    tensor_plan: TensorPlan | None = None
    view: GlobalView | None = None
    programs: Programs | None = None
    """Compiled blocks of a split model."""
    grid: TileGrid | None = None
    expert_plan: ExpertPlan | None = None
    experts: SpreadExperts | None = None
    staged: Staged | None = None
    """The pipeline, which drives forward and backward itself."""
    flats: list[FlatZero] = field(default_factory=list)
    is_fully_sharded: bool = False
    local_sync: list[LocalSync] = field(default_factory=list)
    compression: Compression | None = None
    average: Average | None = None
    """Of the weights, where one is kept; made once there is an optimizer."""
    is_stale: bool = False
    """Whether weights that others look after are still averages, since an evaluation was broken off."""
    num_steps: int = 0
    """Updates done so far."""
    num_samples_here: int = 1
    """What this rank counts by in the step at hand: its samples, or their targets where those differ in
    number; set by whoever drives the step."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user, such as what was left whole."""

    block_paths: tuple[str, ...] = ()
    """Paths of the repeated blocks in the whole model; a stage alone would not show that they repeat."""

    def __post_init__(self) -> None:
        self.block_paths = tuple(find_blocks(self.model))
        first: dict[int, str] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor):
                self.state_names[name] = first.setdefault(id(tensor), name)

    @property
    def callables(self) -> list[nn.Module]:
        """The objective, and the model inside it, which an evaluation calls alone."""
        return [self.objective] + [self.model] * (self.model is not self.objective)

    @property
    def parts(self) -> list[nn.Module]:
        """Modules with this rank's parameters: the model, or its stages."""
        return list(self.staged.stages) if self.staged is not None else [self.model]

    def blocks_of(self, part: nn.Module) -> dict[str, nn.Module]:
        """The repeated blocks that `part` holds parameters of."""
        found = {path: part.get_submodule(path) for path in self.block_paths}
        return {
            path: block
            for path, block in found.items()
            if next(block.parameters(), None) is not None
        }

    def tied_in(self, part: nn.Module) -> frozenset[str]:
        """The parameters of a stage that another stage, of any rank, holds too."""
        tied = self.staged.tied_here if self.staged is not None else frozenset()
        return tied & {name for name, _ in part.named_parameters()}

    def spared_in(self, part: nn.Module) -> frozenset[str]:
        """Those of them that an earlier stage of this rank holds and looks after: one object for both."""
        before = itertools.takewhile(lambda other: other is not part, self.parts)
        held = {name for other in before for name in self.tied_in(other)}
        return self.tied_in(part) & held

    def require_example(self, what: str) -> tuple[Any, ...] | dict[str, Any]:
        if self.example is None:
            raise UsageError(
                f"{what} has to see the model run once: give an example input, example_input=x"
            )
        return self.example

    def train(self, mode: bool = True) -> None:
        for part in (*self.callables, *self.parts):
            part.train(mode)

    # Around a step

    @property
    def loss_scale(self) -> int:
        """What the mean loss is multiplied with, besides its share of the global batch.

        Gradients are averaged over the ranks of `gradient_group`. Along `cp` they are parts of a sum;
        along the tiles of an image every rank already differentiates the whole loss.
        """
        if self.local_sync:
            return self.mesh.axis_size("cp")
        return self.mesh.data_size * self.mesh.axis_size("cp")

    def weight_of(self, units: tuple[int, ...], index: int, share: float) -> float:
        """What the mean loss of one of this rank's microbatches counts for in its backward.

        `share` is its part of the global batch. Replicas that step on their own take the mean over
        their own samples instead.
        """
        if self.local_sync:
            share = units[index] / max(sum(units), 1)
        return share * self.loss_scale

    def skip_reduction(self) -> AbstractContextManager[None]:
        """A context for all but the last microbatch: backward only adds up."""
        if self.is_fully_sharded:
            # Every microbatch reduces: holding whole gradients back would cost what sharding saves.
            return nullcontext()
        return skip_reduction(self.objective)

    @property
    def needs_finish(self) -> bool:
        return bool(self.flats) or self.staged is not None

    def finish_gradients(self) -> None:
        """After the last backward: gradients are those of the global batch."""
        if self.staged is not None:
            self.staged.sum_tied_gradients()
        for flat in self.flats:
            flat.finish_gradients()

    def trainables(self) -> list[Trainable]:
        """What the optimizer updates on this rank."""
        pieces = [
            Trainable(piece.name, piece.parameter, len(piece.original_shape))
            for flat in self.flats
            for piece in flat.pieces
        ]
        flat = {name for flat in self.flats for name in flat.names}
        if flat and not self.is_fully_sharded:
            return pieces
        # A parameter that two stages of this rank hold is one, and stepped once.
        found = {id(t.parameter): t for part in self.parts for t in list_trainables(part)}
        return [t for t in found.values() if t.name not in flat] + pieces

    @property
    def needs_care(self) -> bool:
        """Whether an update is more than clip, step and clear on this rank's own parameters."""
        return bool(
            self.flats
            or self.is_fully_sharded
            or self.local_sync
            or self.staged is not None
            or (self.view is not None and self.view.splits)
        )

    def care(self, optimizer: torch.optim.Optimizer) -> Care | None:
        if not self.needs_care:
            return None
        from ridgeline.parallel.norm import build_norm

        trainables = self.trainables()

        def gradients() -> list[Tensor]:
            found = (t.parameter.grad for t in trainables)
            return [_local(g) for g in found if g is not None]

        def agree(value: Tensor) -> None:
            if self.mesh.world_group is not None:
                dist.all_reduce(value, dist.ReduceOp.MAX, group=self.mesh.world_group)

        def after_step() -> None:
            self._spread()
            self.num_steps += 1
            for sync in self.local_sync:
                sync.after_step(self.num_steps, self.num_samples_here)

        def clear() -> None:
            for flat in self.flats:
                flat.clear_gradients()
            optimizer.zero_grad(set_to_none=True)

        return Care(gradients, build_norm(self), agree, after_step, clear)

    def gathered(self) -> list[Gathered]:
        """What ran on whole tensors so far, on any rank; all of them call it."""
        names = {module: path for part in self.parts for path, module in part.named_modules()}
        sources = [source.fallbacks for source in (self.view, self.grid) if source is not None]
        found = group_fallbacks(sources, names)
        group = self.mesh.world_group
        if not sources or group is None:
            return found
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, found, group=group)
        return merge_gathered(everyone)

    def uncompiled(self) -> list[str]:
        """Sentences on blocks of a split model that no compiled program could stand for so far, on any
        rank; all of them call it."""
        if not self.layout.compile or self.view is None:
            return []
        refused = dict(self.programs.refused) if self.programs is not None else {}
        if self.mesh.world_group is not None:
            everyone: list[Any] = [None] * dist.get_world_size(self.mesh.world_group)
            dist.all_gather_object(everyone, refused, group=self.mesh.world_group)
            refused = {path: why for one in reversed(everyone) for path, why in one.items()}
        reasons: dict[str, list[str]] = {}
        for path, reason in refused.items():
            reasons.setdefault(reason, []).append(path)
        return [
            f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''} runs uncompiled under "
            f"tp: {reason}"
            for reason, paths in reasons.items()
        ]

    # Evaluation

    def prepare_evaluation(self) -> None:
        """Replicas that went their own way come together; running statistics are rank 0's."""
        for sync in self.local_sync:
            sync.finish()
        group = self.mesh.data_group
        if group is not None:
            for part in self.parts:
                for buffer in part.buffers():
                    dist.broadcast(buffer, group_src=0, group=group)

    def keep_average(self, optimizer: torch.optim.Optimizer, decay: float, warmup: bool) -> Average:
        """A moving average of what `optimizer` updates on this rank."""
        parameters = [t.parameter for t in self.trainables()]
        self.average = Average(parameters, optimizer, decay, warmup)
        for sync in self.local_sync[
            :1
        ]:  # one of the stages' for all: they average at the same steps
            sync.beside = self.average.values
        return self.average

    @property
    def num_averaged(self) -> int:
        """Updates that the average has seen, for a checkpoint; 0 without one."""
        return self.average.num_updates if self.average is not None else 0

    @num_averaged.setter
    def num_averaged(self, count: int) -> None:
        if self.average is not None:
            self.average.num_updates = count

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The weights are their moving averages, where these are kept; after it they are what they were,
        bit for bit. All ranks enter and leave it."""
        if self.average is None:
            yield
            return
        for sync in self.local_sync:  # what replicas average from here on they have in common
            sync.finish()
        self._exchange(self.average)
        self._spread()
        try:
            yield
        except BaseException:
            # The others may never come here, so nothing is sent: weights that ranks of a shard group give
            # each other (zero=1, zero=2) follow when all are at the next step.
            self._exchange(self.average)
            if all(flat.num_shards == 1 for flat in self.flats):
                self._spread()
            else:
                self.is_stale = True
            raise
        self._exchange(self.average)
        self._spread()

    def freshen(self) -> None:
        """Before a step: what ranks give each other, where an evaluation of the averages was broken off.
        All ranks do."""
        if self.is_stale:
            self.is_stale = False
            self._spread()

    def _exchange(self, average: Average) -> None:
        if self.is_fully_sharded:
            from ridgeline.parallel.fsdp import free_gathered

            for part in self.parts:
                free_gathered(part)
        average.exchange()

    def _spread(self) -> None:
        """The weights that this rank's optimizer looks after, to those that look after others."""
        for flat in self.flats:
            flat.after_step()

    def inside(self) -> AbstractContextManager[Any]:
        """A context in which outputs of the model may be worked on as if they were whole."""
        return self.view.active() if self.view is not None else nullcontext()

    def predict(self, inputs: Any) -> Any:
        """The model's outputs; None on ranks of a pipeline that do not get them."""
        if self.staged is not None:
            return self.staged.predict(inputs)
        if self.view is not None:
            inputs = tree_map(self.view.enter_input, inputs)
        args, kwargs = call_arguments(inputs)
        return self.model(*args, **kwargs)

    def plain(self, values: Any) -> Any:
        """Whole plain tensors of what was computed `inside`."""
        return tree_map(self.view.plain, values) if self.view is not None else values


def _local(value: Tensor) -> Tensor:
    """The rank's own part of a sharded gradient."""
    return getattr(value, "_local_tensor", value)
