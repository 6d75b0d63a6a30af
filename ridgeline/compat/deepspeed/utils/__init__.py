"""`deepspeed.utils`: what scripts take from there."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ridgeline.compat.deepspeed.comm import get_rank

logger = logging.getLogger("ridgeline.compat.deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """On these ranks; on the first one where none are named, on all for -1."""
    wanted = list(ranks) if ranks else [0]
    if get_rank() in wanted or -1 in wanted:
        logger.log(level, "[Rank %d] %s", get_rank(), message)


class RepeatingLoader:
    """Begins anew when it has come to its end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)
