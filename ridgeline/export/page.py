"""The README of an exported folder: what the package takes and gives, how to build, how to call.

For whoever gets the folder without the run, and perhaps without Python. Called by `package.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.export.check import Bound
from ridgeline.export.described import Described, Port

_TEXT = """# A model for C++

Written by `ridgeline export`. `model.pt2` is the model with its weights, compiled for {device}{machine};
`model.json` says what it was made of and how it was checked.

| input | type | shape |
|---|---|---|
{inputs}

| output | type | shape | rounding allows |
|---|---|---|---|
{outputs}

{batch}

## Build and check

    cmake -S . -B build -DTORCH_DIR="$(python3 -c 'import torch; print(torch.__path__[0])')"
    cmake --build build
    build/check .

It needs the torch that the package was made with (its version is in `model.json`), or a libtorch of
that version. `check` runs the sample in `check/` and compares with what the model gave: exit code 1 if
they differ.

## Call

```cpp
#include "ridgeline_model.h"

ridgeline::Model model("model.pt2");
auto outputs = model.call({{{pointers}}}, samples);   // memory of your own, read where it is
{answer}
```

{memory}`call_into` copies the answers to memory of yours, `run` takes tensors. In CMake:
`add_subdirectory(THIS_FOLDER model)` and `target_link_libraries(simulation PRIVATE ridgeline_model)`.
"""


def read_me(described: Described, bounds: Mapping[str, Bound]) -> str:
    cpu = described.device == "cpu"
    most = [f"{bound.most:.2g}" for bound in bounds.values()]
    answer = described.outputs[0]
    kind = _CPP.get(answer.dtype)
    return _TEXT.format(
        device="CPUs" if cpu else "GPUs",
        machine=" like that of the machine it was made on",
        inputs="\n".join(f"| {_row(p)} |" for p in described.inputs),
        outputs="\n".join(
            f"| {_row(p)} | {bound} |" for p, bound in zip(described.outputs, most, strict=True)
        ),
        batch="`batch` is the number of samples, any from 1 on."
        if described.varies
        else "The number of samples is fixed.",
        memory=""
        if cpu
        else "Pointers lead to memory of the GPU; with `ridgeline::Memory::host` as the last argument to\n"
        "that of the host, which is copied. `Model(path, N)` is for GPU N of those the process sees.\n",
        pointers=", ".join(f"{_word(p.name)}" for p in described.inputs),
        answer=f"const {kind}* answer = outputs[0].const_data_ptr<{kind}>();   // {answer.name}"
        if kind is not None
        else f"const void* answer = outputs[0].const_data_ptr();   // {answer.name}",
    )


_CPP = {
    "float64": "double",
    "float32": "float",
    "int64": "int64_t",
    "int32": "int32_t",
    "int16": "int16_t",
    "int8": "int8_t",
    "uint8": "uint8_t",
    "bool": "bool",
}


def _row(port: Port) -> str:
    sizes = ", ".join("batch" if size is None else str(size) for size in port.shape)
    return f"`{port.name}` | {port.dtype} | [{sizes}]"


def _word(name: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name)
