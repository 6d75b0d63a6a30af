"""Residual networks of 18, 34, 50 and 101 layers (He et al. 2015), named as in torchvision.

The bottleneck is version 1.5: the stride sits on the 3x3 convolution, not on the first 1x1, which
is what every published throughput figure for "ResNet-50" means. Built by `build_model("resnet50")`
and its siblings.
"""

from __future__ import annotations

from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.models.init import reset_layers


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(in_channels, width, stride)

    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(out + shortcut)
        return result


class Bottleneck(nn.Module):
    """1x1 down, 3x3 with the stride, 1x1 up to four times the width, and a shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(in_channels, out_channels, stride)

    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        shortcut = x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(out + shortcut)
        return result


# layers -> (block, blocks in each of the four stages)
LAYERS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
}


class ResNet(nn.Module):
    """A residual network of `layers` layers.

    `small_images` replaces the 7x7 stride-2 stem and its max-pool by one 3x3 convolution, for
    images of about 32 pixels. `zero_init_residual` starts every block as the identity, which helps
    large batches.
    """

    def __init__(
        self,
        layers: int,
        in_channels: int = 3,
        num_classes: int = 1000,
        small_images: bool = False,
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__()
        if layers not in LAYERS:
            raise UsageError(
                f"ResNet has no {layers}-layer form; known: {', '.join(map(str, LAYERS))}"
            )
        block, (n1, n2, n3, n4) = LAYERS[layers]
        self.zero_init_residual = zero_init_residual
        self.maxpool: nn.Module
        if small_images:
            self.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.layer1 = _stage(block, 64, 64, n1, stride=1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, n2, stride=2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, n3, stride=2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, n4, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        self.init_weights()

    def init_weights(self) -> None:
        reset_layers(self)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif self.zero_init_residual and isinstance(module, BasicBlock | Bottleneck):
                nn.init.zeros_(module.last_norm().weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def _stage(
    block: type[BasicBlock] | type[Bottleneck],
    in_channels: int,
    width: int,
    num_blocks: int,
    stride: int,
) -> nn.Sequential:
    """`num_blocks` blocks of one width, the first of which may halve the maps."""
    blocks = [block(in_channels, width, stride)]
    blocks += [block(width * block.expansion, width, 1) for _ in range(num_blocks - 1)]
    return nn.Sequential(*blocks)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """A 1x1 projection where the block changes shape, else nothing."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )
