"""What the job scripts of all schedulers share: how a word is quoted, what may stand in a directive, and
the part below the directives.

A script is read twice: by the scheduler, which takes its own comments from the top, and by bash. Nothing of
the user's may turn into a directive or into shell that was not meant as such: words of the body are quoted
and stay on their line, and a value with letters that a directive cannot hold is refused. Called by the
files in `schedulers/`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import UsageError
from ridgeline.launch.job import Job

ENDS_AT = "RIDGELINE_ENDS_AT"
"""Holds when the time limit strikes, in seconds since 1970: not every scheduler tells the job."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_REFUSED = re.compile(r"[\x00-\x1f\x7f'\"\\`$#\u0085\u2028\u2029]")
_PLAIN = re.compile(r"[A-Za-z0-9._/:,=@%^+-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_JOB_ID = re.compile(r"[^\W_][\w.@\[\]-]*")
_MEMORY = re.compile(r"([0-9]+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_ARRAY_PART = re.compile(r"([0-9]+)(?:-([0-9]+)(?::([0-9]+))?)?")
_LIMIT = re.compile(r"[1-9][0-9]*")
_SENTINELS = re.compile(r"\s*#\s*(SBATCH|BSUB|PBS)\b|[^\w]*(flux|FLUX):")


def quote(word: str) -> str:
    """A word as bash reads it back, on one line whatever it holds.

    >>> print(quote("a b"), quote("it's"), quote("two\\nlines"))
    'a b' 'it'"'"'s' $'two\\nlines'
    """
    if "\0" in word:
        raise UsageError(f"{word!r} holds a zero byte, which no command line can pass on")
    if not _CONTROL.search(word):
        return shlex.quote(word)
    known = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\\": r"\\", "'": r"\'"}
    # Three octal digits, always: a hexadecimal escape would swallow the letter after it.
    letters = [
        known.get(letter) or (f"\\{ord(letter):03o}" if _CONTROL.match(letter) else letter)
        for letter in word
    ]
    return f"$'{''.join(letters)}'"


def join(words: Iterable[str]) -> str:
    return " ".join(quote(word) for word in words)


def value(text: str, place: str) -> str:
    """`text` as it can stand in a directive, in double quotes where it needs them, or a `UsageError`."""
    return text if _PLAIN.fullmatch(checked(text, place)) else f'"{text}"'


def checked(text: str, place: str) -> str:
    """`text` where it can stand between double quotes in a directive, else a `UsageError`."""
    bad = _REFUSED.search(text)
    if bad or not text.strip() or text.startswith("-"):
        what = f"holds {bad.group()!r}" if bad else "starts with -" if text.strip() else "is empty"
        raise UsageError(
            f"{place} {text!r} {what}, which a line for the scheduler cannot hold; choose another"
        )
    return text


def further(job: Job, sentinel: str) -> list[str]:
    """The user's own directives, each an option on one line."""
    lines = []
    for text in job.directives:
        line = text.strip().removeprefix(sentinel).strip()
        if _CONTROL.search(line) or not line.startswith("-"):
            raise UsageError(
                f"the directive {text!r} is not an option on one line; write it as behind {sentinel}, "
                "e.g. --mail-type=END"
            )
        lines.append(line)
    return lines


@dataclass(frozen=True)
class Array:
    """Indices of a job array as ranges (first, last, step), and how many may run at once."""

    ranges: tuple[tuple[int, int, int], ...]
    at_once: int | None = None

    @property
    def first(self) -> int:
        return min(first for first, _, _ in self.ranges)


def read_array(text: str, place: str = "--array") -> Array:
    """The indices in `0-9`, `1,3,5`, `0-9:2`, `0-9%2`.

    >>> read_array("0-3,9%2")
    Array(ranges=((0, 3, 1), (9, 9, 1)), at_once=2)
    """
    indices, percent, limit = text.partition("%")
    matches = [_ARRAY_PART.fullmatch(part) for part in indices.split(",")]
    if None in matches or (percent and not _LIMIT.fullmatch(limit)):
        raise UsageError(
            f"{place} {text!r} is no list of indices; write 0-9, 1,3,5 or 0-9%2 for two at once"
        )
    ranges = []
    for match in matches:
        assert match is not None
        first, last, step = match.group(1), match.group(2) or match.group(1), match.group(3) or "1"
        if int(last) < int(first) or not int(step):
            raise UsageError(f"{place} {text!r} has the range {match.group()!r}, which is empty")
        ranges.append((int(first), int(last), int(step)))
    return Array(tuple(ranges), int(limit) if percent else None)


def read_memory(text: str, place: str = "--memory") -> tuple[int, str]:
    """A number and its unit, K, M, G or T; M where there is none, as schedulers take it.

    >>> read_memory("64GB"), read_memory("4000")
    ((64, 'G'), (4000, 'M'))
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{place} {text!r} is no amount of memory; write a whole number with M, G or T"
        )
    return int(match.group(1)), match.group(2).upper() or "M"


def job_ids(ids: Iterable[str], place: str = "--after") -> tuple[str, ...]:
    for one in ids:
        if not _JOB_ID.fullmatch(one):
            raise UsageError(f"{place} {one!r} is no id of a job; write what `submit` answered")
    return tuple(ids)


def refuse(job: Job, scheduler: str, instead: Mapping[str, str]) -> None:
    """Raises for what a scheduler has no word for; `instead` says what to do, by field of the job."""
    for name, remedy in instead.items():
        if getattr(job, name):
            raise UsageError(
                f"{scheduler} has no word for {name.replace('_', ' ')} {getattr(job, name)!r}; {remedy}"
            )


def check_sizes(job: Job) -> None:
    """Raises when the job asks for nothing, or for less."""
    wanted = {"--nodes": job.nodes, "--per-node": job.per_node}
    wanted["--cpus-per-rank"] = 1 if job.cpus_per_rank is None else job.cpus_per_rank
    wanted["--time"] = 1 if job.time_s is None else job.time_s
    for place, number in wanted.items():
        if number < 1:
            raise UsageError(f"{place} {number} is less than 1; a job needs at least one")
    if (job.gpus_per_node or 0) < 0:
        raise UsageError(f"--gpus-per-node {job.gpus_per_node} is less than none; write 0 or more")
    if job.warn_s < 0:
        raise UsageError(
            f"a warning {job.warn_s} seconds before the end comes after it; write 0 or more"
        )
    if not job.body:
        raise UsageError("the job has no command to run; write it behind --")


def render_script(
    job: Job, sentinel: str, directives: Iterable[str], first: Iterable[str] = ()
) -> str:
    """The whole script. `directives` and the lines to run `first` are checked by whoever made them."""
    check_sizes(job)
    lines = ["#!/bin/bash"]
    lines += [f"{sentinel} {line}" for line in [*directives, *further(job, sentinel)]]
    lines += ["", *first, *_body(job)]
    return "\n".join(lines) + "\n"


def _body(job: Job) -> list[str]:
    # A warning that comes before the body listens would end the shell; the body has a clock as well.
    lines = ["trap '' USR1"]
    # A job that was submitted from a job has its environment.
    lines.append(f"unset {ENDS_AT} RIDGELINE_WARN_S RIDGELINE_REQUEUE RIDGELINE_ARRAY")
    if job.time_s is not None:
        lines.append(f"export {ENDS_AT}=$(($(date +%s) + {job.time_s}))")
    # A module that is not there ends the job here, not in an import an hour later. No `set -u`: the scripts
    # of modules and conda read variables that are not set.
    lines.append("set -e")
    for text in job.setup:
        if any(_SENTINELS.match(line) for line in text.splitlines()):
            raise UsageError(
                f"the set-up line {text!r} is a directive, which no scheduler reads there; give it as one"
            )
        lines.append(text)
    for name, said in job.variables.items():
        lines.append(export(name, said))
    lines.append(f"cd -- {quote(str(job.workdir.absolute()))}")
    dashes = "-- " if job.body[:1] and job.body[0].startswith("-") else ""
    # exec: the signal that a scheduler sends to the shell is the body's. Some schedulers hand the script to
    # bash as its input, which the body is not to read.
    lines.append(f"exec {dashes}{join(job.body)} </dev/null")
    return lines


def export(name: str, said: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name of a variable; letters, digits and _ make one")
    return f"export {name}={quote(said)}"


def write_script(path: Path, text: str) -> None:
    """Write a script as whoever is to run it reads it: file names that are no UTF-8 stay what they are."""
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    path.chmod(0o755)
