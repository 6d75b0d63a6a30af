"""What loops do with an engine that would go wrong in silence, or in somebody else's words.

An optimizer that is stepped past the engine updates with what one rank has; weights that are loaded once a
layout has copies of its own are written over by the next step; and ranks that were given fewer batches are
gone when the others want to hear from them. Called by `engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ridgeline.errors import OURS, UsageError
from ridgeline.launch.failures import is_echo
from ridgeline.parallel.arranged import Arranged
from ridgeline.parallel.mesh import Mesh


def refuse_own_steps(
    optimizer: Optimizer, is_pending: Callable[[], bool], has_passed: Callable[[], bool]
) -> None:
    """`is_pending`: whether backward has run and the engine's step has not; `has_passed`: whether a forward
    pass has, whose loss was not given to backward."""

    def before(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if is_pending():
            raise UsageError(
                "optimizer.step() was called in place of engine.step(), which clips, updates and gives all "
                "ranks the new weights; call engine.step()"
            )
        # Whoever restores a checkpoint has the optimizer make its state by a step that changes nothing.
        if has_passed() and any(group["lr"] for group in optimizer.param_groups):
            raise UsageError(
                "optimizer.step() was called after a forward pass through engine(...) whose loss did not "
                "go through the engine; call engine.backward(loss), and engine.step()"
            )

    optimizer.register_step_pre_hook(before)


class Loads:
    """Notes that weights were loaded into a model after it was arranged, where the optimizer has copies."""

    def __init__(self, arranged: Arranged) -> None:
        self._flats, self._is_new = arranged.flats, False
        if any(flat.has_masters for flat in arranged.flats):
            for module in arranged.model.modules():
                module.register_load_state_dict_post_hook(self._note)

    def _note(self, _module: nn.Module, _keys: Any) -> None:
        self._is_new = True

    def take(self, settle: Callable[[], None]) -> None:
        """The copies follow, before weights are read or updated; `settle` is called before they change."""
        if self._is_new:
            self._is_new = False
            settle()
            for flat in self._flats:
                flat.after_load()


@contextmanager
def telling_who_waits(mesh: Mesh, step: int) -> Iterator[None]:
    """What torch says of a rank that has come to its end sounds like a network's failure."""
    try:
        yield
    except RuntimeError as error:
        if mesh.world_group is not None and is_echo(str(error)):
            error.add_note(
                f"{OURS}rank {mesh.env.rank} was in step {step} of its engine and another rank was gone or "
                "silent; where that one has not failed, it was given fewer batches: deal them with "
                "job.loader, or as many to every rank"
            )
        raise
