"""Models that have a name, as sizes: this library's Llamas and the GPTs of the published tables.

Planning needs no torch, and the models' own room does; a test keeps the Llamas equal to theirs. A recipe's
model is found here too, with the sizes it overrides. Called by `cli_plan.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ridgeline.errors import UsageError, unknown_word
from ridgeline.plan.transformer import Transformer


def _llama(
    name: str, vocab: int, width: int, depth: int, heads: int, ffn: int, seq: int,
    kv_heads: int = 0, tied: bool = False,
) -> Transformer:  # fmt: skip
    return Transformer(
        name, depth, width, heads, ffn, seq, vocab, kv_heads=kv_heads, gated=True, tied=tied,
        learned_positions=False, rotary=True, rms_norm=True, bias=False, dropout=False,
    )  # fmt: skip


def _gpt(name: str, layers: int, hidden: int, heads: int) -> Transformer:
    return Transformer(name, layers, hidden, heads, 4 * hidden, 2048, 51200)


MODELS: Final = {
    model.name: model
    for model in (
        _llama("1m", 1024, 128, 4, 4, 352, 1024),
        _llama("5m", 1024, 256, 6, 4, 704, 1024),
        _llama("15m", 2048, 384, 8, 6, 1024, 1024),
        _llama("60m", 32_768, 512, 8, 8, 1408, 2048),
        _llama("124m", 32_768, 768, 12, 6, 2048, 2048),
        _llama("350m", 32_768, 1024, 24, 8, 2816, 2048),
        _llama("1.3b", 32_768, 2048, 24, 16, 5632, 2048),
        _llama("3b", 32_768, 2560, 32, 20, 6912, 2048),
        _llama("llama2-7b", 32_000, 4096, 32, 32, 11_008, 4096),
        _llama("llama2-13b", 32_000, 5120, 40, 40, 13_824, 4096),
        _llama("llama2-70b", 32_000, 8192, 80, 64, 28_672, 4096, 8),
        _llama("llama3.2-1b", 128_256, 2048, 16, 32, 8192, 8192, 8, tied=True),
        _llama("llama3.2-3b", 128_256, 3072, 28, 24, 8192, 8192, 8, tied=True),
        _llama("llama3-8b", 128_256, 4096, 32, 32, 14_336, 8192, 8),
        _llama("llama3-70b", 128_256, 8192, 80, 64, 28_672, 8192, 8),
        _llama("llama3-405b", 128_256, 16_384, 126, 128, 53_248, 8192, 8),
        _gpt("gpt-1.7b", 24, 2304, 24),
        _gpt("gpt-18b", 40, 6144, 48),
        _gpt("gpt-39b", 48, 8192, 64),
        _gpt("gpt-175b", 96, 12_288, 96),
        _gpt("gpt-530b", 105, 20_480, 128),
        _gpt("gpt-1t", 128, 25_600, 160),
    )
}

_ARGS: Final = {
    "vocab": "vocab",
    "width": "hidden",
    "depth": "layers",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "ffn": "ffn",
    "max_seq": "seq",
    "tie_embeddings": "tied",
}
"""Arguments of the Llama's constructor, and what they are called here."""
_NO_SIZES: Final = ("size", "rope_theta", "norm_eps", "separator")
"""Its others."""


def find_model(name: str, seq: int | None = None) -> Transformer:
    if name not in MODELS:
        raise unknown_word("model", name, MODELS, "the command line (or give a recipe)")
    model = MODELS[name]
    return model if seq is None else replace(model, seq=seq)


def model_of_recipe(name: str, args: Mapping[str, Any], seq: int | None) -> Transformer:
    """The sizes of a recipe's `model`; only Llamas have them so far."""
    if name != "llama":
        raise UsageError(
            f"model.name={name} has no sizes that the planner knows; it plans llama recipes and these "
            f"models: {', '.join(MODELS)}"
        )
    for key in args:
        if key not in _ARGS and key not in _NO_SIZES:
            raise unknown_word("argument", key, (*_ARGS, *_NO_SIZES), "model.args of llama")
    size = str(args.get("size", "1m"))
    if size not in MODELS:
        raise unknown_word("size", size, MODELS, "model.args.size")
    changes: dict[str, Any] = {_ARGS[k]: v for k, v in args.items() if k in _ARGS and v is not None}
    if "hidden" in changes or "heads" in changes:
        changes.setdefault("head_width", 0)
        if "heads" in changes:
            changes.setdefault("kv_heads", 0)
        if "hidden" in changes:
            changes.setdefault("ffn", -(-8 * changes["hidden"] // (3 * 64)) * 64)
    if seq is not None:
        changes["seq"] = seq
    return replace(MODELS[size], **changes)
