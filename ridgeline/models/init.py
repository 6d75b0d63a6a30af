"""How a model draws its first weights, shared by every file in this room.

Each model here has `init_weights()`, which fills every parameter and buffer from torch's current
random state and nothing else. The constructors call it, and so does whoever builds a model on the
`meta` device and materialises it with `to_empty`: both give the same weights for the same seed.
"""

from __future__ import annotations

from torch import nn


def reset_layers(model: nn.Module) -> None:
    """Give every layer that torch knows how to reset its default weights and running statistics."""
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if module is not model and callable(reset):
            reset()


def init_transformer(model: nn.Module, std: float = 0.02) -> None:
    """Normal weights of width `std`, zero biases, unit norms: what transformers start from."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif module is not model and callable(reset := getattr(module, "reset_parameters", None)):
            reset()
