"""Recompute: the same bits with less kept for backward, for modules that know nothing of it."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ridgeline.errors import UsageError
from ridgeline.models import build_model
from ridgeline.models.resnet import BasicBlock
from ridgeline.parallel.batchnorm import apply_sync_batch_norm
from ridgeline.parallel.recompute import apply_recompute
from ridgeline.parallel.share import Share

HOW = ("selective", "full")


def hugging_face(kind: str) -> nn.Module:
    sizes = (
        {"n_embd": 16, "n_head": 2, "n_layer": 3, "n_positions": 16, "vocab_size": 32}
        if kind == "gpt2"
        else {
            "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
            "num_key_value_heads": 1, "num_hidden_layers": 3, "vocab_size": 32,
        }
    )  # fmt: skip
    names = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
    return build_model(f"transformers:{names[kind]}", config=sizes)


class Preactivated(nn.Module):
    """Works in place on results that selective recompute saves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x), inplace=True)
        y = self.second(y)
        y += x
        return y.tanh_()


class Power(nn.Module):
    """The result depends on a buffer that forward moves, as in spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("u", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.u.copy_(F.normalize(self.linear.weight @ self.u, dim=0))
        return x + self.linear(x).tanh() * self.u.sigmoid().tanh()


@dataclasses.dataclass
class Carried:
    x: Tensor
    extra: dict[str, Tensor]


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, carried: Carried, *, scale: tuple[Tensor, float]) -> tuple[Carried, Tensor]:
        y = self.linear(carried.x).sin() * scale[0] * scale[1]
        return Carried(y, {"last": carried.x + carried.extra["last"]}), y.mean()


class Chain(nn.Module):
    """Blocks that take and return several tensors, keyword arguments and a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Boxed() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        carried, means = Carried(x, {"last": x}), []
        for block in self.blocks:
            carried, mean = block(carried, scale=(self.scale, 1.5))
            means.append(mean)
        return carried.extra["last"] * torch.stack(means).sum()


class InPlaceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.relu_())


def vgg() -> nn.Sequential:
    """As torchvision writes them: activations in place."""
    return nn.Sequential(
        nn.Identity(),
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Dropout(0.3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def small_resnet() -> nn.Sequential:
    blocks = [BasicBlock(8, 8, 1), BasicBlock(8, 12, 2)]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5)
    )


def images(size: int, batch: int = 4) -> Callable[[], Tensor]:
    return lambda: torch.randn(batch, 3, size, size)


def tokens() -> Tensor:
    return torch.randint(32, (2, 12))


def vectors() -> Tensor:
    return torch.randn(4, 16)


LLAMA = {"vocab": 32, "width": 16, "depth": 3, "heads": 2, "kv_heads": 1, "max_seq": 16}
VIT = {"image_size": 16, "patch": 4, "width": 16, "depth": 3, "heads": 2, "num_classes": 5}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "llama": (lambda: build_model("llama", **LLAMA), tokens),
    "vit-dropout": (lambda: build_model("vit", dropout=0.2, **VIT), images(16)),
    "hf-gpt2": (lambda: hugging_face("gpt2"), tokens),
    "hf-llama": (lambda: hugging_face("llama"), tokens),
    "resnet18": (
        lambda: build_model("resnet18", num_classes=5, small_images=True),
        images(8, 2),
    ),
    "small-resnet": (small_resnet, images(8)),
    "alexnet-dropout": (lambda: build_model("alexnet", image_size=8, num_classes=5), images(8, 2)),
    "cifar_cnn-batchnorm": (
        lambda: build_model("cifar_cnn", width=8, batch_norm=True, dropout=0.2),
        images(32),
    ),
    "unet2d": (lambda: build_model("unet2d", width=8, depth=2), images(16, 2)),
    "mlp": (lambda: build_model("mlp", in_features=16, depth=6), vectors),
    "vgg-in-place": (vgg, images(8)),
    "in-place": (lambda: nn.Sequential(*(Preactivated() for _ in range(3))), vectors),
    "moving-buffer": (lambda: nn.Sequential(*(Power() for _ in range(3))), vectors),
    "dataclass-kwargs": (Chain, vectors),
}  # fmt: skip


def logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def train(model: nn.Module, make: Callable[[], Any], num_steps: int = 2) -> list[Tensor]:
    """Losses, input gradients, parameter gradients, weights and buffers of a few steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen: list[Tensor] = []
    for _ in range(num_steps):
        x = make()
        if x.is_floating_point():
            x = x.double().requires_grad_()
        out = logits(model(x.clone() if x.requires_grad else x))
        loss = (out * torch.randn_like(out)).square().mean() + torch.rand(())
        loss.backward()
        seen += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        seen += [x.grad] if x.requires_grad else []
        optimizer.step()
        optimizer.zero_grad()
    return [t.clone() for t in (*seen, *model.parameters(), *model.buffers())]


def build(kind: str, how: str = "none") -> tuple[nn.Module, Callable[[], Any], list[str]]:
    torch.manual_seed(0)
    builder, make = MODELS[kind]
    model = builder().double().train()
    return model, make, apply_recompute(model, how) if how != "none" else []


@pytest.mark.table(keep=7)
@pytest.mark.parametrize("kind", MODELS)
def test_recompute_changes_no_bit(kind: str) -> None:
    num_steps = 1 if kind in ("resnet18", "alexnet-dropout") else 2
    model, make, _ = build(kind)
    names = [name for name, _ in model.named_modules()]
    alone = train(model, make, num_steps)
    for how in HOW:
        model, make, paths = build(kind, how)
        assert paths
        assert [name for name, _ in model.named_modules()] == names
        found = train(model, make, num_steps)
        assert len(found) == len(alone)
        for one, other in zip(alone, found, strict=True):
            assert torch.equal(one, other)


def test_paths_name_what_is_recomputed() -> None:
    assert build("llama", "full")[2] == ["layers.0", "layers.1", "layers.2"]
    assert build("alexnet-dropout", "full")[2] == [
        "features[0:3]", "features[3:6]", "features[6:10]", "features[10:13]",
        "classifier[1:4]", "classifier[4:7]",
    ]  # fmt: skip
    assert apply_recompute(nn.Linear(2, 2), "full") == []
    with pytest.raises(UsageError, match=r"'ful'.*recompute.*'full'"):
        apply_recompute(nn.Linear(2, 2), "ful")


# Memory


class Watch(TorchDispatchMode):
    """Every storage that an operation made, by weak reference."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def num_alive_bytes(self) -> int:
        gc.collect()
        return sum(size for ref, size in self.made.values() if not ref.expired())


def kept_bytes(kind: str, how: str) -> int:
    """Memory that a forward pass leaves behind for backward, each storage once.

    Alive after it is more than autograd's own saved tensors, which selective recompute bypasses.
    """
    model, make, _ = build(kind, how)
    x = make()
    x = x.double() if x.is_floating_point() else x
    for _ in range(2):  # the first pass of a region also keeps buffers that turn out not to move
        with Watch() as watch:
            loss = logits(model(x)).square().mean()
        kept = watch.num_alive_bytes()
        del loss
    return kept


@pytest.mark.parametrize(
    "kind",
    ["llama", "vit-dropout", "hf-gpt2", "hf-llama", "resnet18", "alexnet-dropout",
     "cifar_cnn-batchnorm", "vgg-in-place"],
)  # fmt: skip
def test_less_is_kept_for_backward(kind: str) -> None:
    none, selective, full = (kept_bytes(kind, how) for how in ("none", "selective", "full"))
    print(kind, none, selective, full)
    assert full < selective < none


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """What autograd itself saves in forward, each storage once, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        alive.append(t)  # so that no address is used twice
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        logits(model(x)).square().mean()
    return sum(size for pointer, size in sizes.items() if pointer not in own)


def test_autograd_saves_only_the_inputs_of_blocks() -> None:
    """Outside the blocks of full recompute, only what is not in a block is saved."""
    plain, recomputed = build("llama")[0], build("llama", "full")[0]
    x = tokens()
    assert saved_bytes(recomputed, x) < saved_bytes(plain, x) / 4


def count_products(kind: str, how: str) -> dict[str, int]:
    """Expensive operations in backward by name: those of the gradients, and those done again."""
    model, make, _ = build(kind, how)
    x = make()
    loss = logits(model(x.double() if x.is_floating_point() else x)).square().mean()
    counts: dict[str, int] = {}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            name = func._schema.name
            if any(word in name for word in ("mm", "convolution", "scaled_dot")):
                counts[name] = counts.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    with Count():
        loss.backward()
    return counts


@pytest.mark.parametrize("kind", ["llama", "hf-gpt2", "small-resnet"])
def test_selective_repeats_no_product(kind: str) -> None:
    none, selective, full = (count_products(kind, how) for how in ("none", "selective", "full"))
    assert selective == none
    assert sum(full.values()) > sum(none.values())


# The rest of what the second pass must find


class Shift(TorchFunctionMode):
    """Adds to every tanh, as another technique's rewrite would."""

    def __init__(self, amount: float) -> None:
        super().__init__()
        self.amount = amount

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * self.amount if func is torch.tanh else out


class Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * x


@pytest.mark.parametrize("how", HOW)
def test_contexts_are_around_the_recomputation(how: str) -> None:
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Tanh(), Tanh()).double()
        entered: list[float] = []
        amount = [0.0]

        def contexts(amount: list[float] = amount, entered: list[float] = entered) -> Shift:
            entered.append(amount[0])
            return Shift(amount[0])

        if recompute:
            apply_recompute(model, how, contexts)
        x = torch.randn(4, 16, dtype=torch.float64)
        losses = []
        for amount[0] in (1.5, 3.0):  # two forwards before their backwards, as in a pipeline
            with Shift(amount[0]):
                losses.append(model(x).square().sum())
        for loss in losses:
            loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        assert entered == ([1.5, 1.5, 3.0, 3.0] if recompute else [])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_block_that_changes_its_input_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(16, 16), InPlaceFirst(), InPlaceFirst())
    apply_recompute(model, "full")
    with pytest.raises(UsageError, match=r"1 changes its input in place.*inplace=False"):
        model(vectors())


class Shared(nn.Module):
    """Goes through its blocks twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tanh() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x


def autocast_gradients(how: str) -> list[Any]:
    torch.manual_seed(0)
    model = Shared()
    if how != "none":
        apply_recompute(model, how)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(4, 16)).float().square().sum()
    loss.backward()
    return [loss.detach().numpy(), *(p.grad.numpy() for p in model.parameters())]


def test_weights_that_autocast_has_cast_before(ranks: Any) -> None:
    (alone,) = ranks(1, autocast_gradients, "none")
    (full,) = ranks(1, autocast_gradients, "full")
    assert all((a == b).all() for a, b in zip(alone, full, strict=True))
    (selective,) = ranks(1, autocast_gradients, "selective")
    # Cast once a use and not once in all, so the two gradients of a weight add up in float32.
    for one, other in zip(alone, selective, strict=True):
        assert abs(one - other).max() <= abs(one).max() * 2**-7


@pytest.mark.parametrize("kind", ["small-resnet", "cifar_cnn-batchnorm"])
def test_a_copy_recomputes_itself(kind: str) -> None:
    alone, make, _ = build(kind)
    model, _, _ = build(kind, "selective")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # whoever still goes through the original shows it
    expected = train(alone, make)
    assert all(torch.equal(a, b) for a, b in zip(expected, train(twin, make), strict=True))
    loaded = pickle.loads(pickle.dumps(build(kind, "full")[0]))
    loss = logits(loaded(make().double())).sum()
    loss.backward()
    assert next(loaded.parameters()).grad is not None


def test_without_gradients_a_cache_is_still_filled() -> None:
    model, make, _ = build("hf-llama", "full")
    model.eval()
    with torch.no_grad():
        out = model(make(), use_cache=True)
    assert out.past_key_values.get_seq_length() == 12


def test_two_backward_passes_over_one_graph() -> None:
    found = []
    for how in ("none", "full"):
        model, make, _ = build("small-resnet", how)
        torch.manual_seed(1)
        loss = model(make().double()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([t.clone() for t in (model[0].weight.grad, *model.buffers())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Broken(nn.Module):
    """Holds something that torch.compile cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + self.norm(self.linear(x)).tanh()


COMPILED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "llama": (lambda: build_model("llama", **{**LLAMA, "depth": 2}), tokens),
    "batchnorm": (
        lambda: build_model("cifar_cnn", width=4, image_size=8, batch_norm=True),
        images(8),
    ),
    "in-place": MODELS["in-place"],
    "graph-break": (lambda: nn.Sequential(Broken(), Broken()), vectors),
}


@pytest.mark.table(keep=4)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", COMPILED)
def test_under_compile(kind: str, how: str) -> None:
    """aot_eager: traced, differentiated and partitioned as for a compiler, then run as it is."""
    builder, make = COMPILED[kind]
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = builder().double()
        if compiled:
            assert apply_recompute(model, how)
            torch._dynamo.reset()
            model.compile(backend="aot_eager", dynamic=False, fullgraph=kind != "graph-break")
        found.append(train(model, make))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)


def test_a_compiled_graph_keeps_less() -> None:
    found = []
    for how in ("full", "selective", "none"):
        model, make, _ = build("llama", how)
        torch._dynamo.reset()
        model.compile(backend="aot_eager", dynamic=False)
        found.append(saved_bytes(model, make()))
    assert found[0] < found[1] < found[2]


# On several ranks


def sync_batch_norm(how: str) -> list[Any]:
    torch.manual_seed(0)
    group, share = dist.group.WORLD, Share()
    model = build_model("cifar_cnn", width=4, image_size=8, batch_norm=True).double()
    apply_sync_batch_norm(model, group, share)
    if how != "none":
        assert apply_recompute(model, how)
    generator = torch.Generator().manual_seed(dist.get_rank())
    share.num_real = 0 if dist.get_rank() == dist.get_world_size() - 1 else 3  # one only borrows
    x = torch.randn(max(share.num_real, 1), 3, 8, 8, generator=generator, dtype=torch.float64)
    for _ in range(2):
        loss = model(x).square().sum()
        loss.backward()
    return [t.detach().numpy() for t in (loss, *(p.grad for p in model.parameters()))] + [
        b.numpy() for b in model.buffers()
    ]


def test_sync_batch_norm_counts_a_batch_once(ranks: Any) -> None:
    alone = ranks(4, sync_batch_norm, "none")
    for how in HOW:
        for one, other in zip(alone, ranks(4, sync_batch_norm, how), strict=True):
            assert all((a == b).all() for a, b in zip(one, other, strict=True))


def sharded(how: str) -> list[Any]:
    """Weights are gathered before a block's backward, and its second pass finds them there."""
    torch.manual_seed(0)
    model = build_model("llama", **LLAMA).double()
    if how != "none":
        apply_recompute(model, how)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        loss = model(torch.randint(32, (2, 12), generator=generator)).square().mean()
        loss.backward()
    return [loss.detach().numpy(), *(p.grad.full_tensor().numpy() for p in model.parameters())]


def test_sharded_blocks(ranks: Any) -> None:
    alone = ranks(2, sharded, "none")
    for how in HOW:
        for one, other in zip(alone, ranks(2, sharded, how), strict=True):
            assert all((a == b).all() for a, b in zip(one, other, strict=True))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def tensor_parallel(how: str) -> tuple[list[Any], dict[str, int]]:
    """Linear layers whose weights and results are DTensors inside the recomputed blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(Feed(), Feed()).double()
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    styles = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    plan = {f"{i}.{name}": style for i in range(2) for name, style in styles.items()}
    parallelize_module(model, mesh, plan)
    if how != "none":
        assert apply_recompute(model, how) == ["0", "1"]
    x = torch.randn(5, 8, dtype=torch.float64).requires_grad_()
    loss = model(x).square().sum()
    counts: dict[str, int] = {}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            name = func._schema.name
            if name in ("aten::addmm", "_c10d_functional::all_reduce"):
                counts[name] = counts.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    with Count():
        loss.backward()
    gradients = [p.grad for p in model.parameters()]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    found = [loss.detach(), x.grad, *whole]
    return [t.numpy() for t in found], counts


def test_blocks_with_dtensors(ranks: Any) -> None:
    alone = ranks(2, tensor_parallel, "none")
    for how in HOW:
        for (one, counted), (other, counts) in zip(
            alone, ranks(2, tensor_parallel, how), strict=True
        ):
            assert all((a == b).all() for a, b in zip(one, other, strict=True))
            assert (counts == counted) == (how == "selective")
