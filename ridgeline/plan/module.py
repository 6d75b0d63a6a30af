"""Any module in numbers: what each of its blocks computes, moves, keeps for backward and sends on.

`models/trace.py` takes these facts on the meta device, with torch; they are written as JSON, and planning
from the file needs no torch. Every quantity of a microbatch is a fixed part and a part per sample, found by
tracing at two batch sizes. Three modes have costs of their own, because they keep and move different
bytes: `wide` (the parameters' own type), `cast` (autocast to 16 bits over float32 weights) and `half`
(16-bit weights under autocast, what sharding of optimizer state brings with it). Read by `general.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ridgeline.errors import UsageError

FORMAT: Final = "ridgeline module facts"
VERSION: Final = 2
MODES: Final = ("wide", "cast", "half")
KINDS: Final = ("plain", "upcast", "strided", "mixed", "norm_back")
"""Of kernels that move bytes: those that reach the memory's rate, casts to a wider type, products of
strided or broadcast tensors, sums of two types, and gradients of norms: each is slower in its own way."""


@dataclass(frozen=True)
class Amount:
    """`fixed` + `per_sample` for every sample of a microbatch."""

    per_sample: float = 0.0
    fixed: float = 0.0

    def at(self, samples: float) -> float:
        return self.fixed + self.per_sample * samples

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.per_sample + other.per_sample, self.fixed + other.fixed)

    def times(self, factor: float) -> Amount:
        return Amount(self.per_sample * factor, self.fixed * factor)


@dataclass(frozen=True)
class Bytes:
    """Bytes that every tensor-parallel rank has, bytes that such ranks divide among them, bytes that every
    rank has even where what is whole is divided along the sequence (inputs of split layers), and bytes
    that ranks divide who share experts: casts and gradients of their weights."""

    whole: Amount = Amount()
    split: Amount = Amount()
    gathered: Amount = Amount()
    experts: Amount = Amount()

    @property
    def total(self) -> Amount:
        return self.whole + self.split + self.gathered + self.experts

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(
            self.whole + other.whole,
            self.split + other.split,
            self.gathered + other.gathered,
            self.experts + other.experts,
        )


@dataclass(frozen=True)
class Product:
    """`count` equal products of (m, k) and (k, n), or convolutions as implicit ones."""

    kind: str
    """`matrix`, `batched`, `grouped` (of experts, which ranks can have some each of) or `convolution`."""
    m: Amount
    n: Amount
    k: Amount
    batch: Amount = Amount(0.0, 1.0)
    split: str = ""
    """Which of m, n, k and batch tensor-parallel ranks divide."""
    moved: Amount = Amount()
    """Of a convolution: elements read and written, each once."""
    count: int = 1

    def flops(self, samples: float) -> float:
        each = 2.0 * self.m.at(samples) * self.n.at(samples) * self.k.at(samples)
        return self.count * each * self.batch.at(samples)


@dataclass(frozen=True)
class Attention:
    """Attention of `count` equal calls; `stored`: its scores are in memory, and its products and softmax
    are counted with the others."""

    kind: str
    """`fused` or `stored`."""
    batch: Amount
    heads: int
    seq: int
    keys: int
    width: int
    causal: bool
    scores: Amount
    """Elements of the scores: what is stored, or would be without a fused kernel."""
    split: bool = False
    count: int = 1


@dataclass(frozen=True)
class Halo:
    """What a convolution or pooling needs of a neighbour's tile, in elements: one side's rows at full
    width, and one side's columns at full height."""

    rows: Amount
    columns: Amount
    count: int = 1


@dataclass(frozen=True)
class Work:
    """One direction of a block."""

    flops: Amount = Amount()
    """As torch counts them: products, convolutions and attention, not halved for a causal mask."""
    products: tuple[Product, ...] = ()
    attention: tuple[Attention, ...] = ()
    moved: dict[str, Bytes] = field(default_factory=dict)
    """By kernels that are no products, by kind."""
    kernels: int = 0
    """Of those and of products and attention together."""
    views: int = 0
    """Calls that only the host sees."""
    fused_moved: Bytes = Bytes()
    """The same once a compiler has fused what it can."""
    fused_kernels: int = 0


@dataclass(frozen=True)
class Costs:
    """A block in one mode. Bytes kept hold no parameter and no storage twice; what two blocks keep
    belongs to the first."""

    forward: Work
    backward: Work
    saved: Bytes
    """Kept for backward."""
    saved_selective: Bytes
    """Results of products and attention, and the block's inputs."""
    saved_full: Bytes
    """The block's inputs."""
    saved_compiled: Bytes
    """What a compiler keeps, which computes cheap results again."""
    casts: Bytes
    """Of `saved`: 16-bit copies of weights, which autocast keeps until forward is over."""
    peak_forward: Bytes
    """Most at one time, beyond what the blocks before keep and beyond parameters and gradients."""
    peak_backward: Bytes
    peak_gradients: Bytes
    """The same in backward with the gradients that the block itself has made by then."""
    output: Bytes
    """What later blocks read: what a pipeline sends if it is cut behind this block."""
    split_backward: tuple[Bytes, ...] = ()
    """As `peak_backward`, but what would be most on a rank of several that split layers: without and with
    the sequence cut among them."""
    split_gradients: tuple[Bytes, ...] = ()
    spread_backward: Bytes = Bytes()
    """The same on one of several ranks that share experts."""
    last: Work = Work()
    """Of `forward`, what follows the last tensor that is kept: full recompute of a block leaves it out."""
    at_loss: Bytes = Bytes()
    """What is there when a loss of split classes begins, the logits too."""


@dataclass(frozen=True)
class Experts:
    """Experts whose weights lie side by side in one module, of which ranks can have some each."""

    number: int
    chosen: int
    """That a token goes to."""
    parameters: int
    """Of all of them."""
    trainable: int
    tokens: Amount
    sent: dict[str, float]
    """Bytes of a token on its way to them, by mode."""
    returned: dict[str, float]
    """And of what comes back for it."""

    def visits(self, ranks: int) -> float:
        """Ranks of so many that a token goes to, itself among them, were its experts drawn evenly.

        >>> one = Experts(8, 2, 0, 0, Amount(), {}, {})
        >>> one.visits(1), round(one.visits(2), 4), round(one.visits(8), 4)
        (1.0, 1.5714, 2.0)
        """
        each = self.number // ranks
        none = math.comb(self.number - each, self.chosen) / math.comb(self.number, self.chosen)
        return ranks * (1.0 - none)


@dataclass(frozen=True)
class Leaf:
    """One module's own work, without its children's, in the parameters' own type."""

    name: str
    kind: str
    parameters: int = 0
    trainable: int = 0
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    role: str = ""
    """In tensor parallelism: `column`, `row`, `embedding` or `head`."""
    flops_forward: Amount = Amount()
    flops_backward: Amount = Amount()
    moved_forward: Amount = Amount()
    moved_backward: Amount = Amount()
    kernels_forward: int = 0
    kernels_backward: int = 0
    saved: Amount = Amount()
    dropout_mask: Amount = Amount()
    """Of `saved`: masks of dropout."""
    attention: tuple[Attention, ...] = ()


@dataclass(frozen=True)
class Block:
    """A stretch of a module's forward pass between two places where it can be cut; `names` has several
    where as many equal ones follow each other."""

    names: tuple[str, ...]
    kind: str
    recompute: str
    """`block`: on its own, `stretch`: together with its neighbours, empty: never."""
    parameters: int
    trainable: int
    parameter_bytes: int
    split_parameters: int
    """Of `parameters`: those that tensor-parallel ranks divide among them."""
    matrices: int
    """Of `parameters`: those that 16-bit arithmetic casts."""
    buffer_bytes: int
    leaves: tuple[Leaf, ...]
    costs: dict[str, Costs]
    halos: tuple[Halo, ...] = ()
    reduced_forward: Amount = Amount()
    """Elements that tensor-parallel ranks sum in forward, and in how many tensors."""
    reductions_forward: int = 0
    reduced_backward: Amount = Amount()
    reductions_backward: int = 0
    logits: Amount = Amount()
    """Elements that a cross-entropy reads of which tensor-parallel ranks divide the classes."""
    experts: tuple[Experts, ...] = ()
    """Theirs are among the block's parameters."""

    @property
    def count(self) -> int:
        return len(self.names)

    def parameters_of(self, tp: float, ep: int = 1) -> float:
        """What a rank has that is no expert which it shares with others: see `experts_of`."""
        own = self.parameters - self.split_parameters * (1.0 - 1.0 / tp)
        return own - (sum(e.parameters for e in self.experts) if ep > 1 else 0)

    def trainable_of(self, tp: float, ep: int = 1) -> float:
        """Of those, the ones that have gradients."""
        if ep > 1:
            return self.trainable - sum(e.trainable for e in self.experts)
        return self.parameters_of(tp) * self.trainable / self.parameters if self.parameters else 0.0

    def experts_of(self, ep: int) -> tuple[float, float]:
        """Parameters of a rank's part of the experts, and those that have gradients; none where every rank
        has all of them, with the rest of the block."""
        if ep == 1:
            return 0.0, 0.0
        return sum(e.parameters for e in self.experts) / ep, sum(
            e.trainable for e in self.experts
        ) / ep


@dataclass(frozen=True, eq=False)
class ModuleFacts:
    """A module that was traced, blocks in the order of its forward pass."""

    name: str
    blocks: tuple[Block, ...]
    inputs: tuple[str, ...] = ()
    """Shapes and types of one sample."""
    unit: str = "samples"
    units_per_sample: int = 1
    optimizer_slots: int = 2
    """Tensors of state a parameter: 2 for Adam, 1 for momentum, 0 for plain descent."""
    splits: int = 1
    """What a number of tensor-parallel ranks has to divide; 1: no pairs of linear layers."""
    whole: str = ""
    """Why tensor-parallel ranks have nothing to divide, where they have not."""
    tied: tuple[str, ...] = ()
    """Names of parameters that are another's too; they are counted once."""
    tied_parameters: int = 0
    """Elements of those, which a pipeline holds once more on its last stage."""
    notes: tuple[str, ...] = ()
    version: int = VERSION

    @property
    def num_parameters(self) -> int:
        return sum(b.parameters * b.count for b in self.blocks)

    @property
    def num_trainable(self) -> int:
        return sum(b.trainable * b.count for b in self.blocks)

    @property
    def parameter_bytes(self) -> int:
        return sum(b.parameter_bytes * b.count for b in self.blocks)

    @property
    def num_blocks(self) -> int:
        return sum(b.count for b in self.blocks)

    @property
    def most_stages(self) -> int:
        """Of a pipeline, each with a parameter."""
        return sum(b.count for b in self.blocks if b.parameters)

    def flops(self, samples: float = 1.0) -> tuple[float, float]:
        """Forward and backward of so many samples."""
        costs = [(b.count, b.costs["wide"]) for b in self.blocks]
        forward = sum(count * c.forward.flops.at(samples) for count, c in costs)
        return forward, sum(count * c.backward.flops.at(samples) for count, c in costs)

    def saved_bytes(self, samples: float = 1.0, mode: str = "wide") -> float:
        """Kept for backward without recompute."""
        return sum(b.count * b.costs[mode].saved.total.at(samples) for b in self.blocks)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}


_INNER: Final[dict[str, Any]] = {
    "blocks": Block, "leaves": Leaf, "products": Product, "attention": Attention, "halos": Halo,
    "costs": Costs, "moved": Bytes, "experts": Experts, "split_backward": Bytes, "split_gradients": Bytes,
}  # fmt: skip


def facts_from_dict(values: Mapping[str, Any], place: str) -> ModuleFacts:
    """Facts as `to_dict` wrote them; `place` is the file, for what is said of anything else."""
    if not isinstance(values, Mapping) or values.get("format") != FORMAT:
        raise UsageError(
            f"{place} holds no module facts; `ridgeline plan facts RECIPE -o FILE` writes them"
        )
    if values.get("version") != VERSION:
        raise UsageError(
            f"{place} holds module facts of version {values.get('version')!r}, and this release reads "
            f"version {VERSION}; write them again with `ridgeline plan facts`"
        )
    kept = {key: value for key, value in values.items() if key != "format"}
    try:
        found = _build(ModuleFacts, kept)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{place} holds module facts that are damaged ({error}); write them again with "
            "`ridgeline plan facts`"
        ) from error
    assert isinstance(found, ModuleFacts)
    missing = [b.names[0] for b in found.blocks if set(MODES) - set(b.costs)]
    if missing or not found.blocks:
        what = f"block {missing[0]} has not all of {', '.join(MODES)}" if missing else "no blocks"
        raise UsageError(
            f"{place} holds module facts that are damaged ({what}); write them again with "
            "`ridgeline plan facts`"
        )
    return found


def _build(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """A dataclass of this file from plain values; its fields say what they are."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    if unknown := set(values) - set(known):
        raise ValueError(f"{cls.__name__} has no {sorted(unknown)[0]}")
    built: dict[str, Any] = {}
    for name, value in values.items():
        kind = str(known[name].type)
        if kind in ("Amount", "Bytes", "Work"):
            built[name] = _build({"Amount": Amount, "Bytes": Bytes, "Work": Work}[kind], value)
        elif kind.startswith("dict"):
            made = _INNER.get(name)
            built[name] = {k: _build(made, v) if made else float(v) for k, v in value.items()}
        elif kind.startswith("tuple"):
            inner_class = _INNER.get(name)
            built[name] = tuple(_build(inner_class, v) if inner_class else v for v in value)
        elif kind in ("int", "float"):
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise ValueError(f"{cls.__name__}.{name} is {value!r}, no number")
            built[name] = value
        else:
            built[name] = value
    return cls(**built)


def load_facts(path: Path) -> ModuleFacts:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); name a file of facts") from error
    except ValueError as error:
        raise UsageError(
            f"{path} is no JSON ({error}); `ridgeline plan facts RECIPE -o FILE` writes module facts"
        ) from error
    return facts_from_dict(values, str(path))


def write_facts(facts: ModuleFacts, path: Path) -> None:
    try:
        path.write_text(json.dumps(facts.to_dict(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error.strerror}); name another file") from error
