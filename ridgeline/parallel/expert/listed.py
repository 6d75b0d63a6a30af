"""Experts in a list of modules, called one by one with their rows by the code around the list.

That code is the user's, and asks for each expert's outputs on the spot, while a rank with none of them in
memory has to send all rows together. So the module around the list runs twice. The first time experts only
note what they are given and answer with zeros; then all rows travel to their experts and back; the second
time each call gets what came back for it. Gradients leave the rows of the first run, and those of whatever
the code does with the outputs go through the second. Where experts are chosen by what others of them
answered, the two runs ask for different things, which is an error. The first run's work is done twice;
experts are no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ridgeline.errors import RunError, UsageError
from ridgeline.parallel.expert.exchange import Counts, exchange, send_counts, tie


@dataclass(frozen=True)
class Listed:
    """A list of `num` experts, and the module whose code calls them."""

    path: str
    around: str
    num: int


def put_away(expert: nn.Module) -> None:
    """Take the weights out of an expert that another rank has. What is left in their place says their
    shape, type and device to code that asks, and holds one number."""
    for module in expert.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                del module._parameters[name]
                like = parameter.detach()
                setattr(module, name, like.new_zeros(()).expand(like.shape))


class Kept:
    """Buffers and numbers that some modules have in their attributes, to put them back as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._buffers = [
            (module, name, buffer, buffer.clone(), buffer._version)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._numbers = [
            (module, {n: v for n, v in vars(module).items() if type(v) in (int, float, bool)})
            for module in modules
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        for module, name, buffer, values, version in self._buffers:
            if buffer._version != version:
                buffer.copy_(values)
            module._buffers[name] = buffer
        for module, numbers in self._numbers:
            vars(module).update(numbers)


@dataclass
class _Noted:
    """What the code around a list asked of its experts."""

    calls: list[tuple[int, Tensor]] = field(default_factory=list)
    answers: list[Tensor] | None = None
    """Those of the second run; None in the first."""
    num_answered: int = 0


class SpreadList:
    """Stands for the forward of the module around a list, and of every expert in it.

    `moment` makes contexts in which dropout draws as it would now, so that both runs see the same.
    """

    def __init__(
        self,
        around: nn.Module,
        experts: nn.ModuleList,
        plan: Listed,
        num_ranks: int,
        rank: int,
        group: dist.ProcessGroup | None,
        moment: Callable[[], Callable[[], AbstractContextManager[Any]]] = lambda: nullcontext,
    ) -> None:
        self.plan, self.experts, self.group, self.moment = plan, experts, group, moment
        self.num_ranks, self.num_here = num_ranks, plan.num // num_ranks
        self.first = rank * self.num_here
        self._inner = around.forward
        self._own = {number: _forward_of(experts[number]) for number in self._here()}
        inside = {id(m) for m in experts.modules()}
        self._others = [m for m in around.modules() if id(m) not in inside]
        self._noted: _Noted | None = None
        self._outputs: dict[Any, tuple[torch.Size, torch.dtype]] = {}
        for number, expert in enumerate(experts):
            expert.forward = self._asked(number)

    def _here(self) -> range:
        return range(self.first, self.first + self.num_here)

    def _asked(self, number: int) -> Callable[..., Tensor]:
        """What the code around the list calls in place of an expert."""

        def asked(*args: Any, **kwargs: Any) -> Tensor:
            noted = self._noted
            if noted is None:
                raise RunError(
                    f"{self.plan.path}.{number} was called outside of {self.plan.around}, and under ep it "
                    "can only be called there; leave ep out"
                )
            if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].dim() < 1:
                raise UsageError(
                    f"{self.plan.path}.{number} was called with more than one tensor of rows, and under ep "
                    "nothing else is sent to it; do the rest around the expert, or leave ep out"
                )
            if noted.answers is None:
                noted.calls.append((number, args[0]))
                rows = _rows(args[0])
                shape, dtype = self._output_of(rows)
                empty = rows.new_zeros(len(rows), *shape, dtype=dtype)
                return empty if rows is args[0] else empty[0]
            return self._answer(noted, number, args[0])

        return asked

    def _answer(self, noted: _Noted, number: int, x: Tensor) -> Tensor:
        place = noted.num_answered
        noted.num_answered += 1
        assert noted.answers is not None
        if place >= len(noted.calls) or (number, x.shape) != (
            noted.calls[place][0],
            noted.calls[place][1].shape,
        ):
            raise self._other_calls()
        return noted.answers[place]

    def _other_calls(self) -> RunError:
        return RunError(
            f"{self.plan.around} called other experts when it ran for the second time: its choice depends "
            "on what experts answered, or on numbers of its own; leave ep out"
        )

    @torch.compiler.disable  # how many rows come is known as they come
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        versions = [x._version for x in given]
        kept, before = Kept(self._others), _generators(given)
        noted = _Noted()
        with self._noting(noted), self.moment()():
            self._inner(*args, **kwargs)
        if [x._version for x in given] != versions:
            raise UsageError(
                f"{self.plan.around} changes its inputs in place, which under ep it would do twice; leave "
                "its inputs as they are, or leave ep out"
            )
        noted.answers, anchor = self._travel(noted.calls)
        # What was drawn and counted once is drawn and counted again, and what experts drew is not.
        after = _generators(given)
        kept.put_back()
        before()
        with self._noting(noted):
            out = self._inner(*args, **kwargs)
        after()
        if noted.num_answered != len(noted.calls):
            raise self._other_calls()
        return tree_map(lambda x: tie(x, anchor) if _has_gradient(x) else x, out)

    @contextmanager
    def _noting(self, noted: _Noted) -> Iterator[None]:
        before, self._noted = self._noted, noted
        try:
            yield
        finally:
            self._noted = before

    def _travel(self, asked: list[tuple[int, Tensor]]) -> tuple[list[Tensor], Tensor]:
        """The experts' outputs for each call."""
        numbers, inputs = [number for number, _ in asked], [x for _, x in asked]
        if not inputs:
            raise RunError(
                f"{self.plan.around} called none of its experts, and other ranks may wait for it; leave ep "
                "out"
            )
        like = inputs[0]
        order = sorted(range(len(numbers)), key=lambda place: numbers[place])
        flat = [_rows(x) for x in inputs]
        one = flat[0].shape[1:]
        calls = [[0, 0, one.numel()] for _ in range(self.plan.num)]
        for number, rows in zip(numbers, flat, strict=True):
            calls[number][0] += len(rows)
            calls[number][1] += 1
        sent = torch.tensor(calls, device=like.device).view(self.num_ranks, self.num_here, 3)
        came = send_counts(sent, self.group).tolist()
        if {rows.shape[1:] for rows in flat} != {one} or any(
            size != one.numel() for rank in came for _, _, size in rank
        ):
            raise RunError(
                f"experts of {self.plan.path} were called with rows of several shapes, which cannot travel "
                "together; give them tokens as rows of one dimension, or samples of one length"
            )
        counts = Counts(
            [
                sum(n for n, _, _ in calls[r * self.num_here : (r + 1) * self.num_here])
                for r in range(self.num_ranks)
            ],
            [sum(n for n, _, _ in one) for one in came],
        )
        (rows,), anchor = exchange(
            [torch.cat([flat[place] for place in order])], [counts], self.group
        )
        done = self._work(rows, came, like)
        (back,), anchor = exchange([done], [counts.back()], self.group, anchor)
        answers: list[Tensor] = [back] * len(inputs)
        start = 0
        for place in order:
            # A tensor of its own, which the code may change in place as it may an expert's output.
            part = back[start : start + len(flat[place])].clone()
            answers[place] = part if flat[place] is inputs[place] else part[0]
            start += len(part)
        return answers, anchor

    def _work(self, rows: Tensor, came: list[list[list[int]]], like: Tensor) -> Tensor:
        """This rank's experts on the rows of all ranks; one that nobody called is not called here."""
        sizes = [n for one in came for n, _, _ in one]
        parts = list(rows.split(sizes)) if sizes else []
        done: list[Tensor | None] = [None] * len(parts)
        for local, number in enumerate(self._here()):
            places = range(local, len(parts), self.num_here)
            if not any(one[local][1] for one in came):
                continue
            out = self._own[number](torch.cat([parts[place] for place in places]))
            if (
                not isinstance(out, Tensor)
                or not out.dim()
                or len(out) != sum(sizes[p] for p in places)
            ):
                raise UsageError(
                    f"{self.plan.path}.{number} gave a {type(out).__name__} for its rows, and under ep an "
                    "expert has to give a tensor with a row for each; leave ep out"
                )
            for place, part in zip(places, out.split([sizes[p] for p in places]), strict=True):
                done[place] = part
        found = [part for part in done if part is not None]
        if found:
            return torch.cat(found)
        shape, dtype = self._output_of(_rows(like))
        return rows.new_zeros(0, *shape, dtype=dtype)

    def _output_of(self, x: Tensor) -> tuple[torch.Size, torch.dtype]:
        """What an expert makes of a row: the shape and type, learnt from one of this rank's."""
        device = x.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        key = (x.shape[1:], x.dtype, device, autocast)
        if key not in self._outputs:
            # Unseen by selective recompute, which counts calls: this one is not made again.
            with (
                torch.no_grad(),
                _disable_current_modes(),
                torch.random.fork_rng(_devices(x)),
                self.moment()(),
            ):
                out = self._own[self.first](x.new_ones(1, *x.shape[1:]))
            if not isinstance(out, Tensor) or not out.dim() or len(out) != 1:
                raise UsageError(
                    f"{self.plan.path}.{self.first} gave no row for a row, and under ep an expert has to "
                    "give a tensor with a row for each; leave ep out"
                )
            self._outputs[key] = (out.shape[1:], out.dtype)
        return self._outputs[key]


def _rows(x: Tensor) -> Tensor:
    """What an expert is given, row by row; one row alone may come without a dimension for it."""
    return x if x.dim() > 1 else x[None]


def _forward_of(expert: nn.Module) -> Callable[[Tensor], Tensor]:
    """What it does without us; asked of its class at each call, which fp8 changes."""
    own = vars(expert).get("forward")
    return own if own is not None else lambda x: type(expert).forward(expert, x)


def _has_gradient(value: Any) -> bool:
    """On all ranks alike: what came back from experts has one."""
    return isinstance(value, Tensor) and value.is_floating_point() and torch.is_grad_enabled()


def _devices(x: Tensor) -> list[int]:
    return [x.device.index or 0] if x.device.type == "cuda" else []


def _generators(given: list[Tensor]) -> Callable[[], None]:
    """What puts torch's generators back to where they are now."""
    state = torch.get_rng_state()
    devices = {x.device for x in given if x.device.type == "cuda"}
    there = {device: torch.cuda.get_rng_state(device) for device in devices}

    def restore() -> None:
        torch.set_rng_state(state)
        for device, value in there.items():
            torch.cuda.set_rng_state(value, device)

    return restore
