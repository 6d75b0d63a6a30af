"""What is said of DeepSpeed's modules that are not here. Called by those that stand in their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ridgeline.compat.missing import tell_module

HERE = "ridgeline.compat.deepspeed"


def without(module: str, instead: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module of DeepSpeed's that is not here."""
    return tell_module("deepspeed", module, HERE, instead)
