"""AlexNet in the one-tower form of Krizhevsky (2014), layer for layer as torchvision has it.

Kept because it is two models in one: convolutions that have few weights and much arithmetic, and
linear layers that have 96 % of the weights and little arithmetic. Parameter names and order are
torchvision's at 63 pixels and above, so its weights load. Built by `build_model("alexnet")`.
"""

from __future__ import annotations

from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.models.init import reset_layers

SMALLEST_STANDARD_IMAGE = 63
SMALLEST_IMAGE = 8
POOLED_SIZE = 6


class AlexNet(nn.Module):
    """Five convolutions, three pools and three linear layers.

    The published stem (11x11 stride 4, overlapping 3x3 pools) leaves nothing of an image under 63
    pixels. Below that the stem is a 3x3 stride-1 convolution and the pools are 2x2, so the maps
    shrink 8-fold instead of 32-fold (8 -> 1, 32 -> 4), and the classifier takes what is left.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 1000,
        image_size: int = 224,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if image_size < SMALLEST_IMAGE:
            raise UsageError(
                f"AlexNet takes images of at least {SMALLEST_IMAGE} pixels, not {image_size}"
            )
        small = image_size < SMALLEST_STANDARD_IMAGE
        if small:
            stem = nn.Conv2d(in_channels, 64, 3, padding=1)
        else:
            stem = nn.Conv2d(in_channels, 64, 11, stride=4, padding=2)
        pool_size = 2 if small else 3
        self.features = nn.Sequential(
            stem,
            nn.ReLU(),
            nn.MaxPool2d(pool_size, stride=2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(pool_size, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(pool_size, stride=2),
        )
        map_size = _map_size(image_size, small)
        pooled_size = min(map_size, POOLED_SIZE) if small else POOLED_SIZE
        # Maps that already fit are passed on: the adaptive pool has no deterministic CUDA backward.
        self.avgpool: nn.Module = (
            nn.Identity() if map_size == pooled_size else nn.AdaptiveAvgPool2d(pooled_size)
        )
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * pooled_size**2, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, num_classes),
        )

    def init_weights(self) -> None:
        reset_layers(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        logits: Tensor = self.classifier(x.flatten(1))
        return logits


def _map_size(image_size: int, small: bool) -> int:
    """Edge length of the last feature maps."""
    if small:
        return image_size // 8
    size = (image_size + 2 * 2 - 11) // 4 + 1
    for _ in range(3):
        size = (size - 3) // 2 + 1
    return size
