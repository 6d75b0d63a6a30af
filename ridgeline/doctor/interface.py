"""Whether a script of the user's own has the lines that a climb needs, as far as its text can tell.

A climb changes a script's settings through `ridgeline.start`; a script without it can be measured, but
nothing can be tried on it, which is better said before minutes of measuring. What a text cannot tell (an
installed package could call Ridgeline itself) is seen when the script has done its first step. Called by
`cli_doctor.py`, `script.py` and `script_candidate.py`; imports without torch.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

STRANGERS = frozenset({
    "PIL", "h5py", "matplotlib", "numpy", "pandas", "scipy", "sklearn", "timm", "torch", "torchaudio",
    "torchvision", "tqdm", "transformers", "yaml",
})  # fmt: skip
"""Packages that training scripts use and that do not use Ridgeline, beside Python's own."""
_INDIRECT = frozenset({"importlib", "runpy", "__import__", "exec", "eval"})
"""Names by which a script could import what its text does not show."""

FIVE_LINES = (
    "`import ridgeline`, `job = ridgeline.start()`, `model = job.parallelize(model)`, "
    "`loader = job.loader(dataset, batch_size=...)`, `job.mean(loss)`"
)


def tell_missing(script: Path) -> str:
    """One sentence: what is not there, and what to add."""
    return (
        f"{script} does not use Ridgeline's interface, so that nothing can be tried on it from outside; "
        f"five lines do it: {FIVE_LINES} (docs/train.md)"
    )


def surely_lacks_interface(script: Path) -> bool:
    """True where neither the script nor a file beside it that it imports can reach Ridgeline; False also
    where that cannot be known."""
    waiting, seen = [script], set()
    while waiting:
        path = waiting.pop().resolve()
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            return False
        for name in _reached(tree):
            files = _files_of(name, script.parent, path.parent)
            if not files and not _is_stranger(name.partition(".")[0]):
                return False
            waiting += files
    return True


def _is_stranger(package: str) -> bool:
    known = package in STRANGERS or package in sys.stdlib_module_names
    return known and package not in _INDIRECT


def _reached(tree: ast.AST) -> Iterator[str]:
    """Names of what a file imports, and of functions that import without saying so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            within = f"{node.module}." if node.module else ""
            yield from (f"{within}{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Name) and node.id in _INDIRECT:
            yield node.id


def _files_of(name: str, *folders: Path) -> list[Path]:
    """Files of a module that lies beside the script or the file that imports it."""
    parts = name.split(".")
    found = []
    for folder in folders:
        for depth in range(1, len(parts) + 1):
            place = folder.joinpath(*parts[:depth])
            found += [p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()]
    return found
