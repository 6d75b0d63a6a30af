"""What another system has and its interface here has not: one sentence that says what to use instead.

A name is looked up in a module's `__getattr__`, a module by what is asked of it: so that a script which
imports from the inside of that system is told at its import line. Called by the interfaces in this room.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from ridgeline.errors import UsageError


class Missing(UsageError, AttributeError):
    """A name; `hasattr` is told so."""


class MissingModule(UsageError, ImportError):
    """A module, or a name that was imported; a script that tries whether it is there is told so."""


def tell_names(system: str, here: str, elsewhere: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`: `elsewhere` has what to use instead of names that it has not.

    `from PACKAGE import NAME` first looks whether the name is there, and where an AttributeError says that
    it is not Python makes a sentence of its own, without ours.
    """

    def look_up(name: str) -> Any:
        if name in elsewhere:
            asks = sys._getframe(1).f_globals.get("__name__")
            kind = MissingModule if asks == "importlib._bootstrap" else Missing
            raise kind(f"{system}'s {name} is not in {here}; {elsewhere[name]}")
        raise AttributeError(f"module {here!r} has no attribute {name!r}")

    return look_up


def tell_module(system: str, module: str, here: str, instead: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that has nothing. `__path__` is what Python asks for when something is
    imported from it, or a module inside of it."""

    def look_up(name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"module {module!r} of {here} has no attribute {name!r}")
        kind = MissingModule if name == "__path__" else Missing
        raise kind(f"{system}.{module} is not in {here}; {instead}")

    return look_up
