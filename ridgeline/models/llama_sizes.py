"""What makes one Llama differ from another, and the sizes that have a name.

`llama.py` builds from these; the planner's tests read the published ones. Plain numbers, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FFN_MULTIPLE = 64


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama."""

    vocab: int
    width: int
    depth: int
    heads: int
    kv_heads: int | None = None
    """Heads of keys and values, shared among the query heads; None: as many as `heads`."""
    ffn: int | None = None
    """Hidden width of the gated feed-forward; None: 8/3 of `width`, rounded up to 64s."""
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    max_seq: int = 2048
    """Longest sequence that has rotary angles; it costs no parameters."""

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def ffn_width(self) -> int:
        return (
            -(-8 * self.width // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE
            if self.ffn is None
            else self.ffn
        )

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def check_shape(self) -> list[str]:
        """What in these numbers does not fit together, in words; empty when all is well."""
        findings = []
        if self.width % self.heads:
            findings.append(f"width {self.width} does not divide into {self.heads} heads")
        elif self.head_width % 2:
            findings.append(f"a head is {self.head_width} wide, and rotary needs an even width")
        if self.num_kv_heads < 1 or self.heads % self.num_kv_heads:
            findings.append(f"{self.heads} heads do not divide among {self.num_kv_heads} kv_heads")
        return findings


_LLAMA2: dict[str, Any] = {"vocab": 32_000, "max_seq": 4096}
_LLAMA3: dict[str, Any] = {
    "vocab": 128_256,
    "max_seq": 8192,
    "rope_theta": 500_000.0,
    "kv_heads": 8,
}

# Ours up to 3b, named by about how many parameters they have; then the published family. Llama 3.1
# and later stretch the rotary angles beyond 8192 tokens; these do not, so 8192 is their limit here.
SIZES: dict[str, LlamaConfig] = {
    "1m": LlamaConfig(vocab=1024, width=128, depth=4, heads=4, ffn=352, max_seq=1024),
    "5m": LlamaConfig(vocab=1024, width=256, depth=6, heads=4, max_seq=1024),
    "15m": LlamaConfig(vocab=2048, width=384, depth=8, heads=6, max_seq=1024),
    "60m": LlamaConfig(vocab=32_768, width=512, depth=8, heads=8),
    "124m": LlamaConfig(vocab=32_768, width=768, depth=12, heads=6),
    "350m": LlamaConfig(vocab=32_768, width=1024, depth=24, heads=8, ffn=2816),
    "1.3b": LlamaConfig(vocab=32_768, width=2048, depth=24, heads=16, ffn=5632),
    "3b": LlamaConfig(vocab=32_768, width=2560, depth=32, heads=20, ffn=6912),
    "llama2-7b": LlamaConfig(**_LLAMA2, width=4096, depth=32, heads=32, ffn=11_008),
    "llama2-13b": LlamaConfig(**_LLAMA2, width=5120, depth=40, heads=40, ffn=13_824),
    "llama2-70b": LlamaConfig(**_LLAMA2, width=8192, depth=80, heads=64, kv_heads=8, ffn=28_672),
    "llama3.2-1b": LlamaConfig(
        **_LLAMA3, width=2048, depth=16, heads=32, ffn=8192, tie_embeddings=True
    ),
    "llama3.2-3b": LlamaConfig(
        **_LLAMA3, width=3072, depth=28, heads=24, ffn=8192, tie_embeddings=True
    ),
    "llama3-8b": LlamaConfig(**_LLAMA3, width=4096, depth=32, heads=32, ffn=14_336),
    "llama3-70b": LlamaConfig(**_LLAMA3, width=8192, depth=80, heads=64, ffn=28_672),
    "llama3-405b": LlamaConfig(**_LLAMA3, width=16_384, depth=126, heads=128, ffn=53_248),
}
