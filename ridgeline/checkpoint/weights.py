"""The weights of a checkpoint put into one whole model, whatever layout wrote them.

Without an optimizer and without ranks: for programs that want the model and not the training. A tensor is
read at a time and held against its checksum; every one of the model has to be there and no other may be,
because a model that is half filled answers as if it were whole. Called by `export/`, and by `export.py`
for where a weight comes from.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ridgeline.checkpoint.damage import Advance
from ridgeline.checkpoint.files import Reader
from ridgeline.checkpoint.load import read_tensor
from ridgeline.checkpoint.manifest import (
    AVERAGE,
    MODEL,
    REPLICA,
    Damaged,
    Manifest,
    check_sizes,
)
from ridgeline.errors import UsageError

_REMEDY = "use the model.name and model.args that it was made with"


def fill_model(
    model: nn.Module,
    path: Path,
    manifest: Manifest,
    advance: Advance = lambda _: None,
    live: bool = False,
) -> list[str]:
    """Fill every parameter and saved buffer of `model` from the checkpoint; sentences for the user. Where
    there is a moving average of the weights it is that, unless they are wanted `live`."""
    for problem in check_sizes(path, manifest):
        raise Damaged(f"{path} is not whole: {problem}")
    stored = {n.removeprefix(MODEL) for n in manifest.tensors if n.startswith(MODEL)}
    targets = _targets(model)
    for name in sorted(stored - {name for names, _ in targets for name in names}):
        raise UsageError(f"the checkpoint {path} has {name} and the model has not; {_REMEDY}")
    reader = Reader(path, check=True)
    with torch.no_grad():
        for names, target in targets:
            found = [name for name in names if name in stored]
            if not found:
                raise UsageError(
                    f"the model has {names[0]} and the checkpoint {path} has not; {_REMEDY}"
                )
            value = read_tensor(reader, manifest, source_of(found[0], manifest, live))
            advance(manifest.tensors[MODEL + found[0]].num_bytes)
            target.copy_(_shaped(value, target, found[0], path))
    if any(name.startswith(REPLICA) for name in manifest.tensors):
        return ["replicas had stepped on their own; the first one's weights are taken"]
    return []


def source_of(name: str, manifest: Manifest, live: bool) -> str:
    """What the checkpoint has to stand for a weight or a buffer: its moving average, if there is one."""
    average = AVERAGE + name
    return average if not live and average in manifest.tensors else MODEL + name


def _targets(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Each tensor once, with all the names that the model has for it."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            found.setdefault(id(value), ([], value))[0].append(name)
    return list(found.values())


def _shaped(value: Tensor, target: Tensor, name: str, path: Path) -> Tensor:
    """As the model has it: complex numbers are kept as pairs of real ones."""
    if target.is_complex() and value.shape == (*target.shape, 2):
        value = torch.view_as_complex(value.contiguous())
    if value.shape != target.shape:
        raise UsageError(
            f"{name} has shape {list(target.shape)} and in the checkpoint {path} {list(value.shape)}; "
            f"{_REMEDY}"
        )
    return value
