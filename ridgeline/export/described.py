"""What a package takes and gives: names, types, shapes, and which dims follow the number of samples.

The text form is one line a tensor, `image uint8 *,1,28,28`, where * is the number of samples; the package
holds it, and the C++ header reads it. Made by `package.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import UsageError

DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.bool: "bool",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}
"""Types that the C++ header knows, by the names it has for them."""


@dataclass(frozen=True)
class Port:
    """One input or output."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    """None where the dim is, or follows, the number of samples."""

    def shown(self) -> str:
        """
        >>> Port("x", "uint8", (None, 1, 8)).shown()
        'x uint8 [batch, 1, 8]'
        """
        sizes = ", ".join("batch" if size is None else str(size) for size in self.shape)
        return f"{self.name} {self.dtype} [{sizes}]"

    def plain(self) -> dict[str, Any]:
        """For model.json."""
        varies = [dim for dim, size in enumerate(self.shape) if size is None]
        shape = ["batch" if size is None else size for size in self.shape]
        return {"name": self.name, "dtype": self.dtype, "shape": shape, "varying_dims": varies}


@dataclass(frozen=True)
class Described:
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    device: str

    @property
    def varies(self) -> bool:
        return any(None in each.shape for each in self.inputs)

    @staticmethod
    def lines(ports: Sequence[Port]) -> str:
        """
        >>> Described.lines([Port("x", "uint8", (None, 1, 8)), Port("t", "float32", ())])
        'x uint8 *,1,8\\nt float32 -'
        """
        return "\n".join(f"{p.name} {p.dtype} {_sizes(p.shape)}" for p in ports)


def port(name: str, value: Tensor, varies: Sequence[bool]) -> Port:
    """A name has no white space in it: the text form is split there."""
    if value.dtype not in DTYPES:
        raise UsageError(
            f"{name} is of type {value.dtype}, which C++ programs have no word for; let the model take "
            "and return float32"
        )
    sizes = tuple(None if v else size for size, v in zip(value.shape, varies, strict=True))
    return Port(re.sub(r"\s+", "_", name) or "_", DTYPES[value.dtype], sizes)


def _sizes(shape: Sequence[int | None]) -> str:
    return ",".join("*" if size is None else str(size) for size in shape) or "-"
