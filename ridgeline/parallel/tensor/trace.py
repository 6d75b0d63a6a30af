"""One forward of a model on tensors without data, to see where the features of each projection go.

Every linear layer's output features get a mark, and the marks are followed dim by dim through what the
model does (`flows.py`): element-wise work, views, permutations, attention. A flow ends well if it
arrives, whole, as the input of another linear layer or as the model's output, and badly if something
looks along it, a softmax or a norm, say. `plan.py` reads the flows; nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ridgeline.parallel.dry_run import unchanged_attributes
from ridgeline.parallel.tensor import table
from ridgeline.parallel.tensor.flows import Flow, FlowBook, Mark
from ridgeline.parallel.tensor.layers import is_embedding, is_linear

ATTENTION = frozenset(("scaled_dot_product_attention", "multi_head_attention_forward"))


@dataclass
class Trace:
    """What one forward showed."""

    flows: list[Flow]
    token_tables: dict[str, None]
    """Embeddings that are looked up with an input of the model itself."""
    direct: dict[str, str]
    """Layers whose parameter some other code uses, and the function it was seen in."""
    attention: frozenset[str] = frozenset()
    """Functions of `ATTENTION` that were called."""


def trace_flows(model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]) -> Trace:
    """Run `model` once, on the meta device if it can, else for real on a copy of its buffers; what it
    keeps is as before."""
    try:
        with unchanged_attributes(model):
            return _trace(model, inputs, "meta")
    except Exception as first:
        if any(p.device.type == "meta" for p in model.parameters()):
            raise
        try:
            with torch.random.fork_rng(), unchanged_attributes(model):
                return _trace(model, inputs, None)
        except Exception as second:
            raise second from first


def _trace(
    model: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any], device: str | None
) -> Trace:
    def place(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        return tensor.detach().to(device) if device else tensor.detach().clone()

    made: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for path, module in model.named_modules():  # each once: a shared one is put back once too
        for kind, held in ((0, module._parameters), (1, module._buffers)):
            for name, tensor in held.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        keep = kind == 0 and device is None
                        made[id(tensor)] = tensor if keep else place(tensor)
                    state[f"{path}.{name}" if path else name] = made[id(tensor)]
    given = tree_map(place, inputs)
    args, kwargs = ((), dict(given)) if isinstance(given, Mapping) else (tuple(given), {})
    recorder = _Recorder(model, state)
    with torch.no_grad(), recorder.watch(model), recorder:
        recorder.tokens |= {id(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        recorder.book.keep += tree_leaves((args, kwargs))
        outputs = torch.func.functional_call(model, state, args, kwargs, tie_weights=False)
    return recorder.finish(outputs)


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.book = FlowBook()
        self.tokens: set[int] = set()
        self.token_tables: dict[str, None] = {}
        self.direct: dict[str, str] = {}
        self.attention: set[str] = set()
        self.inside = 0
        self.owners: dict[int, list[str]] = {}
        for path, module in model.named_modules():
            if is_linear(module) or is_embedding(module):
                for name, _ in module.named_parameters(recurse=False):
                    full = f"{path}.{name}" if path else name
                    self.owners.setdefault(id(state[full]), []).append(path)

    # Layers

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        handles = []
        seen: dict[int, str] = {}
        for path, module in model.named_modules():
            if is_linear(module) or is_embedding(module):
                seen[id(module)] = path

                def before(_module: nn.Module, _args: Any) -> None:
                    self.inside += 1

                def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
                    self.inside -= 1
                    x = next(iter([*args, *kwargs.values()]))
                    self.layer(seen[id(module)], module, x, out)

                handles.append(module.register_forward_pre_hook(before))
                handles.append(module.register_forward_hook(after, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def layer(self, path: str, module: nn.Module, x: Tensor, out: Tensor) -> None:
        if is_embedding(module):
            if id(x) in self.tokens:
                self.token_tables[path] = None
            return
        marks = self.book.marks_of(x)
        if marks[-1] is not None and not marks[-1].fused:
            self.book.flow(marks[-1]).consumers[path] = None
        self.book.break_all(marks[:-1], f"{path} mixes it")
        flow = self.book.new_flow(path)
        self.book.mark(out, (*(None,) * (out.dim() - 1), Mark(flow)))
        self.book.raw[id(out)] = path
        self.book.keep.append(out)

    # Functions

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.inside:
            return out
        name = table.name_of(func)
        if name in ATTENTION:
            self.attention.add(name)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if name not in table.NATIVE:
            for tensor in tensors:
                for path in self.owners.get(id(tensor), ()):
                    self.direct[path] = name
        if name in _SAME_TOKENS and tensors and id(tensors[0]) in self.tokens:
            self.tokens.add(id(out))
            self.book.keep.append(out)
        if any(id(t) in self.book.marks for t in tensors):
            self.book.follow(name, func, args, kwargs, tensors, out)
        return out

    def finish(self, outputs: Any) -> Trace:
        for value in _all_tensors(outputs):
            self.book.mark_output(self.book.marks_of(value))
        seen = frozenset(self.attention)
        return Trace(self.book.finish(), self.token_tables, self.direct, seen)


_SAME_TOKENS = table.VIEWS | {"to", "long", "contiguous", "int"}


def _all_tensors(outputs: Any) -> list[Tensor]:
    values = tree_leaves(outputs)
    found = [v for v in values if isinstance(v, Tensor)]
    for value in values:
        if hasattr(value, "__dataclass_fields__"):
            found += [v for v in tree_leaves(vars(value)) if isinstance(v, Tensor)]
    return found
