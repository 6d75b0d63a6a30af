"""What loops do with an engine that would go wrong in silence, or in somebody else's words.

An optimizer that is stepped past the engine updates with what one rank has; weights that are loaded once a
layout has copies of its own are written over by the next step, and those that are put in place of arranged
ones are updated by nobody; and ranks that were given fewer batches are gone when the others want to hear
from them. Called by `engine.py`.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol
from weakref import ref

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ridgeline.errors import OURS, UsageError
from ridgeline.launch.failures import is_echo
from ridgeline.parallel.arranged import Arranged
from ridgeline.parallel.mesh import Mesh


class Stepped(Protocol):
    """What an engine says of itself."""

    @property
    def is_updating(self) -> bool: ...
    @property
    def is_pending(self) -> bool: ...
    @property
    def has_passed(self) -> bool: ...


def refuse_own_steps(optimizer: Optimizer, engine: Callable[[], Stepped | None]) -> None:
    """Steps that the loop takes past its engine, while that is there: where gradients wait for the engine,
    and where there are some that it has not exchanged."""

    def before(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        one = engine()
        # Whoever restores a checkpoint has the optimizer make its state by a step that changes nothing.
        if one is None or one.is_updating or not any(g["lr"] for g in optimizer.param_groups):
            return
        if one.is_pending:
            raise UsageError(
                "optimizer.step() was called in place of engine.step(), which clips, updates and gives all "
                "ranks the new weights; call engine.step()"
            )
        if one.has_passed:
            raise UsageError(
                "optimizer.step() was called after a forward pass through engine(...) whose loss did not "
                "go through the engine; call engine.backward(loss), and engine.step()"
            )
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "optimizer.step() was called with gradients that are of this rank alone, or of a part of a "
                "step; call engine(...), engine.backward(loss) and engine.step(), which updates after the "
                "last microbatch"
            )

    # An optimizer of the loop's own that calls itself one without being made as one has none of these.
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        optimizer.register_step_pre_hook(before)


class _Mark:
    """A model's hook, which goes with copies of it and so holds nothing."""

    def __init__(self) -> None:
        self.is_new = False

    def __call__(self, _module: nn.Module, _keys: Any) -> None:
        self.is_new = True


class _NoAssigning:
    """A model's hook, too: weights that take the place of arranged ones its optimizer never updates, and
    other ranks never see. Copies of the model and files of it have one that does nothing instead, and needs
    nothing of ours to be read."""

    def __init__(self, loads: Loads) -> None:
        self._loads = ref(loads)

    def __call__(self, _module: Any, _state: Any, _prefix: str, how: Any, *_: Any) -> None:
        if how.get("assign_to_params_buffers") and self._loads() is not None:
            raise UsageError(
                "load_state_dict(..., assign=True) would put other tensors in place of the weights that "
                "job.engine(model, optimizer) has arranged; leave assign out, so that values are copied, "
                "or load before job.engine"
            )

    def __deepcopy__(self, _memo: Any) -> type[nn.Module]:
        return nn.Identity

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (nn.Identity,)


class Loads:
    """Refuses weights that take the place of arranged ones, and notes that some were loaded after the model
    was arranged, where there are copies of them: the optimizer's masters, or a moving average."""

    def __init__(self, arranged: Arranged) -> None:
        self._arranged, self._mark = arranged, _Mark()
        refuses = _NoAssigning(self)
        for module in {m for part in (arranged.model, *arranged.parts) for m in part.modules()}:
            module.register_load_state_dict_pre_hook(refuses)
        if arranged.average is not None or any(flat.has_masters for flat in arranged.flats):
            for module in arranged.model.modules():
                module.register_load_state_dict_post_hook(self._mark)

    def take(self, settle: Callable[[], None]) -> None:
        """The copies follow, before weights are read or updated; `settle` is called before they change."""
        if self._mark.is_new:
            self._mark.is_new = False
            settle()
            for flat in self._arranged.flats:
                flat.after_load()
            if self._arranged.average is not None:
                self._arranged.average.restart()


FEWER = "it was given fewer batches: deal them with job.loader, or as many to every rank"
ALONE = "it did not do the same: in this layout all ranks do"
"""What is likely where a rank that others wait for has not failed."""


@contextmanager
def telling_who_waits(mesh: Mesh, where: str, likely: str) -> Iterator[None]:
    """What torch says of a rank that has come to its end sounds like a network's failure."""
    try:
        yield
    except RuntimeError as error:
        if mesh.world_group is not None and is_echo(str(error)):
            error.add_note(
                f"{OURS}rank {mesh.env.rank} was {where}, and another rank was gone or silent; where that "
                f"one has not failed, {likely}"
            )
        raise


MEETING = timedelta(minutes=9)
"""How long the first rank waits for all to make the same call: less than the ten minutes of a collective,
so that it is the first to speak."""


def require_all_ranks(arranged: Arranged, what: str) -> None:
    """Before weights are put together of which each rank has a part: where the first one is here alone, the
    exchange would hang, or meet that of a step and end the process. Ranks that are gone are told by the
    exchange itself."""
    group = arranged.mesh.world_group
    if group is None or dist.get_backend(group) != "gloo" or not _lies_in_parts(arranged):
        return
    start = time.monotonic()
    try:
        group.monitored_barrier(MEETING, wait_all_ranks=True)
    except RuntimeError as error:
        missing = re.search(r"Ranks ([\d, ]+) failed to pass", str(error))
        if missing is None or time.monotonic() - start < MEETING.total_seconds():
            return
        raise UsageError(
            f"{what} was called on rank 0, and within {MEETING.total_seconds():g} s not on rank "
            f"{missing[1]}; under {arranged.layout} every rank has a part of the weights, so call it on "
            "all of them, outside of what the first one does alone"
        ) from error


def _lies_in_parts(arranged: Arranged) -> bool:
    """Whether no rank has all weights."""
    if arranged.is_fully_sharded or arranged.staged is not None or arranged.experts is not None:
        return True
    is_cut = arranged.view is not None and bool(arranged.view.splits)
    return is_cut or any(flat.num_shards > 1 for flat in arranged.flats)
