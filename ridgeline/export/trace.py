"""torch.export on the module, and its refusals as one sentence with the place in the user's code.

Python runs the model once on stand-ins for tensors that have shapes and no values, so whatever a model
decides by values stops it: the line that did is the last one of the user's in the traceback. Called by
`package.py`.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ridgeline.errors import RunError, UsageError
from ridgeline.launch.env import wants_traceback

_OWN = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_VALUES = (
    "use torch.where, torch.clamp or torch.cond in place of `if`, and tensors in place of .numpy() and "
    ".tolist()"
)
_MOST = 160
"""Characters of a message of torch's that are shown; RIDGELINE_TRACEBACK=1 shows it all."""


def trace(
    module: nn.Module, tensors: Sequence[Tensor], varying: Sequence[bool]
) -> tuple[ExportedProgram, int | None]:
    """The module as a graph; dim 0 of those inputs that are `varying` may then be of any size, or of any
    up to the number that comes back with it: torch chooses some kernels by whether they can count as far
    (cuDNN's batch norms up to 880,801 samples, convolutions up to 2^31 values)."""
    count = len(tensors[varying.index(True)]) if any(varying) else None
    most: int | None = None
    while True:
        shapes = None
        if count is not None:
            batch = Dim("batch", min=1, max=most)
            shapes = {"tensors": tuple({0: batch} if varies else None for varies in varying)}
        try:
            with torch.no_grad(), quiet():
                program = torch.export.export(module, tuple(tensors), dynamic_shapes=shapes)
            return program, most
        except (UsageError, RunError):
            raise
        except Exception as error:  # torch raises what it likes
            below = None if count is None else largest_batch(str(error))
            if below is None or below < (count or 0) or (most is not None and below >= most):
                raise explain(error, module, count) from error
            most = below


def largest_batch(text: str) -> int | None:
    """Up to how many samples torch could export the model, where its refusal says so.

    >>> largest_batch("Suggested fixes: batch = Dim('batch', max=880801)")
    880801
    >>> largest_batch("Expected op to be '==', got <= for batch <= 2147483647/12288")
    174762
    """
    found = [int(number) for number in re.findall(r"Dim\('batch'[^)]*max=(\d+)", text)]
    parts = re.findall(r"batch <= (\d+)(?:/(\d+))?", text)
    found += [int(number) // int(by or 1) for number, by in parts]
    return min(found, default=None)


@contextmanager
def quiet() -> Iterator[None]:
    """Torch tells much on the way to an error, a whole graph among it, and warns of itself; whoever wants
    to see it all asks for the traceback."""
    if wants_traceback():
        yield
        return
    level = logging.getLogger("torch").level
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("torch").setLevel(logging.ERROR)
        try:
            yield
        finally:
            logging.getLogger("torch").setLevel(level)


def varying_dims(program: ExportedProgram) -> list[list[bool]]:
    """Of each output which dims follow the number of samples."""
    node = next(iter(program.graph.find_nodes(op="output")))
    values = [part.meta["val"] for part in node.args[0]]
    return [[not isinstance(size, int) for size in value.shape] for value in values]


def explain(error: Exception, module: nn.Module, batch: int | None) -> RunError:
    """One sentence: what the model does, where, and what would help."""
    text = str(error)
    where = _where(error, text, module)
    if batch is not None and _is_about_batch(error, text):
        return RunError(
            f"the model is made for batches of one size{where}, so a package for any number of samples "
            f"cannot be had; use --batch {batch}, or write x.shape[0] for it in the code, without int()"
        )
    if _is_about_values(error, text):
        return RunError(
            f"the model cannot be exported: it decides by the values of a tensor{where}; {_VALUES}"
        )
    if "no fake impl" in text or type(error).__name__ == "UnsupportedOperatorException":
        return RunError(
            f"the model cannot be exported: an operator of its own has no rule for shapes{where} "
            f"({_short(text)}); register one with torch.library.register_fake"
        )
    return RunError(
        f"the model cannot be exported: {type(error).__name__}{where}: {_short(text)}; torch.export sees "
        "shapes and no values, so keep to torch's operators there (RIDGELINE_TRACEBACK=1 shows all)"
    )


def _is_about_batch(error: Exception, text: str) -> bool:
    kind = getattr(getattr(error, "error_type", None), "name", "")
    return kind == "CONSTRAINT_VIOLATION" or "Constraints violated" in text


def _is_about_values(error: Exception, text: str) -> bool:
    words = ("data-dependent", "data dependent", "DataDependent", "aten._local_scalar_dense")
    numpy = ".numpy() is not supported for tensor subclasses" in text
    return numpy or any(word in text or word in type(error).__name__ for word in words)


def _short(text: str) -> str:
    first = re.sub(r"\s+", " ", text.strip()).split(" For more information")[0]
    return first if len(first) <= _MOST else first[:_MOST] + " ..."


def _where(error: Exception, text: str, module: nn.Module) -> str:
    """Module and FILE:LINE; of frames that are not ours and not torch's the last, the user's before those
    of installed packages."""
    frames = [frame for frame in _frames(error.__traceback__) if _is_theirs(frame[0])]
    own = [frame for frame in frames if "site-packages" not in Path(frame[0]).parts]
    if own or frames:
        file, line, held = (own or frames)[-1]
        return f" ({_owner(held, module)}{_shown(file)}:{line})"
    # Limits on shapes are put together after the run; torch then writes down where they came from.
    for file, line in reversed(re.findall(r'File "([^"]+)", line (\d+)', text)):
        if _is_theirs(file):
            return f" ({_shown(file)}:{line})"
    return ""


def _frames(trace: TracebackType | None) -> list[tuple[str, int, Any]]:
    return [
        (frame.f_code.co_filename, line, frame.f_locals.get("self"))
        for frame, line in traceback.walk_tb(trace)
    ]


def _is_theirs(file: str) -> bool:
    path = Path(file)
    if file.startswith("<") or _TORCH in path.parents:
        return False
    if _OWN in path.parents and _OWN / "models" not in path.parents:
        return False
    # Python's own library has a part in some tracebacks.
    return Path(traceback.__file__).parent not in (path.parent, path.parent.parent) or (
        "site-packages" in path.parts
    )


def _owner(held: Any, module: nn.Module) -> str:
    for name, part in module.named_modules():
        if part is held and name not in ("", "model"):
            return f"{name.removeprefix('model.')}, "
    return ""


def _shown(file: str) -> str:
    """Short: from the working directory, or from where packages are installed."""
    for root in sys.path:
        if root.endswith("site-packages") and file.startswith(root + os.sep):
            return os.path.relpath(file, root)
    near = os.path.relpath(file)
    return file if near.startswith("..") else near
