"""Which experts a model has, found by watching it run once on an example.

Two ways of writing them are known: one module with stacked weights (`stacked.py`), and a list of modules of
one class (`listed.py`). What looks like either is tried before it is believed: a stack is run in parts on
random rows and weights, a list as if its experts were elsewhere, and both have to give what they gave
whole. Called by `apply.py` of the room, before anything has changed the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ridgeline.errors import UsageError
from ridgeline.models.experts import argument, is_stack, read_call, why_whole
from ridgeline.parallel.expert.listed import Kept, Listed, SpreadList
from ridgeline.parallel.expert.stacked import (
    Stacked,
    counting,
    plan_route,
    with_arguments,
)
from ridgeline.parallel.siblings import run_once

_NUM_TRIED = 24
"""Random rows that a stack is tried on."""


@dataclass(frozen=True)
class ExpertPlan:
    """The experts of a model."""

    stacked: tuple[Stacked, ...] = ()
    listed: tuple[Listed, ...] = ()
    refused: tuple[str, ...] = ()
    """What looked like experts and is none, with the reason: it stays whole."""
    names: frozenset[str] = frozenset()
    """Their parameters."""

    @property
    def num_layers(self) -> int:
        return len(self.stacked) + len({one.around for one in self.listed})

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(one.path for one in (*self.stacked, *self.listed))


@dataclass
class _Seen:
    """The first call of a module."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    out: Any = None
    num: int = 0


def find_experts(model: nn.Module, example: Any, num_ranks: int) -> ExpertPlan:
    """The experts of `model`, each kind as many as `num_ranks` divides; the model is left as it was."""
    kept = Kept(list(model.modules()))
    try:
        return _find(model, example, num_ranks)
    finally:
        kept.put_back()


def _find(model: nn.Module, example: Any, num_ranks: int) -> ExpertPlan:
    shared = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    stacks = {path: m for path, m in model.named_modules() if path and is_stack(m)}
    lists = {path: m for path, m in model.named_modules() if path and _may_be_list(m)}
    around = {path: path.rpartition(".")[0] for path in lists}
    seen = _watch(model, {*stacks, *around.values()}, example)
    refused: dict[str, str] = {}
    unlikely: dict[str, str] = {}
    found_stacks: list[Stacked] = []
    found_lists: list[Listed] = []
    for path, members in lists.items():
        if any(path.startswith(f"{outer.path}.") for outer in found_lists):
            continue  # in an expert, which has it whole
        one = Listed(path, around[path], len(members))
        reason = _try_list(model.get_submodule(around[path]), members, one, seen[around[path]])
        said = "expert" in path.rpartition(".")[2].lower()
        if reason is not None:
            (refused if said else unlikely)[path] = reason
        elif said or not one.num % num_ranks:
            found_lists.append(one)
    for path, module in stacks.items():
        if any(path.startswith(f"{outer.path}.") for outer in found_lists):
            continue
        stack = _read_stack(path, module, seen[path])
        if isinstance(stack, Stacked):
            stack = _tried_stack(module, stack, seen[path], num_ranks)
        if isinstance(stack, str):
            refused[path] = stack
        else:
            found_stacks.append(stack)
    names = {
        f"{one.path}.{name}"
        for one in (*found_stacks, *found_lists)
        for name, _ in model.get_submodule(one.path).named_parameters()
    }
    reasons = tuple(f"{path}: {why}" for path, why in refused.items())
    plan = ExpertPlan(tuple(found_stacks), tuple(found_lists), reasons, frozenset(names))
    _check(model, plan, num_ranks, shared, unlikely)
    return plan


def _check(
    model: nn.Module,
    plan: ExpertPlan,
    num_ranks: int,
    shared: Counter[int],
    unlikely: dict[str, str],
) -> None:
    name = type(model).__name__
    if not plan.paths:
        reasons = [*plan.refused, *(f"{path}: {why}" for path, why in unlikely.items())]
        why = f" ({'; '.join(reasons[:3])})" if reasons else ""
        raise UsageError(
            f"ep={num_ranks} found no experts in {name}{why}; they have to be a list of modules of one "
            "class, each called with its rows, or one module with stacked weights, called with tokens, the "
            "numbers of their experts and their weights; leave ep out"
        )
    stands: Counter[int] = Counter()
    for _, module in model.named_modules(remove_duplicate=False):
        stands.update([id(module), *(id(p) for p in module.parameters(recurse=False))])
    for one in (*plan.stacked, *plan.listed):
        if one.num % num_ranks:
            fits = [n for n in range(2, one.num + 1) if one.num % n == 0]
            raise UsageError(
                f"ep={num_ranks} does not divide the {one.num} experts of {one.path}; use ep="
                f"{' or '.join(str(n) for n in fits)}"
            )
        inside = model.get_submodule(one.path)
        for inner, parameter in inside.named_parameters():
            if shared[id(parameter)] > 1 or stands[id(parameter)] > stands[id(inside)]:
                raise UsageError(
                    f"{one.path}.{inner} is a weight of other modules too, so that no rank can have it for "
                    "itself; leave ep out, or give each its own"
                )


# What is looked at


def _may_be_list(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return False
    kinds = {
        (type(m), tuple((n, p.shape, p.dtype) for n, p in m.named_parameters())) for m in module
    }
    return len(kinds) == 1 and any(True for _ in module.parameters())


def _watch(model: nn.Module, paths: set[str], example: Any) -> dict[str, _Seen]:
    """What the modules at `paths` were given first; one that did not run was given nothing."""
    seen = {path: _Seen() for path in paths}
    handles: list[Any] = []

    def copied(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, Tensor) else value

    for path in paths:

        def before(_: Any, args: Any, kwargs: Any, one: _Seen = seen[path]) -> None:
            if not one.num:
                one.args, one.kwargs = tree_map(copied, args), tree_map(copied, kwargs)

        def after(_: Any, args: Any, out: Any, one: _Seen = seen[path]) -> None:
            if not one.num:
                one.out = tree_map(copied, out)
            one.num += 1

        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    try:
        run_once(model, example, None)
    finally:
        for handle in handles:
            handle.remove()
    return seen


# Stacks


def _read_stack(path: str, module: nn.Module, seen: _Seen) -> Stacked | str:
    """How it is called, or why it is not understood."""
    if reason := why_whole(module):
        return reason
    if not seen.num:
        return "it did not run on the example"
    call = read_call(seen.args, seen.kwargs)
    if isinstance(call, str):
        return call
    x = argument(seen.args, seen.kwargs, call.rows)
    if not isinstance(seen.out, Tensor) or seen.out.shape[:-1] != x.shape[:-1]:
        return "it does not give a row for each token"
    num = len(next(module.parameters()))
    return Stacked(path, num, call.rows, call.index, call.weight)


def _tried_stack(module: nn.Module, stack: Stacked, seen: _Seen, num_ranks: int) -> Stacked | str:
    """The stack with the attributes that count its experts, once its parts gave what it gave whole."""
    if stack.num % num_ranks:
        return stack  # refused for that, by name
    whole = {
        name for name, value in vars(module).items() if type(value) is int and value == stack.num
    }
    named = tuple(sorted(name for name in whole if "expert" in name))
    error: Exception | None = None
    for counters in dict.fromkeys((named, tuple(sorted(whole)), ())):
        try:
            if _parts_agree(module, stack, counters, seen, num_ranks):
                return Stacked(
                    stack.path, stack.num, stack.rows, stack.index, stack.weight, counters
                )
        except Exception as found:
            error = error or found
    return f"its parts do not give what it gives whole{f' ({error})' if error else ''}"


@torch.no_grad()
def _parts_agree(
    module: nn.Module, stack: Stacked, counters: tuple[str, ...], seen: _Seen, num_ranks: int
) -> bool:
    """Random rows through all experts at once, and through each rank's part of them."""
    x = argument(seen.args, seen.kwargs, stack.rows)
    slots = argument(seen.args, seen.kwargs, stack.index).shape[1]
    with torch.random.fork_rng(_devices(x)):
        torch.manual_seed(0)
        rows = torch.randn(_NUM_TRIED, x.shape[-1], device=x.device, dtype=x.dtype)
        index = torch.rand(_NUM_TRIED, stack.num, device=x.device).topk(slots).indices
        weight = torch.rand(_NUM_TRIED, slots, device=x.device, dtype=x.dtype)
        weights = {n: 0.1 * torch.randn_like(p) for n, p in module.named_parameters()}
    if x.dim() > 2:
        rows = rows.view(1, *rows.shape)

    def call(values: dict[str, Tensor], num: int, *given: Tensor) -> Tensor:
        changes = dict(zip((stack.rows, stack.index, stack.weight), given, strict=True))
        args, kwargs = with_arguments(seen.args, seen.kwargs, changes)
        with counting(module, counters, num):
            out: Tensor = torch.func.functional_call(module, values, args, kwargs)
        return out.reshape(-1, out.shape[-1])

    wanted = call(weights, stack.num, rows, index, weight)
    route = plan_route(index, stack.num, num_ranks)
    each, total, done = stack.num // num_ranks, torch.zeros_like(wanted), 0
    for rank, number in enumerate(route.numbers[:, 1].tolist()):
        pairs = route.pairs[done : done + number]
        tokens = torch.div(pairs, slots, rounding_mode="floor")
        part = {n: w[rank * each : (rank + 1) * each] for n, w in weights.items()}
        flat = rows.reshape(-1, rows.shape[-1])[tokens]
        experts = route.errands[done : done + number, 1:]
        total.index_add_(0, tokens, call(part, each, flat, experts, weight.flatten()[pairs, None]))
        done += number
    return _are_close(total, wanted)


def _are_close(a: Any, b: Any) -> bool:
    """To rounding: half the digits of their type."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    bound = torch.finfo(a.dtype).eps ** 0.5 * (
        1.0 + b.detach().abs().max().item() if b.numel() else 1.0
    )
    return bool(((a - b).abs() <= bound).all())


def _devices(x: Tensor) -> list[int]:
    return [x.device.index or 0] if x.device.type == "cuda" else []


# Lists


def _try_list(around: nn.Module, members: nn.ModuleList, plan: Listed, seen: _Seen) -> str | None:
    """None for experts; otherwise why not."""
    said = "expert" in plan.path.rpartition(".")[2].lower()
    if not seen.num:
        return "they did not run on the example"
    if any(True for _ in members.buffers()):
        return "they hold buffers, and ranks share only weights of experts"
    kept = Kept(list(around.modules()))
    before = [vars(m).get("forward") for m in members]
    try:
        with torch.no_grad(), torch.random.fork_rng(), _random_weights(around):
            torch.manual_seed(0)
            args, kwargs = tree_map(_shaken, (seen.args, seen.kwargs))
            torch.manual_seed(1)
            shapes, wanted = _row_shapes(around, members, args, kwargs)
            if not said and (len(shapes) == plan.num and len(set(shapes.values())) < 2):
                return "each is called with the same rows: layers, or heads"
            if not said and any(len(shape) != 2 for shape in shapes.values()):
                return "they are called with more than rows"
            kept.put_back()
            torch.manual_seed(1)
            got = SpreadList(around, members, plan, 1, 0, None)(*args, **kwargs)
    except Exception as error:
        return str(error).partition("\n")[0] or type(error).__name__
    finally:
        kept.put_back()
        for member, forward in zip(members, before, strict=True):
            vars(member).pop("forward", None)
            if forward is not None:
                member.forward = forward
    pairs = zip(tree_leaves(got), tree_leaves(wanted), strict=True)
    same = all(_are_close(a, b) for a, b in pairs if isinstance(a, Tensor))
    return None if same else "called with their rows all together they give something else"


@contextmanager
def _random_weights(module: nn.Module) -> Iterator[None]:
    """Weights of zeros would make any answer the right one."""
    held = [(p, p.data) for p in module.parameters()]
    torch.manual_seed(2)
    try:
        for parameter, values in held:
            if values.is_floating_point():
                parameter.data = (
                    torch.randn_like(values) * (values.shape[-1] if values.dim() else 1) ** -0.5
                )
        yield
    finally:
        for parameter, values in held:
            parameter.data = values


def _shaken(value: Any) -> Any:
    """Random numbers in place of an example's, which is zeros and would all go to the same experts."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.randn_like(value)
    return value


def _row_shapes(
    around: nn.Module, members: nn.ModuleList, args: Any, kwargs: Any
) -> tuple[dict[int, torch.Size], Any]:
    """The shapes that the modules were called with, and what came of it all."""
    shapes: dict[int, torch.Size] = {}
    handles = []
    for number, member in enumerate(members):

        def before(_: Any, given: Any, number: int = number) -> None:
            if given and isinstance(given[0], Tensor) and given[0].dim():
                shapes[number] = given[0].shape

        handles.append(member.register_forward_pre_hook(before))
    try:
        return shapes, around(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
