"""Initial weights from safetensors files: those of `ridgeline checkpoint export`, or of `transformers`.

Every tensor of the model has to be there in its shape and nothing else may be, because a model that is
half pretrained trains without a word. Read a tensor at a time into the model that is there. Called by
`train/setup.py` before the model is cut, so that it works in every layout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.models.llama import Llama
from ridgeline.models.llama_names import (
    check_config,
    from_transformers,
    is_computed,
    is_transformers,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MOST_NAMES = 3


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill every parameter and saved buffer of `model` from `path`."""
    files = [_Opened(file) for file in _find_files(path)]
    keys = {key: file for file in files for key in file.keys if not key.startswith("optim/")}
    names = {key: key for key in keys}
    if isinstance(model, Llama) and is_transformers(set(keys)):
        _check_settings(model, path)
        names = {key: from_transformers(key) for key in keys if not is_computed(key)}
    tied: dict[int, list[str]] = {}
    targets: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            tied.setdefault(id(tensor), []).append(name)
            targets[name] = tensor
    there = set(names.values())
    missing = [group[0] for group in tied.values() if not there & set(group)]
    unexpected = sorted(there - set(targets))
    wrong = []
    for key, name in names.items():
        shape, wanted = (
            keys[key].shape(key),
            tuple(targets[name].shape) if name in targets else None,
        )
        if wanted is not None and shape != wanted and not _is_pairs(targets[name], shape):
            wrong.append(f"{name} ({list(shape)} where the model has {list(wanted)})")
    findings = [
        f"{what} {', '.join(found[:_MOST_NAMES])}"
        + (f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else "")
        for what, found in (
            ("it lacks", missing),
            ("the model has no", unexpected),
            ("of another shape:", wrong),
        )
        if found
    ]
    if findings:
        raise UsageError(
            f"model.weights={path} does not fit the model: {'; '.join(findings)}; "
            "use the model.name and model.args that it was made with"
        )
    with torch.no_grad():
        _copy(names, keys, targets, tied, path)


def _copy(
    names: dict[str, str],
    keys: dict[str, _Opened],
    targets: dict[str, Tensor],
    tied: dict[int, list[str]],
    path: Path,
) -> None:
    filled: set[int] = set()
    for key, name in names.items():
        target, value = targets[name], keys[key].read(key)
        if _is_pairs(target, tuple(value.shape)):
            value = torch.view_as_complex(value.contiguous())
        value = value.to(target.device, target.dtype)
        if id(target) in filled and not torch.equal(value, target):
            raise UsageError(
                f"model.weights={path} has different values for {' and '.join(tied[id(target)])}, which "
                "are one weight in the model; use model.args that do not tie them"
            )
        filled.add(id(target))
        target.copy_(value)


def _is_pairs(target: Tensor, shape: tuple[int, ...]) -> bool:
    """Complex numbers as pairs of real ones, as checkpoints keep them."""
    return target.is_complex() and shape == (*target.shape, 2)


class _Opened:
    """One file, from which single tensors are read."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = cast(Any, safe_open(path, framework="pt"))
            self.keys: set[str] = set(self._file.keys())
        except (OSError, SafetensorError) as error:
            raise UsageError(f"model.weights: {path} cannot be read ({error})") from error

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(key).get_shape())

    def read(self, key: str) -> Tensor:
        value: Tensor = self._file.get_tensor(key)
        return value


def _find_files(path: Path) -> list[Path]:
    """The file, or those of a directory: one called model.safetensors, or what an index lists."""
    if path.is_file() and path.suffix != ".json":
        return [path]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    index = path if path.is_file() else path / INDEX
    if not index.is_file():
        raise UsageError(
            f"no weights at model.weights={path}; give a safetensors file, or a directory with "
            f"{SINGLE} or {INDEX}"
        )
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise UsageError(f"model.weights: {index} is no index of safetensors files") from error
    return [index.parent / name for name in dict.fromkeys(listed)]


def _check_settings(model: Llama, path: Path) -> None:
    """Settings that no shape tells, where the files came with them."""
    beside = (path if path.is_dir() else path.parent) / "config.json"
    if not beside.is_file():
        return
    findings = check_config(json.loads(beside.read_text(encoding="utf-8")), model.config)
    if findings:
        raise UsageError(
            f"model.weights={path} does not fit, by its {beside}: {'; '.join(findings)}"
        )
