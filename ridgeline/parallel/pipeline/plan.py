"""Where to cut a model into stages, and what each stage needs: pure, and the same on every rank.

A cut is a module at whose call a stage begins. Candidates are proven on a recording (`record.py`): a
module is one when nothing made of weights before its call is used after it, but for its arguments, which
may be arguments of later calls too, as what conditions every block is, and for what modules returned, as
the skips of a U-Net are. Among them, those are taken that
make the most expensive stage cheapest. Called by `apply.py`; the stages are built from the plan by
`stage.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.parallel.blocks import find_blocks
from ridgeline.parallel.pipeline.balance import Weigher, balance
from ridgeline.parallel.pipeline.record import BATCHES, Call, Recording, record
from ridgeline.parallel.pipeline.structure import (
    TensorSpec,
    Where,
    batch_size,
    map_leaves,
    spec_of,
    tensors_in,
)

UNEVEN = 1.3
"""Times its even share from which the reason is told why the largest stage is so large."""


@dataclass(frozen=True)
class Made:
    """A call before the cut that returned what is used after it."""

    path: str
    order: int


# What gives the same again, and costs next to nothing: of the model's own forward, between modules.
_REPEATABLE = frozenset(
    {"relu", "gelu", "silu", "elu", "leaky_relu", "tanh", "sigmoid", "softplus", "hardtanh", "mish"}
    | {"add", "__add__", "__radd__", "sub", "__sub__", "mul", "__mul__", "__rmul__", "cat", "stack"}
    | {"__getitem__", "view", "reshape", "flatten", "unflatten", "permute", "transpose", "movedim"}
    | {"unsqueeze", "squeeze", "contiguous", "chunk", "split", "unbind", "expand", "to", "float"}
    | {"type_as"}
)
_MOST_PARTS = 4
"""Tensors that are sent in place of one: more, and it is no cut."""
_DEEPEST = 16
"""Functions between a value and what modules returned: more are not done again."""


@dataclass(frozen=True)
class Sent:
    """One tensor that crosses a cut: an argument of the module there, or what a call before it returned."""

    where: Where
    """Keys that lead to it in `(args, kwargs)` of the call, or in what `made` returned."""
    spec: TensorSpec
    made: Made | None = None


@dataclass(frozen=True)
class Cut:
    """A stage begins when the module at `path` is called."""

    path: str
    sent: tuple[Sent, ...]


@dataclass(frozen=True)
class Take:
    """A call after the cut that is given again what crossed it."""

    path: str
    where: Where
    """In the arguments of that call."""
    sent: int
    """Which of the tensors that crossed."""


@dataclass(frozen=True)
class StandIn:
    """A call that a stage answers with zeros, because earlier stages did the work."""

    path: str
    order: int
    output: Any
    """What it returns, with a `TensorSpec` for each tensor."""
    given: tuple[tuple[Where, int], ...] = ()
    """Where in it are tensors that crossed the cut, and which of those."""


@dataclass(frozen=True)
class Filler:
    """A parameter that a stage does not hold, but whose shape its forward pass asks for."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class StageSpec:
    """What one stage holds and does."""

    first: str
    """Path of the module it begins with; empty for the first stage."""
    parameters: tuple[str, ...]
    """Names of the parameters it trains, as `named_parameters` of the model gives them."""
    buffers: tuple[str, ...]
    stand_ins: tuple[StandIn, ...]
    fillers: tuple[Filler, ...]
    cost: float
    """Its share of the model's cost; in the caller's unit where the caller gave costs."""
    order: tuple[str, ...] = ()
    """The blocks that its forward calls, one after the other, up to where it stops."""
    takes: tuple[Take, ...] = ()
    """Calls that get what crossed the cut before it, beside the one that it begins with."""
    stale: tuple[str, ...] = ()
    """Those of `buffers` that another stage changes by what it computes, and this one by stand-ins."""


@dataclass(frozen=True)
class Tied:
    """A parameter that several stages train; each has a copy, gradients are summed over them."""

    name: str
    stages: tuple[int, ...]


@dataclass(frozen=True)
class StagePlan:
    """The cuts of one model and what follows from them."""

    stages: tuple[StageSpec, ...]
    cuts: tuple[Cut, ...]
    """`cuts[k]` lies between stages k and k + 1."""
    tied: tuple[Tied, ...]
    input_shapes: tuple[tuple[Where, tuple[int, ...]], ...]
    """The example's tensors, without the batch dim where they have one."""
    refused: tuple[str, ...] = ()
    """Why other places are no cuts."""

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def rank_of(self, stage: int, num_ranks: int) -> int:
        return stage % num_ranks

    def indices_of(self, rank: int, num_ranks: int) -> list[int]:
        """The stages of one rank: every `num_ranks`-th."""
        return list(range(rank, self.num_stages, num_ranks))

    def describe(self) -> str:
        """One line a stage: where it begins, how many parameters, what it costs."""
        total = sum(stage.cost for stage in self.stages) or 1.0
        lines = []
        for index, stage in enumerate(self.stages):
            first = stage.first or "inputs"
            share = 100 * stage.cost / total
            lines.append(
                f"stage {index}: from {first}, {len(stage.parameters)} tensors, {share:.0f} %"
            )
        most = max((stage.cost for stage in self.stages), default=0.0) / total
        if self.refused and most * self.num_stages > UNEVEN:
            lines.append(
                f"these are uneven, since {len(self.refused)} other places are no cuts ({self.refused[0]})"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class _Carried:
    """A value that calls before a cut returned, and something after it uses."""

    key: int
    call: int
    """The outermost of those calls."""
    where: Where


@dataclass(frozen=True)
class _Point:
    """A place where the model could be cut."""

    call: int
    path: str
    clock: int
    flops: int
    sent: tuple[tuple[Where, int], ...]
    carried: tuple[_Carried, ...] = ()

    @property
    def numbers(self) -> dict[int, int]:
        """Which of the tensors that cross is each of them."""
        places = [key for _, key in self.sent]
        places += [one.key for one in self.carried if one.key not in places]
        return {key: places.index(key) for key in places}


def plan_stages(
    model: nn.Module,
    num_stages: int,
    example_inputs: Any,
    costs: Mapping[str, float] | None = None,
    *,
    device: torch.device | None = None,
    autocast_dtype: torch.dtype | None = None,
    carries: bool = True,
) -> StagePlan:
    """Cut `model` into `num_stages` stages of about the same cost.

    `example_inputs` are what the model is called with: a tensor, a tuple of arguments, or a dictionary
    of keywords, of a microbatch's size. `costs` are measured costs by module path (in any unit, of
    modules that are not inside one another); a stage costs the sum of those that begin in it. Without
    them it is an estimate from FLOPs and parameters. `device` is where the model will run (default:
    where the inputs are) and `autocast_dtype` the type its arithmetic will be in. `carries` says whether
    what modules returned before a cut may be used after it.
    """
    if device is None:
        device = next((t.device for _, t in tensors_in(example_inputs)), torch.device("cpu"))
    small, large = record(model, example_inputs, device, autocast_dtype)
    if [call.path for call in small.calls] != [call.path for call in large.calls]:
        raise UsageError(
            f"{type(model).__name__} calls other modules for a batch of {BATCHES[0]} than for one of "
            f"{BATCHES[1]}, so it cannot be cut into pipeline stages; use pp=1"
        )
    points, refused = _candidates(model, small, carries)
    weigh = Weigher(model, small, [(point.clock, point.flops) for point in points], costs)
    sizes = [
        sum(
            small.values[key].tensor.numel()
            for key in {key for _, key in point.sent} | set(point.numbers)
        )
        for point in points
    ]
    chosen = balance(weigh, sizes, num_stages)
    if chosen is None:
        raise _too_few(model, num_stages, weigh.most_stages(), refused)
    cuts = [points[index] for index in chosen]
    stages = _stage_specs(model, small, large, cuts, weigh.costs_of(chosen))
    holders: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for name in stage.parameters:
            holders.setdefault(name, []).append(index)
    batch = batch_size(example_inputs)
    return StagePlan(
        tuple(stages),
        tuple(
            _cut(point, small, large, begin)
            for point, begin in zip(cuts, [-1, *(c.clock for c in cuts)], strict=False)
        ),
        tuple(Tied(name, tuple(where)) for name, where in holders.items() if len(where) > 1),
        tuple(
            (where, tuple(t.shape[1:] if t.dim() and t.shape[0] == batch else t.shape))
            for where, t in tensors_in(example_inputs)
        ),
        tuple(refused),
    )


def _candidates(model: nn.Module, seen: Recording, carries: bool) -> tuple[list[_Point], list[str]]:
    """Places to cut in the order of the forward pass, and why others are none.

    Between the repeated blocks rather than inside them, unless there are none between.
    """
    num_calls = Counter(call.path for call in seen.calls)
    blocks = tuple(f"{path}." for path in find_blocks(model))
    points: list[_Point] = []
    refused: list[str] = []
    last_uses = sorted(
        (v.last_use, v.defined, k) for k, v in seen.values.items() if v.last_use >= 0
    )
    for index, call in enumerate(seen.calls):
        if call.parent < 0 or call.path.startswith(blocks):
            continue
        sent = tuple(
            (where, value)
            for where, value in call.inputs.items()
            if value in seen.values and seen.values[value].is_tainted
        )
        if not sent or (points and points[-1].clock == call.start):
            continue  # nothing has been computed yet, or since the last candidate
        if num_calls[call.path] > 1:
            refused.append(f"{call.path} is called {num_calls[call.path]} times")
            continue
        found = _what_crosses(
            seen, call, {value for _, value in sent}, last_uses, num_calls, carries
        )
        if isinstance(found, str):
            refused.append(f"no cut at {call.path}: {found}")
        else:
            points.append(_Point(index, call.path, call.start, call.flops_start, sent, found))
    return points, refused


def _what_crosses(
    seen: Recording,
    call: Call,
    sent: set[int],
    last_uses: list[tuple[int, int, int]],
    num_calls: Mapping[str, int],
    carries: bool,
) -> tuple[_Carried, ...] | str:
    """What the part after a cut at `call` needs of the part before, besides its arguments; in words where
    it cannot have it."""
    carried: list[_Carried] = []
    for key in sent:
        value = seen.values[key]
        if not value.tensor.is_floating_point():
            return f"it takes a {value.tensor.dtype} tensor computed from weights"
    for clock, where in seen.reads:
        if clock <= call.start and not _inside_stand_in(seen, where, call.start):
            reader = seen.path_of(where) or "the model's own forward"
            return f"{reader} looks at values computed before it (a number, or which rows to take)"
    for last_use, defined, key in last_uses[bisect_left(last_uses, (call.start + 1, -1, -1)) :]:
        value = seen.values[key]
        if defined > call.start or (key in sent and last_use <= call.end):
            continue
        if key in sent and _is_only_given(seen, call, key, num_calls):
            continue
        hidden = not value.is_tainted and _inside_stand_in(seen, value.call, call.start)
        found = _carry(seen, key, call.start) if value.is_tainted and carries else None
        if found is not None:
            carried = list(dict.fromkeys([*carried, *found]))
        elif value.is_tainted or hidden:
            source = seen.path_of(value.call) or "the model's own forward"
            user = seen.path_of(value.last_call) or "the model's own forward"
            return f"a tensor made in {source} is used later in {user}"
    if carried and (
        written := _written_apart(seen, sent | {one.key for one in carried}, call.start)
    ):
        return f"a tensor made in {written} is changed in place after it, by another of its views"
    return tuple(carried)


def _written_apart(seen: Recording, keys: set[int], clock: int) -> str:
    """Where one of several tensors that cross was made, which share memory that is written to later: behind
    the cut each has memory of its own. Empty where none is."""
    roots = Counter(seen.values[key].root for key in keys)
    for key in keys:
        value = seen.values[key]
        if roots[value.root] > 1 and any(when > clock for when in value.changes):
            return seen.path_of(value.call) or "the model's own forward"
    return ""


def _carry(seen: Recording, key: int, clock: int, depth: int = 0) -> tuple[_Carried, ...] | None:
    """A value that a call which is over returned as it is now: a stage that begins at `clock`, and answers
    for that call, can answer with it. One that was made of such values alone it makes again. None where
    neither is so, as of what a call has kept aside."""
    value, outer = seen.values[key], -1
    at = value.call
    while at >= 0:
        call = seen.calls[at]
        outer = at if call.is_stand_in_possible and call.end <= clock else outer
        at = call.parent
    since = value.defined if outer < 0 else seen.calls[outer].end
    if value.is_hooked or depth > _DEEPEST or not value.tensor.is_floating_point():
        return None
    if any(since < when <= clock for when in value.changes):
        return None
    if outer >= 0:
        places = tensors_in(seen.calls[outer].output)
        where = next((where for where, tensor in places if id(tensor) == key), None)
        return None if where is None else (_Carried(key, outer, where),)
    if value.made_by not in _REPEATABLE:
        return None
    found: list[_Carried] = []
    for one in value.made_of:
        part = seen.values.get(one)
        # Weights are elsewhere, and what is made of neither weights nor inputs may be drawn anew.
        more = None
        if part is not None and part.is_tainted:
            more = _carry(seen, one, clock, depth + 1)
        if more is None:
            return None
        found = list(dict.fromkeys([*found, *more]))
        if len(found) > _MOST_PARTS:
            return None
    return tuple(found) if found else None


def _is_only_given(seen: Recording, call: Call, key: int, num_calls: Mapping[str, int]) -> bool:
    """Whether all that becomes of an argument of a call after it is to be one of other calls', which a
    stage can give them: of modules that are called once, so that it is known which call it is."""
    takers = _takers(seen, call, key)
    if any(num_calls[one.path] > 1 for one in takers):
        return False
    return all(
        use <= call.end or any(one.start < use <= one.end for one in takers)
        for use in seen.values[key].uses
        if use > call.start
    )


def _takers(seen: Recording, call: Call, key: int) -> list[Call]:
    """The outermost calls after this one that a value is given to."""
    found: list[Call] = []
    for one in seen.calls:
        if one.start < call.end or key not in one.inputs.values():
            continue
        if not found or one.start >= found[-1].end:
            found.append(one)
    return found


def _takes(seen: Recording, point: _Point, end: int) -> tuple[Take, ...]:
    """Up to the call that the next stage begins with, which is told of it as well. What stand-ins return
    needs no taker, and may be given to modules that are called again with something else."""
    carried = {one.key for one in point.carried}
    return tuple(
        Take(one.path, where, number)
        for number, (_, key) in enumerate(point.sent)
        if key not in carried
        for one in _takers(seen, seen.calls[point.call], key)
        if one.start <= end
        for where, value in one.inputs.items()
        if value == key
    )


def _inside_stand_in(seen: Recording, call: int, clock: int) -> bool:
    """Whether a call is part of one that a stage beginning at `clock` does not run."""
    while call >= 0:
        found = seen.calls[call]
        if found.is_stand_in_possible and found.end <= clock:
            return True
        call = found.parent
    return False


def _too_few(model: nn.Module, asked: int, most: int, refused: list[str]) -> UsageError:
    why = f" ({refused[0]})" if refused else ""
    return UsageError(
        f"{type(model).__name__} cannot be cut into {asked} pipeline stages{why}; the largest number "
        f"of stages that works is {most}: use pp x virtual <= {most}"
    )


def _order_in(seen: Recording, index: int, begin: int) -> int:
    """Which of the calls of its module a call is, in a stage that begins at `begin`: what is inside of a
    call that the stage answers for is not called there."""
    path = seen.calls[index].path
    return sum(
        one.path == path and not (one.parent >= 0 and _inside_stand_in(seen, one.parent, begin))
        for one in seen.calls[:index]
    )


def _cut(point: _Point, small: Recording, large: Recording, begin: int) -> Cut:
    """`begin` is when the stage before it begins, which sends."""
    sent = []
    for where, key in point.sent:
        other = large.values[large.calls[point.call].inputs[where]].tensor
        sent.append(Sent(where, spec_of(small.values[key].tensor, other, BATCHES)))
    arguments = {key for _, key in point.sent}
    for one in point.carried:
        if one.key in arguments:
            continue  # sent as such already
        call = small.calls[one.call]
        other = dict(tensors_in(large.calls[one.call].output))[one.where]
        spec = spec_of(small.values[one.key].tensor, other, BATCHES)
        sent.append(Sent(one.where, spec, Made(call.path, _order_in(small, one.call, begin))))
    return Cut(point.path, tuple(sent))


def _stage_specs(
    model: nn.Module,
    small: Recording,
    large: Recording,
    cuts: list[_Point],
    costs: list[float],
) -> list[StageSpec]:
    bounds = [-1, *(cut.clock for cut in cuts), small.end]
    owners = _owners(model, small, bounds)
    specs = []
    for index, cost in enumerate(costs):
        begin, end = bounds[index], bounds[index + 1]

        def runs_here(
            uses: list[tuple[int, int]], begin: int = begin, end: int = end, index: int = index
        ) -> bool:
            return any(
                begin < clock <= end
                or (clock <= begin and not (index and _inside_stand_in(small, call, begin)))
                for clock, call in uses
            )

        held = tuple(name for name, stages in owners.items() if index in stages)
        fillers = tuple(
            Filler(name, tuple(p.shape), p.dtype)
            for name, p in model.named_parameters()
            if name not in held and runs_here(small.uses.get(name, []) + small.looks.get(name, []))
        )
        buffers = tuple(
            name
            for name, _ in model.named_buffers()
            if name not in small.uses or runs_here(small.uses[name])
        )
        stand_ins = _stand_ins(small, large, cuts[index - 1]) if index else ()
        first = cuts[index - 1].path if index else ""
        order = _order(small, cuts, begin if index else -1, end)
        stale = tuple(
            name
            for name, clock in small.changes.items()
            if name in buffers and not begin < clock <= end
        )
        takes = _takes(small, cuts[index - 1], end) if index else ()
        specs.append(StageSpec(first, held, buffers, stand_ins, fillers, cost, order, takes, stale))
    return specs


def _order(seen: Recording, cuts: Sequence[Cut], begin: int, end: int) -> tuple[str, ...]:
    """The calls beside those that are cut at, in a stage that begins and ends at these times; of their
    modules also those from inside of others."""
    at = {cut.path for cut in cuts}
    beside = {call.parent for call in seen.calls if call.path in at}
    paths = {call.path for call in seen.calls if call.parent in beside}
    return tuple(
        call.path
        for call in seen.calls
        if call.path in paths
        and call.start < end
        and not (call.parent >= 0 and _inside_stand_in(seen, call.parent, begin))
    )


def _owners(model: nn.Module, seen: Recording, bounds: list[int]) -> dict[str, set[int]]:
    """The stages that use each parameter; one that nothing uses goes with the one before it."""
    owners: dict[str, set[int]] = {}
    previous = 0
    for name, _ in model.named_parameters():
        stages = {bisect_left(bounds, clock) - 1 for clock, _ in seen.uses.get(name, [])}
        owners[name] = stages or {previous}
        previous = min(owners[name])
    return owners


def _stand_ins(small: Recording, large: Recording, cut: _Point) -> tuple[StandIn, ...]:
    """The outermost calls that were over when a stage began and that only weights matter to."""
    found = []
    clock, numbers = cut.clock, cut.numbers
    for index, (call, other) in enumerate(zip(small.calls, large.calls, strict=True)):
        if not call.is_stand_in_possible or call.end > clock:
            continue
        if call.parent >= 0 and _inside_stand_in(small, call.parent, clock):
            continue
        larger = dict(tensors_in(other.output))

        def spec(where: Where, leaf: Any, larger: dict[Where, Tensor] = larger) -> Any:
            return spec_of(leaf, larger[where], BATCHES) if isinstance(leaf, Tensor) else leaf

        # Also an argument of the cut, which a later stage may be sent in turn.
        given = tuple(
            (where, numbers[id(tensor)])
            for where, tensor in tensors_in(call.output)
            if id(tensor) in numbers
            and not any(call.end < when <= clock for when in small.values[id(tensor)].changes)
        )
        order = _order_in(small, index, clock)
        found.append(StandIn(call.path, order, map_leaves(call.output, spec), given))
    return tuple(found)
