"""What `transformers` calls the weights and the settings of our Llama, and back. Plain text, no torch.

The values are the same: both turn the two halves of a head against each other, so no weight has to be
permuted. Used by `ridgeline checkpoint export --names transformers` and by `model.weights`.
"""

from __future__ import annotations

import re
from typing import Any

from ridgeline.models.llama_sizes import LlamaConfig

_OUTSIDE = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_INSIDE = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_BACK = {theirs: ours for ours, theirs in (_OUTSIDE | _INSIDE).items()}
_OURS = re.compile(r"(?:layers\.(\d+)\.)?(.+)\.weight$")
_THEIRS = re.compile(r"(?:model\.layers\.(\d+)\.)?(.+)\.weight$")


def to_transformers(name: str) -> str:
    """The name that `LlamaForCausalLM` has for a weight of ours."""
    match = _OURS.match(name)
    known = _OUTSIDE if match is None or match[1] is None else _INSIDE
    if match is None or match[2] not in known:
        raise ValueError(f"{name} is no weight of our Llama")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{known[match[2]]}.weight"


def from_transformers(name: str) -> str:
    """Our name for a weight of `LlamaForCausalLM`; one that we have no name for keeps its own."""
    match = _THEIRS.match(name)
    if match is None or match[2] not in _BACK:
        return name
    layer = "" if match[1] is None else f"layers.{match[1]}."
    return f"{layer}{_BACK[match[2]]}.weight"


def is_transformers(names: set[str]) -> bool:
    """Whether a file's keys are those of `LlamaForCausalLM`."""
    return "model.embed_tokens.weight" in names


def is_computed(name: str) -> bool:
    """Tables that older files hold and that nobody reads."""
    return name.endswith("rotary_emb.inv_freq")


def transformers_config(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """`config.json` for `LlamaForCausalLM.from_pretrained`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,  # where versions before 5 look
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def check_config(found: dict[str, Any], config: LlamaConfig) -> list[str]:
    """What a `config.json` says that the shapes of weights do not, and that is otherwise here."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    findings = []
    if kind != "default":
        findings.append(
            f"it stretches rotary angles ({kind}), which ours does not; "
            "use model.name=transformers:LlamaForCausalLM"
        )
    theta = rope.get("rope_theta", found.get("rope_theta", config.rope_theta))
    for name, theirs, ours in (
        ("heads", found.get("num_attention_heads"), config.heads),
        ("kv_heads", found.get("num_key_value_heads"), config.num_kv_heads),
        ("rope_theta", theta, config.rope_theta),
        ("norm_eps", found.get("rms_norm_eps"), config.norm_eps),
    ):
        if theirs is not None and theirs != ours:
            findings.append(f"it has {name}={theirs} and model.args gives {ours}")
    return findings
