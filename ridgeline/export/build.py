"""From a graph to a package on disk, by AOTInductor, and back into this process.

The names, types and shapes of inputs and outputs travel inside the package, so a C++ program needs no
other file to know what to feed. Called by `package.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ridgeline.errors import RunError, UsageError
from ridgeline.export.described import Described
from ridgeline.export.trace import quiet

FORMAT = "1"
Loaded = Callable[..., Any]


def require_compiler() -> None:
    """AOTInductor writes C++ for every device; without a compiler it would say so after a minute."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise UsageError(
            "no C++ compiler (g++ or clang++) on the PATH here, which a package is made with; load a "
            "module that has one (e.g. `module load gcc`), or install g++"
        )


def compile_package(program: ExportedProgram, path: Path, described: Described) -> None:
    """Compile and write `path`, which ends in .pt2."""
    settings = {
        # The number of threads is that of the program that calls, not of the machine that compiled.
        "cpp.dynamic_threads": True,
        "aot_inductor.metadata": {
            "ridgeline.format": FORMAT,
            "ridgeline.inputs": described.lines(described.inputs),
            "ridgeline.outputs": described.lines(described.outputs),
            "ridgeline.device": described.device,
        },
    }
    try:
        with torch.no_grad(), quiet():
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=settings
            )
    except OSError as error:
        raise RunError(f"{path} could not be written ({error.strerror or error})") from error
    except Exception as error:  # a compiler's own, of many kinds
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        raise RunError(
            f"torch could not compile the model: {type(error).__name__}: {first.strip():.200}; the model "
            "itself is fine, so try another --device or --dtype (RIDGELINE_TRACEBACK=1 shows all)"
        ) from error


def load_package(path: Path) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """The package in this process, as a function of a row of tensors."""
    loaded: Loaded = torch._inductor.aoti_load_package(str(path))

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            outputs = loaded(*tensors)
        return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]

    return call
