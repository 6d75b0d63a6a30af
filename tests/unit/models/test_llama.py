"""Llama: causal, grouped heads, positions, and the same numbers as `transformers`."""

import pytest
import torch

from ridgeline.models.llama import Llama

TINY = {"vocab": 48, "width": 32, "depth": 2, "heads": 4, "max_seq": 64}


@pytest.fixture
def tokens():
    return torch.randint(48, (2, 12), generator=torch.Generator().manual_seed(0))


def widen(model):
    """Weights large enough for attention to matter; the initial ones barely move the residual."""
    torch.manual_seed(5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_later_token_does_not_change_earlier_logits(tokens, kv_heads):
    model = widen(Llama(**TINY, kv_heads=kv_heads)).double()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 48
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-14)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=(0, 2)).min() > 1e-6


def test_grouped_heads_equal_repeated_key_and_value_heads(tokens):
    grouped = widen(Llama(**TINY, kv_heads=2)).double()
    full = Llama(**TINY, kv_heads=4).double()
    weights = grouped.state_dict()
    for key, value in weights.items():
        if key.endswith(("wk.weight", "wv.weight")):
            weights[key] = value.view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(weights)
    torch.testing.assert_close(grouped(tokens), full(tokens), rtol=1e-12, atol=1e-12)


def test_positions_say_where_tokens_stand(tokens):
    model = widen(Llama(**TINY)).double()
    first = torch.arange(12)
    torch.testing.assert_close(model(tokens, first), model(tokens))
    torch.testing.assert_close(model(tokens, first.expand(2, -1)), model(tokens))
    # Rotary is relative: moving all tokens changes nothing, moving half of them does.
    torch.testing.assert_close(model(tokens, first + 20), model(tokens), rtol=1e-10, atol=1e-10)
    halves = torch.cat([first[:6], first[6:] + 20])
    assert (model(tokens, halves) - model(tokens)).abs().max() > 1e-3


def test_rotary_tables_do_not_depend_on_how_the_model_came_to_its_type():
    built = Llama(**TINY).double().layers[0].attention.rotary
    with torch.device("meta"):
        model = Llama(**TINY).double()
    materialised = model.to_empty(device="cpu").layers[0].attention.rotary
    round_trip = Llama(**TINY).bfloat16().double().layers[0].attention.rotary
    assert torch.equal(built.cos, materialised.cos)
    assert torch.equal(built.sin, round_trip.sin)
    assert (built.cos**2 + built.sin**2 - 1).abs().max() < 1e-15
    assert not any("rotary" in key for key in model.state_dict())


def test_tied_embeddings_stay_tied_off_the_meta_device():
    with torch.device("meta"):
        model = Llama(**TINY, tie_embeddings=True)
    model.to_empty(device="cpu")
    assert model.head.weight is model.embed.weight
    model.double()
    assert model.head.weight is model.embed.weight


def test_residual_projections_start_smaller():
    torch.manual_seed(0)
    model = Llama("1m", depth=8)
    layer = model.layers[0]
    assert layer.attention.wq.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.attention.wo.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert layer.feed_forward.w2.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


NAMES = {
    "embed": "embed_tokens",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


def name_in_transformers(key):
    if key.startswith("head."):
        return "lm_head.weight"
    for ours, theirs in NAMES.items():
        key = key.replace(ours, theirs)
    return "model." + key


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_agrees_with_transformers(tokens, kv_heads):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    theirs = widen(transformers.LlamaForCausalLM(config)).eval()
    ours = Llama(**TINY, kv_heads=kv_heads, ffn=64)
    weights = theirs.state_dict()
    ours.load_state_dict({key: weights[name_in_transformers(key)] for key in ours.state_dict()})
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
