"""What a model keeps in Python, as it was before a run that was only for looking.

A counter of calls, a temperature that falls, a mask made at the first call: a dry run would move them on,
and on the meta device leave tensors without data behind. Buffers and weights are the business of whoever
runs the model. Called by `tensor/trace.py`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_TORCH = frozenset(vars(nn.Module()))
"""What every module has, and torch looks after."""
_CONTAINERS = (list, dict, set, deque)


@contextmanager
def unchanged_attributes(model: nn.Module) -> Iterator[None]:
    """Put the attributes of all modules of `model` back afterwards: which there are, what they are, and
    what lists, dicts and sets among them hold. Objects of other kinds that change inside stay changed."""
    before = [(m, type(m), _own(m), _contents(_own(m))) for m in model.modules()]
    try:
        yield
    finally:
        for module, kind, held, contents in before:
            if type(module) is not kind:
                continue  # a lazy one, which is another module now
            for name in _own(module).keys() - held.keys():
                del module.__dict__[name]
            module.__dict__.update(held)
            for name, content in contents.items():
                _refill(held[name], content)


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _TORCH}


def _contents(held: dict[str, Any]) -> dict[str, Any]:
    return {n: copy.copy(value) for n, value in held.items() if type(value) in _CONTAINERS}


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.extend(content) if isinstance(container, list | deque) else container.update(content)
