"""Saving while training goes on: plan once, copy aside, write in the background, appear whole or not.

Only the optimizer's step changes weights and its own state, so they are copied while the next batch runs
forward and backward, and `release` (called before the update) waits for what is left of that. The rest of
a save, the disk's part, is a thread of its own. Torch's planner decides once which rank writes which box.
When a write fails the run goes on: the last whole checkpoint stays, the copy is written again a few times,
and the outcome says why. Called by `train/`.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ridgeline.checkpoint.held import State
from ridgeline.checkpoint.manifest import MODEL, Manifest, StoredFile, checkpoint_name
from ridgeline.checkpoint.retain import Keep, remove_old
from ridgeline.checkpoint.storage import commit, write_boxes
from ridgeline.errors import RunError

RETRY_AFTER_S = (1.0, 5.0, 20.0)
"""Pauses before a write that failed is tried again."""


@dataclass(frozen=True)
class Outcome:
    """How one save ended, the same on every rank."""

    step: int
    path: Path | None
    """None when it could not be written."""
    problem: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    """From the call to the rename."""
    removed: tuple[str, ...] = ()
    is_final: bool = False
    """Whether another try would end alike."""


@dataclass
class _Plan:
    """Which boxes this rank writes; made once for as long as the state keeps its structure."""

    structure: tuple[Any, ...]
    items: list[WriteItem]
    metadata: Metadata | None
    """On rank 0."""
    copies: list[Tensor]
    """Host memory for each item, used again in every save."""


def _no_problem() -> str:
    return ""


class Saver:
    """Writes checkpoints of a run under `directory`; every rank has one and calls it alike.

    `group` is a process group with CPU communication over all ranks that is used for nothing else,
    because a thread talks over it; `world` is that of the loop. None for one process. `before` does on
    each rank what a checkpoint must not be there without, or says why it could not.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        group: dist.ProcessGroup | None,
        world: dist.ProcessGroup | None,
        keep: Keep,
        device: torch.device,
        retry_after_s: tuple[float, ...] = RETRY_AFTER_S,
        before: Callable[[], str] = _no_problem,
    ) -> None:
        self._directory, self._rank = directory, rank
        self._group, self._world = group, world
        self._keep, self._device, self._retry = keep, device, retry_after_s
        self._before = before
        self._plan: _Plan | None = None
        self._thread: threading.Thread | None = None
        self._outcomes: list[Outcome] = []
        self._copied = threading.Event()
        self._copied.set()
        self._count = 0
        self._remover: ThreadPoolExecutor | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._event: torch.cuda.Event | None = None

    # Called by the loop

    def save(self, state: State, manifest: Manifest, wait: bool = False) -> bool:
        """Begin a save, or do all of it with `wait`; whether it began.

        A save that falls due while the one before is still being written is left out, because the disk
        is slower than the plan; with `wait` it takes its turn.
        """
        self.release()
        busy, changed = self._agree(self._thread_is_busy(), self._structure_changed(state))
        if busy and not wait:
            return False
        self.join()
        if changed:
            self._plan = self._make_plan(state)
        plan = self._plan
        assert plan is not None
        self._count += 1
        began = time.perf_counter()
        if wait and self._stream is None:
            # The weights stand still until it is written, so they need not be copied.
            sources, copy = [_view(state, item) for item in plan.items], _nothing
        else:
            sources, copy = self._host_copies(state, plan), self._start_copy(state, plan)
        aside = self._directory / f".{checkpoint_name(manifest.step)}-{self._count}.part"
        self._thread = threading.Thread(
            target=self._write,
            args=(copy, sources, plan, aside, manifest, began),
            name="ridgeline-save",
            daemon=True,
        )
        self._thread.start()
        if wait:
            self.join()
        return True

    def release(self) -> None:
        """Before anything changes the weights: what is being saved has to be copied by then."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._event = None
        self._copied.wait()

    def join(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait for what is being written, and for what is being removed."""
        self.join()
        if self._remover is not None:
            self._remover.shutdown(wait=True)
            self._remover = None

    def _delete(self, path: Path) -> None:
        """Out of sight already; a large file can take a disk a second, which nobody has to wait for."""
        if self._remover is None:
            self._remover = ThreadPoolExecutor(1, "ridgeline-remove")
        self._remover.submit(shutil.rmtree, path, ignore_errors=True)

    def outcomes(self) -> list[Outcome]:
        """How the saves ended that have ended since the last time."""
        done, self._outcomes = self._outcomes, []
        return done

    # On the caller's thread

    def _thread_is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _structure_changed(self, state: State) -> bool:
        return self._plan is None or self._plan.structure != _structure(state)

    def _agree(self, *flags: bool) -> list[bool]:
        """True for all ranks when it is for one."""
        if self._group is None:
            return list(flags)
        values = torch.tensor([int(flag) for flag in flags])
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._world)
        return [bool(value) for value in values.tolist()]

    def _make_plan(self, state: State) -> _Plan:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, None, self._rank == 0)
        mine = planner.create_local_plan()
        metadata = None
        if self._rank == 0 or self._group is None:
            plans: list[SavePlan] = self._gather(mine)
            answer: list[Any]
            try:
                answer, metadata = planner.create_global_plan(plans)
            except Exception as error:  # told to all ranks, which wait for their parts
                answer = [f"{type(error).__name__}: {error}"] * len(plans)
            mine = self._scatter(answer)
        else:
            self._gather(mine)
            mine = self._scatter(None)
        if isinstance(mine, str):
            raise RunError(f"the checkpoint cannot be planned: {mine}")
        items = planner.finish_plan(mine).items
        return _Plan(_structure(state), items, metadata, [])

    def _host_copies(self, state: State, plan: _Plan) -> list[Tensor]:
        """Host memory for what this rank writes, kept for the next save."""
        if not plan.copies:
            for item in plan.items:
                view = _view(state, item)
                pinned = self._stream is not None and view.is_cuda
                plan.copies.append(torch.empty(view.shape, dtype=view.dtype, pin_memory=pinned))
        return plan.copies

    def _start_copy(self, state: State, plan: _Plan) -> Callable[[], None]:
        """Copy what changes at any time now; returns the rest of the work, for the thread."""
        later: list[tuple[Tensor, Tensor]] = []
        for item, host in zip(plan.items, plan.copies, strict=True):
            held = state[item.index.fqn]
            pair = (host, _view(state, item))
            if held.steady:
                later.append(pair)
            else:
                host.copy_(pair[1])
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for host, live in later:
                    host.copy_(live, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self._event = event
            return lambda: event.synchronize()
        self._copied.clear()

        def copy() -> None:
            try:
                for host, live in later:
                    host.copy_(live)
            finally:
                self._copied.set()

        return copy

    # On the thread

    def _write(
        self,
        copy: Callable[[], None],
        sources: list[Tensor],
        plan: _Plan,
        aside: Path,
        manifest: Manifest,
        began: float,
    ) -> None:
        place = {id(item): values for item, values in zip(plan.items, sources, strict=True)}
        try:
            if self._stream is not None:
                torch.cuda.set_device(self._device)  # a thread's own is device 0, another rank's
            problem = self._finish_copy(copy)
            for pause in (*self._retry, None):
                outcome = self._try(plan, place, aside, manifest, began, problem)
                if outcome.path is not None or pause is None or outcome.is_final:
                    break
                time.sleep(pause)
        except Exception as error:  # a rank that is gone; the loop will hear of it by itself
            outcome = Outcome(manifest.step, None, f"{type(error).__name__}: {error}")
        self._outcomes.append(outcome)

    def _finish_copy(self, copy: Callable[[], None]) -> str:
        """Why there is nothing to write, if that is so."""
        try:
            copy()
        except Exception as error:
            return f"rank {self._rank}: {_reason(error)}"
        return ""

    def _try(
        self,
        plan: _Plan,
        place: dict[int, Tensor],
        aside: Path,
        manifest: Manifest,
        began: float,
        problem: str,
    ) -> Outcome:
        file: StoredFile | None = None
        results: list[WriteResult] = []
        final = bool(problem)
        try:
            problem = problem or self._before()
            if not problem:
                # Beside the writing: the disk is the slower of the two.
                with ThreadPoolExecutor(1) as pool:
                    check = pool.submit(_find_no_number, plan.items, place)
                    file, results = write_boxes(
                        aside, self._rank, plan.items, lambda item: place[id(item)]
                    )
                    problem = check.result()
                    final = bool(problem)
        except Exception as error:
            problem = f"rank {self._rank}: {_reason(error)}"
        everyone = self._gather((file, results, problem, final))
        outcome = None
        if everyone is not None:
            outcome = self._finish(plan, everyone, aside, manifest, began)
        told: Outcome = self._broadcast(outcome)
        return told

    def _finish(
        self, plan: _Plan, everyone: list[Any], aside: Path, manifest: Manifest, began: float
    ) -> Outcome:
        problems = [problem for _, _, problem, _ in everyone if problem]
        path, removed = None, []
        files = {
            results[0].storage_data[0]: file for file, results, *_ in everyone if file is not None
        }
        if not problems:
            try:
                assert plan.metadata is not None
                results = [result for _, part, *_ in everyone for result in part]
                path = commit(self._directory, aside, manifest, plan.metadata, files, results)
                removed = remove_old(self._directory, self._keep, self._delete)
            except Exception as error:
                problems.append(f"rank 0: {_reason(error)}")
        if path is None:
            shutil.rmtree(aside, ignore_errors=True)
        return Outcome(
            manifest.step,
            path,
            "; ".join(problems),
            sum(file.num_bytes for file in files.values()),
            time.perf_counter() - began,
            tuple(removed),
            is_final=any(final for *_, final in everyone),
        )

    # Between ranks

    def _gather(self, value: Any) -> list[Any] | Any:
        """All ranks' values on rank 0, None on the others."""
        if self._group is None:
            return [value]
        everyone = [None] * dist.get_world_size(self._group) if self._rank == 0 else None
        dist.gather_object(value, everyone, group_dst=0, group=self._group)
        return everyone

    def _scatter(self, values: list[Any] | None) -> Any:
        if self._group is None:
            assert values is not None
            return values[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, values, group_src=0, group=self._group)
        return mine[0]

    def _broadcast(self, value: Any) -> Any:
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self._group)
        return box[0]


def _find_no_number(items: list[WriteItem], place: dict[int, Tensor]) -> str:
    """Weights that are no numbers must not be gone on from; a sentence on the first."""
    for item in items:
        values = place[id(item)]
        if not item.index.fqn.startswith(MODEL) or not values.is_floating_point():
            continue
        # A sum first: it is finite in nearly every save, and cheaper than looking at each.
        total = values.sum(dtype=torch.float64 if values.dtype is torch.float64 else torch.float32)
        if not bool(total.isfinite()) and not bool(values.isfinite().all()):
            return f"{item.index.fqn.removeprefix(MODEL)} is not a number everywhere"
    return ""


def _view(state: State, item: WriteItem) -> Tensor:
    return state[item.index.fqn].__get_tensor_shard__(item.index)


def _structure(state: State) -> tuple[Any, ...]:
    return tuple(
        (name, held.shape, held.dtype, held.boxes, held.is_offered) for name, held in state.items()
    )


def _nothing() -> None:
    return


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
