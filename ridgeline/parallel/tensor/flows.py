"""Marks on dims that say where features come from, and how each torch function carries them on.

A `FlowBook` is told of every call that a traced model makes (`trace.py`) and keeps the account: marks
that meet become one `Flow`, one that something looks along is broken. It looks at shapes and names of
functions only, never at values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ridgeline.parallel.tensor import table
from ridgeline.parallel.tensor.shapes import follow_strides, follow_view, view_groups


@dataclass
class Flow:
    """Features that belong together: cut one way or not at all."""

    producers: dict[str, int] = field(default_factory=dict)
    """Linear layers they come from, and how many parts each holds side by side."""
    units: dict[str, set[int]] = field(default_factory=dict)
    """By producer, the numbers of runs (heads) that a cut has to leave whole."""
    consumers: dict[str, None] = field(default_factory=dict)
    is_output: bool = False
    fixed: bool = False
    """Whether the model names the number of units itself, so that more of them would not fit."""
    broken: dict[str, str] = field(default_factory=dict)
    """What looked along the features, so that they cannot be cut, by producer: one whose features were
    added to others after something had looked along those is not named here."""


@dataclass(frozen=True)
class Mark:
    flow: int
    fused: bool = False
    """Whether it holds only if the dim before it turns out to number the parts of a projection."""


Marks = tuple[Mark | None, ...]


class FlowBook:
    """Which dims of which tensors hold the features of which layers."""

    def __init__(self) -> None:
        self.flows: list[Flow] = []
        self.parent: list[int] = []
        self.by_path: dict[str, int] = {}
        self.marks: dict[int, Marks] = {}
        self.raw: dict[int, str] = {}
        """Tensors that are a layer's very output, and its path."""
        self.fused_sizes: dict[str, int] = {}
        """Layers whose output was viewed as three dims or more: the length of the first."""
        self.keep: list[Any] = []  # a mark is found by the tensor's id, so the tensor has to live

    def root(self, flow: int) -> int:
        while self.parent[flow] != flow:
            flow = self.parent[flow]
        return flow

    def new_flow(self, path: str) -> int:
        if path not in self.by_path:
            self.flows.append(Flow({path: 1}, {path: set()}))
            self.parent.append(len(self.flows) - 1)
            self.by_path[path] = self.parent[-1]
        return self.root(self.by_path[path])

    def join(self, a: int, b: int) -> int:
        a, b = sorted((self.root(a), self.root(b)))
        if a != b:
            into, other = self.flows[a], self.flows[b]
            into.producers |= other.producers
            into.units |= other.units
            into.consumers |= other.consumers
            into.is_output |= other.is_output
            into.fixed |= other.fixed
            into.broken = other.broken | into.broken
            self.parent[b] = a
        return a

    def flow(self, mark: Mark) -> Flow:
        return self.flows[self.root(mark.flow)]

    def break_all(self, marks: Marks, why: str, dims: Sequence[int] | None = None) -> None:
        for dim, mark in enumerate(marks):
            if mark is not None and not mark.fused and (dims is None or dim in dims):
                self.flow(mark).broken = (
                    dict.fromkeys(self.flow(mark).producers, why) | self.flow(mark).broken
                )

    def marks_of(self, x: Any) -> Marks:
        if not isinstance(x, Tensor):
            return ()
        return self.marks.get(id(x), (None,) * x.dim())

    def mark(self, x: Any, marks: Marks) -> None:
        if isinstance(x, Tensor) and any(m is not None for m in marks):
            assert len(marks) == x.dim()
            self.marks[id(x)] = marks
            self.keep.append(x)

    def follow(
        self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Any
    ) -> None:
        x = tensors[0]
        if name in table.NATIVE or name in table.CREATE or not _tensors(out):
            return
        base = name
        target = table.in_place_target(name, args, kwargs)
        if target is not None:
            _, _, other = table.out_of_place(name, args, kwargs)
            base = table.name_of(other) if other is not None else ""
        if base in table.ELEMENTWISE or base in table.DROPOUTS or base in table.LOSSES:
            self._elementwise(tensors, out)
        elif base in table.VIEWS and base in table.RULES:
            self._view(name, x, args, kwargs, out)
        elif base in table.PARTS and self._part(x, args, kwargs, out):
            pass
        elif base in table.REARRANGED or base in table.PARTS or base == "__getitem__":
            self._rearrange(name, func, x, args, kwargs, out)
        elif base in table.MATMULS:
            self._matmul(tensors, out)
        elif base == "einsum" and "->" in args[0] and "." not in args[0]:
            self._einsum(args[0], tensors, out)
        elif base == "scaled_dot_product_attention":
            self._attention(tensors, out)
        elif base in ("softmax", "log_softmax") or base in table.NORMS or base in table.REDUCED:
            self._along(base, x, args, kwargs, out)
        elif base in ("cat", "concat"):
            self._cat(tensors, args, kwargs, out)
        elif base == "cross_entropy":
            self.mark_output(self.marks_of(x)[1:2])
            self.break_all(self.marks_of(x), base, [0, *range(2, x.dim())])
        else:
            for tensor in tensors:
                self.break_all(self.marks_of(tensor), name)

    def _labelled(
        self,
        tensors: Sequence[Tensor],
        labels: Sequence[Sequence[Any]],
        out: Any,
        to: Sequence[Any],
    ) -> None:
        """Marks of dims with one label join; a label that is not in the result ends its marks."""
        found: dict[Any, Mark] = {}
        for tensor, names in zip(tensors, labels, strict=True):
            for label, mark in zip(names, self.marks_of(tensor), strict=True):
                if mark is None or mark.fused:
                    continue
                if label not in to:
                    self.break_all((mark,), "a sum")
                elif label in found:
                    found[label] = Mark(self.join(found[label].flow, mark.flow))
                else:
                    found[label] = mark
        for tensor, names in zip(tensors, labels, strict=True):
            for label, mark, length in zip(names, self.marks_of(tensor), tensor.shape, strict=True):
                if label in found and mark is None and length > 1:
                    self.flow(found[label]).fixed = True
        self.mark(out, tuple(found.get(label) for label in to))

    def _elementwise(self, tensors: list[Tensor], out: Any) -> None:
        labels = [range(-t.dim(), 0) for t in tensors]
        if not isinstance(out, Tensor) or any(t.dim() > out.dim() for t in tensors):
            for tensor in tensors:  # a loss
                self.mark_output(self.marks_of(tensor))
            return
        fused = [m for m in self.marks_of(tensors[0]) if m is not None and m.fused]
        self._labelled(tensors, labels, out, range(-out.dim(), 0))
        if fused and len(tensors) == 1:
            self.mark(out, self.marks_of(tensors[0]))

    def _matmul(self, tensors: list[Tensor], out: Tensor) -> None:
        a, b = tensors
        if a.dim() < 2 or b.dim() < 2:
            self.break_all(self.marks_of(a), "a product")
            self.break_all(self.marks_of(b), "a product")
            return
        lead = list(range(out.dim() - 2))
        first = [*lead[len(lead) - a.dim() + 2 :], "m", "k"]
        second = [*lead[len(lead) - b.dim() + 2 :], "k", "n"]
        self._labelled(tensors, [first, second], out, [*lead, "m", "n"])

    def _einsum(self, equation: str, tensors: list[Tensor], out: Tensor) -> None:
        inputs, _, to = equation.replace(" ", "").partition("->")
        self._labelled(tensors, inputs.split(","), out, to)

    def _attention(self, tensors: list[Tensor], out: Tensor) -> None:
        q, k, _, *mask = tensors
        lead = list(range(q.dim() - 2))
        heads = q.dim() - 3
        if k.shape[heads] != q.shape[heads]:
            for mark in self.marks_of(q):
                if mark is not None:
                    self.flow(mark).fixed = True
        labels = [[*lead, "t", "e"], [*lead, "s", "e"], [*lead, "s", "f"]]
        labels += [[*lead, "t", "s"][-tensor.dim() :] for tensor in mask]
        for tensor, names in zip(tensors, labels, strict=True):
            broken = [d for d, label in enumerate(names) if label in ("t", "s", "e", "f")]
            self.break_all(self.marks_of(tensor), "attention", broken)
        self._labelled(tensors, labels, out, [*lead, "t", "f"])

    def _along(self, name: str, x: Tensor, args: Any, kwargs: Any, out: Any) -> None:
        marks = self.marks_of(x)
        if name in table.NORMS:
            shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
            dims = list(range(x.dim() - len(shape), x.dim()))
        else:
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            dims = (
                list(range(x.dim())) if dim is None else [dim] if isinstance(dim, int) else [*dim]
            )
            dims = [d % x.dim() for d in dims]
            if not isinstance(out, Tensor) or (dim is None and out.dim() == 0):
                self.mark_output(marks)  # a mean over everything is a loss
                return
        self.break_all(marks, name, dims)
        if out.dim() == x.dim():
            self.mark(out, tuple(None if d in dims else m for d, m in enumerate(marks)))
        else:
            self.mark(out, tuple(m for d, m in enumerate(marks) if d not in dims))

    def _cat(self, tensors: list[Tensor], args: Any, kwargs: Any, out: Tensor) -> None:
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
        tensors = [t for t in tensors if t.dim() == out.dim()]
        for tensor in tensors:
            self.break_all(self.marks_of(tensor), "cat", [dim])
        labels = [[("cat", i) if d == dim else d for d in range(out.dim())] for i in
                  range(len(tensors))]  # fmt: skip
        self._labelled(tensors, labels, out, ["cat" if d == dim else d for d in range(out.dim())])

    def _view(self, name: str, x: Tensor, args: Any, kwargs: Any, out: Tensor) -> None:
        marks = self.marks_of(x)
        new: list[Mark | None] = [None] * out.dim()
        for dim, mark in enumerate(marks):
            if mark is None:
                continue
            to = follow_view(x.shape, out.shape, dim)
            if to is None:
                self.break_all((mark,), name)
                continue
            new[to] = mark
            flow = self.flow(mark)
            if not _inferred(name, args, kwargs, to, out.dim()):
                flow.fixed = True
            if out.shape[to] < x.shape[dim] and not mark.fused:
                path = self.raw.get(id(x))
                group = next(second for first, second in view_groups(x.shape, out.shape)
                             if dim in first)  # fmt: skip
                if path is not None and len(group) > 2:
                    after = group[group.index(to) + 1]
                    new[after] = Mark(mark.flow, fused=True)
                    self.keep.append(out)
                    self.raw[id(out)] = path
                    self.fused_sizes[path] = out.shape[to]
                else:
                    for producer in flow.producers:
                        flow.units[producer].add(out.shape[to])
        self.mark(out, tuple(new))

    def _part(self, x: Tensor, args: Any, kwargs: Any, out: Any) -> bool:
        """A projection's own output split in equal parts along its features."""
        path = self.raw.get(id(x))
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        mark = self.marks_of(x)[-1]
        if path is None or mark is None or dim % x.dim() != x.dim() - 1 or len(out) < 2:
            return False
        if len({t.shape[-1] for t in out}) != 1:
            return False
        self._set_parts(mark, path, len(out))
        for piece in out:
            self.mark(piece, (*(None,) * (x.dim() - 1), mark))
        return True

    def _set_parts(self, mark: Mark, path: str, parts: int) -> None:
        flow = self.flow(mark)
        if flow.producers[path] not in (1, parts):
            flow.broken = {path: f"{path} in parts of two kinds"} | flow.broken
        flow.producers[path] = parts

    def _rearrange(
        self, name: str, func: Callable[..., Any], x: Tensor, args: Any, kwargs: Any, out: Any
    ) -> None:
        marks = self.marks_of(x)
        rest = args[1:]
        found = None
        if not any(isinstance(a, Tensor) for a in tree_leaves(rest)):
            found = follow_strides(x.shape, lambda t: func(t, *rest, **kwargs))
        if found is None:
            self.break_all(marks, name)
            return
        lost = {d for d, m in enumerate(marks) if m is not None}
        lost &= {d for d in lost if any(d not in origin for _, origin in found)}
        plain = [d for d in lost if not marks[d].fused]  # type: ignore[union-attr]
        fused = [d for d, m in enumerate(marks) if m is not None and m.fused and d not in lost]
        for dim in plain:
            mark = marks[dim]
            assert mark is not None
            path = self.raw.get(id(x))
            if fused and path is not None:  # the dim numbers the parts of a fused projection
                self._set_parts(mark, path, x.shape[dim])
                flow = self.flow(mark)
                flow.units[path].add(x.shape[fused[0]])
                marks = tuple(Mark(m.flow) if m is not None and m.fused else m for m in marks)
                marks = (*marks[:dim], None, *marks[dim + 1 :])
            else:
                self.break_all((mark,), name)
        for tensor, (_, origin) in zip(_tensors(out), found, strict=True):
            kept = tuple(None if o is None or o in lost else marks[o] for o in origin)
            self.mark(tensor, kept)
            if id(x) in self.raw and any(m is not None and m.fused for m in kept):
                self.raw[id(tensor)] = self.raw[id(x)]
        if name in ("expand", "broadcast_to"):
            self._fix(marks)

    def _fix(self, marks: Marks) -> None:
        for mark in marks:
            if mark is not None:
                self.flow(mark).fixed = True

    def mark_output(self, marks: Marks) -> None:
        for mark in marks:
            if mark is not None and not mark.fused:
                self.flow(mark).is_output = True

    def finish(self) -> list[Flow]:
        """The flows, once the model has run."""
        for path, num in self.fused_sizes.items():
            flow = self.flows[self.new_flow(path)]
            if flow.producers[path] == 1:  # heads came first
                flow.units[path].add(num)
        return [self.flows[i] for i in range(len(self.flows)) if self.root(i) == i]


def _tensors(out: Any) -> list[Tensor]:
    return [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, Tensor)]


def _inferred(name: str, args: Any, kwargs: Any, to: int, dims: int) -> bool:
    """Whether the length of dim `to` of a view's result is left to torch, by a -1 or a flatten."""
    if name == "flatten":
        return True
    if name in ("view_as", "reshape_as"):
        return False
    rest = list(args[1:]) or list(kwargs.values())
    if name == "unflatten":
        at = rest[0] % (dims - len(rest[1]) + 1)
        return not at <= to < at + len(rest[1]) or rest[1][to - at] == -1
    sizes = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    return bool(sizes[to] == -1)
