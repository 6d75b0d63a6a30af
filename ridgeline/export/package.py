"""Any module as a folder that a C++ program uses: traced, compiled, checked, and there only when all is
well.

The order is the contract: what can be refused without a compiler is refused first, everything is written
beside the place it goes to, and only a package that gave what the model gives is renamed to it. `run.py`
calls this with the model of a run; a script can call `export_model` with one of its own.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.checkpoint.files import as_bytes
from ridgeline.errors import RunError, UsageError
from ridgeline.export.build import compile_package, load_package, require_compiler
from ridgeline.export.check import (
    Bound,
    Measured,
    compare,
    exact_outputs,
    find_bounds,
    require_repeatable,
)
from ridgeline.export.deployed import Deployed, Prepare, input_names
from ridgeline.export.described import Described, port
from ridgeline.export.native import Native, copy_sources, try_native
from ridgeline.export.page import read_me
from ridgeline.export.trace import trace, varying_dims
from ridgeline.models.inputs import Inputs, tensors_of

MODEL, ABOUT, CHECK = "model.pt2", "model.json", "check"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """What was made, and what is known of it."""

    out: Path
    described: Described
    bounds: dict[str, Bound]
    measured: tuple[Measured, ...] = ()
    """In Python; empty where nothing was checked."""
    counts: tuple[int, ...] = ()
    """Batch sizes that were compared."""
    native: Native = field(default_factory=Native)
    compile_s: float = 0.0
    num_bytes: int = 0


def export_model(
    model: nn.Module,
    inputs: Inputs,
    out: Path | str,
    *,
    varies: bool = True,
    check: bool = True,
    prepare: Prepare | None = None,
    about: Mapping[str, Any] | None = None,
    say: Say = lambda _: None,
) -> Exported:
    """Write `model`, in evaluation mode and for the device it is on, to the new folder `out`.

    `inputs` are a batch as the model is called with it: a tensor, a tuple, or a dictionary by argument.
    With `varies` the package takes any number of samples, the first dim of whatever has as many as the
    first input. `prepare` is what is done to inputs before the model, inside the package.
    """
    out = Path(out)
    check_target(out)
    require_compiler()
    deployed, tensors = _deploy(model, inputs, prepare)
    with torch.no_grad():
        outputs, left_out = deployed.look(*tensors)
    for text in left_out:
        say(f"not exported: {text} is no tensor")
    dtype = _floating_type(model)
    if check:
        require_repeatable(deployed, tensors, outputs, find_bounds(outputs, None, dtype))
    bounds = find_bounds(outputs, exact_outputs(deployed, tensors), dtype)
    count = len(tensors[0]) if tensors[0].dim() else 1
    varying = [varies and t.dim() > 0 and len(t) == count for t in tensors]
    program, most = trace(deployed, tensors, varying)
    described = _describe(model, inputs, tensors, varying, outputs, varying_dims(program))
    say("takes " + "; ".join(p.shown() for p in described.inputs))
    say("gives " + "; ".join(p.shown() for p in described.outputs))
    if most is not None:
        say(f"for at most {most:,} samples in a call: its kernels count no further")
    aside = out.with_name(f".{out.name}.part")
    shutil.rmtree(aside, ignore_errors=True)  # of one that was killed
    try:
        _make_folder(aside, out)
        say(f"compiling for {described.device}, which takes a minute or more")
        began = time.perf_counter()
        compile_package(program, aside / MODEL, described)
        took = time.perf_counter() - began
        say(f"compiled in {took:.1f} s")
        _write_check(aside / CHECK, described, tensors, outputs, bounds)
        copy_sources(aside)
        done = Exported(
            out, described, bounds, compile_s=took, num_bytes=(aside / MODEL).stat().st_size
        )
        if check:
            done = _check(done, deployed, tensors, varying, aside, say)
        text = json.dumps({**_about(done, dtype), **(about or {})}, indent=2) + "\n"
        (aside / ABOUT).write_text(text, encoding="utf-8")
        (aside / "README.md").write_text(read_me(described, bounds), encoding="utf-8")
        aside.rename(out)
    except OSError as error:
        raise RunError(f"{out} could not be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return done


def check_target(out: Path) -> None:
    """Before anything is built: nothing is ever written over."""
    if out.exists():
        raise UsageError(f"{out} exists already; choose another OUT, or remove it")


def _make_folder(aside: Path, out: Path) -> None:
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"OUT={out} cannot be made ({error.strerror}); give a folder in a place that you may write to"
        ) from error


def _deploy(
    model: nn.Module, inputs: Inputs, prepare: Prepare | None
) -> tuple[Deployed, list[Tensor]]:
    """The module as it is exported, and a batch of contiguous tensors on its device."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    tensors = [t.detach().to(device).contiguous() for t in tensors_of(inputs)]
    model.eval()
    # Without `prepare` the model is called with exactly what is given, and gives back exactly what it does.
    deployed = Deployed(model, prepare or (lambda x: x), inputs, widen=prepare is not None)
    return deployed.eval().requires_grad_(False), tensors


def _floating_type(model: nn.Module) -> torch.dtype:
    """The narrowest that weights are kept in."""
    found = [p.dtype for p in model.parameters() if p.dtype.is_floating_point]
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _describe(
    model: nn.Module,
    inputs: Inputs,
    tensors: Sequence[Tensor],
    varying: Sequence[bool],
    outputs: Mapping[str, Tensor],
    output_dims: Sequence[Sequence[bool]],
) -> Described:
    takes = tuple(
        port(name, value, [varies and dim == 0 for dim in range(value.dim())])
        for name, value, varies in zip(input_names(model, inputs), tensors, varying, strict=True)
    )
    gives = tuple(
        port(name, value, dims)
        for (name, value), dims in zip(outputs.items(), output_dims, strict=True)
    )
    return Described(takes, gives, tensors[0].device.type)


def _write_check(
    folder: Path,
    described: Described,
    tensors: Sequence[Tensor],
    outputs: Mapping[str, Tensor],
    bounds: Mapping[str, Bound],
) -> None:
    """The sample and what the model made of it, as plain bytes in the order of memory."""
    folder.mkdir()
    lines = []
    for place, (about, value) in enumerate(zip(described.inputs, tensors, strict=True)):
        lines.append(f"input {about.name} {about.dtype} {_shape(value)}")
        (folder / f"input-{place}.bin").write_bytes(_bytes(value))
    for place, (about, name) in enumerate(zip(described.outputs, outputs, strict=True)):
        value = outputs[name]
        lines.append(f"output {about.name} {about.dtype} {_shape(value)} {bounds[name].most!r}")
        (folder / f"output-{place}.bin").write_bytes(_bytes(value))
    (folder / "check.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _bytes(value: Tensor) -> memoryview:
    return as_bytes(torch.view_as_real(value).cpu() if value.is_complex() else value.cpu())


def _shape(value: Tensor) -> str:
    return ",".join(map(str, value.shape)) or "-"


def _check(
    done: Exported,
    deployed: Deployed,
    tensors: Sequence[Tensor],
    varying: Sequence[bool],
    folder: Path,
    say: Say,
) -> Exported:
    """In Python at several batch sizes, then in C++."""
    count = len(tensors[0]) if tensors[0].dim() else 1
    counts = sorted({1, 2, count}) if any(varying) else [count]
    batches = [
        [t[:size].contiguous() if v else t for t, v in zip(tensors, varying, strict=True)]
        for size in counts
    ]
    package = load_package(folder / MODEL)
    measured = compare(deployed, package, batches, counts, done.bounds)
    sizes = ", ".join(map(str, counts))
    for one in measured:
        say(
            f"{one.name}: the package differs from the model by at most {one.difference:.2g} "
            f"(rounding allows {one.bound:.2g}; batches of {sizes})"
        )
    with tempfile.TemporaryDirectory(prefix="ridgeline-export-") as build:
        native = try_native(folder, Path(build))
    for one in native.measured:
        say(f"{one.name}: the C++ program differs from the model by at most {one.difference:.2g}")
    if native.call_ms is not None:
        say(f"the C++ program takes {native.call_ms:.3g} ms a call of {count} samples")
    if native.not_checked:
        say(native.not_checked)
    return Exported(
        done.out,
        done.described,
        done.bounds,
        tuple(measured),
        tuple(counts),
        native,
        done.compile_s,
        done.num_bytes,
    )


def _about(done: Exported, dtype: torch.dtype) -> dict[str, Any]:
    """model.json, but for what only a run knows."""
    native = done.native
    cpp: dict[str, Any] = {m.name: m.difference for m in native.measured}
    return {
        "format": 1,
        "inputs": [p.plain() for p in done.described.inputs],
        "outputs": [p.plain() for p in done.described.outputs],
        "device": done.described.device,
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "check": {
            "batches": list(done.counts),
            "bounds": {name: bound.plain() for name, bound in done.bounds.items()},
            "python": {m.name: m.difference for m in done.measured},
            "cpp": cpp,
            "cpp_call_ms": native.call_ms,
            "not_checked": _not_checked(done),
        },
    }


def _not_checked(done: Exported) -> list[str]:
    if not done.measured:
        return ["nothing was compared (--no-check)"]
    return [native] if (native := done.native.not_checked) else []
