"""Files that grow while one looks at them: what is new in them, and never again what was read before.

A run of weeks has a `metrics.jsonl` of hundreds of MB, on a file system that others use too. Called by
`live.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MUCH = 4 * 2**20
"""Of more than so many new bytes, lines that may be left out are taken only in part."""
_TAIL = 2**20
"""But the newest all."""


@dataclass(frozen=True)
class News:
    """What a file has that it did not have before."""

    starts_over: bool
    """Whether it is another file, or a shorter one, than before: what was known of it no longer holds."""
    values: Iterator[dict[str, Any]]
    """Of the new lines, in their order; those that are no JSON objects are passed over."""


class Followed:
    """One file by its path. A line counts once its end is there."""

    def __init__(self, path: Path, spare: bytes = b"", tail: int | None = None) -> None:
        """Lines that begin with `spare` may be left out where there are very many; with `tail` only so many
        bytes at the end of a file are looked at when it is first seen."""
        self.path, self._spare, self._tail = path, spare, tail
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def read(self) -> News:
        """To be read to its end before the next call."""
        try:
            file = self.path.open("rb", buffering=2**18)
            stat = os.fstat(file.fileno())
        except OSError:
            return News(self._forget(), iter(()))
        identity = (stat.st_dev, stat.st_ino)
        starts_over = False
        if identity != self._identity or stat.st_size < self._offset:
            starts_over = self._forget()
            self._identity = identity
            if self._tail is not None and stat.st_size > self._tail:
                file.seek(stat.st_size - self._tail)
                file.readline()  # the rest of a line
                self._offset = file.tell()
        if stat.st_size == self._offset:
            file.close()
            return News(starts_over, iter(()))
        return News(starts_over, self._values(file, stat.st_size))

    def _forget(self) -> bool:
        """Whether anything was known."""
        known = self._offset > 0
        self._offset, self._identity = 0, None
        return known

    def _values(self, file: BinaryIO, size: int) -> Iterator[dict[str, Any]]:
        one_in = max(1, (size - self._offset) // MUCH)
        with file:
            file.seek(self._offset)
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    return  # somebody is writing it
                self._offset += len(line)
                is_spare = bool(self._spare) and line.startswith(self._spare)
                if is_spare and number % one_in and self._offset < size - _TAIL:
                    continue
                try:
                    value = json.loads(line)
                except ValueError:
                    continue
                if isinstance(value, dict):
                    yield value
