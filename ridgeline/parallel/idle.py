"""Gradients that torch's `fully_shard` leaves to chance: of parameters that a rank did not use, and of
those that it cannot shard.

It reduces the gradients that are there, so that ranks which used other experts, or other branches, send
buffers of other sizes. Here a parameter without a gradient sends zeros, as in stages 1 and 2; where no
rank has a gradient it has none after backward either, and the optimizer leaves it alone as it would on one
device. Parameters without dimensions are whole on every rank; their gradients are averaged over the same
ranks as backward ends. Called by `fsdp.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class IdleParameters:
    """Watches the backward passes of a module that `fully_shard` has sharded; `groups` are those it
    reduces over, `whole` the parameters that it leaves alone."""

    def __init__(
        self,
        model: nn.Module,
        groups: list[dist.ProcessGroup],
        whole: Sequence[nn.Parameter] = (),
    ) -> None:
        self._groups = groups
        self._whole = [p for p in whole if p.requires_grad]
        self._used: set[int] = set()
        states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
        together = [group for state in states for group in _groups_of(state)]
        self._parameters = [
            p for group in together for p in group.fsdp_params if p.sharded_param.requires_grad
        ]
        if not self._parameters and not self._whole:
            return
        self._device = together[0].device if together else self._whole[0].device
        # On the objects themselves, where torch looks them up at every pass.
        for group in together:
            group.post_backward = self._filled(group, group.post_backward)
        for state in states:
            last = state._root_post_backward_final_callback
            state._root_post_backward_final_callback = self._agreed(last)

    def _filled(self, group: Any, reduce: Callable[..., None]) -> Callable[..., None]:
        """The reduction of weights that are gathered together, with zeros for what has no gradient."""

        def post_backward(*unused: Any) -> None:
            for parameter in group.fsdp_params if group.reduce_grads else ():
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is None or not whole.requires_grad:
                    continue
                is_here = parameter.unsharded_accumulated_grad is not None or whole.grad is not None
                if is_here or parameter.sharded_param.grad is not None:  # that of an earlier pass
                    self._used.add(id(parameter))
                if not is_here:
                    whole.grad = torch.zeros_like(whole)
            reduce(*unused)

        return post_backward

    def _agreed(self, last: Callable[[], None]) -> Callable[[], None]:
        """The end of a backward pass, after which all ranks know what nobody used."""

        def callback() -> None:
            last()
            used = [id(p) in self._used for p in self._parameters]
            used += [p.grad is not None for p in self._whole]
            self._used.clear()
            # The usual case, in which the host neither copies anything nor waits for the answer.
            make = {"dtype": torch.int32, "device": self._device}
            flags = torch.ones(len(used), **make) if all(used) else torch.tensor(used, **make)
            for group in self._groups:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
            self._average_whole()
            if not all(used):
                held = [*(p.sharded_param for p in self._parameters), *self._whole]
                for parameter, anywhere in zip(held, flags.tolist(), strict=True):
                    if not anywhere:
                        parameter.grad = None

        return callback

    @torch.no_grad()
    def _average_whole(self) -> None:
        """Every rank has the mean after this. What earlier passes left is the same on all of them, and so
        is its mean: a step may have any number of passes."""
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self._whole:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            kinds.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in kinds.values():
            together = torch.stack(gradients)
            for group in self._groups:
                dist.all_reduce(together, op=dist.ReduceOp.AVG, group=group)
            for gradient, mean in zip(gradients, together, strict=True):
                gradient.copy_(mean)


def _groups_of(state: Any) -> list[Any]:
    """The weights of a module that are gathered together; before torch 2.13 all of them, or none."""
    several = getattr(state, "_fsdp_param_groups", None)
    one = getattr(state, "_fsdp_param_group", None)
    return list(several) if several is not None else [one] * (one is not None)
