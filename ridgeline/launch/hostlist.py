"""Lists of hosts and of tasks a host, in the ways schedulers write them. Pure functions on text.

Slurm folds names (`nid[001-003,010],gpu-a1`) and counts (`4(x2),1`); LSF writes hosts and counts in turn
(`h1 4 h2 4`); PBS and LSF leave files with a line a slot. Called by `detect.py`.
"""

from __future__ import annotations

import itertools
import re

from ridgeline.errors import UsageError

_RANGE = re.compile(r"(\d+)(?:-(\d+))?$")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?$")
# A list that unfolds to more is a slip, not a machine.
_MAX_HOSTS = 1_000_000


def expand_hosts(text: str, place: str) -> list[str]:
    """The names in a folded list.

    >>> expand_hosts("nid[001-003,010],gpu-a1", "SLURM_NODELIST")
    ['nid001', 'nid002', 'nid003', 'nid010', 'gpu-a1']
    """
    hosts: list[str] = []
    for name in _split_names(text, place):
        parts = re.split(r"\[([^\[\]]*)\]", name)
        choices = [
            [part] if number % 2 == 0 else _expand_numbers(part, text, place)
            for number, part in enumerate(parts)
        ]
        if any("[" in part or "]" in part for part in parts):
            raise _no_list(text, place, "its brackets do not match")
        hosts += ["".join(pieces) for pieces in itertools.product(*choices)]
        if len(hosts) > _MAX_HOSTS:
            raise _no_list(text, place, f"it has more than {_MAX_HOSTS} hosts")
    if not hosts:
        raise _no_list(text, place, "it is empty")
    return hosts


def _split_names(text: str, place: str) -> list[str]:
    """At the commas that are outside of brackets."""
    names, depth, start = [], 0, 0
    for position, letter in enumerate(text + ","):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        elif letter == "," and depth == 0:
            name = text[start:position].strip()
            if not name:
                raise _no_list(text, place, "a name between commas is empty")
            names.append(name)
            start = position + 1
        if depth not in (0, 1):
            raise _no_list(text, place, "its brackets do not match")
    if depth:
        raise _no_list(text, place, "its brackets do not match")
    return names


def _expand_numbers(text: str, whole: str, place: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.match(part.strip())
        if match is None:
            raise _no_list(whole, place, f"{part!r} in brackets is no number and no range")
        first, last = match.group(1), match.group(2) or match.group(1)
        if int(last) < int(first) or int(last) - int(first) > _MAX_HOSTS:
            raise _no_list(whole, place, f"the range {part!r} goes nowhere")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def expand_counts(text: str, place: str) -> list[int]:
    """Tasks on each node.

    >>> expand_counts("4(x2),1", "SLURM_TASKS_PER_NODE")
    [4, 4, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.match(part.strip())
        if match is None:
            raise _no_list(text, place, f"{part!r} is no count such as 4 or 4(x2)")
        times = int(match.group(2) or 1)
        if len(counts) + times > _MAX_HOSTS:
            raise _no_list(text, place, f"it is for more than {_MAX_HOSTS} nodes")
        counts += [int(match.group(1))] * times
    return counts


def read_host_pairs(text: str, place: str) -> list[tuple[str, int]]:
    """Hosts and slots in turn, as in LSF's `LSB_MCPU_HOSTS`.

    >>> read_host_pairs("h1 4 h2 2", "LSB_MCPU_HOSTS")
    [('h1', 4), ('h2', 2)]
    """
    words = text.split()
    if not words or len(words) % 2 or not all(word.isdigit() for word in words[1::2]):
        raise _no_list(text, place, "it is not host and number in turn")
    return [(host, int(number)) for host, number in zip(words[::2], words[1::2], strict=True)]


def read_host_lines(text: str, place: str) -> list[tuple[str, int]]:
    """Hosts with their number of lines, in the order in which they first stand: a file with a line a slot.

    >>> read_host_lines("a\\na\\nb\\n", "PBS_NODEFILE")
    [('a', 2), ('b', 1)]
    """
    counts: dict[str, int] = {}
    for line in text.splitlines():
        host = line.strip()
        if host:
            counts[host] = counts.get(host, 0) + 1
    if not counts:
        raise _no_list(text, place, "it names no host")
    return list(counts.items())


def _no_list(text: str, place: str, why: str) -> UsageError:
    return UsageError(f"{place}={text[:120]!r} is no list that can be read: {why}")
