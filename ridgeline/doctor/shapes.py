"""The products and convolutions of one model: a step's shapes, which are odd, and what padding wins.

The shapes are watched on the meta device, where a step costs nothing; then each is timed as it is and
with its odd dimensions filled up to the next multiple. Called by `ridgeline machine compute --model`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.config import RunConfig
from ridgeline.data.build import build_sources
from ridgeline.doctor.convolutions import Convolution, read_convolution
from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.machine.compute import DTYPES, Shape, Work, _build, _enough, _mode, time_many
from ridgeline.machine.picture import amount
from ridgeline.models.build import build_model
from ridgeline.models.inputs import change_each
from ridgeline.train.checks import count_parts
from ridgeline.train.objective import Objective
from ridgeline.train.tasks import build_task

MULTIPLES = {"fp8": 16, "bf16": 8, "fp16": 8, "tf32": 4, "fp32": 4, "fp64": 2}
"""Elements in 16 bytes: what a tensor core's operands have to be aligned to."""
TILE = 128
"""Tensor-core kernels work in tiles of about this size; a dimension just above a multiple wastes one."""
HEADS = (64, 128)
"""Head sizes that every fused attention has a kernel for."""
_LARGE = 4 * TILE
CONV_BACKWARD = "convolution backward"
_GAIN = 0.02


@dataclass(frozen=True)
class Used:
    """One shape of a step, and how often it comes."""

    kind: str
    dims: tuple[int, ...]
    """(m, n, k), (batch, m, n, k), or of a convolution (samples, channels, maps, filters, kernel)."""
    count: int
    """In one forward and backward pass of a microbatch."""
    where: tuple[str, ...] = ()
    """Parameters of the shape (n, k) or (k, n): whose product this is."""
    conv: Convolution | None = None

    @property
    def flops(self) -> float:
        once = self.conv.flops if self.conv is not None else Shape(self.kind, self.dims).flops
        return once * self.count


@dataclass(frozen=True)
class Cliff:
    """One dimension that does not suit the device."""

    dim: str
    """m, n or k; channels or filters of a convolution."""
    size: int
    padded: int
    reason: str


@dataclass(frozen=True)
class Swept:
    """One shape as it was measured, padded and not."""

    used: Used
    seconds: float
    flops_per_s: float
    cliffs: tuple[Cliff, ...] = ()
    padded_dims: tuple[int, ...] = ()
    padded_s: float | None = None

    @property
    def gain(self) -> float:
        """How much of this product's time padding saves; below 0 it costs."""
        return 1 - self.padded_s / self.seconds if self.padded_s and self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gain": self.gain}


class _Products(TorchDispatchMode):
    """Notes the sizes of every matrix product and convolution that goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, tuple[int, ...], Convolution | None], int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        found = product_of(name, [getattr(a, "shape", None) for a in args])
        conv = read_convolution(name, args, result)
        if conv is not None:
            found = ("convolution" if conv.mask is None else CONV_BACKWARD, conv.dims)
        if found is not None:
            key = (*found, conv)
            self.found[key] = self.found.get(key, 0) + 1
        return result


def product_of(op: str, shapes: Sequence[Any]) -> tuple[str, tuple[int, ...]] | None:
    """The kind and sizes of an op that is a matrix product, by its name and its operands' shapes."""
    two = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2)}
    if op not in two or len(shapes) <= two[op][1]:
        return None
    a, b = (shapes[i] for i in two[op])
    if a is None or b is None:
        return None
    if len(a) == 2 and len(b) == 2:
        return "matrix", (int(a[0]), int(b[1]), int(a[1]))
    if len(a) == 3 and len(b) == 3:
        return "batched", (int(a[0]), int(a[1]), int(b[2]), int(a[2]))
    return None


def collect_shapes(config: RunConfig) -> list[Used]:
    """The products of a rank's microbatch, forward and backward, the largest share of FLOPs first."""
    layout = Layout.parse(config.layout, "layout")
    sources = build_sources(config.data.source, config.data.args, config.train.seed)
    info = sources[0].info
    task = build_task(config.train.task, info.task)
    batch = max(1, config.train.batch // max(1, layout.dp * count_parts(layout)))
    try:
        with torch.device("meta"):
            model = build_model(config.model.name, **config.model.args)
            inputs = info.zeros(batch)
            targets = torch.zeros((batch, *info.target_shape), dtype=info.target_dtype)
        dtype = next(model.parameters()).dtype
        inputs = change_each(inputs, lambda x: x.to(dtype) if x.is_floating_point() else x)
        return watch_shapes(model, lambda: Objective(model, task.loss)(inputs, targets))
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        raise UsageError(
            f"--model {config.model.name}: it cannot run on the meta device, where its shapes are "
            f"watched ({str(error).splitlines()[0]}); `ridgeline doctor` watches the real step"
        ) from error


def watch_shapes(model: nn.Module, loss: Callable[[], torch.Tensor]) -> list[Used]:
    with _Products() as products, torch.enable_grad():
        loss().backward()
    names = names_by_shape(model.named_parameters())
    used = [
        Used(
            kind,
            dims,
            count,
            parameters_of(dims, names) if conv is None else names.get(conv.weight, ()),
            conv,
        )
        for (kind, dims, conv), count in products.found.items()
    ]
    return sorted(used, key=lambda u: -u.flops)


def names_by_shape(parameters: Iterable[tuple[str, Any]]) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Names of matrices, with the numbers of repeated blocks left out, by shape."""
    found: dict[tuple[int, ...], dict[str, None]] = {}
    for name, parameter in parameters:
        if parameter.dim() >= 2:
            words = ["*" if word.isdecimal() else word for word in name.split(".")]
            found.setdefault(tuple(parameter.shape), {})[".".join(words)] = None
    return {shape: tuple(names) for shape, names in found.items()}


def parameters_of(
    dims: Sequence[int], names: Mapping[tuple[int, ...], tuple[str, ...]]
) -> tuple[str, ...]:
    """Whose product it is: a weight is two of the three dimensions, in either order."""
    if len(dims) != 3:
        return ()
    m, n, k = dims
    found: dict[str, None] = {}
    for pair in ((n, k), (m, n), (m, k)):
        for shape in (pair, pair[::-1]):
            found.update(dict.fromkeys(names.get(shape, ())))
    return tuple(found)


def find_cliffs(used: Used, precision: str, vocabulary: int | None = None) -> tuple[Cliff, ...]:
    """Dimensions that are no multiple of what the device wants, and what to make of them."""
    if used.conv is not None:
        precision = _of_convolutions(precision)
    need = MULTIPLES[precision]
    found = []
    if used.conv is not None:
        if used.conv.groups > 1:  # the channels of a group are the model's own business
            return ()
        sizes = (used.conv.inputs[1], used.conv.outputs[1])
        return tuple(
            Cliff(
                name,
                size,
                _up(size, need),
                f"{size} {name}: no multiple of {need}, as {precision} wants",
            )
            for name, size in zip(("channels", "filters"), sizes, strict=True)
            if size % need
        )
    names = ("m", "n", "k")
    for name, size in zip(names, used.dims[-3:], strict=True):
        what = "vocabulary " if size == vocabulary else ""
        if size % need:
            padded = _up(size, TILE if size > _LARGE else need)
            reason = f"{what}{size} is no multiple of {need}, which {precision} products need"
            found.append(Cliff(name, size, padded, reason))
        elif size > TILE and size % 64:
            padded = _up(size, TILE if size > _LARGE else 64)
            reason = f"{what}{size} is no multiple of 64: the last tile of {TILE} is half empty"
            found.append(Cliff(name, size, padded, reason))
        elif used.kind == "batched" and name == "k" and size < max(HEADS) and size not in HEADS:
            near = next(head for head in HEADS if head >= size)
            found.append(Cliff(name, size, near, f"head size {size}: kernels are made for {HEADS}"))
    return tuple(found)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def sweep_model(
    used: Sequence[Used],
    device: torch.device,
    precision: str,
    vocabulary: int | None = None,
    most: int = 24,
    repeats: int = 7,
    longest_s: float = 1.0,
) -> list[Swept]:
    """Time the largest products, and all that are odd, as they are and padded, turn by turn; those that
    take longest first. What takes longer than `longest_s`, or does not fit, is not among them."""
    rows: list[tuple[Swept, Work, Work | None]] = []
    for number, one in enumerate(used):
        cliffs = find_cliffs(one, precision, vocabulary)
        if number >= most and not cliffs:
            continue
        larger = _fill(one, {cliff.dim: cliff.padded for cliff in cliffs})
        try:
            work = _build_used(one, precision, device)
            other = _build_used(larger, precision, device) if cliffs else None
            if work is None:
                continue
            with _mode(precision, device):
                if time_many(work, 1, device) > longest_s:
                    continue
                if other is not None:
                    time_many(other, 1, device)
        except torch.OutOfMemoryError:
            continue
        rows.append((Swept(one, 0.0, 0.0, cliffs, larger.dims if cliffs else ()), work, other))
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in rows]
    with _mode(precision, device):
        counts = [_enough(work, device) for _, work, _ in rows]
        for _ in range(repeats):
            for (_, work, other), count, (plain, filled) in zip(rows, counts, times, strict=True):
                plain.append(time_many(work, count, device))
                if other is not None:
                    filled.append(time_many(other, count, device))
    swept = []
    for (row, _, _), (plain, filled) in zip(rows, times, strict=True):
        seconds = statistics.median(plain)
        rate = row.used.flops / row.used.count / seconds
        after = statistics.median(filled) if filled else None
        swept.append(replace(row, seconds=seconds, flops_per_s=rate, padded_s=after))
    return sorted(swept, key=lambda s: -s.seconds * s.used.count)


def _fill(used: Used, wanted: Mapping[str, int]) -> Used:
    """The same with these dimensions filled up."""
    if used.conv is not None:
        channels, filters = used.conv.inputs[1], used.conv.outputs[1]
        if not wanted:
            return used
        conv = used.conv.with_channels(
            wanted.get("channels", channels), wanted.get("filters", filters)
        )
        return replace(used, conv=conv, dims=conv.dims)
    names = ("b", "m", "n", "k")[-len(used.dims) :]
    dims = tuple(wanted.get(n, d) for n, d in zip(names, used.dims, strict=True))
    return replace(used, dims=dims)


def _build_used(used: Used, precision: str, device: torch.device) -> Work | None:
    if used.conv is None:
        return _build(Shape(used.kind, used.dims), precision, device)[0]
    return used.conv.build(DTYPES[_of_convolutions(precision)], device)


def _of_convolutions(precision: str) -> str:
    """There are none in fp8: beside such products they stay in bf16."""
    return "bf16" if precision == "fp8" else precision


def describe_swept(
    rows: Sequence[Swept],
    peak: float | None,
    left_out: Sequence[tuple[Used, Sequence[Cliff]]] = (),
) -> list[str]:
    """A line a shape, then what padding would win in all. `left_out` are shapes that were not timed."""
    total = sum(row.seconds * row.used.count for row in rows) or 1.0
    lines, saved = [], 0.0
    for row in rows:
        share = row.seconds * row.used.count / total
        of = f", {row.flops_per_s / peak:.0%} of the best" if peak else ""
        lines.append(
            f"{_name(row.used):<32} {share:6.1%} of product time  {amount(row.flops_per_s, 'FLOP/s')}{of}"
            f"  {', '.join(row.used.where[:2])}"
        )
        lines += [f"    cliff: {cliff.reason}" for cliff in row.cliffs]
        if row.padded_s is not None:
            to = "x".join(map(str, row.padded_dims))
            change = f"{abs(row.gain):.0%} of it"
            word = f"wins {change}" if row.gain > _GAIN else "wins nothing"
            if row.gain < -_GAIN:
                word = f"costs {change}"
            lines.append(f"    padded to {to}: {word}, measured")
            saved += max(row.gain, 0.0) * row.seconds * row.used.count
    for one, cliffs in left_out:
        if cliffs:
            lines.append(f"{_name(one)}: not timed")
            lines += [f"    cliff: {cliff.reason}" for cliff in cliffs]
    if left_out:
        lines.append(
            f"{len(left_out)} of {len(rows) + len(left_out)} shapes were not timed: the smallest, and what "
            "takes too long on this device or does not fit"
        )
    if any(row.cliffs for row in rows):
        lines.append(f"padding where it wins would save {saved / total:.1%} of the product time")
    elif not any(cliffs for _, cliffs in left_out):
        lines.append("no dimension of this model is odd for the device")
    return lines


def _name(used: Used) -> str:
    kind = f"{used.kind} " if used.conv is not None else ""
    return f"{kind}{'x'.join(map(str, used.dims))} ({used.count} times)"
