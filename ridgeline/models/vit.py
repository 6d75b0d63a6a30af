"""Vision transformer (Dosovitskiy et al. 2020): classifies images, or maps a field to the next one.

The forecast task is the model of global-weather tutorials: fields of, say, 20 variables on a
360x720 grid in, the same grid out. Built by `build_model("vit")`.

Shapes: B batch, C channels, T tokens (patches, and the class token if any), D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ridgeline.errors import UsageError, unknown_word
from ridgeline.models.encoder import FeedForward, SelfAttention
from ridgeline.models.init import init_transformer

TASKS = ("classify", "forecast")
POOLS = ("cls", "mean")
NORM_EPS = 1e-6
INIT_STD = 0.02

# Published configurations, as arguments: ViT(**SIZES["b16"])
SIZES: dict[str, dict[str, int | str]] = {
    "s16": {"patch": 16, "width": 384, "depth": 12, "heads": 6, "pool": "cls"},
    "b16": {"patch": 16, "width": 768, "depth": 12, "heads": 12, "pool": "cls"},
    "l16": {"patch": 16, "width": 1024, "depth": 24, "heads": 16, "pool": "cls"},
}


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each around a residual."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.attention = SelfAttention(width, heads)
        self.ffn_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.feed_forward = FeedForward(width, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        out_BTD: Tensor = x_BTD + self.dropout(self.feed_forward(self.ffn_norm(x_BTD)))
        return out_BTD


class ViT(nn.Module):
    """Patches in, blocks, and a head for the task.

    `task="classify"` gives logits of `num_classes`, read from a class token (`pool="cls"`) or from
    the mean of the patches. `task="forecast"` gives a field of `out_channels` channels (default: as
    many as come in) on the input's grid, each patch by one linear map of its token; it has no class
    token and ignores `pool` and `num_classes`. `image_size` is the edge, or height and width.
    """

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        patch: int = 8,
        width: int = 384,
        depth: int = 12,
        heads: int = 8,
        mlp_ratio: float = 4,
        num_classes: int = 1000,
        task: str = "classify",
        out_channels: int | None = None,
        pool: str = "mean",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if task not in TASKS:
            raise unknown_word("task", task, TASKS, "ViT(task=)")
        if pool not in POOLS:
            raise unknown_word("pool", pool, POOLS, "ViT(pool=)")
        height, breadth = (image_size, image_size) if isinstance(image_size, int) else image_size
        if height % patch or breadth % patch:
            raise UsageError(f"a {height}x{breadth} image does not divide into patches of {patch}")
        self.task = task
        self.patch = patch
        self.grid = (height // patch, breadth // patch)
        has_cls = task == "classify" and pool == "cls"
        num_tokens = self.grid[0] * self.grid[1] + has_cls

        self.patch_embed = nn.Conv2d(in_channels, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width)) if has_cls else None
        self.pos_embed = nn.Parameter(torch.empty(1, num_tokens, width))
        self.dropout = nn.Dropout(dropout)
        hidden = int(width * mlp_ratio)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        if task == "forecast":
            num_classes = (out_channels or in_channels) * patch**2
        self.head = nn.Linear(width, num_classes)
        self.init_weights()

    def init_weights(self) -> None:
        init_transformer(self, INIT_STD)
        nn.init.trunc_normal_(self.pos_embed, std=INIT_STD)
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=INIT_STD)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BTD = self.patch_embed(x_BCHW).flatten(2).transpose(1, 2)
        if self.cls_token is not None:
            cls_B1D = self.cls_token.expand(x_BTD.shape[0], -1, -1).to(x_BTD.dtype)
            x_BTD = torch.cat([cls_B1D, x_BTD], dim=1)
        x_BTD = self.dropout(x_BTD + self.pos_embed)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_BTD = self.norm(x_BTD)
        if self.task == "forecast":
            return self._unpatchify(self.head(x_BTD))
        pooled_BD = x_BTD[:, 0] if self.cls_token is not None else x_BTD.mean(dim=1)
        logits: Tensor = self.head(pooled_BD)
        return logits

    def _unpatchify(self, x: Tensor) -> Tensor:
        """(B, tokens, channels * patch * patch) -> (B, channels, height, width)."""
        rows, columns = self.grid
        x = x.view(x.shape[0], rows, columns, -1, self.patch, self.patch)
        return x.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
