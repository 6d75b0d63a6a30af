"""One safetensors file of a checkpoint's weights, for other programs and for `model.weights`.

Written a tensor at a time, so that memory for the largest tensor is enough. A weight that the model has
under several names is written once, under the first; the others stand in the file's metadata, as
safetensors' own `save_model` does it. Called by `ridgeline checkpoint export`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.checkpoint.damage import Advance
from ridgeline.checkpoint.files import DTYPES, Reader, as_bytes, encode_header
from ridgeline.checkpoint.load import read_tensor
from ridgeline.checkpoint.manifest import (
    ITEM_BYTES,
    MODEL,
    OPTIMIZER,
    REPLICA,
    Manifest,
    check_sizes,
    read_manifest,
)
from ridgeline.checkpoint.weights import source_of
from ridgeline.config import parse_config
from ridgeline.errors import RunError, UsageError, unknown_word
from ridgeline.models.build import build_model
from ridgeline.models.llama import Llama
from ridgeline.models.llama_names import to_transformers, transformers_config
from ridgeline.models.weights import SINGLE

SHORT_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
NAMINGS = ("own", "transformers")


@dataclass(frozen=True)
class Exported:
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Row:
    key: str
    """In the file that is written."""
    source: str
    """In the checkpoint."""
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


def export_weights(
    path: Path,
    out: Path,
    names: str = "own",
    dtype: str | None = None,
    optimizer: bool = False,
    advance: Advance = lambda _: None,
    live: bool = False,
) -> Exported:
    """Write the weights of the checkpoint at `path` to the file `out`, with `config.json` beside it when
    they are named for transformers; where it has a moving average of them, that, unless `live`."""
    _check(out, names, dtype, optimizer)
    manifest = read_manifest(path)
    for problem in check_sizes(path, manifest):
        raise RunError(f"{path} is not whole: {problem}")
    llama = _llama_of(manifest, path) if names == "transformers" else None
    rename: Callable[[str], str] = to_transformers if llama is not None else lambda name: name
    rows = _rows(manifest, rename, SHORT_DTYPES[dtype] if dtype else None, optimizer, live)
    metadata = {"format": "pt"}
    if llama is None:
        metadata |= {str(name): str(first) for name, first in manifest.state["tied"].items()}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if llama is not None:
            word = str(DTYPES[rows[0].dtype]).removeprefix("torch.")
            text = json.dumps(transformers_config(llama.config, word), indent=2) + "\n"
            out.with_name("config.json").write_text(text, encoding="utf-8")
        num_bytes = _write(out, rows, metadata, Reader(path, check=True), manifest, advance)
    except OSError as error:
        raise RunError(f"{out} could not be written ({error.strerror})") from error
    notes = []
    if any(name.startswith(REPLICA) for name in manifest.tensors):
        notes.append("replicas had stepped on their own; the first one's weights are taken")
    return Exported(len(rows), num_bytes, tuple(notes))


def _check(out: Path, names: str, dtype: str | None, optimizer: bool) -> None:
    if names not in NAMINGS:
        raise unknown_word("naming", names, NAMINGS, "--names")
    if dtype is not None and dtype not in SHORT_DTYPES:
        raise unknown_word("type", dtype, SHORT_DTYPES, "--dtype")
    if out.suffix != ".safetensors":
        raise UsageError(f"OUT={out} does not end in .safetensors; give the name of a file")
    if names == "transformers" and optimizer:
        raise UsageError("--optimizer is not for --names transformers, which has no word for it")
    if names == "transformers" and out.name != SINGLE:
        raise UsageError(
            f"OUT={out} is not called {SINGLE}, which from_pretrained looks for; "
            f"use {out.with_name(SINGLE)}"
        )


def _llama_of(manifest: Manifest, path: Path) -> Llama:
    """The checkpoint's model without its weights, when it is our Llama."""
    config = parse_config(manifest.config, f"the configuration in {path}").model
    if config.name.startswith("transformers:"):
        raise UsageError(f"{config.name} has transformers' names already; leave out --names")
    if config.name != "llama":
        raise UsageError(
            f"--names transformers is for model.name=llama, and {path} is of {config.name}; "
            "leave it out"
        )
    with torch.device("meta"):
        model = build_model(config.name, **config.args)
    assert isinstance(model, Llama)
    return model


def _rows(
    manifest: Manifest,
    rename: Callable[[str], str],
    dtype: str | None,
    optimizer: bool,
    live: bool,
) -> list[_Row]:
    """What goes into the file; the widest types first, so that every tensor is aligned."""
    rows = []
    for name, stored in manifest.tensors.items():
        if name.startswith(MODEL):
            floating = DTYPES[stored.dtype].is_floating_point
            kind = dtype if dtype is not None and floating else stored.dtype
            own = name.removeprefix(MODEL)
            rows.append(_Row(rename(own), source_of(own, manifest, live), kind, stored.shape))
        elif optimizer and name.startswith(OPTIMIZER):
            rows.append(_Row(name, name, stored.dtype, stored.shape))
    return sorted(rows, key=lambda row: (-ITEM_BYTES[row.dtype], row.key))


def _write(
    out: Path,
    rows: list[_Row],
    metadata: dict[str, str],
    reader: Reader,
    manifest: Manifest,
    advance: Advance,
) -> int:
    """Aside, then by one rename, so that half a file is never there under its name."""
    head = encode_header([(row.key, row.dtype, row.shape) for row in rows], metadata)
    aside = out.with_name(out.name + ".part")
    try:
        with aside.open("wb") as file:
            file.write(head)
            for row in rows:
                value = read_tensor(reader, manifest, row.source)
                file.write(as_bytes(value.to(DTYPES[row.dtype])))
                advance(row.num_bytes)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(out)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
    return len(head) + sum(row.num_bytes for row in rows)
