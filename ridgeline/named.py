"""A user's own class or function by the text `module:name`, as recipes give it.

Models, sources and losses can all be the user's; this is the one place that imports them, so that a
wrong word in any of the three is answered in the same way. The module may lie in the working directory.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from types import ModuleType
from typing import Any

from ridgeline.errors import UsageError, nearest_word, tell_where


def import_named(text: str, place: str) -> Any:
    """What `module:name` (or `module:outer.inner`) stands for; `place` is the key that said it."""
    module_name, _, path = text.partition(":")
    if not module_name or not path or module_name.startswith("."):
        raise UsageError(f"{place} {text!r} should read module:name", key=place)
    return find_attribute(_import(module_name, text, place), path, text, place)


def _import(module_name: str, text: str, place: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        # For good, as `python -m` does: the user's module may import its neighbours later on.
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise UsageError(
                f"{place} {text!r}: there is no module {module_name!r} in {here} or the installed "
                "packages",
                key=place,
            ) from error
        raise UsageError(
            f"{place} {text!r}: importing {module_name!r} failed: {error}{tell_where(error)}",
            key=place,
        ) from error
    except Exception as error:
        kind = type(error).__name__
        raise UsageError(
            f"{place} {text!r}: importing {module_name!r} failed: {kind}: {error}{tell_where(error)}",
            key=place,
        ) from error


def find_attribute(module: ModuleType, path: str, text: str, place: str) -> Any:
    """The attribute at a dotted path inside a module."""
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            guess = nearest_word(part, [n for n in dir(found) if not n.startswith("_")])
            hint = f"; did you mean {guess!r}?" if guess else ""
            what = f"{place} {text!r}: {module.__name__!r} has no {path!r}{hint}"
            raise UsageError(what, key=place)
        found = getattr(found, part)
    return found


def tell_place(found: Any) -> str:
    """Where a function or class was written, as ` at FILE:LINE`; empty where no file says so."""
    while hasattr(found, "func"):  # functools.partial
        found = found.func
    written = found if inspect.isroutine(found) or inspect.isclass(found) else type(found)
    try:
        file = inspect.getsourcefile(inspect.unwrap(written))
        line = inspect.getsourcelines(written)[1]
    except (TypeError, OSError):
        return ""
    return f" at {os.path.relpath(file)}:{line}" if file else ""
