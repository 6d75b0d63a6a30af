"""A machine's profile, field by field: all there, none unknown, each a value that a machine can have.

A profile is written by hand, by whoever has another machine than those shipped; what is wrong with one is
said with the field's place, its value and what would be right. Called by `machine.py` for files and by
`ridgeline plan --what-if` for single values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

from ridgeline.errors import UsageError, unknown_word

PRECISIONS: Final = ("fp8", "bf16", "fp16", "tf32", "fp32", "fp64")
SHARES: Final = (
    "sustained_clock", "gemm_efficiency", "memory_efficiency", "flash_efficiency", "efficiency",
    "pair_efficiency",
)  # fmt: skip
"""Of what a data sheet says, more than 0 and at most 1."""
PARTS: Final = ("overlap_cost", "skew")
"""From 0 to 1."""
COUNTS: Final = ("num_sms", "devices_per_node", "devices_per_domain", "devices_per_board")
ABOVE: Final = ("memory_bytes", "memory_bandwidth", "bandwidth")
"""More than 0; every other number may be 0."""


def read_number(place: str, value: Any, option: str = "") -> float:
    """What stands at `place`, as a number that can stand there; `option`: who said so."""
    name = place.rpartition(".")[2]
    place = f"{place} in {option}" if option else place
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)  # YAML reads 1e9 as text
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{value!r} of {place} is no number; write one without a unit, as 24e9 for 24 GB"
        ) from error
    if name in COUNTS:
        if not (math.isfinite(number) and number >= 1 and number == int(number)):
            raise UsageError(f"{value} of {place} is no count; give 1, 2, 3 and so on")
        return int(number)
    if not math.isfinite(number) or number < 0:
        raise UsageError(f"{value} of {place} is no value that it can have; give a number above 0")
    if name in SHARES and not 0 < number <= 1:
        raise UsageError(f"{value} of {place} is a share of the data sheet; give 0.87 for 87 %")
    if name in PARTS and number > 1:
        raise UsageError(f"{value} of {place} is a share; give a number from 0 to 1")
    if name in ABOVE and number == 0:
        raise UsageError(f"{value} of {place} is no value that it can have; give a number above 0")
    return number


def read_rates(place: str, value: Any) -> dict[str, float]:
    """FLOP/s by precision; of those that a device does not have, 0 or nothing."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{place} is {value!r}; give rates by precision, as {{bf16: 312e12}}")
    for name in value:
        if name not in PRECISIONS:
            raise unknown_word("precision", str(name), PRECISIONS, place)
    rates = {name: read_number(f"{place}.{name}", rate) for name, rate in value.items()}
    if not rates.get("fp32"):
        raise UsageError(f"{place} has no fp32; every device has it, and sums and norms are in it")
    return rates


def read_fields(kind: type, values: Any, place: str) -> dict[str, Any]:
    """Values for a dataclass: its fields of numbers and words, each checked."""
    where = place or "the profile"
    if not isinstance(values, Mapping):
        raise UsageError(f"{where} is {values!r}, where fields were expected")
    known = {field.name: field for field in dataclasses.fields(kind)}
    for name in values:
        if name not in known:
            raise unknown_word("field", str(name), known, where)
    missing = [
        field.name
        for field in known.values()
        if field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UsageError(f"{where} lacks {', '.join(missing)}")
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = f"{place}.{name}".removeprefix(".")
        kind_of = str(known[name].type)
        if kind_of == "str":
            found[name] = str(value)
        elif kind_of == "bool":
            if not isinstance(value, bool):
                raise UsageError(f"{value!r} of {inner} is neither true nor false")
            found[name] = value
        elif kind_of in ("int", "float"):
            found[name] = read_number(inner, value)
        else:
            found[name] = value
    return found
