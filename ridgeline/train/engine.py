"""Every layout for a loop of the user's own: `engine = job.engine(model, optimizer)`.

A loop that calls `optimizer.step()` itself can have the layouts that look like one device from outside. The
others drive backward or the update: they cut weights, share out the optimizer's work, scale losses, or send
microbatches through stages. An `Engine` does these three for the loop, which keeps everything else.

    for x, y in loader:
        loss = F.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()

Made by `Job.engine`; `compat/deepspeed` says the same in other words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ridgeline.config import DdpConfig
from ridgeline.errors import UsageError
from ridgeline.models.inputs import call_arguments, num_samples
from ridgeline.optim.adopt import adopt, freeze_others, learn_groups
from ridgeline.optim.average import averaging
from ridgeline.optim.update import build_update
from ridgeline.parallel.apply import arrange
from ridgeline.parallel.arranged import Arranged
from ridgeline.parallel.ddp import Replicated
from ridgeline.parallel.flat import broadcast_module
from ridgeline.parallel.gather import full_state
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.precision import AUTOCAST, Precision, Scaler
from ridgeline.parallel.random import Randomness
from ridgeline.parallel.share import Share
from ridgeline.train.checks import count_parts
from ridgeline.train.dealt import Dealt, Microbatches
from ridgeline.train.dealt_alike import compare_samples
from ridgeline.train.misused import (
    ALONE,
    FEWER,
    Loads,
    refuse_own_steps,
    require_all_ranks,
    telling_who_waits,
)
from ridgeline.train.objective import Objective
from ridgeline.tuning import TuneConfig

Loss = Callable[[Any, Any], Tensor]


class Engine:
    """A model, its optimizer and a layout: forward, backward and the update of a user's own loop."""

    def __init__(
        self,
        mesh: Mesh,
        precision: Precision,
        seed: int,
        dealt: Dealt,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        clip: float | None,
        loss: Loss | None,
        example: Any,
        elementwise: bool,
        ddp: DdpConfig,
        tune: TuneConfig | None,
        scaler: Scaler | None = None,
        ema: float | None = None,
        ema_warmup: bool = True,
    ) -> None:
        if loss is None and mesh.layout.pp > 1:
            raise UsageError(
                "a pipeline takes the loss itself, on its last stage: give engine(..., loss=function of "
                "outputs and targets), and call engine.train_batch(batches)"
            )
        if clip is not None and clip <= 0:
            raise UsageError(
                f"engine(clip={clip}) would leave no gradient; use a norm above 0, or None"
            )
        if precision.scaler is not None:  # one for each engine, which adapts to its own gradients
            precision = replace(precision, scaler=scaler or Scaler(precision.device_type))
        self._mesh, self._precision, self._dealt = mesh, precision, dealt
        self._optimizer, self._loss = optimizer, loss
        self.parts = count_parts(mesh.layout)
        """Microbatches of a step."""
        groups = learn_groups(optimizer, model)
        frozen = freeze_others(model, groups)
        # Replicas take the first one's weights in any case; parts of one model have to be of one, too.
        broadcast_module(model, [mesh.world_group])
        self._randomness = Randomness(seed)
        self.arranged = _arrange(model, mesh, loss, example, self._randomness, ddp, tune)
        if frozen:
            some = ", ".join(frozen[:3]) + (
                f" and {len(frozen) - 3} more" if len(frozen) > 3 else ""
            )
            self.arranged.notes.insert(0, f"not trained, since the optimizer has them not: {some}")
        if clip is None and self.arranged.flats:
            self.arranged.notes.append(
                f"{mesh.layout} keeps gradients where torch.nn.utils.clip_grad_norm_ does not find them: "
                "clip by job.engine(clip=...), if you do"
            )
        trainables = self.arranged.trainables()
        adopt(optimizer, groups, trainables, cut=_cuts(self.arranged), elementwise=elementwise)
        self._update = build_update(
            optimizer,
            [t.parameter for t in trainables],
            clip,
            precision.scaler,
            self.arranged.care(optimizer),
        )
        if ema is not None:
            average = self.arranged.keep_average(optimizer, ema, ema_warmup)
            self._update = averaging(self._update, average, self._overflowed)
        self.settle: Callable[[], None] = lambda: None
        """Called before weights change other than by the optimizer: what is being saved is copied first."""
        self._guard_gradients()
        self.is_updating = False
        """Whether the optimizer's step is this engine's."""
        refuse_own_steps(optimizer, ref(self))
        self._loads = Loads(self.arranged)
        self._passes = 0
        """Forward passes with gradients since the last backward."""
        self._drawn = 0
        """Forward passes in training mode since then, each with random numbers of its own."""
        self._micro = 0
        """Microbatches of the step at hand whose gradients are there."""
        self._samples = 0
        self._pending = False
        """Whether backward has run and `step` was not called since."""
        self._left: tuple[int, ...] = ()
        """What gradients were after the microbatches of a step that is not over."""
        self._compared = False
        self.num_steps = 0
        """Updates done, without those that an overflow in fp16 left out."""
        self.num_skipped = 0
        self.has_stepped = False
        """Whether the last `step()` updated the weights, or left them out for an overflow."""
        self.grad_norm: Tensor | None = None
        """Of the last update; None without clipping."""

    # What it is made of

    @property
    def module(self) -> nn.Module:
        """The user's model; in a pipeline the first of this rank's stages."""
        return self.arranged.model

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    @property
    def notes(self) -> list[str]:
        """What the layout had to say of the model."""
        return self.arranged.notes

    @property
    def ends_step(self) -> bool:
        """Whether the microbatch at hand is the last of its step."""
        return self._micro + 1 == self.parts

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's; `step` has cleared them already."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def train(self, mode: bool = True) -> Engine:
        """Training mode, or evaluation's."""
        self.arranged.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    # A step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, whole on every rank; what was computed in 16 bits is float32 again."""
        self._require_no_pipeline("engine(...)")
        if torch.is_grad_enabled():
            self._compare((args, kwargs))
            self.arranged.freshen()
            if self._micro:
                self._require_own_gradients("engine(...)")
            self._passes += 1
        self._begin((args, kwargs), self._micro)
        # Replicas meet in a forward pass of training alone: one rank may evaluate by itself.
        called = self.arranged.objective if torch.is_grad_enabled() else self.arranged.model
        with self._telling(), self._reducing(), self._precision.autocast():
            return self._wide(called(*args, **kwargs))

    def backward(self, loss: Tensor) -> None:
        """Gradients of a mean over the samples of the microbatch at hand, each counted as it should be."""
        self._require_no_pipeline("engine.backward")
        if loss.numel() != 1:
            raise UsageError(
                f"engine.backward was given a tensor of shape {list(loss.shape)}; give the mean loss, one "
                "number"
            )
        if self._pending:
            raise UsageError(
                "engine.backward was called twice without engine.step() between; add the losses, and call "
                "it once"
            )
        if not self._passes:
            raise UsageError(
                "engine.backward was given a loss of which no forward pass went through engine(...): what "
                "the model itself or a method of it computes would not be exchanged with other ranks; "
                "call engine(x)"
            )
        self._passes = self._drawn = 0
        with self._telling():
            with self._reducing():
                self._precision.backward(loss * self._weight())
            if self.ends_step:
                self._finish()
        if not self.ends_step:
            self._left = self._gradients()
        self._pending = True

    def step(self) -> None:
        """After `backward`: the update, where the microbatch was the last of its step."""
        if not self._pending:
            raise UsageError(
                "engine.step() has no gradients yet; call engine.backward(loss) before it"
            )
        self._pending = False
        self._samples += self._dealt.num_real
        self._micro = (self._micro + 1) % self.parts
        self.has_stepped = not self._micro
        if self.has_stepped:
            self._step()

    def train_batch(self, batches: Iterable[Any]) -> Tensor:
        """One update from the next microbatches, pairs of inputs and targets; the mean loss over all ranks.

        The only way through a pipeline; elsewhere it is short for the loop above. A tuple or a mapping of
        inputs is several arguments of the model.
        """
        loss = self._require_loss("train_batch")
        if self._micro or self._pending:
            raise UsageError(
                "engine.train_batch was called in the middle of a step; finish it with engine.step()"
            )
        if self.arranged.staged is not None:
            total = self._through_stages(self._take(batches))
        else:
            total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
            for inputs, targets in self._each(batches):
                args, kwargs = call_arguments(inputs)
                value = loss(self(*args, **kwargs), targets)
                total += value.detach() * (self._dealt.scale / self.parts)
                self.backward(value)
                self.step()
        return self._mesh.sum_over_data(total) / self._mesh.data_size

    @torch.no_grad()
    def eval_batch(self, batches: Iterable[Any]) -> Tensor:
        """The mean loss of the next microbatches over all ranks, in evaluation mode; through a pipeline,
        too."""
        loss = self._require_loss("eval_batch")
        was_training = self.module.training
        self.settle()
        self.arranged.freshen()
        self.train(False)
        self.arranged.prepare_evaluation()
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for inputs, targets in self._each(batches):
            with self._precision.autocast(), self.arranged.inside():
                outputs = self.arranged.predict(inputs)
                if outputs is not None:
                    value = self.arranged.plain(loss(self._wide(outputs), targets))
                    total += value * (self._dealt.scale / self.parts)
        self.train(was_training)
        stages = self._mesh.group("pp")
        if stages is not None:  # the last one has it, the others add zeros
            dist.all_reduce(total, group=stages)
        return self._mesh.sum_over_data(total) / self._mesh.data_size

    def forget(self) -> None:
        """Leave a step that was begun: its gradients are dropped, and the next microbatch is the first."""
        self._micro = self._samples = self._passes = self._drawn = 0
        self._pending = False
        self._optimizer.zero_grad(set_to_none=True)

    def weights(self, averaged: bool = False) -> dict[str, Tensor]:
        """The whole model's, under its own names, on the first rank and empty elsewhere; all ranks call
        it. With `averaged` their moving averages, where the engine keeps them.

        Where ranks have parts of the weights and the first one is here alone, it says so after nine minutes
        (on CPUs; on GPUs NCCL ends it after ten)."""
        require_all_ranks(self.arranged, "engine.weights()")
        self.take_loaded()
        if not averaged or self._is_averaged:
            with telling_who_waits(self._mesh, "in engine.weights()", ALONE):
                return full_state(self.arranged)
        with self.averaged():
            # The model's own memory is about to be that of the live weights again.
            copies: dict[int, Tensor] = {}
            return {
                name: copies.setdefault(id(value), value.detach().clone())
                for name, value in full_state(self.arranged).items()
            }

    @contextmanager
    def averaged(self) -> Iterator[Engine]:
        """The moving average of the weights in their place, for evaluation; afterwards they are what they
        were, bit for bit. All ranks enter it, and none steps inside."""
        if self.arranged.average is None:
            raise UsageError(
                "engine.averaged() has no moving average to show; make the engine with "
                "job.engine(..., ema=0.999)"
            )
        if self._is_averaged:
            raise UsageError("engine.averaged() was entered twice; leave it first")
        self.take_loaded()
        self.settle()
        with self.arranged.averaged():
            yield self

    def state_dict(self) -> dict[str, Any]:
        """What is beside weights and optimizer: the counts, and the loss scale of fp16. For checkpoints;
        weights are in `weights()`."""
        scaler = self._precision.scaler
        return {
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "num_averaged": self.arranged.num_averaged,
            "scaler": scaler.state_dict() if scaler is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]
        self.arranged.num_steps = self.num_steps + self.num_skipped
        self.arranged.num_averaged = state.get("num_averaged", 0)
        if self._precision.scaler is not None and state["scaler"]:
            self._precision.scaler.load_state_dict(state["scaler"])

    # Inside of one

    def _begin(self, inputs: Any, index: int) -> None:
        """Before a forward pass: which samples it has, and how many of them are real."""
        share = self.arranged.share
        share.num_real = self._dealt.num_real
        if not self._randomness.is_used:
            return
        ids = self._dealt.samples
        if ids is None:  # a loader of the user's own: by their place in the step
            size = num_samples(inputs)
            first = (index * self._mesh.data_size + self._mesh.data_rank) * size
            found, key = (
                torch.arange(first, first + size, device=self._mesh.device),
                self._all_steps,
            )
        else:
            found, key = torch.from_numpy(ids).to(self._mesh.device), self._dealt.key
        # A second pass over the same samples (as for a consistency loss) drops others.
        self._randomness.begin(key + (self._drawn << 48), found)
        if self.arranged.staged is None:
            self._drawn += self.module.training

    def _guard_gradients(self) -> None:
        """A loop's own `optimizer.zero_grad()` clears what a layout keeps elsewhere as well (a GAN's, after
        the other's step), but not what the first microbatches of a step have left for its last."""
        flats, clear, me = self.arranged.flats, self._optimizer.zero_grad, ref(self)

        def zero_grad(set_to_none: bool = True) -> None:
            engine = me()
            if engine is not None and engine._pending:
                raise UsageError(
                    "optimizer.zero_grad() between engine.backward and engine.step() leaves that nothing; "
                    "call it after engine.step(), or engine.forget() to leave the step out"
                )
            if engine is not None and engine._micro:
                engine._require_own_gradients("optimizer.zero_grad()")
                return
            for flat in flats:
                flat.clear_gradients()
            clear(set_to_none=set_to_none)

        self._optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def _require_own_gradients(self, where: str) -> None:
        """In the middle of a step: nobody has cleared them, clipped them or added to them since."""
        if self._gradients() != self._left:
            raise UsageError(
                f"{where} after {self._micro} of {self.parts} microbatches: the gradients that these have "
                "left were changed since; let engine.step() clear them, clip by job.engine(clip=...), and "
                "where another model's backward goes through this one switch its gradients off there "
                "(requires_grad_(False))"
            )

    def _gradients(self) -> tuple[int, ...]:
        """What changes with whatever is done to them."""
        found = [p.grad for p in self.arranged.model.parameters() if p.grad is not None]
        seen = [getattr(gradient, "_local_tensor", gradient)._version for gradient in found]
        return (*seen, *(v for flat in self.arranged.flats for v in flat.gradient_versions()))

    def take_loaded(self) -> None:
        """What was loaded into the model is what the optimizer has: before weights are read or updated."""
        self._loads.take(self.settle)

    def _telling(self) -> AbstractContextManager[None]:
        if torch.is_grad_enabled():
            return telling_who_waits(self._mesh, f"in step {self._all_steps + 1}", FEWER)
        return telling_who_waits(self._mesh, "in a forward pass without gradients", ALONE)

    @property
    def _all_steps(self) -> int:
        return self.num_steps + self.num_skipped

    def _reducing(self) -> AbstractContextManager[None]:
        """Gradients are exchanged in the last microbatch alone, where a layout can wait."""
        if self.ends_step or not torch.is_grad_enabled():
            return nullcontext()
        return self.arranged.skip_reduction()

    def _weight(self) -> float:
        """What the mean loss of the microbatch at hand counts for."""
        # Along cp gradients are parts of a sum, and averaged.
        return self._dealt.scale / self.parts * self._mesh.axis_size("cp")

    def _finish(self) -> None:
        replicated = self.arranged.objective
        if isinstance(replicated, Replicated):
            replicated.require_gradients()
        if self.arranged.needs_finish:
            self.arranged.finish_gradients()

    @property
    def is_pending(self) -> bool:
        """Whether backward has run and `step` was not called since."""
        return self._pending

    @property
    def has_passed(self) -> bool:
        """Whether a forward pass has run whose loss was not given to `backward`."""
        return self._passes > 0

    @property
    def _is_averaged(self) -> bool:
        return self.arranged.average is not None and self.arranged.average.is_in_place

    def _overflowed(self) -> bool:
        scaler = self._precision.scaler
        return scaler is not None and scaler.overflowed

    def _step(self) -> None:
        if self._is_averaged:
            raise UsageError(
                "a step was taken within engine.averaged(), where the weights are their averages; leave it "
                "first"
            )
        self.arranged.num_samples_here, self._samples = max(self._samples, 1), 0
        self.take_loaded()
        self.is_updating = True
        try:
            with self._telling():
                self.grad_norm = self._update()
        finally:
            self.is_updating = False
        if self._overflowed():
            self.num_skipped += 1
        else:
            self.num_steps += 1

    def _through_stages(self, batch: Microbatches) -> Tensor:
        staged = self.arranged.staged
        assert staged is not None
        self._compare(batch.inputs[0])
        self.arranged.freshen()
        scale = self._precision.scale() * self._mesh.axis_size("cp")
        weights = [one / self.parts * scale for one in batch.scales]

        def prepare(index: int) -> None:
            self._dealt.take(batch.dealt[index])
            self._begin(batch.inputs[index], index)

        with self._telling(), self._precision.autocast():
            total = staged.forward_backward(
                batch.inputs, batch.targets, batch.counts, weights, prepare
            )
        self._samples = sum(batch.counts)
        self._finish()
        self.has_stepped = True
        self._step()
        return total / scale

    def _each(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """As many microbatches as a step has, on this rank's device."""
        found = iter(batches)
        if found is not batches:
            raise UsageError(
                f"engine was given a {type(batches).__name__} to take microbatches from, which would begin "
                "anew "
                "in each step; give iter(...) of it, once for an epoch"
            )
        for index in range(self.parts):
            try:
                batch = next(found)
            except StopIteration:
                raise UsageError(
                    f"the batches given ended after {index} microbatches of a step of {self.parts}; "
                    "give an iterator that goes on, as that of a loader in its next epoch"
                ) from None
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise UsageError(
                    f"a batch given is a {type(batch).__name__}; give pairs of inputs and targets"
                )
            inputs, targets = tree_map_only(
                Tensor, lambda x: x.to(self._mesh.device, non_blocking=True), tuple(batch)
            )
            yield tuple(inputs) if isinstance(inputs, list) else inputs, targets

    def _take(self, batches: Iterable[Any]) -> Microbatches:
        taken = Microbatches()
        for inputs, targets in self._each(batches):
            taken.inputs.append(inputs)
            taken.targets.append(targets)
            taken.dealt.append(self._dealt.copy())
            size = num_samples(inputs)
            taken.counts += (min(self._dealt.num_real, size) if self._dealt.is_ours else size,)
            taken.scales.append(self._dealt.scale)
        return taken

    def _compare(self, inputs: Any) -> None:
        """Looked at once."""
        if not self._compared and not self._dealt.is_ours:
            self._compared = True
            compare_samples(self._mesh, inputs)

    def _wide(self, outputs: Any) -> Any:
        narrow = AUTOCAST.get(self._precision.name)
        if narrow is None:
            return outputs
        return tree_map_only(Tensor, lambda x: x.float() if x.dtype is narrow else x, outputs)

    def _require_loss(self, what: str) -> Loss:
        if self._loss is None:
            raise UsageError(
                f"engine.{what} takes the loss itself: give job.engine(..., loss=function)"
            )
        return self._loss

    def _require_no_pipeline(self, what: str) -> None:
        if self.arranged.staged is not None:
            raise UsageError(
                f"{what} cannot be had with pp={self._mesh.layout.pp}, whose stages lie on several ranks; "
                "use engine.train_batch(batches) and engine.eval_batch(batches)"
            )


def _arrange(
    model: nn.Module,
    mesh: Mesh,
    loss: Loss | None,
    example: Any,
    randomness: Randomness,
    ddp: DdpConfig,
    tune: TuneConfig | None,
) -> Arranged:
    if example is not None and not isinstance(example, (tuple, dict)):
        example = (example,)
    is_staged = mesh.layout.pp > 1
    return arrange(
        Objective(model, loss) if is_staged and loss is not None else model,
        mesh.layout,
        mesh,
        model=model,
        loss=loss if is_staged else None,
        share=Share(),
        ddp=ddp,
        randomness=randomness,
        example=example,
        tune=tune,
    )


def _cuts(arranged: Arranged) -> bool:
    """Whether the optimizer has parts of parameters."""
    flat = any(flat.num_shards > 1 or flat.offload for flat in arranged.flats)
    splits = arranged.view is not None and bool(arranged.view.splits)
    return flat or splits or arranged.is_fully_sharded
