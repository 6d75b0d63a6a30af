"""What a recipe trains on, as samples to be packed: the one part of packing that needs torch.

A source gives tensors for a batch; here it is asked for a sample at a time, as it is in epoch 0, without
what `data.augment` does to it. Called by `ridgeline data pack recipe:NAME`.
"""

from __future__ import annotations

import numpy as np
import torch

from ridgeline.config import RunConfig
from ridgeline.data.build import build_sources
from ridgeline.data.formats.contract import Sample, Schema, schema_of
from ridgeline.data.source import Source
from ridgeline.errors import UsageError


class SourceSamples:
    """A source as `pack.Samples`."""

    def __init__(self, source: Source, origin: str) -> None:
        if source.info.arguments:
            raise UsageError(
                f"the samples of data.source have {len(source.info.arguments)} inputs, and packing is for "
                "one; join them into one array in the data set, or train from the data set itself"
            )
        self._source = source
        self._width = len(str(len(source) - 1))
        self.origin = origin
        self.classes: list[str] = []
        self.schema: Schema = schema_of(self.read(0))

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: int) -> Sample:
        inputs, targets = self._source.fetch(np.array([index]), 0)
        return {"input": _array(inputs[0]), "target": _array(targets[0])}

    def key(self, index: int) -> str:
        return f"{index:0{self._width}d}"


def _array(value: torch.Tensor) -> np.ndarray:
    # numpy has no bfloat16; nothing is lost in float32.
    wide = value.float() if value.dtype == torch.bfloat16 else value
    return np.asarray(wide.numpy(), order="C")


def open_recipe(config: RunConfig) -> dict[str, SourceSamples]:
    """The parts of a recipe's data that hold samples, by the names `packed` looks for."""
    train, held_out = build_sources(config.data.source, config.data.args, config.train.seed)
    origin = (
        f"recipe {config.name}, seed {config.train.seed}, {config.data.source} {config.data.args}"
    )
    parts = {"train": SourceSamples(train, f"{origin}, train")}
    if len(held_out):
        parts["eval"] = SourceSamples(held_out, f"{origin}, eval")
    return parts
