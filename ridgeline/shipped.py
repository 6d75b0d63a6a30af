"""The short names of what comes with Ridgeline, for commands that check a recipe before they start it.

What each stands for is in tables beside the code (`models/build.py`, `data/build.py`, `train/tasks.py`),
which load torch; a test holds the two to each other. Imports nothing.
"""

from __future__ import annotations

from typing import Final

MODELS: Final = (
    "alexnet", "bert", "cifar_cnn", "llama", "mlp", "resnet18", "resnet34", "resnet50", "resnet101",
    "unet2d", "unet3d", "vit",
)  # fmt: skip
SOURCES: Final = ("digits", "fields", "images", "packed", "synthetic", "text")
METRICS: Final = {
    "classify": ("loss", "accuracy"),
    "segment": ("loss", "pixel_accuracy"),
    "causal_lm": ("loss", "token_accuracy", "perplexity"),
    "masked_lm": ("loss", "token_accuracy", "perplexity"),
    "forecast": ("loss", "rmse"),
}
"""Of each task, what an evaluation gives."""
TASKS: Final = tuple(METRICS)
NATURAL: Final = {
    "digits": "classify", "fields": "forecast", "images": "classify", "synthetic": "classify",
    "text": "causal_lm",
}  # fmt: skip
"""What a source is for where its argument `task` says nothing else. Of others their data decides."""
