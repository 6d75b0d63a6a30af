"""Data parallelism: every rank holds the model, gradients are averaged while backward goes on.

torch's DistributedDataParallel does the buckets and the overlap. `Replicated` adds two things: it
looks like the module it wraps (attributes, state-dict keys), so that code which has never heard of it
goes on working, and it weighs gradients by the share of the global batch that a rank really has, so
that an uneven batch gives the gradient of one device. Called by `apply.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from ridgeline.errors import UsageError
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.share import Share

_MAX_NAMES_SHOWN = 5


class _ScaleGradient(torch.autograd.Function):
    """The identity forward; backward multiplies the gradient by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


def _weigh_gradients(outputs: Any, scale: float) -> Any:
    """`outputs` whose gradients count `scale` times: tensors in any container torch knows, and in
    dataclasses. One that it cannot look into would be left out in silence, so that is an error."""
    weighed = 0

    def weigh(value: Any) -> Any:
        nonlocal weighed
        if isinstance(value, Tensor) and value.requires_grad:
            weighed += 1
            return _ScaleGradient.apply(value, scale)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [f.name for f in dataclasses.fields(value) if f.init]
            new = {name: tree_map(weigh, getattr(value, name)) for name in fields}
            return dataclasses.replace(value, **new)
        return value

    result = tree_map(weigh, outputs)
    if not weighed:
        raise UsageError(
            f"the model returned a {type(outputs).__name__} in which no tensor with a gradient was "
            "found; return a tensor, or a tuple, dict or dataclass of them, so that an uneven batch "
            "can be weighed"
        )
    return result


def weigh_outputs(module: nn.Module, share: Share) -> None:
    """Have the gradients of `module` weighed by the rank's share of the batch, as `Replicated` does."""
    forward = module.forward

    @functools.wraps(forward)
    def weighed(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        if share.scale == 1.0 or not torch.is_grad_enabled():
            return outputs
        return _weigh_gradients(outputs, share.scale)

    module.forward = weighed  # type: ignore[method-assign]


def _guarded(method: MethodType, name: str) -> Callable[..., Any]:
    """A method of the wrapped module, which must not be a way around the reduction of gradients."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        leaves = tree_leaves(result)
        if any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in leaves):
            raise UsageError(
                f"model.{name}(...) was called on a parallelized model and its result has gradients, "
                "which would not be reduced over the ranks; call the model itself, model(...), and "
                f"do what {name} does in its forward"
            )
        return result

    return call


class Replicated(DistributedDataParallel):
    """A module whose gradients are averaged over the data ranks, and which still looks like itself."""

    def __init__(self, module: nn.Module, share: Share, **options: Any) -> None:
        super().__init__(module, **options)
        self._share = share
        self._trained = [p for p in module.parameters() if p.requires_grad]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            outputs = super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            unused = self._unused(str(error))
            if not unused:
                raise
            raise UsageError(_say_unused(unused, "the step before")) from error
        if self._share.scale == 1.0 or not torch.is_grad_enabled():
            return outputs
        return _weigh_gradients(outputs, self._share.scale)

    def require_gradients(self) -> None:
        """After backward: a rank that would not take part in a reduction says so before it does anything
        else, which the others would take for its part."""
        if self.find_unused_parameters or all(p.grad is not None for p in self._trained):
            return
        missing = [n for n, p in self.named_parameters() if p.requires_grad and p.grad is None]
        raise UsageError(_say_unused(_first(missing), "this step"))

    def _unused(self, message: str) -> list[str]:
        """Names of the parameters that torch's complaint gives by number; empty for another one."""
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        if "Expected to have finished reduction" not in message or found is None:
            return []
        names = [name for name, value in self.named_parameters() if value.requires_grad]
        return _first([names[int(index)] for index in found[1].split()])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(super().__getattr__("module"), name)
        return _guarded(found, name) if isinstance(found, MethodType) else found

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)


def _first(names: list[str]) -> list[str]:
    rest = len(names) - _MAX_NAMES_SHOWN
    return names[:_MAX_NAMES_SHOWN] + [f"and {rest} more parameters"] * (rest > 0)


def _say_unused(names: list[str], when: str) -> str:
    return (
        f"{', '.join(names)} had no part in the loss of {when}, and every rank waited for their "
        "gradients: set ddp.find_unused=true (in a loop of your own parallelize(model, "
        "find_unused=True)), or take them out of the model"
    )


def apply_ddp(
    model: nn.Module, mesh: Mesh, share: Share, bucket_mb: float = 25.0, find_unused: bool = False
) -> nn.Module:
    """Wrap `model`; weights and buffers of rank 0 are sent to the others as this returns."""
    assert mesh.gradient_group is not None
    _spare_constants(model, mesh)
    return Replicated(
        model,
        share,
        device_ids=[mesh.device.index] if mesh.device.type == "cuda" else None,
        process_group=mesh.gradient_group,
        bucket_cap_mb=bucket_mb,
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=True,
    )


def _spare_constants(model: nn.Module, mesh: Mesh) -> None:
    """Send buffers that are no state (rotary tables, masks) once, not before every forward pass.

    Batch-norm statistics and other buffers of the state dict go on being rank 0's in every step.
    """
    kept = set(model.state_dict())
    constants = {name: buffer for name, buffer in model.named_buffers() if name not in kept}
    for buffer in constants.values():
        if buffer.is_contiguous():  # an expanded one is a view of a constant, and the same anyway
            torch.distributed.broadcast(buffer, group_src=0, group=mesh.gradient_group)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(constants))


def skip_reduction(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which backward only adds to local gradients: for all but the last microbatch."""
    return model.no_sync() if isinstance(model, Replicated) else nullcontext()


def watch_last_gradient(model: nn.Module, call: Callable[[], None]) -> None:
    """Call `call` when the last local gradient of a backward pass is there.

    Communication that ends after that moment is exposed. The parameter whose gradient comes last is
    found in the first backward pass, after which a single hook remains, so that it costs nothing.
    """
    order: list[nn.Parameter] = []
    hooks: list[Any] = []
    parameters = [p for p in model.parameters() if p.requires_grad]

    def first_pass(parameter: nn.Parameter) -> None:
        # With parameters that get no gradient, the pass is over when the next one begins.
        begins_again = any(parameter is known for known in order)
        if not begins_again:
            order.append(parameter)
        if begins_again or len(order) == len(parameters):
            for hook in hooks:
                hook.remove()
            order[-1].register_post_accumulate_grad_hook(lambda _: call())

    hooks.extend(p.register_post_accumulate_grad_hook(first_pass) for p in parameters)
