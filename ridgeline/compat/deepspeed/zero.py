"""`deepspeed.zero`: contexts around a model's making, which here is whole on every rank until
`initialize`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor

from ridgeline.errors import UsageError


@contextmanager
def Init(*args: Any, **options: Any) -> Iterator[None]:
    """The model is made as it is; `initialize` cuts it."""
    yield


@contextmanager
def GatheredParameters(params: Any, *args: Any, **options: Any) -> Iterator[None]:
    """Before `initialize` parameters are whole, and may be changed by all ranks alike."""
    for parameter in params if isinstance(params, (list, tuple)) else [params]:
        if isinstance(parameter, DTensor):
            raise UsageError(
                "deepspeed.zero.GatheredParameters was called on parameters that are in shards by now; "
                "change "
                "weights before deepspeed.initialize, and read them with engine.save_16bit_model"
            )
    yield
