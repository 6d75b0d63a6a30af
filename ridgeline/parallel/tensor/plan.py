"""What of a model is cut over the tensor ranks, from its own plan if it has one, else from its graph.

A flow of features (`trace.py`) that leads from some linear layers to others is cut: the first by
columns, the second by rows. Attention is such a flow, with heads that have to stay whole. Token
embeddings are cut by rows of the vocabulary and the output head by columns; a weight that both share is
cut once. Any choice is right, because the model runs with global shapes; the plan decides how much is
sent and held. What is not cut is named with the reason. Called by `parallel/apply.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ridgeline.errors import UsageError
from ridgeline.parallel.tensor.flows import Flow
from ridgeline.parallel.tensor.layers import Layer, is_embedding, is_linear, is_transposed
from ridgeline.parallel.tensor.split import Split
from ridgeline.parallel.tensor.trace import Trace, trace_flows

COLUMN_WORDS = frozenset(("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"))
ROW_WORDS = frozenset(("rowwise", "rowwise_rep", "rowwise_split_input"))
OTHER_WORDS = frozenset(("embedding_rowwise", "replicate", "sequence_parallel"))
MIN_ROWS = 16
"""A vocabulary or a head with fewer rows a rank is not worth the communication."""


@dataclass(frozen=True)
class TensorPlan:
    """Layers to cut over `size` ranks by module path, and what stays whole, with the reason."""

    size: int
    layers: dict[str, Layer]
    whole: dict[str, str]
    attention: frozenset[str] = frozenset()
    """Which functions the model was seen to attend with, for whoever cuts sequences."""

    @property
    def report(self) -> str:
        """A few lines for people."""
        lines = [f"split over {self.size}: {', '.join(_shorten(self.layers)) or 'nothing'}"]
        reasons: dict[str, list[str]] = {}
        for path, reason in self.whole.items():
            reasons.setdefault(reason, []).append(path)
        for reason, paths in reasons.items():
            lines.append(f"left whole: {', '.join(_shorten(paths))} ({reason})")
        return "\n".join(lines)


def plan_tensor(
    model: nn.Module, size: int, example_inputs: tuple[Any, ...] | Mapping[str, Any]
) -> TensorPlan:
    """Decide how `model` is cut over `size` ranks; `example_inputs` are its arguments, or keywords.

    Pure: the same model, size and inputs give the same plan on every rank.
    """
    name = type(model).__name__
    try:
        trace = trace_flows(model, example_inputs)
    except UsageError:
        raise
    except Exception as error:
        _run_plainly(
            model, example_inputs
        )  # a model that fails alone is not at fault for tp's sake
        raise UsageError(
            f"tp={size}: {name} could not be run once on its example inputs to see how it is put "
            f"together ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); "
            "give inputs that it takes, or leave tp out"
        ) from error
    planner = _Planner(model, size, trace)
    planner.cut_flows()
    planner.cut_vocabulary()
    planner.check_shared()
    if size > 1 and not planner.layers:
        reasons = "; ".join(f"{p}: {r}" for p, r in list(planner.whole.items())[:5])
        raise UsageError(
            f"tp={size}: nothing in {name} can be split: looked for pairs of linear layers with "
            "element-wise work between, attention with its projections, token embeddings and an "
            f"output head{f' ({reasons})' if reasons else ''}; leave tp out"
        )
    return TensorPlan(size, planner.layers, planner.whole, trace.attention)


def _run_plainly(model: nn.Module, example_inputs: tuple[Any, ...] | Mapping[str, Any]) -> None:
    """Raises what one device would raise."""
    with torch.no_grad():
        if isinstance(example_inputs, Mapping):
            model(**example_inputs)
        else:
            model(*example_inputs)


class _Planner:
    def __init__(self, model: nn.Module, size: int, trace: Trace) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.size, self.trace = size, trace
        self.layers: dict[str, Layer] = {}
        self.whole: dict[str, str] = {}
        self.unfed: dict[str, str] = {}
        """Layers that would be cut by rows if what they read were cut, and why that is not. It comes before
        where their own features go, which are mostly added to those of other layers."""
        self.words = _own_words(self.modules)
        for path, word in self.words.items():
            if word not in COLUMN_WORDS | ROW_WORDS | OTHER_WORDS:
                self.whole[path] = f"its own plan says {word!r}, which is not known here"

    def cut_flows(self) -> None:
        for flow in self.trace.flows:
            producers = [p for p in flow.producers if p not in self.layers]
            reason = self._refusal(flow, producers)
            if reason:
                for path in producers:
                    self.whole.setdefault(path, _told(flow, path, reason))
                continue
            if flow.consumers:
                self._cut_pair(flow, producers)
            else:
                self._cut_head(flow, producers)
        for path, module in self.modules.items():
            if is_linear(module) and path not in self.layers:
                self.whole.setdefault(path, "no linear layer before or after to share a cut with")
        self.whole |= {p: reason for p, reason in self.unfed.items() if p in self.whole}
        for path in self.layers:
            self.whole.pop(path, None)

    def _refusal(self, flow: Flow, producers: list[str]) -> str:
        if flow.broken:
            return f"its features go into {next(iter(flow.broken.values()))}"
        if len(producers) < len(flow.producers):
            return "its features are added to those of a layer that is cut already"
        for path in [*flow.producers, *flow.consumers]:
            if path in self.trace.direct:
                return f"{path} has a parameter that {self.trace.direct[path]} uses directly"
        if not flow.consumers and not flow.is_output:
            return "its features lead to no linear layer"
        return ""

    def _cut_pair(self, flow: Flow, producers: list[str]) -> None:
        consumers = [p for p in flow.consumers if p not in self.layers]
        if self.words:
            producers = self._allowed(producers, COLUMN_WORDS)
            consumers = self._allowed(consumers, ROW_WORDS)
        fits = [p for p in producers if self._fits(flow, p)]
        if fits and consumers:
            for path in producers:
                if path in fits:
                    self._column(path, flow.producers[path], flow.units[path])
                else:
                    self.whole.setdefault(path, self._misfit(flow, path))
            for path in consumers:
                self._row(path, None)
            return
        heads = {n for path in producers for n in flow.units[path]}
        fused = any(flow.producers[p] > 1 for p in producers)
        if producers and consumers and len(heads) == 1 and not flow.fixed and not fused:
            self._pad(producers, consumers, heads.pop())
            return
        for path in producers:
            self.whole.setdefault(path, self._misfit(flow, path))
        for path in consumers:
            self.unfed.setdefault(path, self._misfit(flow, path))

    def _pad(self, producers: list[str], consumers: list[str], heads: int) -> None:
        padded = -(-heads // self.size) * self.size
        order = (*range(heads), *(-1,) * (padded - heads))
        for path in producers:
            self._column(path, 1, set(), heads, order)
        for path in consumers:
            self._row(path, (heads, order))

    def _allowed(self, paths: list[str], words: frozenset[str]) -> list[str]:
        for path in paths:
            if self.words.get(path) not in words:
                self.whole.setdefault(path, "not so in the model's own plan")
        return [path for path in paths if self.words.get(path) in words]

    def _cut_head(self, flow: Flow, producers: list[str]) -> None:
        if self.words:
            producers = self._allowed(producers, COLUMN_WORDS)
        for path in producers:
            features = self._features(path)
            if features < MIN_ROWS * self.size:
                self.whole.setdefault(path, f"only {features} outputs")
            elif not self._fits(flow, path) or flow.producers[path] > 1:
                self.whole.setdefault(path, self._misfit(flow, path))
            else:
                self._column(path, 1, set())

    def _fits(self, flow: Flow, path: str) -> bool:
        features, parts = self._features(path), flow.producers[path]
        units = flow.units[path] or ({features // parts} if parts > 1 else set())
        return all(n % self.size == 0 for n in units)

    def _misfit(self, flow: Flow, path: str) -> str:
        numbers = sorted({n for p in flow.producers for n in flow.units[p] if n % self.size})
        if flow.units.get(path):
            numbers = sorted(n for n in flow.units[path] if n % self.size)
        what = " and ".join(map(str, numbers)) or "its"
        return f"{what} heads or parts do not divide over {self.size} ranks"

    def _features(self, path: str) -> int:
        module: Any = self.modules[path]
        return int(module.weight.shape[1 if is_transposed(module) else 0])

    def _column(
        self, path: str, parts: int, units: set[int], heads: int = 0, order: Any = None
    ) -> None:
        module: Any = self.modules[path]
        if parts > 1:
            # A rank's features: its share of the first part, then of the second, ...
            heads = parts * self.size
            order = tuple(p * self.size + r for r in range(self.size) for p in range(parts))
        dim = 1 if is_transposed(module) else 0
        splits = {"weight": Split(dim, tuple(module.weight.shape), heads, order)}
        if module.bias is not None:
            splits["bias"] = Split(0, tuple(module.bias.shape), heads, order)
        self.layers[path] = Layer("column", splits, parts)

    def _row(self, path: str, padding: tuple[int, tuple[int, ...]] | None) -> None:
        module: Any = self.modules[path]
        dim = 0 if is_transposed(module) else 1
        heads, order = padding or (0, None)
        self.layers[path] = Layer(
            "row", {"weight": Split(dim, tuple(module.weight.shape), heads, order)}
        )

    def cut_vocabulary(self) -> None:
        for path in self.trace.token_tables:
            module: Any = self.modules[path]
            rows = module.num_embeddings
            if rows < MIN_ROWS * self.size:
                self.whole[path] = f"only {rows} rows"
            elif module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
                self.whole[path] = "it changes or weighs its rows as it looks them up"
            elif path in self.trace.direct:
                self.whole[path] = f"{self.trace.direct[path]} uses its weight directly"
            else:
                split = Split(0, tuple(module.weight.shape))
                self.layers[path] = Layer("vocabulary", {"weight": split})

    def check_shared(self) -> None:
        """A parameter that several layers hold is cut for all of them alike, or for none."""
        holders: dict[int, list[tuple[str, str]]] = {}
        for path, module in self.modules.items():
            if is_linear(module) or is_embedding(module):
                for name, parameter in module.named_parameters(recurse=False):
                    holders.setdefault(id(parameter), []).append((path, name))
        changed = True
        while changed:
            changed = False
            for places in holders.values():
                cuts = {
                    self.layers[path].splits.get(name) if path in self.layers else None
                    for path, name in places
                }
                if len(cuts) > 1:
                    for path, _ in places:
                        if self.layers.pop(path, None) is not None:
                            changed = True
                            self.whole[path] = "it shares a parameter with a layer that stays whole"


def _told(flow: Flow, path: str, reason: str) -> str:
    """Why a flow is not cut, as it is true of one of the layers that it comes from."""
    if not flow.broken:
        return reason
    if path in flow.broken:
        return f"its features go into {flow.broken[path]}"
    return f"its features are added to others that go into {next(iter(flow.broken.values()))}"


def _own_words(modules: dict[str, nn.Module]) -> dict[str, str]:
    """The model's own plan as {module path: word}; empty when it has none."""
    for path, owner in modules.items():
        plan = getattr(owner, "tp_plan", None) or getattr(owner, "_tp_plan", None)
        if not isinstance(plan, Mapping):
            continue
        prefix = f"{path}." if path else ""
        words = {}
        for pattern, word in plan.items():
            expression = re.compile(re.escape(prefix + pattern).replace(r"\*", "[^.]+"))
            words |= {place: word for place in modules if expression.fullmatch(place)}
        if words:
            return words
    return {}


def _shorten(paths: Any) -> list[str]:
    """Paths that differ only in numbers, once."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path) for path in paths))
