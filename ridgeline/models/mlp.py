"""A plain multi-layer perceptron, the smallest model that trains; built by `build_model("mlp")`.

It flattens whatever it is given, so the same model takes feature vectors and images. The layers are
one `Sequential`, which makes it the first thing to try any technique on.
"""

from __future__ import annotations

from torch import Tensor, nn

from ridgeline.errors import unknown_word
from ridgeline.models.init import reset_layers

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


class MLP(nn.Module):
    """`depth` hidden layers of `hidden` units each, then a linear head."""

    def __init__(
        self,
        in_features: int = 64,
        hidden: int = 128,
        depth: int = 2,
        out_features: int = 10,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise unknown_word("activation", activation, ACTIVATIONS, "MLP(activation=)")
        layers: list[nn.Module] = [nn.Flatten()]
        width = in_features
        for _ in range(depth):
            layers += [nn.Linear(width, hidden), ACTIVATIONS[activation]()]
            width = hidden
        layers.append(nn.Linear(width, out_features))
        self.layers = nn.Sequential(*layers)

    def init_weights(self) -> None:
        reset_layers(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits
