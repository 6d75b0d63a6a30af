"""The C++ side of a package: its sources, built here and run on the sample where there is something to
build them with.

That the package gives the right numbers in Python says nothing of a linker, a compiler or a header; so
the program that comes with it is tried before anybody has to. Called by `package.py`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.errors import RunError
from ridgeline.export.check import Measured

SOURCES = Path(__file__).parent / "cpp"
FILES = ("ridgeline_model.h", "main.cpp", "CMakeLists.txt")
_LIMIT_S = 1800.0
_OUTPUT = re.compile(r"^(\S+): largest difference (\S+), bound (\S+?)(?:: DIFFERS)?$", re.MULTILINE)
_TIME = re.compile(r"^(\S+) ms a call of", re.MULTILINE)


@dataclass(frozen=True)
class Native:
    """What the C++ program found, or why it was not asked."""

    measured: tuple[Measured, ...] = ()
    call_ms: float | None = None
    not_checked: str = ""


def copy_sources(folder: Path) -> None:
    for name in FILES:
        shutil.copyfile(SOURCES / name, folder / name)


def try_native(folder: Path, build: Path) -> Native:
    """Build the program of `folder` in `build` and run it on the sample."""
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            return Native(not_checked=f"no {tool} on this machine: the C++ program was not built")
    torch_dir = Path(torch.__file__).parent
    configure = ["cmake", "-S", str(folder), "-B", str(build), f"-DTORCH_DIR={torch_dir}"]
    for command in (configure, ["cmake", "--build", str(build)]):
        done = _run(command)
        if done.returncode:
            raise RunError(
                f"the C++ program could not be built: `{' '.join(command[:2])}` says: {_complaint(done)}; "
                "--no-check leaves it out"
            )
    done = _run([str(build / "check"), str(folder)])
    measured = tuple(Measured(n, float(a), float(b)) for n, a, b in _OUTPUT.findall(done.stdout))
    if done.returncode == 1 and measured:
        worst = max(measured, key=lambda m: m.difference - m.bound)
        raise RunError(
            f"output {worst.name} of the C++ program differs from the model's by up to "
            f"{worst.difference:.3g}, where rounding allows {worst.bound:.3g}; nothing was written. "
            "Please report this"
        )
    if done.returncode:
        raise RunError(
            f"the C++ program ended with {done.returncode}: {_complaint(done)}; nothing was written"
        )
    times = _TIME.findall(done.stdout)
    return Native(measured, float(times[0]) if times else None)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise RunError(
            f"`{' '.join(command[:2])}` took more than {_LIMIT_S / 60:.0f} minutes; --no-check leaves the "
            "C++ program out"
        ) from error
    except OSError as error:
        raise RunError(f"`{command[0]}` could not be started ({error.strerror})") from error


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The first line that says what is wrong, of a tool that says much."""
    lines = [
        line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()
    ]
    told = [line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)]
    return (told or lines or ["nothing"])[0][:300]
