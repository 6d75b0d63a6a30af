"""Blocks of a split model as compiled programs on plain local tensors.

The global view looks at every function as it is called, which costs the host more than most devices need to
compute. But what a rank computes in a block is the same every time, as long as shapes, cuts, modes and the
block's own settings are: so the block runs once on stand-ins for its local tensors, through the view's own
rules, and what the rules do there is a program of plain functions and collectives, forward and backward. It
is compiled and called from then on. What decides whether a program may be called again is its `_Look`; a
block that no program can stand for (it keeps something between calls, changes its input, watches gradients)
runs in the view as before, and `Programs.refused` says why. Called by `parallel/apply.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ridgeline.parallel.fallbacks import Fallbacks
from ridgeline.parallel.random import Keys, Node, Randomness
from ridgeline.parallel.tensor.backends import Backend
from ridgeline.parallel.tensor.move import enter, own_of
from ridgeline.parallel.tensor.settings import (
    SIMPLE,
    GivenUp,
    Refused,
    differ,
    remember,
    setting,
)
from ridgeline.parallel.tensor.view import GlobalView

_MOST_LOOKS = 16
"""Programs of one block; after that it runs in the view. A batch of another size is a look of its own."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOT_SETTINGS = frozenset(nn.Module().__dict__) - {"training"} | {
    "forward",
    "_keyed",
    "_recomputed",
}
_MOST_DRAWS = 64
"""Uses of random numbers in one block."""


@dataclass(frozen=True)
class _Cut:
    """How a DTensor lies, from which and its local part it can be made again."""

    placements: tuple[Any, ...]
    runs: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(view: GlobalView, x: DTensor) -> _Cut:
        return _Cut(x.placements, view.runs(x), tuple(x.shape))

    def join(self, view: GlobalView, local: Tensor) -> DTensor:
        return view.mark_runs(enter(local, view.mesh, self.placements, self.shape), self.runs)


@dataclass(frozen=True)
class _Draw:
    """One use of keyed random numbers in a block: of which of its modules, and which call of it."""

    path: str
    index: tuple[tuple[str, int], ...]
    """Which call it was of this module and of those around it, up to the block."""
    number: int


@dataclass
class _Program:
    """What a block is for one look."""

    run: Callable[..., Any]
    outputs: list[_Cut | None] = field(default_factory=list)
    """Of each tensor that it returns: how it is cut, or None for a plain one."""
    spec: TreeSpec | None = None
    constants: dict[int, Any] = field(default_factory=dict)
    """What it returns that is no tensor, by its place."""
    draws: list[_Draw] = field(default_factory=list)
    sites: dict[Any, Tensor] = field(default_factory=dict)
    """Of these draws, in each block and call."""
    gathered: Fallbacks = field(default_factory=Fallbacks)
    problem: str = ""


@dataclass
class Programs:
    """Those of one model on this rank."""

    view: GlobalView
    randomness: Randomness | None
    backend: Backend
    refused: dict[str, str] = field(default_factory=dict)
    """Paths of blocks that have run in the view, and why."""
    made: dict[Any, _Program | str] = field(default_factory=dict)
    """By look; shared by blocks that look alike. A text: why there is none."""
    _empty: dict[torch.device, Tensor] = field(default_factory=dict)

    def no_sites(self, device: torch.device) -> Tensor:
        """For a program that may draw, and does not."""
        if device not in self._empty:
            self._empty[device] = torch.zeros(_MOST_DRAWS, dtype=torch.int64, device=device)
        return self._empty[device]

    @property
    def num_made(self) -> int:
        return sum(isinstance(program, _Program) for program in self.made.values())

    def add(self, blocks: Mapping[str, nn.Module]) -> None:
        """Have calls of these, by path, run as programs where they can. All ranks of the axis call it."""
        blocks = dict(blocks)
        for path in _shared_dropout(blocks):
            self.refused[path] = "dropout in it is not its own alone"
            del blocks[path]
        forms = {path: _forms(block) for path, block in blocks.items()}
        group = self.view.mesh.get_group(self.view.tp)
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, forms, group=group)
        for path, block in blocks.items():
            block.forward = _Block(self, block, path, tuple(one[path] for one in everyone)).call


class _Block:
    """One block: its state as inputs of programs, and what they are looked up by."""

    def __init__(self, programs: Programs, block: nn.Module, path: str, forms: Any) -> None:
        self.programs, self.view, self.block, self.path = programs, programs.view, block, path
        self.forms = forms
        """Names, shapes and strides of its parameters and buffers on every rank."""
        self.given_up = ""
        """Why nothing is tried any more."""
        self.tree: list[tuple[Any, ...]] | None = None
        """What its modules are made of, as of its first call."""
        self.forward = block.forward
        self.looks: set[Any] = set()
        self.modules = list(block.named_modules())
        self.node: Node | None = vars(block).get("_keyed")

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self.given_up or not self.view.is_active:
            return self.forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        try:
            with torch._C.DisableTorchFunction():
                given, metas = self._take(leaves)
                state = _state(module for _, module in self.modules)
                kinds = tuple((t.dtype, t.requires_grad) for t in state)
                look = (spec, metas, self._settings(), self._modes(), kinds, self.forms)
        except Refused as error:
            self.programs.refused[self.path] = str(error)
            return self.forward(*args, **kwargs)
        if look not in self.programs.made:
            return self._first(look, leaves, spec, given, state)
        self.looks.add(look)
        program = self.programs.made[look]
        if isinstance(program, str):
            self.programs.refused.setdefault(self.path, program)
            return self.forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            sites = self._begin()
            if sites is not None and program.draws:
                sites = self._sites(program)
            found = program.run(*given, *state, *self._random(sites))
            return self._give(program, found)

    # Arguments and results

    def _take(self, leaves: list[Any]) -> tuple[list[Tensor], tuple[Any, ...]]:
        """Local tensors of the arguments, and what else is to be known of them."""
        given, metas = [], []
        for leaf in leaves:
            if isinstance(leaf, DTensor):
                # Nothing of a rank's own may be in a look: they have to find the same ones new.
                local = self.view.own(leaf).contiguous()
                given.append(local)
                metas.append((_Cut.of(self.view, leaf), local.dtype, local.requires_grad))
            elif isinstance(leaf, Tensor):
                given.append(leaf)
                metas.append(_meta(leaf))
            else:
                if not isinstance(leaf, SIMPLE):
                    raise Refused(f"it is given a {type(leaf).__name__}")
                metas.append((type(leaf), leaf))
        return given, tuple(metas)

    def _give(self, program: _Program, found: Sequence[Tensor]) -> Any:
        values = [
            tensor if cut is None else cut.join(self.view, tensor)
            for tensor, cut in zip(found, program.outputs, strict=True)
        ]
        assert program.spec is not None
        view_notes = self.view.fallbacks
        for entry in program.gathered.found:
            view_notes.add(entry)
        if not program.constants:
            return tree_unflatten(values, program.spec)
        rest = iter(values)
        num = program.spec.num_leaves
        leaves = [
            program.constants[i] if i in program.constants else next(rest) for i in range(num)
        ]
        return tree_unflatten(leaves, program.spec)

    # The block's own state

    def _names(self) -> list[str]:
        """Of what `_state` gives of the block, in its order."""
        names = []
        for kind in ("_parameters", "_buffers"):
            for path, module in self.modules:
                held = getattr(module, kind).items()
                names += [f"{path}.{n}" if path else n for n, t in held if t is not None]
        return names

    def _settings(self) -> tuple[Any, ...]:
        """Everything else that its code may read of its modules: what is simple by its value, an object by
        what it is and what it holds."""
        if _has_any_global_hook():
            raise Refused("there are hooks on all modules")
        found: list[Any] = []
        known: dict[int, Any] = {}
        for path, module in self.modules:
            own = module.__dict__
            if path and any(own[name] for name in _HOOKS):
                raise Refused(f"there are hooks on {path}")
            found += [path, type(module)]
            for name, value in own.items():
                if name not in _NOT_SETTINGS:
                    found += [name, setting(value, known)]
        tree = [(m.__dict__.get("forward"), *m._modules.values()) for _, m in self.modules]
        if self.tree is None:
            self.tree = tree
        if any(map(differ, tree, self.tree)):
            raise Refused("its modules are not those that it had")
        return tuple(found)

    def _modes(self) -> tuple[Any, ...]:
        """What torch's functions look at besides their arguments, and how samples are named."""
        device = self.view.mesh.device_type
        cast = torch.is_autocast_enabled(device)
        randomness = self.programs.randomness if self.node is not None else None
        rows = None if randomness is None else randomness.keys.rows
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_autocast_dtype(device) if cast else None,
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
            None if rows is None else _meta(rows),
            randomness is not None and randomness.keys.sample_dim,
        )

    # Random numbers

    def _begin(self) -> Tensor | None:
        """Count a call of the block, as its own forward would; room for its sites if it may draw."""
        if self.node is None or self.programs.randomness is None:
            return None
        self.node.begin()
        device = self.programs.randomness.keys.base.device
        return self.programs.no_sites(device)

    def _random(self, sites: Tensor | None) -> list[Tensor]:
        """What keyed dropout starts from: the step and its samples, and where in the model it is."""
        if sites is None:
            return []
        assert self.programs.randomness is not None
        keys = self.programs.randomness.keys
        return [keys.base, keys.base if keys.rows is None else keys.rows, sites]

    def _sites(self, program: _Program) -> Tensor:
        """Those of the program's draws in this call of this block."""
        assert self.node is not None
        assert self.programs.randomness is not None
        around = tuple(node.index for node in (self.node, *self.node.ancestors()))
        device = self.programs.randomness.keys.base.device
        key, known = (self.path, around, device), program.sites
        if key not in known:
            modules = dict(self.modules)
            numbers = [0] * _MOST_DRAWS
            for i, draw in enumerate(program.draws):
                calls = {modules[path]._keyed: index for path, index in draw.index}
                numbers[i] = modules[draw.path]._keyed.site(draw.number, calls)
            known[key] = torch.tensor(numbers, dtype=torch.int64, device=device)
        return known[key]

    @contextmanager
    def _stand_ins(self, program: _Program, given: Sequence[Tensor]) -> Iterator[None]:
        """Keyed dropout draws from inputs of the program; everything is as before afterwards."""
        randomness = self.programs.randomness
        if self.node is None or randomness is None:
            yield
            return
        base, rows, sites = given
        before, program.draws = randomness._state(), []
        keys = randomness.keys
        paths = {module._keyed: path for path, module in self.modules if "_keyed" in vars(module)}

        def site(node: Node, number: int) -> Tensor:
            if len(program.draws) == _MOST_DRAWS:
                raise Refused(f"it draws random numbers more than {_MOST_DRAWS} times")
            inside = [n for n in (node, *node.ancestors()) if n in paths and n is not self.node]
            index = tuple((paths[n], n.index) for n in inside)
            program.draws.append(_Draw(paths[node], index, number))
            return sites[len(program.draws) - 1]

        randomness.keys = Keys(base, None if keys.rows is None else rows, keys.sample_dim)
        randomness.site_of = site
        try:
            yield
        finally:
            randomness.site_of = None
            randomness._restore(before)

    # Tracing

    def _first(
        self, look: Any, leaves: list[Any], spec: TreeSpec, given: list[Tensor], state: list[Tensor]
    ) -> Any:
        """Make the program of a look, and run it; or the block in the view where there is none."""
        programs, randomness = self.programs, self.programs.randomness
        counted = randomness._state() if randomness is not None else None
        program = _Program(lambda: None)
        agreed: list[bool] = []

        def when_ready() -> None:
            # All ranks of the axis or none: a program has its collectives in an order of its own.
            agreed.append(self._agree(not program.problem))
            if not agreed[0]:
                raise Refused(program.problem or "it cannot be one on another rank")
            if sites is not None:
                with torch.no_grad():
                    sites.copy_(self._sites(program))

        def check(graph: torch.fx.GraphModule) -> None:
            program.problem = program.problem or _unfit(graph)

        problem, lasting = "", False
        try:
            if len(self.looks) >= _MOST_LOOKS:
                raise GivenUp(f"it has been called in {_MOST_LOOKS} forms")
            self.looks.add(look)
            program.run = programs.backend(self._tracer(program, leaves, spec), check, when_ready)
            sites = self._begin()
            sites = None if sites is None else sites.clone()
            found = program.run(*given, *state, *self._random(sites))
        except Exception as error:
            if agreed and agreed[0]:
                raise
            problem, lasting = program.problem or _first_line(error), isinstance(error, GivenUp)
        if not agreed:
            self._agree(False)
        if problem:
            if lasting:
                self.given_up = problem
            else:
                programs.made[look] = problem
            programs.refused.setdefault(self.path, problem)
            if randomness is not None:
                randomness._restore(counted)
            args, kwargs = tree_unflatten(leaves, spec)
            return self.forward(*args, **kwargs)
        programs.made[look] = program
        with torch._C.DisableTorchFunction():
            return self._give(program, found)

    def _agree(self, fine: bool) -> bool:
        assert self.view.tp is not None
        mesh = self.view.mesh
        word = torch.tensor(int(fine), device=mesh.device_type)
        dist.all_reduce(word, dist.ReduceOp.MIN, group=mesh.get_group(self.view.tp))
        return bool(word)

    def _tracer(
        self, program: _Program, leaves: list[Any], spec: TreeSpec
    ) -> Callable[..., list[Tensor]]:
        """The block as a function of plain tensors: those given to it, its state, and random keys."""
        view, names = self.view, self._names()
        cuts = [_Cut.of(view, x) if isinstance(x, DTensor) else None for x in leaves]
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        others = [None if isinstance(x, Tensor) else x for x in leaves]  # a program outlives them

        def trace(*tensors: Tensor) -> list[Tensor]:
            given, rest = tensors[: len(places)], tensors[len(places) :]
            state, random = rest[: len(names)], rest[len(names) :]
            inner = list(others)
            for i, tensor in zip(places, given, strict=True):
                cut = cuts[i]
                inner[i] = tensor if cut is None else cut.join(view, tensor)
            before = [own_of(inner[i]) if cuts[i] is not None else None for i in places]
            args, kwargs = tree_unflatten(inner, spec)
            settings, gathered, view.fallbacks = self._settings(), view.fallbacks, Fallbacks()
            view.watched.clear()
            try:
                with (
                    self._undone(),
                    _own_saving(),
                    self._stand_ins(program, random),
                    _reparametrize_module(self.block, dict(zip(names, state, strict=True))),
                ):
                    result = self.forward(*args, **kwargs)
                    now = _state(module for _, module in self.modules)
                    if self._settings() != settings or differ(now, state):
                        raise GivenUp("it keeps something of one call for the next")
            finally:
                program.gathered, view.fallbacks = view.fallbacks, gathered
            if view.watched:
                raise Refused(f"it uses {view.watched[0]}")
            for i, own in zip(places, before, strict=True):
                if cuts[i] is not None and own_of(inner[i]) is not own:
                    raise Refused("it changes its input in place")
            found = self._results(program, result)
            held = {x.untyped_storage()._cdata for x in given}
            if any(x.untyped_storage()._cdata in held for x in found):
                raise Refused("it returns its input, or a view of it")
            return found

        return trace

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """What the block's code sets of its modules meanwhile is not for the next call to find."""
        held = [(module.__dict__, dict(module.__dict__)) for _, module in self.modules]
        inner: dict[int, tuple[Any, Any]] = {}
        for _, own in held:
            for name, value in own.items():
                if name not in _NOT_SETTINGS:
                    remember(value, inner)
        try:
            yield
        finally:
            for now, before in (*held, *inner.values()):
                if isinstance(now, list):
                    now[:] = before
                else:
                    now.clear()
                    now.update(before)

    def _results(self, program: _Program, result: Any) -> list[Tensor]:
        leaves, program.spec = tree_flatten(result)
        program.outputs, program.constants, found = [], {}, []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, DTensor):
                program.outputs.append(_Cut.of(self.view, leaf))
                found.append(self.view.own(leaf))
            elif isinstance(leaf, Tensor):
                program.outputs.append(None)
                found.append(leaf)
            elif isinstance(leaf, SIMPLE):
                program.constants[i] = leaf
            else:
                raise Refused(f"it returns a {type(leaf).__name__}")
        return found


def _state(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers as they are now: another technique may have put others in place."""
    modules = list(modules)
    found = [p for m in modules for p in m._parameters.values() if p is not None]
    return found + [b for m in modules for b in m._buffers.values() if b is not None]


def _forms(block: nn.Module) -> tuple[Any, ...]:
    """What it has of parameters and buffers, and of what form."""
    modules = list(block.named_modules())
    found = []
    for kind in ("_parameters", "_buffers"):
        for path, module in modules:
            held = [(n, t) for n, t in getattr(module, kind).items() if t is not None]
            found += [(kind, path, n, tuple(t.shape), t.stride()) for n, t in held]
    return tuple(found)


def _shared_dropout(blocks: Mapping[str, nn.Module]) -> list[str]:
    """Blocks with dropout that is elsewhere too: how often it was called is not a block's own affair."""
    homes: dict[Node, list[str]] = {}
    for path, block in blocks.items():
        for module in block.modules():
            if "_keyed" in vars(module):
                homes.setdefault(module._keyed, []).append(path)
    unfit = []
    for node, paths in homes.items():
        owners = {node, *node.ancestors()}
        strange = any(vars(blocks[path]).get("_keyed") not in owners for path in paths)
        unfit += paths if strange or len(set(paths)) > 1 else []
    return list(dict.fromkeys(unfit))


def _meta(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad


def _unfit(graph: torch.fx.GraphModule) -> str:
    """Why a program with these functions would not be the block."""
    for node in graph.graph.nodes:
        for target in (
            node.target,
            *node.args,
        ):  # one with effects is an argument of who keeps their order
            if getattr(target, "namespace", "") == "c10d":
                return f"{target} is waited for by other code"
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags and "attention" not in str(node.target):
            return f"{node.target} draws from torch's generator"
    return ""


@contextmanager
def _own_saving() -> Iterator[None]:
    """What the trace keeps for its backward is nobody else's: recompute or offload would take it."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if isinstance(error, Refused) else f"{type(error).__name__}: {''.join(text[:1])}"
