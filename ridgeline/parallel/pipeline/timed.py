"""Torch's pipeline stage, fed with microbatches of any size, with every piece of its work timed.

The schedules of `torch.distributed.pipelining` drive a stage by a handful of methods; this overrides
those in which torch 2.11 and 2.13 differ, or want one size for all microbatches, or negotiate shapes
that the plan knows. Built by `run.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from ridgeline.errors import RunError, UsageError
from ridgeline.parallel.pipeline.plan import StagePlan
from ridgeline.parallel.pipeline.structure import batch_size, take_rows
from ridgeline.parallel.pipeline.timeline import Recorder

Loss = Callable[[Any, Any], Tensor]
"""(what the model returns, targets) -> the loss of one microbatch."""


@dataclass
class Feed:
    """The microbatches of one step, and their losses; filled before a schedule runs."""

    loss: Loss
    inputs: list[Any] = field(default_factory=list)
    targets: list[Any] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    sizes: tuple[int, ...] = ()
    """Samples in each of `inputs`."""
    prepare: Callable[[int], None] | None = None
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    total: Tensor | None = None

    def weighted_loss(self, outputs: Any, index: int) -> Tensor:
        """Of the real samples of one microbatch; of a filler, the loss of its first one times 0."""
        num_rows = max(self.counts[index], 1)
        weight = self.weights[index] if self.counts[index] else 0.0
        targets = self.targets[index]
        targets = take_rows(targets, num_rows, batch_size(targets))
        outputs = take_rows(outputs, num_rows, self.sizes[index])
        with self.inside():
            loss = self.loss(outputs, targets) * weight
        part = loss.detach().clone()
        self.total = part if self.total is None else self.total + part
        return loss


class TimedStage(PipelineStage):
    """Torch's stage, fed from outside its schedule, with shapes that are known and not negotiated."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        plan: StagePlan,
        feed: Feed,
        recorder: Recorder,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        def crossing(cut: int) -> tuple[Tensor, ...]:
            return tuple(
                torch.empty(
                    item.spec.shape(feed.sizes[0]),
                    dtype=item.spec.dtype,
                    device="meta",
                    requires_grad=True,
                )
                for item in plan.cuts[cut].sent
            )

        is_last = index + 1 == plan.num_stages
        super().__init__(
            module,
            index,
            plan.num_stages,
            device,
            input_args=crossing(index - 1) if index else (),
            # The last stage's output is the loss; it goes nowhere.
            output_args=(torch.empty((), device="meta"),) if is_last else crossing(index),
            group=group,
        )
        self.plan, self.feed, self.recorder = plan, feed, recorder
        self.microbatch = -1
        self._runtime_validate = False  # 2.13, when debugging: it knows of one size only

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        self.microbatch = fwd_chunk_id
        if self.feed.prepare is not None:
            self.feed.prepare(fwd_chunk_id)
        with self.recorder.span(self.stage_index, "F", fwd_chunk_id):
            try:
                return super().forward_one_chunk(fwd_chunk_id, (), {}, save_forward_output)
            except RuntimeError as error:
                if isinstance(error.__cause__, UsageError | RunError):
                    raise error.__cause__ from None  # said in one sentence already
                raise

    def forward_maybe_with_nosync(self, *received: Tensor, **_: Any) -> Any:
        inputs = self.feed.inputs[self.microbatch]
        output = super().forward_maybe_with_nosync(*received, inputs=inputs)
        return self.feed.weighted_loss(output, self.microbatch) if self.is_last else output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        if self.is_first and not full_backward:  # torch does all of it with the weights
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            return
        with self.recorder.span(self.stage_index, "B", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if not self.is_first and self.has_backward:
            self._fill_gradients(bwd_chunk_id)

    def _fill_gradients(self, index: int) -> None:
        """What was received and had no part in the loss has a gradient of zeros, of this microbatch's size:
        torch sends nothing for it, or zeros of the first one's."""
        sent = self.plan.cuts[self.stage_index - 1].sent
        self.bwd_cache[index] = tuple(
            item.spec.zeros(self.feed.sizes[index], self.device) if gradient is None else gradient
            for gradient, item in zip(self.bwd_cache[index], sent, strict=True)
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        kind = "B" if self.is_first else "W"
        with self.recorder.span(self.stage_index, kind, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Once a step, for stages whose gradients are in shards."""
        if not isinstance(self.submod, FSDPModule):
            super().perform_reduce_grad(grad_scale_factor)
            return
        with self.recorder.exchange():
            super().perform_reduce_grad(grad_scale_factor)

    # Torch has one size for all microbatches. Ours may be uneven, and filling them up would change
    # the statistics of a batch norm; each has its own buffers, so those get the right size.

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._prepare_forward_infra(*args, **kwargs)
        if not self.is_first:
            self._resize(self.args_recv_info, self.stage_index - 1)
        return found

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._prepare_backward_infra(*args, **kwargs)
        if not self.is_last:
            self._resize(self.grad_recv_info, self.stage_index)
        return found

    def _resize(self, infos: dict[int, Any], cut: int) -> None:
        for index, size in enumerate(self.feed.sizes):
            for info, item in zip(infos[index], self.plan.cuts[cut].sent, strict=True):
                shape, old = item.spec.shape(size), info.buffer
                if tuple(old.shape) != shape:
                    info.buffer = old.new_empty(shape).requires_grad_(old.requires_grad)

    # Torch 2.13 lets the stages vote on whether shapes are static; they are, on all of them.

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Any = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Any = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    # Torch 2.11 compares every output with its plan, and the loss has none; `Stage` has checked.

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None: ...

    def _validate_fwd_outputs(self, outputs: Any) -> None: ...
