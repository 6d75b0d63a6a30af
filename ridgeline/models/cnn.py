"""A small convolutional classifier for CIFAR-10 and the 8x8 digits of scikit-learn.

Every first example uses it: it trains in seconds on a CPU. Built by `build_model("cifar_cnn")`.
"""

from __future__ import annotations

from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.models.init import reset_layers

HIDDEN_UNITS_PER_WIDTH = 4


class CifarCNN(nn.Module):
    """Stages of two 3x3 convolutions and a 2x2 pool, then two linear layers.

    Images of 16 pixels and more go through three stages (`width`, 2 and 4 times `width` channels);
    smaller ones through two, so that 8x8 digits still reach the head as 2x2 maps.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 10,
        image_size: int = 32,
        width: int = 32,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if image_size < 4:
            raise UsageError(f"CifarCNN takes images of at least 4 pixels, not {image_size}")
        num_stages = 3 if image_size >= 16 else 2
        layers: list[nn.Module] = []
        channels = in_channels
        for stage in range(num_stages):
            out_channels = width * 2**stage
            for _ in range(2):
                layers.append(nn.Conv2d(channels, out_channels, 3, padding=1, bias=not batch_norm))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(out_channels))
                layers.append(nn.ReLU())
                channels = out_channels
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        final_size = image_size // 2**num_stages
        hidden = HIDDEN_UNITS_PER_WIDTH * width
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(channels * final_size**2, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )
        self.init_weights()

    def init_weights(self) -> None:
        reset_layers(self)
        for module in self.features:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits
