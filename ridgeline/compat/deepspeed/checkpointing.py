"""`deepspeed.checkpointing`: torch's, which every layout of ours knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as _checkpoint


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run it again in backward rather than keep what it computes."""
    return _checkpoint(function, *args, use_reentrant=False)


def configure(*args: Any, **options: Any) -> None:
    """Partitions and copies on the host are not made; `ridgeline.layout` has recompute and offload."""


def is_configured() -> bool:
    return True


def reset() -> None:
    """Nothing is kept from step to step."""
