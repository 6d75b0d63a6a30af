"""Cross-entropy of a linear layer's outputs without ever holding all of them.

For a vocabulary of 32,768 and 65,536 tokens the logits alone are 4 GB in bf16, and their gradient as much
again. Here some tokens at a time are multiplied, turned into a loss and into gradients, and forgotten; the
gradients are computed in forward, since backward would only multiply again. Sums are in float32 at least.
`defer_head` finds a model's output layer by watching it run, and has it hand on its input in training.
Called by `train/chunked.py`.

Shapes: T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.models.inputs import call_arguments
from ridgeline.parallel.operators import as_type


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        shares_T: Tensor,
        chunk: int,
        dtype: torch.dtype,
    ) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        weight, bias = as_type(weight_VD, dtype), None if bias_V is None else as_type(bias_V, dtype)
        # Relative to the largest share: 1/65536 of a small probability is nothing in float16.
        top = as_type(shares_T.max(), wide).clamp(min=torch.finfo(wide).tiny)
        total = torch.zeros((), dtype=wide, device=x_TD.device)
        grads_x = []
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=x_TD.device)
        grad_bias = torch.zeros(weight.shape[:1], dtype=wide, device=x_TD.device)
        for start in range(0, x_TD.shape[0], chunk):
            part = as_type(x_TD[start : start + chunk], dtype)
            index = targets_T[start : start + chunk].unsqueeze(1)
            share = as_type(shares_T[start : start + chunk], wide)
            logits = as_type(F.linear(part, weight, bias), wide)
            norm = logits.logsumexp(1, keepdim=True)
            total = total + ((norm - logits.gather(1, index)).squeeze(1) * share).sum()
            each = torch.exp(logits - norm)
            each = each.scatter_add(1, index, torch.full_like(norm, -1.0))
            each = each * (share / top).unsqueeze(1)
            narrow = as_type(each, dtype)
            grads_x.append(narrow @ weight)
            grad_weight = grad_weight + as_type(narrow.t() @ part, wide)
            if bias is not None:
                grad_bias = grad_bias + each.sum(0)
        ctx.save_for_backward(torch.cat(grads_x), grad_weight, grad_bias, top)
        ctx.dtypes = (x_TD.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, grad_bias, top = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.dtypes
        factor = as_type(grad, grad_weight.dtype) * top
        return (
            as_type(as_type(grad_x, grad_weight.dtype) * factor, of_x),
            as_type(grad_weight * factor, of_weight),
            None if of_bias is None else as_type(grad_bias * factor, of_bias),
            None,
            None,
            None,
            None,
        )


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    shares_T: Tensor,
    chunk: int = 4096,
) -> Tensor:
    """The sum over tokens of share x cross-entropy of `F.linear(x, weight, bias)`.

    A token that does not count has share 0, and any target that is in the vocabulary.
    """
    kind = x_TD.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_TD.dtype
    with torch.autocast(kind, enabled=False):
        return _Loss.apply(x_TD, weight_VD, bias_V, targets_T, shares_T, chunk, dtype)


class DeferredLinear(nn.Linear):
    """An output layer that leaves its product to the loss while the model trains."""

    def forward(self, input: Tensor) -> Tensor:
        return input if self.training else super().forward(input)


@torch.no_grad()
def defer_head(model: nn.Module, example: tuple[Any, ...], output_of: Any) -> DeferredLinear:
    """The layer whose outputs are the model's, from now on a `DeferredLinear`.

    `output_of` takes the tensor of logits out of what the model returns. Both ways are run once on the
    example, and a model that does anything to the logits after that layer is refused.
    """
    was_training = model.training
    args, kwargs = call_arguments(example)
    model.eval()
    made: dict[str, Tensor] = {}
    layers = {n: m for n, m in model.named_modules() if type(m) is nn.Linear}
    handles = [
        layer.register_forward_hook(lambda _, __, out, name=name: made.__setitem__(name, out))
        for name, layer in layers.items()
    ]
    try:
        whole = output_of(model(*args, **kwargs))
        for handle in handles:
            handle.remove()
        same = [n for n, out in made.items() if out.shape == whole.shape and out.equal(whole)]
        if not same:
            raise UsageError(
                f"tune.loss=chunked needs a model whose outputs are those of an nn.Linear, and in "
                f"{type(model).__name__} no layer's are; leave it out"
            )
        head = layers[same[-1]]
        head.__class__ = DeferredLinear
        head.training = True
        hidden = output_of(model(*args, **kwargs))
        head.training = False
        if hidden.shape[:-1] != whole.shape[:-1] or hidden.shape[-1] != head.in_features:
            raise _after(same[-1])
        if not F.linear(hidden.to(head.weight.dtype), head.weight, head.bias).equal(whole):
            head.__class__ = nn.Linear
            raise _after(same[-1])
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)
    return head  # type: ignore[return-value]


def _after(name: str) -> UsageError:
    return UsageError(
        f"tune.loss=chunked takes the product of {name} into the loss, but the model does something to "
        "its outputs after it; leave it out"
    )
