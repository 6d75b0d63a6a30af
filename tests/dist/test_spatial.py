"""Spatial parallelism: whatever a model does with tiles is what it does with the whole image."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import ridgeline
from ridgeline.models import build_model
from ridgeline.parallel.batchnorm import apply_sync_batch_norm
from ridgeline.parallel.share import Share
from ridgeline.parallel.spatial.apply import apply_spatial
from ridgeline.parallel.spatial.grid import TileGrid, cut_evenly
from ridgeline.parallel.spatial.map import tile_map_svg
from ridgeline.parallel.spatial.tensor import TileTensor, gather
from ridgeline.train.objective import Objective
from ridgeline.train.tasks import TASKS

GRIDS = [(2, 1), (1, 2), (2, 2), (4, 1)]
TOLERANCE = 1e-10


@functools.cache
def make_groups(height: int, width: int, first: int = 0) -> tuple[Any, Any]:
    """The row and the column group of this rank; every rank makes all of them, in one order."""
    rank = dist.get_rank()
    rows = columns = None
    for start in range(0, dist.get_world_size(), height * width):
        for column in range(width):
            members = [start + row * width + column for row in range(height)]
            group = dist.new_group(members)
            rows = group if rank in members else rows
        for row in range(height):
            members = [start + row * width + column for column in range(width)]
            group = dist.new_group(members)
            columns = group if rank in members else columns
    return rows, columns


def make_grid(shape: tuple[int, int], overlap: bool = True) -> TileGrid:
    height, width = shape
    if shape == (1, 1):
        return TileGrid()
    rows, columns = make_groups(height, width)
    rank = dist.get_rank() % (height * width)
    return TileGrid(
        rows=rows if height > 1 else None,
        columns=columns if width > 1 else None,
        row_rank=rank // width,
        row_size=height,
        column_rank=rank % width,
        column_size=width,
        overlap=overlap,
    )


def average(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())


def weigh(outputs: Any) -> Tensor:
    """One number to which every element of every output adds differently."""
    total = torch.zeros((), dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    for out in tree_leaves(outputs):
        if isinstance(out, Tensor) and out.is_floating_point():
            weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
            total = total + (out * weights).sum()
    return total


def gap(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    if not found.is_floating_point():
        return float((found != wanted).any())
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3))


def compare(module: nn.Module, inputs: list[Tensor], grid: TileGrid) -> dict[str, float]:
    """How far tiles are from the whole: outputs, gradients of inputs and parameters, buffers."""
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]

    def run(model: nn.Module, place: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        torch.manual_seed(9)
        given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        outputs = model(*given)
        tiles = [out for out in tree_leaves(outputs) if isinstance(out, Tensor)]
        whole = [place(out) for out in tiles]
        loss = weigh(whole)
        if loss.requires_grad:
            loss.backward()
        found = {f"output {i}": out.detach() for i, out in enumerate(whole)}
        found["loss"] = loss.detach()
        for i, x in enumerate(given):
            if x.grad is not None:
                found[f"input {i}"] = x.grad
        found |= {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        found |= {f"buffer {n}": b for n, b in model.named_buffers()}
        return found

    module = module.double()
    tiled = apply_spatial(copy.deepcopy(module), grid)
    wanted, found = run(module, lambda out: out), run(tiled, gather)
    assert wanted.keys() == found.keys()
    average([t for name, t in found.items() if name.startswith(("input", "grad"))])
    return {name: gap(found[name], wanted[name]) for name in wanted}


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any], *parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(parameters)

    def forward(self, *args: Any) -> Any:
        return self.function(*args, *self.weights)


Case = tuple[Callable[[], nn.Module], list[Any]]
CASES: dict[str, Case] = {}
SIZE = (2, 4, 13, 11)


def add(name: str, make: Callable[[], nn.Module], *shapes: Any) -> None:
    assert name not in CASES
    CASES[name] = (make, list(shapes or [SIZE]))


def add_function(name: str, function: Callable[..., Any], *shapes: Any) -> None:
    add(name, lambda: Call(function), *shapes)


# Convolution
for k, s, d, p in [
    (1, 1, 1, 0), (3, 1, 1, 1), (3, 2, 1, 1), (5, 1, 1, 2), (2, 1, 1, 0), (2, 2, 1, 0), (4, 2, 1, 1),
    (3, 1, 2, 2), (3, 2, 3, 1), (7, 2, 1, 3), (3, 3, 1, 0), (1, 2, 1, 0), (1, 1, 1, 1), (9, 1, 1, 4),
    (3, 1, 1, 5), (2, 5, 1, 1),
]:  # fmt: skip
    add(f"conv-k{k}s{s}d{d}p{p}", functools.partial(nn.Conv2d, 4, 6, k, s, p, d))
add("conv-groups", lambda: nn.Conv2d(4, 8, 3, padding=1, groups=2, bias=False))
add("conv-depthwise", lambda: nn.Conv2d(4, 4, (3, 5), padding=(1, 2), groups=4))
add("conv-uneven", lambda: nn.Conv2d(4, 3, (2, 5), (1, 2), (0, 3), (3, 1)))
for k in (3, 4):
    add(f"conv-same-{k}", functools.partial(nn.Conv2d, 4, 3, k, padding="same", dilation=2))
add("conv-valid", lambda: nn.Conv2d(4, 3, 3, padding="valid"))
for mode in ("reflect", "replicate", "circular"):
    add(f"conv-{mode}", functools.partial(nn.Conv2d, 4, 3, 5, 2, 2, padding_mode=mode))
add("conv-large", lambda: nn.Conv2d(4, 3, 3, padding=1), (1, 4, 40, 37))
add("conv-large-stride", lambda: nn.Conv2d(4, 3, 5, 2, padding=2), (1, 4, 45, 50))
add("conv-tiny", lambda: nn.Conv2d(4, 3, 3, padding=1), (2, 4, 4, 5))
add("conv-shrinks", lambda: nn.Conv2d(4, 3, 5), (2, 4, 7, 6))
add(
    "conv-grows",
    lambda: nn.Sequential(nn.Conv2d(4, 3, 5), nn.Conv2d(3, 2, 3, padding=4)),
    (2, 4, 7, 6),
)
add("conv3d", lambda: nn.Conv3d(2, 3, 3, padding=1), (1, 2, 9, 7, 5))
add(
    "conv3d-stride",
    lambda: nn.Conv3d(2, 3, (3, 2, 4), (2, 1, 2), (1, 0, 2), (1, 2, 1)),
    (1, 2, 9, 7, 6),
)
add("conv3d-same", lambda: nn.Conv3d(2, 3, 4, padding="same"), (1, 2, 9, 7, 6))
for k, s, p, o, d in [
    (2, 2, 0, 0, 1), (3, 1, 1, 0, 1), (3, 2, 1, 1, 1), (4, 2, 1, 0, 1), (3, 3, 0, 2, 1),
    (2, 4, 0, 3, 1), (3, 2, 2, 1, 2), (5, 1, 3, 0, 1),
]:  # fmt: skip
    add(
        f"transposed-k{k}s{s}p{p}o{o}d{d}",
        functools.partial(nn.ConvTranspose2d, 4, 6, k, s, p, o, 2, True, d),
    )
add("transposed-3d", lambda: nn.ConvTranspose3d(2, 4, 3, 2, 1, (1, 0, 1)), (1, 2, 5, 7, 3))
add(
    "transposed-grows",
    lambda: nn.Sequential(nn.MaxPool2d(4), nn.ConvTranspose2d(4, 3, 3, 3, bias=False)),
)

# Pooling
for k, s, p, d, ceil in [
    (2, None, 0, 1, False), (3, 2, 1, 1, False), (3, 2, 1, 1, True), (2, 2, 0, 1, True),
    (3, 1, 1, 1, False), (3, 2, 1, 2, True), (5, 3, 2, 1, False),
]:  # fmt: skip
    add(
        f"maxpool-k{k}s{s}p{p}d{d}{'c' * ceil}",
        functools.partial(nn.MaxPool2d, k, s, p, d, False, ceil),
    )
    if d == 1:
        for count in (True, False):
            add(
                f"avgpool-k{k}s{s}p{p}{'c' * ceil}-{count}",
                functools.partial(nn.AvgPool2d, k, s, p, ceil, count),
            )
add("avgpool-divisor", lambda: nn.AvgPool2d(3, 2, 1, divisor_override=5))
add("maxpool3d", lambda: nn.MaxPool3d(3, 2, 1), (1, 2, 9, 7, 5))
add("avgpool3d", lambda: nn.AvgPool3d(3, 2, 1, count_include_pad=False), (1, 2, 9, 7, 5))
add("maxpool-indices", lambda: nn.MaxPool2d(2, return_indices=True))
for size in (1, 2, 3, 6, (7, None), (13, 11), (20, 3)):
    add(f"adaptive-avg-{size}", functools.partial(nn.AdaptiveAvgPool2d, size))
    add(f"adaptive-max-{size}", functools.partial(nn.AdaptiveMaxPool2d, size))
add("adaptive-avg3d", lambda: nn.AdaptiveAvgPool3d((4, 2, 3)), (1, 2, 9, 7, 5))
add("adaptive-max3d", lambda: nn.AdaptiveMaxPool3d((4, 2, 3)), (1, 2, 9, 7, 5))
add_function("adaptive-max-ties", lambda x: F.adaptive_max_pool2d(F.relu(x), 3))

# Interpolation
for size in (None, (26, 22), (7, 19), (13, 30), (3, 2)):
    for mode, align in [("nearest", None), ("nearest-exact", None), ("bilinear", False), ("bilinear", True),
                        ("bicubic", False), ("bicubic", True), ("area", None)]:  # fmt: skip
        scale = 2 if size is None else None
        add(
            f"interpolate-{mode}-{align}-{size}",
            functools.partial(nn.Upsample, size, scale, mode, align),
        )
for scale in (1.7, 0.6, (2.5, 3)):
    add(
        f"interpolate-linear-{scale}",
        functools.partial(nn.Upsample, None, scale, "bilinear", False),
    )
    add(f"interpolate-nearest-{scale}", functools.partial(nn.Upsample, None, scale))
    add(
        f"interpolate-recomputed-{scale}",
        functools.partial(nn.Upsample, None, scale, "bilinear", True, True),
    )
add("trilinear", lambda: nn.Upsample(None, 2, "trilinear"), (1, 2, 5, 6, 3))
add_function("antialias", lambda x: F.interpolate(x, (7, 5), mode="bilinear", antialias=True))
add_function(
    "pyramid",
    lambda x: x + F.interpolate(F.adaptive_avg_pool2d(x, 2), x.shape[2:], mode="bilinear"),
)

# Norms
for size in (SIZE, (1, 4, 9, 7, 5)):
    dims = len(size) - 2
    batch = nn.BatchNorm2d if dims == 2 else nn.BatchNorm3d
    instance = nn.InstanceNorm2d if dims == 2 else nn.InstanceNorm3d
    add(f"batchnorm-{dims}", functools.partial(batch, 4), size)
    add(f"batchnorm-plain-{dims}", functools.partial(batch, 4, affine=False, momentum=None), size)
    add(f"groupnorm-{dims}", functools.partial(nn.GroupNorm, 2, 4), size)
    add(f"instancenorm-{dims}", functools.partial(instance, 4, affine=True), size)
    add(
        f"instancenorm-track-{dims}", functools.partial(instance, 4, track_running_stats=True), size
    )
    add(f"layernorm-{dims}", functools.partial(nn.LayerNorm, size[1:]), size)
add("batchnorm-eval", lambda: nn.BatchNorm2d(4).eval())
add("batchnorm-stats", lambda: nn.BatchNorm2d(4, track_running_stats=False).eval())
add("layernorm-columns", lambda: nn.LayerNorm(11))
add(
    "layernorm-channels",
    lambda: Call(lambda x, w: F.layer_norm(x.permute(0, 2, 3, 1), (4,), w), torch.randn(4)),
)
add("local-response", lambda: nn.LocalResponseNorm(2))

# Padding
for amounts in [(1, 2, 3, 0), (2, 0, 0, 3), (0, 0, 1, 1), (4, 4, 4, 4)]:
    for mode in ("constant", "reflect", "replicate", "circular"):
        add_function(f"pad-{mode}-{amounts}", functools.partial(F.pad, pad=amounts, mode=mode))
add_function("pad-value", lambda x: F.pad(x, (1, 1, 0, 2, 1, 0), value=2.5))
add_function("pad-crop", lambda x: F.pad(x, (-1, -2, -3, 1)))
add_function("pad-3d", lambda x: F.pad(x, (1, 0, 2, 1, 0, 2), mode="replicate"), (1, 2, 9, 7, 5))

# Element by element
for function in (torch.exp, torch.sigmoid, F.gelu, F.silu, F.hardswish, F.elu, F.mish, F.softplus, F.relu6,
                 F.leaky_relu, F.softsign, F.hardtanh, F.logsigmoid, torch.abs, torch.square):  # fmt: skip
    add_function(f"elementwise-{function.__name__}", function)
add("prelu", lambda: nn.PReLU(4))
add("relu-in-place", lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True)))
add_function(
    "arithmetic",
    lambda x, y: (2 * x - y / 3 + 1) ** 2 - (-x) * (1 - y) + torch.maximum(x, y),
    SIZE,
    SIZE,
)
add_function("max-of-two", lambda x, y: torch.max(x, y) + torch.min(x, y), SIZE, SIZE)
add_function("where", lambda x: torch.where(x > 0, x, 0.1 * x).clamp(-1, 1).masked_fill(x > 1, 3.0))
add(
    "broadcast",
    lambda: Call(
        lambda x, a, b, c: a * x + b + c,
        torch.randn(4, 1, 1),
        torch.randn(13, 1),
        torch.randn(1, 4, 13, 11),
    ),
)
add_function("in-place", lambda x: (x * 1).add_(1).mul_(x))


def assign(x: Tensor) -> Tensor:
    y = x.clone()
    y += 1
    y[:, 0] = 0
    y[:, 1] = x[:, 2]
    y[:, :, 2:5] = 7.0
    return y


add_function("assign", assign)
add_function("softmax", lambda x: F.softmax(x, 1) + F.log_softmax(x, 1).exp())
add_function("glu", lambda x: F.glu(x, 1))
add_function("normalize", lambda x: F.normalize(x, dim=1))
add_function(
    "convert", lambda x: x.to(torch.float64).contiguous().float().double().detach() + x.type_as(x)
)
add_function("dropout", lambda x: F.dropout(x, 0.3) + F.dropout(x, 0.2, training=False))
add_function("dropout2d", lambda x: F.dropout2d(F.dropout2d(x, 0.5) + torch.rand_like(x), 0.1))

# Reductions
for name in ("mean", "sum", "amax", "amin", "var", "std"):
    for dims in ((2, 3), (2,), (3,), (1,), (0, 2, 3), (-1, 1)):
        for keep in (True, False):
            if keep or dims in ((2, 3), (2,)):
                add_function(
                    f"{name}-{dims}-{keep}",
                    functools.partial(
                        lambda name, dims, keep, x: getattr(x, name)(dim=dims, keepdim=keep),
                        name,
                        dims,
                        keep,
                    ),
                )
    if not name.startswith("am"):
        add_function(f"{name}-all", functools.partial(lambda name, x: getattr(x, name)(), name))
add_function("max-all", lambda x: x.max() + x.min())
add_function("max-channels", lambda x: x.max(1))
add_function("argmax", lambda x: x.argmax(1))
add_function("max-rows", lambda x: x.max(2).values)
add_function("amax-ties", lambda x: F.relu(x).amax((2, 3)) + x.clamp(max=0.0).amax())
add_function(
    "var-options",
    lambda x: (x.var((2, 3), unbiased=False), torch.var_mean(x, (0, 2), correction=2)),
)
add_function("squeeze-excite", lambda x: x * x.mean((2, 3), keepdim=True).sigmoid())
add_function("logsumexp", lambda x: x.logsumexp(1) + x.logsumexp((2, 3), keepdim=True).sum())


# Losses
def labels(x: Tensor) -> Tensor:
    return (x[:, 0].detach() * 3).long().abs() % 4


for options in (
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 1},
    {"label_smoothing": 0.1},
    {
        "weight": torch.tensor([1.0, 2.0, 0.5, 3.0]).double(),
        "ignore_index": 2,
        "label_smoothing": 0.2,
    },
):
    key = "-".join(sorted(options)) + options.get("reduction", "")
    add_function(
        f"cross-entropy-{key}",
        functools.partial(lambda options, x, y: F.cross_entropy(x, labels(y), **options), options),
        SIZE,
        SIZE,
    )
add_function("cross-entropy-soft", lambda x, y: F.cross_entropy(x, y.softmax(1)), SIZE, SIZE)
add_function(
    "nll", lambda x, y: F.nll_loss(F.log_softmax(x, 1), labels(y), ignore_index=0), SIZE, SIZE
)
for function in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
    for reduction in ("mean", "sum", "none"):
        add_function(
            f"{function.__name__}-{reduction}",
            functools.partial(function, reduction=reduction),
            SIZE,
            SIZE,
        )
add_function(
    "bce",
    lambda x, y: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), pos_weight=torch.ones(4, 1, 1).double() * 2
    ),
    SIZE,
    SIZE,
)
add_function(
    "kl", lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), SIZE, SIZE
)
add_function(
    "dice",
    lambda x, y: 1 - (2 * (x * y).sum((0, 2, 3)) / (x * x + y * y).sum((0, 2, 3))).mean(),
    SIZE,
    SIZE,
)

# Shapes
add_function("flatten", lambda x: x.flatten(1))
add_function("flatten-tokens", lambda x: x.flatten(2).transpose(1, 2))
add_function("view-groups", lambda x: x.view(2, 2, 2, 13, 11).transpose(1, 2).reshape(2, 4, 13, 11))
add_function("view-unit", lambda x: x.view(2, 1, 4, 13, 1, 11).squeeze(1).unsqueeze(0))
add_function("permute", lambda x: x.permute(0, 2, 3, 1).contiguous().movedim(3, 1))
add_function("transposed-sum", lambda x: x + x.transpose(2, 3), (2, 4, 12, 12))
add_function(
    "windows",
    lambda x: (
        x.view(2, 4, 4, 3, 2, 5)
        .permute(0, 2, 4, 3, 5, 1)
        .exp()
        .permute(0, 5, 1, 3, 2, 4)
        .reshape(2, 4, 12, 10)
    ),
    (2, 4, 12, 10),
)
add("pixel-shuffle", lambda: nn.PixelShuffle(2))
add("pixel-unshuffle", lambda: nn.PixelUnshuffle(3), (2, 2, 12, 15))
add_function("unflatten", lambda x: x.unflatten(1, (2, -1)).flatten(0, 1))
add_function(
    "expand",
    lambda x: (
        x[:, :1].expand(-1, 3, -1, -1) + x.mean((2, 3), keepdim=True)[:, :3].expand(2, 3, 13, 11)
    ),
)
add_function("repeat", lambda x: x.repeat(1, 2, 1, 1))
add_function(
    "slices",
    lambda x: (
        x[:, 1:3],
        x[..., 1:-1, 2:],
        x[:, :, ::2, 1::3],
        x[0],
        x[:, :, 5],
        x[..., None, -1],
        x[:, :, -4:],
    ),
)
add_function("index-tensor", lambda x: x[:, :, torch.tensor([0, 3, 12])])
add_function(
    "split",
    lambda x: (
        *x.chunk(2, 1),
        *x.split([3, 10], 2),
        *x.unbind(1),
        x.narrow(3, 2, 7),
        x.select(2, 4),
    ),
)
add_function("cat-channels", lambda x, y: torch.cat([x, y.exp(), x[:, :1]], 1), SIZE, SIZE)
add_function("cat-rows", lambda x: torch.cat([x[..., -2:], x, x[..., :3]], -1))
add_function("cat-columns", lambda x: torch.cat([x, torch.ones(2, 4, 3, 11).double()], 2))
add_function("cat-plain", lambda x: torch.cat([x, torch.ones(2, 1, 13, 11).double()], 1))
add_function(
    "coordinates",
    lambda x: torch.cat(
        [
            x,
            torch.linspace(0, 1, x.size(2))
            .double()
            .view(1, 1, -1, 1)
            .expand(x.size(0), 1, -1, x.size(3)),
        ],
        1,
    ),
)
add_function("stack", lambda x, y: torch.stack([x, y], 1).mean(1), SIZE, SIZE)
add_function("flip-roll", lambda x: x.flip(2, 3) + x.roll((3, -2), (2, 3)) + x.roll(1, 1))
add(
    "channels-last-linear",
    lambda: Call(lambda x, w: F.linear(x.permute(0, 2, 3, 1), w) @ w, torch.randn(5, 4)),
)
add_function(
    "attention",
    lambda x: (
        F.scaled_dot_product_attention(*[x.flatten(2).transpose(1, 2)] * 3)
        .transpose(1, 2)
        .reshape(x.shape)
    ),
)
add_function("cumsum", lambda x: x.cumsum(2) + x.cumsum(1))
add_function("sort", lambda x: x.sort(2).values)
add_function(
    "places",
    lambda x: (
        torch.where(x > 0)[2],
        torch.tensor(torch.equal(x, x)),
        x.item() if x.numel() == 1 else x,
    ),
)
add_function("einsum", lambda x: torch.einsum("bchw,bdhw->bcd", x, x))


def check_cases(names: list[str], shape: tuple[int, int], overlap: bool) -> dict[str, float]:
    """The cases that are not the same, with their largest difference."""
    wrong = {}
    for name in names:
        make, shapes = CASES[name]
        torch.manual_seed(3)
        module = make()
        inputs = [torch.randn(size, dtype=torch.float64) for size in shapes]
        try:
            gaps = compare(module, inputs, make_grid(shape, overlap))
        except Exception as error:
            raise AssertionError(f"{name}: {error!r}") from error
        wrong |= {f"{name}: {key}": value for key, value in gaps.items() if not value < TOLERANCE}
    return wrong


def batches() -> list[Any]:
    """Every case on four ranks; on two, where there is less to go wrong, a third of them each way."""
    chosen = []
    for shape, names in [
        ((2, 2), list(CASES)),
        ((4, 1), list(CASES)),
        ((2, 1), list(CASES)[::3]),
        ((1, 2), list(CASES)[1::3]),
    ]:
        num = -(-len(names) // 40)
        chosen += [pytest.param(shape, names[i::num], id=f"{shape}-{i}") for i in range(num)]
    return chosen


@pytest.mark.parametrize(("shape", "names"), batches())
def test_every_operation(ranks: Any, shape: tuple[int, int], names: list[str]) -> None:
    for wrong in ranks(shape[0] * shape[1], check_cases, names, shape, True):
        assert wrong == {}


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
def test_convolution_without_overlap(ranks: Any, shape: tuple[int, int]) -> None:
    names = [name for name in CASES if name.startswith("conv")]
    for wrong in ranks(4, check_cases, names, shape, False):
        assert wrong == {}


# Whole models


class Functional(nn.Module):
    """As people write them: sizes read off tensors, padding and skips by hand, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 5, stride=2)
        self.second = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular", bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.gate = nn.Linear(8, 8)
        self.position = nn.Parameter(torch.randn(1, 8, 1, 13))
        self.up = nn.Conv2d(11, 4, 3, padding="same")
        self.head = nn.Linear(4 * 4 * 3, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        height, width = x.shape[-2:]
        y = F.pad(x, (0, -width % 4, 0, -height % 4), mode="replicate")
        y = F.relu(self.first(y), inplace=True)
        y = y + self.position[..., : y.size(3)]
        y = F.silu(self.norm(self.second(y)))
        y = y * torch.sigmoid(self.gate(y.mean((2, 3))))[:, :, None, None]
        y = F.interpolate(y, size=(height, width), mode="bilinear", align_corners=True)
        y = self.up(torch.cat([x, y], dim=1))
        y = y - y.amax(dim=(-2, -1), keepdim=True)
        pooled = F.adaptive_avg_pool2d(F.avg_pool2d(y, 3, 2, 1), (4, 3))
        return {"image": y, "logits": self.head(F.dropout(pooled.flatten(1), 0.2))}


def small_alexnet() -> nn.Module:
    """With the published stem and the adaptive pool, without the 57 million weights behind them."""
    with torch.device("meta"):
        model = build_model("alexnet", image_size=67)
    model.classifier = nn.Linear(256 * 36, 5, device="meta")
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model


def segmenting(**kwargs: Any) -> nn.Module:
    model = build_model("unet2d", width=4, depth=2, out_channels=4, **kwargs)
    return Objective(model, TASKS["segment"].loss)


MODELS: dict[str, tuple[Callable[[], nn.Module], list[Any]]] = {
    "resnet18": (lambda: build_model("resnet18", num_classes=5), [(2, 3, 33, 47)]),
    "resnet50": (lambda: build_model("resnet50", num_classes=5), [(2, 3, 33, 47)]),
    "cifar_cnn": (
        lambda: build_model("cifar_cnn", width=4, batch_norm=True, dropout=0.2),
        [(2, 3, 32, 32)],
    ),
    "alexnet": (small_alexnet, [(1, 3, 67, 67)]),
    "unet2d-batch-transpose": (
        lambda: build_model("unet2d", width=4, depth=3),
        [(2, 3, 29, 19)],
    ),
    "unet2d-group-upsample": (
        lambda: build_model("unet2d", width=8, depth=2, norm="group", up="interpolate"),
        [(2, 3, 21, 27)],
    ),
    "unet2d-segment": (segmenting, [(2, 3, 21, 18), "labels"]),
    "unet3d": (
        lambda: build_model("unet3d", width=4, depth=2, norm="group"),
        [(1, 3, 11, 9, 6)],
    ),
    "vit": (
        lambda: build_model(
            "vit", image_size=24, patch=4, width=16, depth=2, heads=2, num_classes=5
        ),
        [(2, 3, 24, 24)],
    ),
    "vit-forecast": (
        lambda: build_model(
            "vit", image_size=24, patch=4, width=16, depth=1, heads=2, task="forecast"
        ),
        [(2, 3, 24, 24)],
    ),
    "functional": (Functional, [(2, 3, 25, 22)]),
}


def check_model(
    name: str, shape: tuple[int, int], overlap: bool = True
) -> tuple[str, float, list[str]]:
    make, shapes = MODELS[name]
    torch.manual_seed(3)
    module = make()
    inputs: list[Tensor] = []
    for size in shapes:
        if size == "labels":
            inputs.append(torch.randint(4, (2, 21, 18)))
        else:
            inputs.append(torch.randn(size, dtype=torch.float64))
    grid = make_grid(shape, overlap)
    gaps = compare(module, inputs, grid)
    worst = max(gaps, key=lambda key: gaps[key])
    return worst, gaps[worst], grid.fallbacks.functions


HEAVY = {"resnet18": [(1, 2), (4, 1)], "resnet50": [(2, 2)]}
"""Tens of millions of weights to compare: not on every grid."""


@pytest.mark.table(keep=16)
@pytest.mark.parametrize(
    ("name", "shape"), [(n, shape) for n in MODELS for shape in HEAVY.get(n, GRIDS)], ids=str
)
def test_whole_models(ranks: Any, name: str, shape: tuple[int, int]) -> None:
    found = ranks(shape[0] * shape[1], check_model, name, shape, timeout=480)
    for worst, size, fallbacks in found:
        assert size < 1e-9, worst
        # Only where the image ends: features for a linear layer, tokens in two directions. Rows
        # alone become spans of tokens, and the first to mix those is attention.
        ends = name in ("vit", "vit-forecast", "cifar_cnn", "alexnet", "functional")
        word = "scaled_dot_product_attention" if "vit" in name and shape[1] == 1 else "flatten"
        assert fallbacks == [word] * ends


# Memory


def saved_bytes(shape: tuple[int, int], overlap: bool) -> int:
    """Bytes that a stack of convolutions keeps for backward: each storage once, no parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers)
    known = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    apply_spatial(model, make_grid(shape, overlap))
    x = torch.randn(1, 8, 128, 128)
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_activations_fall_with_the_number_of_tiles(ranks: Any, shape: tuple[int, int]) -> None:
    """To 1/n, and for each convolution the strips around the tile: three rows or columns a side."""
    (whole,) = ranks(1, saved_bytes, (1, 1), True)
    num_ranks = shape[0] * shape[1]
    per_rank = ranks(num_ranks, saved_bytes, shape, True)
    height, width = 128 // shape[0], 128 // shape[1]
    pixels = 0
    if shape[0] > 1:
        pixels += 2 * 3 * (width + 2)
    if shape[1] > 1:
        pixels += 2 * 3 * height
    strips = 4 * 8 * 4 * pixels  # convolutions, channels, bytes
    for found in per_rank:
        assert whole / num_ranks <= found <= whole / num_ranks + strips + 4096
        assert found < 1.25 * whole / num_ranks


# Together with the rest


def with_data_ranks() -> dict[str, float]:
    """Two data ranks of different batch sizes, each on two tiles, with batch norm over all four."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 3, 13, 10, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (5, 13, 10), generator=generator)
    torch.manual_seed(1)
    plain = build_model("unet2d", width=4, depth=1, out_channels=4).double()
    grid = make_grid((2, 1))
    tiled = Objective(copy.deepcopy(plain), TASKS["segment"].loss)
    apply_sync_batch_norm(tiled, dist.group.WORLD, Share())
    apply_spatial(tiled, grid)
    F.cross_entropy(plain(x), y).backward()
    mine = slice(0, 3) if dist.get_rank() < 2 else slice(3, 5)
    loss = tiled(x[mine], y[mine])
    share = len(x[mine]) / 5
    (loss * share * 2).backward()
    average([p.grad for p in tiled.parameters()])
    wanted = dict(plain.named_parameters()) | dict(plain.named_buffers())
    gaps = {}
    for name, p in (*tiled.model.named_parameters(), *tiled.model.named_buffers()):
        found, right = (p.grad, wanted[name].grad) if p.requires_grad else (p, wanted[name])
        gaps[name] = gap(found, right)
    return gaps


def norm_of_copies(shape: tuple[int, int]) -> dict[str, float]:
    """Maps that become too small to be cut, and vectors: every rank has them whole."""
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=5), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(3)
    )
    net.append(nn.BatchNorm1d(3))
    x = torch.randn(4, 3, 13, 10, dtype=torch.float64)
    net = net.double()
    net(x)  # so that the lazy layer is there
    tiled = apply_spatial(
        apply_sync_batch_norm(copy.deepcopy(net), dist.group.WORLD, Share()), make_grid(shape)
    )
    weigh(net(x)).backward()
    weigh(tiled(x)).backward()
    first = [p.grad for p in net.parameters()]
    average([p.grad for p in tiled.parameters()])
    gaps = {n: gap(p.grad, g) for (n, p), g in zip(tiled.named_parameters(), first, strict=True)}
    buffers = dict(net.named_buffers())
    return gaps | {name: gap(b, buffers[name]) for name, b in tiled.named_buffers()}


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
def test_sync_batch_norm_of_what_every_rank_has(ranks: Any, shape: tuple[int, int]) -> None:
    for gaps in ranks(4, norm_of_copies, shape):
        assert max(gaps.values()) < TOLERANCE, gaps


def test_sync_batch_norm_over_data_and_tiles(ranks: Any) -> None:
    for gaps in ranks(4, with_data_ranks):
        assert max(gaps.values()) < TOLERANCE, gaps


def norm_of_data_ranks_alone() -> None:
    halves = [dist.new_group([i]) for i in range(2)]
    model = nn.Sequential(nn.BatchNorm2d(3))
    apply_sync_batch_norm(model, halves[dist.get_rank()], Share())
    apply_spatial(model, make_grid((2, 1)))


def test_a_norm_that_leaves_tiles_out_is_named(ranks: Any) -> None:
    with pytest.raises(ranks.Failure) as caught:
        ranks(2, norm_of_data_ranks_alone)
    assert isinstance(caught.value.error, ridgeline.UsageError)
    assert str(caught.value.error).startswith("0 takes batch statistics over ranks [")


class Recomputed(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
            for _ in range(3)
        )
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x.square().mean()


def recomputed_gradients(recompute: bool) -> Any:
    model = apply_spatial(Recomputed(recompute).double(), make_grid((2, 2)))
    model(torch.randn(2, 3, 17, 14, generator=torch.Generator().manual_seed(1)).double()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).numpy()


def test_recompute_gives_the_same_bits(ranks: Any) -> None:
    pairs = zip(
        ranks(4, recomputed_gradients, True), ranks(4, recomputed_gradients, False), strict=True
    )
    assert all((a == b).all() for a, b in pairs)


def low_precision(overlap: bool) -> float:
    """bf16 by autocast, channels last: the format is kept, and the loss is near that of float32."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 5, padding=2), nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 4, 2, 2),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    x = torch.randn(2, 3, 33, 30).contiguous(memory_format=torch.channels_last)
    wanted = model(x)
    out = apply_spatial(copy.deepcopy(model), make_grid((2, 2), overlap))(x)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert not out.is_contiguous()
    torch.testing.assert_close(out.gather(), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        low = apply_spatial(copy.deepcopy(model), make_grid((2, 2), overlap))(x)
        assert low.dtype == torch.bfloat16
        loss = low.float().square().mean()
    loss.backward()
    return float(loss.detach() / wanted.detach().square().mean())


@pytest.mark.parametrize("overlap", [True, False])
def test_channels_last_and_autocast(ranks: Any, overlap: bool) -> None:
    assert ranks(4, low_precision, overlap) == pytest.approx([1.0] * 4, rel=0.02)


def narrow_loss(dtype: torch.dtype, weighted: bool) -> float:
    """How far the loss of logits in 16 bits over 4093 pixels is from float64's, as autocast has it."""
    torch.manual_seed(0)
    logits = torch.randn(1, 3, 63, 65).to(dtype)
    target = torch.randint(0, 3, (1, 63, 65))
    target[0, 0, :2] = -100
    weight = torch.tensor([0.3, 1.7, 2.9]) if weighted else None
    wanted = F.cross_entropy(logits.double(), target, None if weight is None else weight.double())

    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(x, target, weight)

    with torch.autocast("cpu", dtype):
        found = apply_spatial(Loss(), make_grid((2, 1)))(logits)
    assert found.dtype == torch.float32
    return float((found.double() - wanted).abs() / wanted)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pixels_are_counted_in_more_than_16_bits(
    ranks: Any, dtype: torch.dtype, weighted: bool
) -> None:
    assert max(ranks(2, narrow_loss, dtype, weighted)) < 1e-6


def metrics() -> None:
    """As evaluation counts: over outputs that are tiles and targets that are not."""
    torch.manual_seed(0)
    model = build_model("unet2d", width=4, depth=1, out_channels=4).eval()
    x, y = torch.randn(2, 3, 13, 10), torch.randint(4, (2, 13, 10))
    plain = TASKS["segment"].sums(model(x), y)
    apply_spatial(model, make_grid((2, 1)))
    with torch.no_grad():
        assert isinstance(model(x), TileTensor)
        assert TASKS["segment"].sums(model(x), y) == plain


def test_metrics_of_tiles(ranks: Any) -> None:
    ranks(2, metrics)


# What it looks like


def look() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1))
    names = list(model.state_dict())
    grid = make_grid((2, 1))
    assert apply_spatial(model, grid) is model
    assert list(model.state_dict()) == names
    x = torch.randn(2, 3, 7, 5)
    out = model(x)
    assert isinstance(out, TileTensor)
    assert (out.shape, out.dim(), out.size(2), len(out)) == ((2, 4, 7, 5), 4, 7, 2)
    assert out.local.shape == (2, 4, [3, 4][grid.row_rank], 5)
    assert out.requires_grad
    assert "TileTensor" in repr(out)
    whole = out.gather()
    assert type(whole) is Tensor
    assert whole.shape == (2, 4, 7, 5)
    assert grid.fallbacks.found == []
    for _ in range(2):
        out.cumsum(2)
    (found,) = grid.fallbacks.found
    assert (found.function, found.shape, found.num_calls) == ("cumsum", (2, 4, 7, 5), 2)
    assert type(apply_spatial(copy.deepcopy(model), grid, gather_outputs=True)(x)) is Tensor


def test_a_tile_looks_like_the_whole_image(ranks: Any) -> None:
    ranks(2, look)


def too_small(shape: tuple[int, int]) -> None:
    apply_spatial(nn.Conv2d(1, 1, 3, padding=1), make_grid(shape))(torch.ones(1, 1, 3, 1))


@pytest.mark.parametrize(("shape", "largest"), [((4, 1), "3x1"), ((2, 2), "2x1")])
def test_an_image_too_small_for_the_grid(ranks: Any, shape: tuple[int, int], largest: str) -> None:
    with pytest.raises(ranks.Failure) as caught:
        ranks(4, too_small, shape)
    assert isinstance(caught.value.error, ridgeline.UsageError)
    assert "3x1 is too small" in str(caught.value.error)
    assert f"spatial={largest}" in str(caught.value.error)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def own_function(gathers: bool) -> None:
    """Whatever is done next with what an autograd.Function gave."""
    model = Call(lambda x: Own.apply(x) if gathers else Own.apply(x).sum())
    x = torch.ones(1, 1, 4, 4, requires_grad=True)
    apply_spatial(model, make_grid((2, 1)), gather_outputs=gathers)(x)


@pytest.mark.parametrize("gathers", [True, False])
def test_an_autograd_function_of_the_models_own_is_named(ranks: Any, gathers: bool) -> None:
    """Its gradient would be lost in silence."""
    with pytest.raises(ranks.Failure) as caught:
        ranks(2, own_function, gathers)
    assert isinstance(caught.value.error, ridgeline.UsageError)
    assert str(caught.value.error).startswith("Own is an autograd.Function")


def count_messages(shape: tuple[int, int], overlap: bool) -> tuple[int, int, int]:
    """Convolutions that ran between the start of an exchange and its end, forward and backward."""
    grid = make_grid(shape, overlap)
    model = apply_spatial(nn.Conv2d(2, 2, 3, padding=1).double(), grid)
    x = torch.randn(1, 2, 24, 24, dtype=torch.float64, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        loss = model(x).sum()
        loss.backward()
    names = [
        event.name for event in sorted(trace.events(), key=lambda event: event.time_range.start)
    ]

    def between(start: str, end: str) -> int:
        found = open_now = 0
        for name in names:
            if name == start:
                open_now += 1
            elif name == end:
                open_now -= 1
            elif open_now and name in ("aten::conv2d", "ConvolutionBackward0"):
                found += 1
        return found

    return (
        between("_Start", "_Finish"),
        between("_FinishBackward", "_StartBackward"),
        names.count("_Start"),
    )


@pytest.mark.parametrize(("shape", "phases"), [((2, 1), 1), ((2, 2), 2)])
def test_the_interior_is_computed_while_the_halo_travels(
    ranks: Any, shape: tuple[int, int], phases: int
) -> None:
    num_ranks = shape[0] * shape[1]
    assert ranks(num_ranks, count_messages, shape, True) == [(phases, phases, phases)] * num_ranks
    assert ranks(num_ranks, count_messages, shape, False) == [(0, 0, phases)] * num_ranks


# The partition and its picture


@pytest.mark.parametrize("size", range(1, 40))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_a_dim_is_cut_evenly(size: int, num_ranks: int) -> None:
    spans = cut_evenly(size, num_ranks)
    assert len(spans) == num_ranks
    if size < num_ranks:
        assert set(spans) == {(0, size)}
    else:
        assert [i for low, high in spans for i in range(low, high)] == list(range(size))
        lengths = [high - low for low, high in spans]
        assert max(lengths) - min(lengths) <= 1


def test_the_tile_map_is_a_picture_of_it() -> None:
    root = ElementTree.fromstring(tile_map_svg(13, 20, (2, 3), 2))
    kinds = [element.get("class") for element in root.iter()]
    assert kinds.count("tile") == 6
    assert kinds.count("halo") == 6
    assert kinds.count("send") == 2 * (2 * 2 + 3)
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "rank 5" in words
    assert "7x7" in words
    alone = ElementTree.fromstring(tile_map_svg(8, 8, (1, 1), 2))
    assert [e.get("class") for e in alone.iter()].count("halo") == 0
    with pytest.raises(ridgeline.UsageError, match="3x3 cannot be drawn on a grid of 4x1"):
        tile_map_svg(3, 3, (4, 1), 1)
