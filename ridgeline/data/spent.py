"""Where a source's time goes: open, read, decode, collate, copy, added up by those who ask.

Off unless a sink is given, so that training pays nothing. Read by `ridgeline data bench`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Spent:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.is_on = False

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        if not self.is_on:
            yield
            return
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begin
