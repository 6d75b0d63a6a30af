"""One stage of a pipeline: the user's own module and forward pass, with the other stages taken out.

A stage runs the model's forward on the model's inputs. Calls that earlier stages did are answered with
zeros, or with what they returned where this stage or a later one needs it, what is made of the inputs alone
(masks, positions, rotary tables) is computed again, the module at the stage's beginning, and those after it
that are given the same, get the received tensors for their arguments, and the pass stops where the next
stage begins. So a model needs no rewriting, and only activations travel. `build_stages` is called by
`apply.py`; what it returns may be checkpointed, sharded, replicated before `run.py` drives it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import RunError, UsageError
from ridgeline.models.inputs import call_arguments
from ridgeline.parallel.pipeline.plan import Cut, Made, StagePlan, StandIn
from ridgeline.parallel.pipeline.structure import (
    TensorSpec,
    Where,
    batch_size,
    copy_containers,
    map_leaves,
    replace_tensors,
    tensors_in,
)

Change = Callable[[int, Tensor], Tensor]
"""(index of a cut, a tensor that crosses it) -> the tensor in another form."""

_RECEIVED, _TAKEN = "_ridgeline_received", "_ridgeline_taken"


class _Stop(BaseException):
    """The next stage begins here. Not an `Exception`, so that a model's own `except` lets it pass."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.call = (args, kwargs)


class _Stray(BaseException):
    """The forward pass took another path than planned; what follows may have no weights here."""


class _Own(torch.autograd.Function):
    """A copy, since a model may change its arguments in place and a leaf of the graph forbids it.

    Its gradient is what is sent back: as memory lies, so contiguous.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


class Stage(nn.Module):
    """Mixed into the class of the user's model, whose names and attributes a stage keeps.

    `forward(*received, inputs=...)` gives the tuple of tensors to send, or, in the last stage, what
    the model returns. `inputs` are the model's: a tensor, a tuple of arguments or keywords.
    """

    _stage: _Runner

    def forward(self, *received: Tensor, inputs: Any) -> Any:
        return self._stage.run(self, received, inputs)


class _Runner:
    """How one stage runs; no module, so that the stage's parameters have no prefix."""

    def __init__(
        self,
        plan: StagePlan,
        index: int,
        forward: Callable[..., Any],
        enter: Change | None,
        leave: Change | None,
    ) -> None:
        self.plan, self.index, self.forward = plan, index, forward
        self.enter, self.leave = enter, leave
        self.spec = plan.stages[index]
        self.begin: Cut | None = plan.cuts[index - 1] if index else None
        self.stop: Cut | None = plan.cuts[index] if index + 1 < plan.num_stages else None
        self.is_hooked = False
        self.is_active = False
        self.received: tuple[Tensor, ...] = ()
        self.batch = 0
        self.device = torch.device("cpu")
        self.num_calls: dict[str, int] = {}
        self.made: dict[Made, dict[Where, Tensor]] = {}
        """The tensors that calls returned, of those that the next stages ask for."""
        self.num_made: dict[str, int] = {}
        ends = (self.stop.path,) if self.stop is not None else ()
        self.planned = (*self.spec.order, *ends)
        self.num_called = 0
        self.strayed = ""
        """What the forward pass did otherwise than in the example, if it ever did; see `run.py`."""

    def run(self, model: nn.Module, received: tuple[Tensor, ...], inputs: Any) -> Any:
        if not self.is_hooked:
            self._hook(model)
        args, kwargs = call_arguments(inputs)
        self.batch = batch_size(inputs)
        self.device = next(tensor.device for _, tensor in tensors_in(inputs))
        self.received = tuple(self._receive(tensor) for tensor in received)
        self.num_calls, self.num_made, self.num_called = {}, {}, 0
        self.is_active = True
        try:
            with self._fillers(model):
                output = self.forward(model, *args, **kwargs)
        except _Stop as stop:
            return self._send(stop)
        except _Stray:
            return self._send_nothing(self.received)
        finally:
            self.is_active = False
            self.received, received = (), self.received
            self.made = {}
        if self.num_called < len(self.planned):
            self._stray("it ended")
        return output if self.stop is None else self._send_nothing(received)

    def _call(self, path: str) -> None:
        """A block is called: the next one of the plan, or the pass has gone another way."""
        at, self.num_called = self.num_called, self.num_called + 1
        if at < len(self.planned) and self.planned[at] == path:
            return
        self._stray(f"{path} was called")
        if self.stop is not None:
            raise _Stray  # the next block may have its weights in another stage

    def _stray(self, what: str) -> None:
        if not self.strayed:
            at = min(self.num_called - (what != "it ended"), len(self.planned))
            after = [*self.planned, "the end"][at]
            self.strayed = f"{what} where {after} should have been"

    def _send_nothing(self, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Zeros for a next stage that waits: the step comes to its end, and every rank hears why."""
        assert self.stop is not None
        link = sum((t.sum() * 0.0 for t in received if t.is_floating_point()), torch.zeros(()))
        if not link.requires_grad:
            link = link.detach().requires_grad_()
        zeros = (item.spec.zeros(self.batch, self.device) for item in self.stop.sent)
        return tuple((zero + link.to(self.device)).to(zero.dtype) for zero in zeros)

    def _receive(self, tensor: Tensor) -> Tensor:
        tensor = _Own.apply(tensor)
        return self.enter(self.index - 1, tensor) if self.enter else tensor

    def _send(self, stop: _Stop) -> tuple[Tensor, ...]:
        assert self.stop is not None
        found = dict(tensors_in(stop.call))
        sent = []
        for item in self.stop.sent:
            of = found if item.made is None else self.made[item.made]
            tensor = of[item.where]
            tensor = self.leave(self.index, tensor) if self.leave else tensor
            tensor = tensor.to(item.spec.dtype)
            if tuple(tensor.shape) != item.spec.shape(self.batch):
                raise RunError(
                    f"stage {self.index} would send a tensor of {list(tensor.shape)} to "
                    f"{self.stop.path} where the plan says {list(item.spec.shape(self.batch))}"
                )
            # Torch detaches what a stage returns in place, and sends memory as it lies.
            is_kept = tensor.is_leaf or any(tensor is one for one in self.received)
            if tensor._is_view() or is_kept or not tensor.is_contiguous():
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            sent.append(tensor)
        return tuple(sent)

    def _hook(self, model: nn.Module) -> None:
        """Done at the first run: before the hooks of, and around, whatever wrapped the modules."""
        if self.begin is not None:
            model.get_submodule(self.begin.path).register_forward_pre_hook(
                self._replace, with_kwargs=True, prepend=True
            )
        if self.stop is not None:
            model.get_submodule(self.stop.path).register_forward_pre_hook(
                self._raise, with_kwargs=True, prepend=True
            )
        asked = [one.made for one in self.stop.sent if one.made is not None] if self.stop else []
        for path in dict.fromkeys(made.path for made in asked):
            model.get_submodule(path).register_forward_hook(self._keeping(path, set(asked)))
        takes: dict[str, dict[Where, int]] = {}
        for take in self.spec.takes:
            takes.setdefault(take.path, {})[take.where] = take.sent
        for path, places in takes.items():
            # Before what ends the pass, which sends it on.
            model.get_submodule(path).register_forward_pre_hook(
                self._giving(places), with_kwargs=True, prepend=True
            )
        for path in dict.fromkeys(path for stage in self.plan.stages for path in stage.order):
            # Before the others, of which one ends the pass.
            model.get_submodule(path).register_forward_pre_hook(self._noting(path), prepend=True)
        self.is_hooked = True

    def _noting(self, path: str) -> Callable[[nn.Module, Any], None]:
        def note(_: nn.Module, __: Any) -> None:
            if self.is_active:
                self._call(path)

        return note

    def _keeping(self, path: str, asked: set[Made]) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            if not self.is_active:
                return
            made = Made(path, self.num_made.get(path, 0))
            self.num_made[path] = made.order + 1
            if made in asked:
                self.made[made] = dict(tensors_in(output))

        return keep

    def _replace(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        assert self.begin is not None
        found = dict(tensors_in((args, kwargs)))
        places = [item.where for item in self.begin.sent if item.made is None]
        if self.is_active:
            received = self.received
            # A checkpointed block runs again in the backward pass, called with the same stand-ins; what is
            # there already needs no note, and would hold itself by it.
            for place, tensor in zip(places, received, strict=False):
                if found[place] is not tensor:
                    setattr(found[place], _RECEIVED, received)
                    break
        else:
            notes = (getattr(found[place], _RECEIVED, None) for place in places)
            received = next((note for note in notes if note is not None), ())
        return replace_tensors((args, kwargs), dict(zip(places, received, strict=False)))

    def _giving(self, places: dict[Where, int]) -> Callable[[nn.Module, Any, Any], Any]:
        def give(_: nn.Module, args: Any, kwargs: Any) -> Any:
            found = dict(tensors_in((args, kwargs)))
            new = {}
            for where, number in places.items():
                if self.is_active:
                    new[where] = self.received[number]
                    if found[where] is not new[where]:
                        setattr(found[where], _TAKEN, new[where])  # for when a block runs again
                elif hasattr(found[where], _TAKEN):
                    new[where] = getattr(found[where], _TAKEN)
            return replace_tensors((args, kwargs), new)

        return give

    def _raise(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self.is_active:
            raise _Stop(args, kwargs)

    @contextmanager
    def _fillers(self, model: nn.Module) -> Iterator[None]:
        """Zeros without memory in place of parameters that are elsewhere, while the stage runs."""
        filled = []
        for filler in self.spec.fillers:
            path, _, name = filler.name.rpartition(".")
            module = model.get_submodule(path)
            # Pairs may be taken for complex numbers, which have to lie in memory as such.
            held = filler.shape if filler.shape[-1:] == (2,) else ()
            zero = torch.zeros(held, dtype=filler.dtype, device=self.device)
            module.__dict__[name] = zero.expand(filler.shape)
            filled.append((module, name))
        try:
            yield
        finally:
            for module, name in filled:
                del module.__dict__[name]

    def stand_in(self, path: str, answers: dict[int, StandIn], forward: Any) -> Callable[..., Any]:
        """The forward of a module of which some calls are answered, with zeros and what was received."""

        def answer(*args: Any, **kwargs: Any) -> Any:
            order = self.num_calls.get(path, 0)
            self.num_calls[path] = order + 1
            if not self.is_active or order not in answers:
                return forward(*args, **kwargs)
            given = dict(answers[order].given)

            def fill(where: Where, leaf: Any) -> Any:
                if where in given:
                    return self.received[given[where]]
                is_tensor = isinstance(leaf, TensorSpec)
                return leaf.zeros(self.batch, self.device) if is_tensor else leaf

            return copy_containers(map_leaves(answers[order].output, fill))

        return answer


def build_stages(
    model: nn.Module,
    plan: StagePlan,
    indices: Sequence[int],
    enter: Change | None = None,
    leave: Change | None = None,
) -> list[Stage]:
    """The stages `indices` of `model`, each a module of the model's own class with its own names.

    They share the parameters and buffers of `model` and hold no others than their plan says: memory
    is free once the caller lets go of `model`. A parameter that two stages of one rank train is one
    object. `enter` is applied to each received tensor and `leave` to each one about to be sent; what
    `leave` gives must be a plain tensor of the planned shape.
    """
    return [_build(model, plan, index, enter, leave) for index in indices]


def stale_buffers(part: nn.Module) -> frozenset[str]:
    """Buffers of a stage that hold nothing of the model, because another stage changes them."""
    return frozenset(part._stage.spec.stale) if isinstance(part, Stage) else frozenset()


def _build(
    model: nn.Module, plan: StagePlan, index: int, enter: Change | None, leave: Change | None
) -> Stage:
    spec = plan.stages[index]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    kept = {id(t) for name, t in tensors if name in {*spec.parameters, *spec.buffers}}
    memo: dict[int, Any] = {id(tensor): tensor for _, tensor in tensors}
    for name, tensor in tensors:
        if name in spec.stale:  # the stage whose it is may be on the same rank
            memo[id(tensor)] = tensor.detach().clone()
            kept.add(id(memo[id(tensor)]))
    stage = copy.deepcopy(model, memo)
    kind = type(model)
    if "forward" in stage.__dict__:
        raise UsageError(
            f"{kind.__name__} has a forward set on the instance, which a pipeline stage cannot take "
            "over; give the class the forward and build the model anew"
        )
    runner = _Runner(plan, index, kind.forward, enter, leave)
    answers: dict[str, dict[int, StandIn]] = {}
    for stand_in in spec.stand_ins:
        answers.setdefault(stand_in.path, {})[stand_in.order] = stand_in
    for path, orders in answers.items():
        module = stage.get_submodule(path)
        module.forward = runner.stand_in(path, orders, module.forward)
    for module in stage.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in kept:
                    held[name] = None  # not deleted: a model may tie weights again when it is moved
    stage.__class__ = type(f"{kind.__name__}Stage", (Stage, kind), {})
    stage._stage = runner
    return stage
