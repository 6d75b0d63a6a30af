"""What a model is trained for: a loss that is a mean over samples, and metrics as exact sums.

A loss has to be the mean over the samples it is given, or over their counted targets where the source
says how many each sample has (`count_targets`): that is what lets any split of the global batch be put
together again exactly. Metrics are pairs (sum, count), added over batches and ranks before anything is
divided. Called by `train/setup.py` and `train/evaluate.py`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.errors import UsageError, unknown_word
from ridgeline.named import import_named, tell_place

Loss = Callable[[Any, Tensor], Tensor]
Sums = dict[str, tuple[Tensor, Tensor]]

IGNORED = -100
"""A target that counts for nothing, as in torch."""


@dataclass(frozen=True)
class Task:
    """A loss and its metrics. `sums` maps outputs and targets to (sum, count) pairs."""

    name: str
    loss: Loss
    sums: Callable[[Any, Tensor], Sums]
    finish: Callable[[dict[str, float]], dict[str, float]] = lambda means: means
    """Turns means into what people read: a root of a mean square, a perplexity."""
    metrics: tuple[str, ...] = ("loss",)
    """Names an evaluation gives, which are the names a target can have."""
    higher_is_better: frozenset[str] = frozenset()
    skips_ignored: bool = False
    """Whether the loss is a mean over the targets that are not IGNORED, of all samples together."""


def main_output(outputs: Any) -> Tensor:
    """The tensor a loss is taken of: the output, its `logits`, or the first of a tuple."""
    if isinstance(outputs, Tensor):
        return outputs
    logits = (
        outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", None)
    )
    if isinstance(logits, Tensor):
        return logits
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    raise UsageError(
        f"the model returned {type(outputs).__name__}; a task needs a tensor, or something whose "
        "`logits` or first item is one (train.task=module:function takes any)"
    )


def _count(value: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return value.double(), torch.tensor(count, dtype=torch.float64, device=value.device)


def _classify_loss(outputs: Any, targets: Tensor) -> Tensor:
    logits = main_output(outputs)
    if logits.dim() != 2 or targets.shape not in (logits.shape[:1], logits.shape):
        wanted = "[samples, classes] and [samples], or [samples, classes] for both"
        raise _shapes("classify", wanted, logits, targets)
    return F.cross_entropy(logits, targets)


def _segment_loss(outputs: Any, targets: Tensor) -> Tensor:
    logits = main_output(outputs)
    if logits.dim() < 3 or logits.shape[2:] != targets.shape[1:]:
        raise _shapes("segment", "[samples, classes, ...] and [samples, ...]", logits, targets)
    return F.cross_entropy(logits, targets)


def _shapes(task: str, wanted: str, outputs: Tensor, targets: Tensor) -> UsageError:
    """Shapes that do not belong together; torch would broadcast some of them in silence."""
    return UsageError(
        f"task {task} wants outputs and targets shaped {wanted}, but they are "
        f"{list(outputs.shape)} and {list(targets.shape)}; change the model, the data or train.task"
    )


def _classify_sums(outputs: Any, targets: Tensor) -> Sums:
    # Of shares of classes (mixed samples) the largest is the one to find.
    labels = targets if targets.dim() == 1 else targets.argmax(1)
    right = (main_output(outputs).argmax(1) == labels).sum()
    return {"accuracy": _count(right, labels.numel())}


def _segment_sums(outputs: Any, targets: Tensor) -> Sums:
    right = (main_output(outputs).argmax(1) == targets).sum()
    return {"pixel_accuracy": _count(right, targets.numel())}


def _causal_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Mean over the targets that are not ignored; 0 where all are, which torch calls no number."""
    logits = main_output(outputs)
    some = (targets != IGNORED).sum().clamp(max=1)
    targets = torch.where(some > 0, targets, 0)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED) * some


def _with_perplexity(means: dict[str, float]) -> dict[str, float]:
    loss = means["loss"]
    return {**means, "perplexity": math.exp(loss) if loss < 700 else math.inf}


def _masked_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Mean over samples of the mean over their masked positions, whatever their number."""
    logits = main_output(outputs)
    each = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(targets.shape)
    masked = (targets != IGNORED).sum(1).clamp(min=1)
    return (each.sum(1) / masked).mean()


def _token_sums(outputs: Any, targets: Tensor) -> Sums:
    counted = targets != IGNORED
    right = ((main_output(outputs).argmax(-1) == targets) & counted).sum()
    return {"token_accuracy": (right.double(), counted.sum().double())}


def _forecast_loss(outputs: Any, targets: Tensor) -> Tensor:
    predicted = main_output(outputs)
    if predicted.shape != targets.shape:
        raise _shapes("forecast", "alike", predicted, targets)
    return F.mse_loss(predicted, targets)


def _forecast_sums(outputs: Any, targets: Tensor) -> Sums:
    error = (main_output(outputs).double() - targets.double()).square().sum()
    return {"rmse": _count(error, targets.numel())}


def _root(means: dict[str, float]) -> dict[str, float]:
    return {**means, "rmse": math.sqrt(means["rmse"])}


TASKS: dict[str, Task] = {
    "classify": Task(
        "classify",
        _classify_loss,
        _classify_sums,
        metrics=("loss", "accuracy"),
        higher_is_better=frozenset({"accuracy"}),
        skips_ignored=True,
    ),
    "segment": Task(
        "segment",
        _segment_loss,
        _segment_sums,
        metrics=("loss", "pixel_accuracy"),
        higher_is_better=frozenset({"pixel_accuracy"}),
        skips_ignored=True,
    ),
    "causal_lm": Task(
        "causal_lm",
        _causal_loss,
        _token_sums,
        _with_perplexity,
        metrics=("loss", "token_accuracy", "perplexity"),
        higher_is_better=frozenset({"token_accuracy"}),
        skips_ignored=True,
    ),
    "masked_lm": Task(
        "masked_lm",
        _masked_loss,
        _token_sums,
        _with_perplexity,
        metrics=("loss", "token_accuracy", "perplexity"),
        higher_is_better=frozenset({"token_accuracy"}),
    ),
    "forecast": Task("forecast", _forecast_loss, _forecast_sums, _root, ("loss", "rmse")),
}


def build_task(name: str, natural: str) -> Task:
    """A task by name; `auto` takes the source's own; `module:function` is a loss of the user's."""
    if name == "auto":
        name = natural
    if name in TASKS:
        return TASKS[name]
    if ":" not in name:
        raise unknown_word("task", name, TASKS, "train.task")
    return Task(name, _user_loss(name), lambda outputs, targets: {})


def _user_loss(name: str) -> Loss:
    found = import_named(name, "train.task")
    if not callable(found):
        raise UsageError(f"train.task={name} is not a function of outputs and targets")
    _require_two(name, found)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        value = found(outputs, targets)
        if not isinstance(value, Tensor) or value.dim() != 0:
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else value
            raise UsageError(
                f"train.task={name} returned {what}; it should return one number as a tensor, the "
                "mean loss over the samples it was given"
            )
        return value

    return loss


def _require_two(name: str, found: Callable[..., Any]) -> None:
    """A loss that cannot be called as it will be: known before a step, and Python's own error would not say
    which setting it comes from."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # one written in C may not say what it takes
        return
    try:
        signature.bind("outputs", "targets")
    except TypeError as error:
        word = name.partition(":")[2]
        raise UsageError(
            f"train.task={name} is called as {word}(outputs, targets), and {word}{signature}"
            f"{tell_place(found)} cannot be ({error}); let it take two positional arguments, what the "
            "model returned and the targets, with defaults for any others"
        ) from None


def check_target(target: dict[str, float], task: Task) -> None:
    """A target that no evaluation will ever give is a mistake to hear of before training."""
    for name in target:
        if name not in task.metrics:
            raise unknown_word("metric", name, task.metrics, "train.target")
