"""Forward and backward of microbatches through stages that lie on several ranks.

The schedules are those of `torch.distributed.pipelining`; this feeds them microbatches of uneven size,
takes the loss on the last stage, sums the gradients of tied weights, and can time every piece of work.
The stages may be wrapped in anything (DDP, `fully_shard`, checkpointing). Called by the trainer's
forward-backward function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ridgeline.errors import RunError, UsageError, unknown_word
from ridgeline.parallel.pipeline.plan import StagePlan
from ridgeline.parallel.pipeline.stage import Stage
from ridgeline.parallel.pipeline.structure import (
    batch_size,
    pad_rows,
    tensors_in,
)
from ridgeline.parallel.pipeline.timed import Feed, Loss, TimedStage
from ridgeline.parallel.pipeline.timeline import Event, Mark, Recorder, Timeline, no_mark

_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI = {"interleaved": ScheduleInterleaved1F1B, "zerobubble": ScheduleInterleavedZeroBubble}
SCHEDULES = (*_SINGLE, *_MULTI)


def check_schedule(schedule: str, num_ranks: int, num_microbatches: int, virtual: int) -> list[str]:
    """What keeps a schedule from running with these numbers: one sentence each, none when it can."""
    asked = f"schedule={schedule} with pp={num_ranks}, microbatches={num_microbatches}"
    if num_microbatches < 1:
        return [f"{asked} has no microbatch; use microbatches={num_ranks}"]
    if schedule in _SINGLE and virtual != 1:
        return [f"{asked}, virtual={virtual} has one stage a rank; use schedule=interleaved"]
    if schedule == "interleaved" and virtual < 2:
        return [f"{asked}, virtual={virtual} needs virtual=2 or more; or use schedule=1f1b"]
    if schedule == "1f1b" and num_microbatches < num_ranks:
        return [
            f"{asked} needs at least one microbatch a stage; use microbatches={num_ranks} or "
            "schedule=gpipe"
        ]
    rounds = max(1, num_microbatches // num_ranks)
    if schedule in _MULTI and num_microbatches % rounds:
        lower, upper = (num_microbatches // num_ranks * num_ranks, num_ranks * (rounds + 1))
        return [
            f"{asked} does not divide into {rounds} rounds of the same size; use "
            f"microbatches={lower} or {upper}"
        ]
    return []


class Pipeline:
    """The stages of this rank, and the schedule that runs them with those of the other ranks.

    Every rank of `group` builds it at the same time, and calls its methods in the same order with
    the same inputs; targets are read on the rank of the last stage only. Rank r of the group has the
    stages `plan.indices_of(r, num_ranks)`, in that order.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        plan: StagePlan,
        loss: Loss,
        schedule: str,
        num_microbatches: int,
        virtual: int,
        group: dist.ProcessGroup,
        device: torch.device,
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`inside` makes the context that losses are taken in."""
        self.num_ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if schedule not in SCHEDULES:
            raise unknown_word("schedule", schedule, SCHEDULES, "layout.schedule")
        findings = check_schedule(schedule, self.num_ranks, num_microbatches, virtual)
        if findings:
            raise UsageError(findings[0])
        if plan.num_stages != self.num_ranks * virtual:
            raise UsageError(
                f"a plan of {plan.num_stages} stages on {self.num_ranks} ranks with virtual={virtual}"
                f" where {self.num_ranks * virtual} stages are needed"
            )
        if schedule == "zerobubble" and any(isinstance(s, DistributedDataParallel) for s in stages):
            raise UsageError(
                "schedule=zerobubble adds weight gradients without the hooks that DDP waits for, so "
                "they would never be reduced; use schedule=1f1b, or reduce them after the step"
            )
        self.indices = plan.indices_of(self.rank, self.num_ranks)
        assert len(stages) == len(self.indices)
        self.stages, self.plan, self.schedule = list(stages), plan, schedule
        self.num_microbatches, self.virtual = num_microbatches, virtual
        self.group, self.device = group, device
        self.recorder = Recorder(device)
        self._feed = Feed(loss, inside=inside)
        self._built: tuple[tuple[int, ...], Any] | None = None
        self._timed: list[TimedStage] = []
        self._events: list[Event] | None = None
        self._heard = _Heard()
        # The first operation of a group has to be one of all its ranks, and schedules talk in pairs.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    def forward_backward(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        counts: Sequence[int],
        weights: Sequence[float],
        prepare: Callable[[int], None] | None = None,
        mark: Mark = no_mark,
    ) -> Tensor:
        """One step: adds the gradient of sum of weights[i] * loss_i to the stages' parameters.

        One entry a microbatch; they may differ in size. The loss is taken of the first `counts[i]`
        samples, and one of count 0 counts for nothing (without any sample, it borrows one).
        `prepare(i)` is called before each of microbatch i's forward passes, `mark` when a piece of work
        begins and when it ends. The sum is returned on every rank, in float64.
        """
        if len(inputs) != self.num_microbatches:
            raise UsageError(
                f"{len(inputs)} microbatches where the layout says microbatches="
                f"{self.num_microbatches}; fill up with ones of count 0"
            )
        self.recorder.mark = mark
        feed = self._feed
        full = max(inputs, key=batch_size)
        self._check_shapes(full)
        feed.inputs = [_at_least_one(part, full) for part in inputs]
        feed.sizes = tuple(batch_size(part) for part in feed.inputs)
        feed.counts, feed.weights, feed.prepare = list(counts), list(weights), prepare
        feed.targets, feed.total = [], None
        if self.has_last_stage:
            spare = max(targets, key=batch_size)
            feed.targets = [_at_least_one(part, spare) for part in targets]
        if self._built is None or self._built[0] != feed.sizes:
            self._built = None  # its buffers go before the new ones come
            self._built = (feed.sizes, self._build())
        # The targets that torch sees only count the microbatches; the feed has the real ones.
        index = torch.arange(self.num_microbatches)
        self._built[1].step(target=index, return_outputs=False)
        feed.inputs, feed.targets, feed.prepare = [], [], None
        if self.recorder.is_on:
            self._events = self.recorder.take(self.rank)
        total = self._share_total(feed.total)
        self._require_planned_order()
        return total

    def _require_planned_order(self) -> None:
        """Every rank raises when a stage took another path than the plan, in which it may have worked
        on zeros. A GPU is not waited for: there all hear of it one step later."""
        parts = [part for stage in self.stages for part in stage.modules()]
        here = next(
            (p._stage.strayed for p in parts if isinstance(p, Stage) and p._stage.strayed), ""
        )
        if not self._heard.ask(bool(here), self.group, self.device):
            return
        told: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(told, here, group=self.group)
        raise RunError(
            f"the forward pass took another path than in the example ({next(filter(None, told))}): "
            "which blocks run depends on the data, and pipeline stages need one order; use pp=1 with "
            "dp, zero or recompute"
        )

    def forward(self, inputs: Sequence[Any]) -> list[Any] | None:
        """Outputs of each microbatch, on the rank of the last stage; None elsewhere. No gradient.

        Any number of microbatches of any size. With several stages a rank they go through one after
        the other, which no order of sends can make wait in a circle.
        """
        outputs: list[Any] = []
        works: list[tuple[dist.Work, Tensor]] = []
        local: tuple[Tensor, ...] = ()
        with torch.no_grad():
            for part in inputs:
                self._check_shapes(part)
                for index, module in zip(self.indices, self.stages, strict=True):
                    received = local if self.num_ranks == 1 else self._receive(index, part)
                    found = module(*received, inputs=part)
                    if index + 1 == self.plan.num_stages:
                        outputs.append(found)
                    elif self.num_ranks == 1:
                        local = found
                    else:
                        to = self.plan.rank_of(index + 1, self.num_ranks)
                        works += [(dist.isend(t, group=self.group, group_dst=to), t) for t in found]
        for work, _ in works:
            work.wait()
        self._require_planned_order()
        return outputs if self.has_last_stage else None

    def sum_tied_gradients(self) -> None:
        """Give every copy of a tied parameter the sum of the gradients of all copies.

        Before clipping and the update, once a step. The order of the sum is that of the stages, so
        copies stay equal to the last bit.
        """
        for tied in self.plan.tied:
            holders = sorted({self.plan.rank_of(stage, self.num_ranks) for stage in tied.stages})
            if self.rank in holders and len(holders) > 1:
                self._sum_over(self._parameter(tied.name), holders)

    @property
    def has_last_stage(self) -> bool:
        return self.plan.num_stages - 1 in self.indices

    def record_next_step(self) -> None:
        """Time the pieces of the next `forward_backward`; every rank calls it."""
        self._events = None
        self.recorder.start()

    def fill_received(self) -> None:
        """Give what no neighbour sends ordinary values, after the first step: a rank that is simulated
        alone would compute with what was in its memory, and take as long as that takes."""
        for stage in self._timed:
            infos = (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            for info in (one for group in infos for one in group):
                if isinstance(getattr(info, "buffer", None), Tensor):
                    with torch.no_grad():
                        info.buffer.normal_()

    def own_events(self) -> list[Event]:
        """What the last recorded step did on this rank, which asks no other."""
        if self._events is None:
            raise UsageError("no pipeline step was recorded; call record_next_step() before one")
        return self._events

    def timeline(self) -> Timeline:
        """What the last recorded step did, on all ranks; every rank calls it."""
        gathered: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(gathered, self.own_events(), group=self.group)
        return Timeline(
            tuple(event for events in gathered for event in events),
            self.schedule,
            self.num_ranks,
            self.num_microbatches,
            self.virtual,
        )

    def _build(self) -> Any:
        stages = [
            TimedStage(module, index, self.plan, self._feed, self.recorder, self.device, self.group)
            for index, module in zip(self.indices, self.stages, strict=True)
        ]

        self._timed = stages

        def loss(output: Tensor, _: Tensor) -> Tensor:
            return output

        if self.schedule in _SINGLE:
            return _SINGLE[self.schedule](
                stages[0], self.num_microbatches, loss_fn=loss, scale_grads=False
            )
        return _MULTI[self.schedule](stages, self.num_microbatches, loss_fn=loss, scale_grads=False)

    def _check_shapes(self, inputs: Any) -> None:
        batch = batch_size(inputs)
        found = {
            where: tuple(t.shape[1:] if t.dim() and t.shape[0] == batch else t.shape)
            for where, t in tensors_in(inputs)
        }
        for where, shape in self.plan.input_shapes:
            # An example that is one tensor, and one in a tuple, are the same call.
            other = found.get(where, found.get(where[1:], found.get((0, *where))))
            if other != shape:
                raise UsageError(
                    f"model input {list(other) if other else 'missing'} (without the batch dim) where "
                    f"the pipeline was planned for {list(shape)}; pad the samples to one shape"
                )

    def _receive(self, index: int, inputs: Any) -> tuple[Tensor, ...]:
        if index == 0:
            return ()
        source = self.plan.rank_of(index - 1, self.num_ranks)
        batch = batch_size(inputs)
        found = []
        for item in self.plan.cuts[index - 1].sent:
            tensor = torch.empty(item.spec.shape(batch), dtype=item.spec.dtype, device=self.device)
            dist.recv(tensor, group=self.group, group_src=source)
            found.append(tensor)
        return tuple(found)

    def _share_total(self, total: Tensor | None) -> Tensor:
        shared = torch.zeros((), dtype=torch.float64, device=self.device)
        if total is not None:
            shared.copy_(total)
        last = self.plan.rank_of(self.plan.num_stages - 1, self.num_ranks)
        dist.broadcast(shared, group=self.group, group_src=last)
        return shared

    def _parameter(self, name: str) -> nn.Parameter:
        """By its name in the model, whatever a wrapper has put before it."""
        for stage in self.stages:
            for path, parameter in stage.named_parameters():
                if path == name or _plain(path) == name:
                    return parameter
        raise KeyError(name)

    def _sum_over(self, parameter: nn.Parameter, holders: list[int]) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        mine = (grad.to_local() if isinstance(grad, DTensor) else grad).contiguous()
        parts = {r: mine if r == self.rank else torch.empty_like(mine) for r in holders}
        others = [r for r in holders if r != self.rank]
        ops = [dist.P2POp(dist.isend, mine, group=self.group, group_peer=r) for r in others]
        ops += [dist.P2POp(dist.irecv, parts[r], group=self.group, group_peer=r) for r in others]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        total = parts[holders[0]].clone()
        for rank in holders[1:]:
            total += parts[rank]
        (grad.to_local() if isinstance(grad, DTensor) else grad).copy_(total)


def _at_least_one(value: Any, spare: Any) -> Any:
    return value if batch_size(value) else pad_rows(value, 1, spare)


class _Heard:
    """Whether any rank said yes: on a CPU now, on a GPU the time before, which is known by now."""

    def __init__(self) -> None:
        self._before: tuple[Tensor, torch.cuda.Event] | None = None

    def ask(self, here: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
        flag = torch.full((), float(here), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        if device.type != "cuda":
            return bool(flag)
        host, before = torch.empty((), pin_memory=True), self._before
        host.copy_(flag, non_blocking=True)
        self._before = (host, torch.cuda.Event())
        self._before[1].record()
        if before is None:
            return False
        before[1].synchronize()
        return bool(before[0])


def _plain(path: str) -> str:
    """A parameter's path without the names that DDP, `torch.compile` and checkpointing put in."""
    wrappers = {"module", "_orig_mod", "_checkpoint_wrapped_module"}
    return ".".join(part for part in path.split(".") if part not in wrappers)
