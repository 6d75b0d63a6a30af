"""Asking a scheduler's programs, with what can go wrong on the way put into one sentence."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import RunError, UsageError

LIMIT_S = 60.0
"""A scheduler that does not answer for so long is not asked further."""


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def why(self) -> str:
        """The last thing it complained about, on one line."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with {self.code} and said nothing"


def ask(
    argv: Sequence[str],
    *,
    stdin: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Answer:
    """What a program answers, whatever its exit code; an error only where it could not be asked."""
    env = {**os.environ, **(variables or {})}
    try:
        with open(stdin or os.devnull, "rb") as source:
            done = subprocess.run(
                list(argv), stdin=source, capture_output=True, timeout=LIMIT_S, env=env
            )
    except FileNotFoundError as error:
        if stdin is not None and error.filename == str(stdin):
            raise UsageError(f"there is no script at {stdin}") from error
        raise UsageError(
            f"{argv[0]} is not installed here, or not on PATH; run this where jobs are submitted from"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise RunError(
            f"{argv[0]} has not answered for {LIMIT_S:.0f} s; the scheduler may be down, try later"
        ) from error
    return Answer(
        done.returncode,
        done.stdout.decode("utf-8", "replace"),
        done.stderr.decode("utf-8", "replace"),
    )


def demand(
    argv: Sequence[str],
    *,
    stdin: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> str:
    """What a program prints; an error with its own words when it refuses."""
    answer = ask(argv, stdin=stdin, variables=variables)
    if answer.code:
        raise RunError(f"{argv[0]} refused ({answer.code}): {answer.why}")
    return answer.out
