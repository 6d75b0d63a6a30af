"""The parity table: kinds of models in layouts, each compared with one device in float64.

    python tests/parity/table.py             # all of it; `make parity`
    python tests/parity/table.py --reduced   # what CI runs
    python tests/parity/table.py --part 2/4  # every fourth row, for one of four machines

Prints a row for each, and "N of N same". A layout that names a precision is compared in that one. Which
layouts there are is read off the composition table (`ridgeline.verify.layouts`); which model a layout is
shown on is decided here: images for tiles, tokens for sequences, both for what does not care.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

# `mixture.py` beside this file, also for the ranks: they are forked.
sys.path.insert(0, str(Path(__file__).parent))

from ridgeline.config import RECIPES, RunConfig, find_recipe, load_config
from ridgeline.errors import RunError
from ridgeline.layout import Layout, techniques
from ridgeline.verify.layouts import factored_layouts, pair_layouts, rounded_layouts, single_layouts
from ridgeline.verify.run import Row, Verifier

STEPS = 5
MOST_RANKS = 8


@dataclass(frozen=True)
class Kind:
    """A model and its data."""

    recipe: str
    overrides: tuple[str, ...] = ()

    def config(self) -> RunConfig:
        return load_config(find_recipe(self.recipe), self.overrides).config


def _transformers(name: str, config: str) -> tuple[str, ...]:
    return (f"model.name=transformers:{name}", f"model.args={{config: {config}}}")


GPT2 = "{vocab_size: 256, n_positions: 64, n_embd: 32, n_layer: 4, n_head: 4}"
BERT = (
    "{vocab_size: 257, hidden_size: 32, num_hidden_layers: 4, num_attention_heads: 4,"
    " intermediate_size: 64, max_position_embeddings: 64}"
)
PACKED = (
    f"data.args={{path: {RECIPES.parent}, pattern: '**/__init__.py', seq_len: 48, pack: fit}}",
    "model.args={size: 1m, vocab: 257, separator: 256}",
)
"""Short documents: every sequence has another number of targets that count."""
DROPOUT = "model.args.dropout=0.1"
MIXTURE = "model={name: 'mixture:Mixture', args: {stacked: %s}}"
MIXTRAL = (
    "{vocab_size: 256, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4,"
    " num_attention_heads: 4, num_key_value_heads: 2, num_local_experts: 4, max_position_embeddings: 64}"
)
KINDS: dict[str, Kind] = {
    "llama": Kind("llama-text"),
    "llama-tied": Kind("llama-text", ("model.args.tie_embeddings=true",)),
    "llama-packed": Kind("llama-text", PACKED),
    "bert": Kind("bert-text"),
    "vit": Kind("vit-fields", (DROPOUT,)),
    "hf-gpt2": Kind("llama-text", _transformers("GPT2LMHeadModel", GPT2)),
    "mixture": Kind("llama-text", (MIXTURE % "false",)),
    "mixture-stacked": Kind("llama-text", (MIXTURE % "true",)),
    "hf-mixtral": Kind("llama-text", _transformers("MixtralForCausalLM", MIXTRAL)),
    "hf-bert": Kind("bert-text", _transformers("BertForMaskedLM", BERT)),
    "timm-vit": Kind(
        "digits",
        ("data.args={size: 16}", "model.name=timm:vit_tiny_patch16_224",
         "model.args={img_size: 16, patch_size: 4, in_chans: 1, num_classes: 10, embed_dim: 32,"
         " depth: 4, num_heads: 4}"),
    ),
    "unet": Kind("unet-fields"),
    "unet-batchnorm": Kind(
        "unet-fields", ("model.args.norm=batch", "ddp.sync_batch_norm=true", "train.clip=null")
    ),
    "cnn": Kind("digits", (DROPOUT,)),
    "alexnet": Kind("alexnet-digits"),
    "resnet18": Kind(
        "resnet50-synthetic",
        ("model.name=resnet18", "data.args.shape=[3, 33, 47]", "ddp.sync_batch_norm=true",
         "layout="),
    ),
    "mlp": Kind(
        "digits", ("model={name: mlp, args: {in_features: 64, hidden: 24, out_features: 10}}",)
    ),
}  # fmt: skip

HYBRIDS = (
    "dp=2,tp=2,pp=2,microbatches=2",
    "dp=2,zero=3,tp=2",
    "dp=2,zero=2,pp=2,microbatches=2",
    "dp=2,zero=1,tp=2,sp=true,pp=2,microbatches=4",
    "dp=2,zero=3,cp=2,tp=2",
    "dp=4,zero=3,shard=2,tp=2,recompute=full",
    "dp=2,zero=2,pp=2,microbatches=4,schedule=interleaved,virtual=2",
)
TILED = ("spatial=2", "spatial=2x2", "dp=2,spatial=2", "dp=2,spatial=2x2", "dp=2,zero=1,spatial=2")

# Beside what the composition table gives: other layers and other models in 16 bits.
SIXTEEN_BITS: dict[str, tuple[str, ...]] = {
    "bert": tuple(f"{text},precision=fp16" for text in ("dp=2,zero=1", "tp=2", "cp=2")),
    "mlp": tuple(f"{text},precision=bf16" for text in ("tp=2", "pp=2,microbatches=2")),
    "cnn": tuple(
        f"{text},precision={precision}"
        for text in ("dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "spatial=2x2")
        for precision in ("bf16", "fp16")
    ),
    "unet": ("spatial=2,precision=fp16", "dp=2,zero=2,precision=fp16"),
    "vit": ("dp=2,zero=2,precision=fp8", "pp=2,microbatches=2,precision=fp8"),
}

# Layouts a kind of model is shown in, besides those of the table; refused ones are no row.
REDUCED: dict[str, tuple[str, ...]] = {
    "llama": (
        "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=4,zero=3,shard=2", "tp=2", "tp=2,sp=true",
        "cp=2", "pp=2,microbatches=2", "pp=2,microbatches=2,schedule=interleaved,virtual=2",
        "pp=2,microbatches=2,schedule=zerobubble", "recompute=full",
        "offload=optimizer", "dp=2,zero=3,offload=params", "offload=activations",
        "dp=2,accumulate=2", "dp=2,compress=powersgd:2", "dp=2,sync=local:2",
        "dp=2,tp=2,pp=2,microbatches=2", "dp=2,zero=3,tp=2", "dp=2,zero=2,precision=fp16",
        "dp=2,zero=2,precision=fp8",
    ),
    "llama-tied": ("pp=2,microbatches=2", "dp=2,zero=2,pp=2,microbatches=2", "tp=2"),
    "llama-packed": (
        "dp=2,zero=3", "tp=2,sp=true", "cp=2", "pp=2,microbatches=2", "dp=2,accumulate=2",
    ),
    "hf-gpt2": ("tp=2,recompute=full", "pp=2,microbatches=2", "cp=2"),
    "hf-bert": ("tp=2", "pp=2,microbatches=2", "cp=2"),
    "bert": ("dp=2,tp=2",),
    "vit": ("tp=2", "cp=2", "dp=2,zero=2"),
    "timm-vit": ("tp=2", "cp=2", "pp=2,microbatches=2"),
    "mixture": ("dp=2,ep=2", "dp=4,zero=1,ep=2", "dp=2,zero=3,ep=2,precision=fp16"),
    "mixture-stacked": ("dp=2,zero=2,pp=2,microbatches=2,ep=2", "dp=2,ep=2,precision=bf16"),
    "hf-mixtral": ("dp=2,zero=1,ep=2",),
    "unet": ("spatial=2", "spatial=2x2", "dp=2,spatial=2x2", "pp=2,microbatches=2,schedule=gpipe"),
    "unet-batchnorm": ("dp=2,spatial=2",),
    "cnn": (
        "dp=2,zero=3", "recompute=selective", "spatial=2", "tp=2", "dp=2,zero=3,precision=bf16",
        "spatial=2,precision=fp16",
    ),
    "mlp": ("tp=2", "dp=2,pp=2,microbatches=2", "pp=2,microbatches=2,precision=bf16"),
}  # fmt: skip


# Of the whole table alone: each is near one of the rows above.
FURTHER: dict[str, tuple[str, ...]] = {
    "llama": (
        "dp=2,zero=2,pp=2,microbatches=2", "dp=2,zero=3,cp=2,tp=2", "recompute=full,precision=fp8",
        "pp=2,microbatches=2,precision=fp8", "pp=2,microbatches=2,schedule=gpipe", "dp=2,compress=bf16",
        "recompute=selective",
    ),
    "llama-packed": ("dp=2", "tp=2", "dp=2,sync=local:2"),
    "unet": (
        "dp=2,zero=2,pp=2,microbatches=2", "pp=4,microbatches=4", "pp=2,microbatches=2,recompute=full",
        "pp=2,microbatches=2",
        "pp=2,microbatches=4,schedule=interleaved,virtual=2",
    ),
}  # fmt: skip


def rows(reduced: bool) -> dict[str, list[Layout]]:
    """The layouts that each kind of model is shown in."""
    if reduced:
        return {kind: [Layout.parse(x) for x in texts] for kind, texts in REDUCED.items()}
    pairs = [*single_layouts(MOST_RANKS), *pair_layouts(MOST_RANKS)]
    table = {kind: [Layout.parse(text) for text in texts] for kind, texts in REDUCED.items()}
    for kind, texts in FURTHER.items():
        table[kind] += [Layout.parse(text) for text in texts]
    table["alexnet"] = [Layout.parse(f"pp={p},microbatches={2 * p}") for p in (2, 4)]
    table["resnet18"] = [Layout.parse(x) for x in ("dp=2", "pp=2,microbatches=2", *TILED[:2])]
    for kind in ("llama", "llama-tied", "hf-gpt2", "hf-bert", "vit"):
        table[kind] += [Layout.parse(text) for text in HYBRIDS]
    table["hf-bert"].append(Layout.parse("cp=2,tp=2"))  # heads and positions of one dropout mask
    for kind in ("unet", "unet-batchnorm", "cnn"):
        table[kind] += [Layout.parse(text) for text in TILED]
    for kind, texts in SIXTEEN_BITS.items():
        table[kind] += [Layout.parse(text) for text in texts]
    for layout in [*pairs, *factored_layouts(MOST_RANKS), *rounded_layouts(MOST_RANKS)]:
        table[_shown_on(layout)].append(layout)
    return {kind: list(dict.fromkeys(layouts)) for kind, layouts in table.items()}


def _shown_on(layout: Layout) -> str:
    used = techniques(layout)
    if "spatial" in used:
        # A CNN has rows in 16 bits that take a tenth of the time of a U-Net's.
        return "cnn" if layout.precision != "fp32" else "unet"
    return "mixture-stacked" if "ep" in used else "llama"


def part_of(table: dict[str, list[Layout]], index: int, count: int) -> dict[str, list[Layout]]:
    """The rows of the `index`-th of `count` machines: one in `count`, so that all have like work."""
    flat = [(kind, layout) for kind, layouts in table.items() for layout in layouts]
    found: dict[str, list[Layout]] = {}
    for kind, layout in flat[index - 1 :: count]:
        found.setdefault(kind, []).append(layout)
    return found


def read_part(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 1 <= I <= N, such as 2/4")
    return int(index), int(count)


def missing(kind: str) -> str:
    """What a kind of model needs and this machine has not; empty when it can be shown."""
    package = KINDS[kind].config().model.name.partition(":")[0]
    if package not in ("timm", "transformers"):
        return ""
    try:
        importlib.import_module(package)
    except Exception as error:  # timm needs a torchvision that fits, which may be there and broken
        return f"{package} cannot be imported here ({error})"
    return ""


def prove(kind: str, layouts: list[Layout]) -> Iterator[Row]:
    """Each layout of one kind of model; batches fit the layouts of one number of pieces at a time."""
    by_pieces: dict[int, list[Layout]] = {}
    for layout in layouts:
        pieces = layout.dp * max(layout.accumulate, layout.microbatches)
        by_pieces.setdefault(pieces, []).append(layout)
    for group in by_pieces.values():
        verifier = Verifier(KINDS[kind].config(), group, STEPS)
        try:
            for layout in group:
                exact = layout.precision == "fp32"
                yield verifier.check(layout, "float64" if exact else layout.precision)
        finally:
            verifier.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reduced", action="store_true", help="the rows that CI runs")
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), help="only these models")
    parser.add_argument("--part", type=read_part, metavar="I/N", help="the I-th of N slices")
    args = parser.parse_args()
    start, total, same, unseen = time.perf_counter(), 0, 0, 0
    chosen = {k: v for k, v in rows(args.reduced).items() if not args.kind or k in args.kind}
    if args.part:
        chosen = part_of(chosen, *args.part)
    print(f"{'model':<16}{'layout':<58}loss     gradient weight   eval     verdict")
    for kind, layouts in chosen.items():
        if reason := missing(kind):
            unseen += len(layouts)
            print(f"{kind:<16}NOT SHOWN: {reason}", flush=True)
            continue
        for row in prove(kind, layouts):
            found = row.comparison
            sizes = astuple(found.sizes) if found is not None else ()
            shown = " ".join(f"{size:<8.1e}" for size in sizes)
            total += 1
            same += row.verdict == "same"
            detail = f": {row.detail}" if row.detail else ""
            print(f"{kind:<16}{row.layout!s:<58}{shown:<36}{row.verdict}{detail}", flush=True)
    part = "part {}/{}, ".format(*args.part) if args.part else ""
    hidden = f", {unseen} not shown" if unseen else ""
    seconds = time.perf_counter() - start
    print(f"{same} of {total} same{hidden} ({part}{STEPS} steps, {seconds:.0f} s)")
    return 0 if same == total else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunError as error:
        sys.exit(f"parity: {error}")
