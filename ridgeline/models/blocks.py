"""The repeated blocks of a module that nobody described: where it is natural to cut it.

Recompute wraps them, sharding gathers weights one at a time, pipelines cut between them, the planner
counts them. A block is a child of a `ModuleList`, `Sequential` or `ModuleDict` that has a sibling of its
own class; a class of torch's own layers does not count, so that a plain `Sequential` of convolutions has
none. Called by `trace.py`, and through `parallel/blocks.py` by everything that arranges a model.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Blocks by their path, in the order of registration; none inside another."""
    found: dict[str, nn.Module] = {}
    classes = _repeated_classes(model)

    def look(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            place = f"{path}.{name}" if path else name
            if isinstance(module, _CONTAINERS) and type(child) in classes:
                if all(child is not known for known in found.values()):
                    found[place] = child
            else:
                look(child, place)

    look(model, "")
    return found


def _repeated_classes(model: nn.Module) -> set[type]:
    """Classes of which one container holds several with parameters, other than single layers."""
    repeated: set[type] = set()
    for module in model.modules():
        if isinstance(module, _CONTAINERS):
            counts = Counter(type(c) for c in module.children() if _has_parameters(c))
            repeated |= {kind for kind, count in counts.items() if count > 1 and _is_block(kind)}
    return repeated


def _is_block(kind: type) -> bool:
    return (
        kind is nn.Sequential
        or not kind.__module__.startswith("torch.nn.modules")
        or ("Transformer" in kind.__name__)
    )


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
