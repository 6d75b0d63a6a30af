"""Measure a user's own script: it runs as it is until enough steps were seen, and is ended then.

A step is over when an optimizer's `step` is, which torch tells every hook that asks; waits for data are
those of torch's loader, which `job.loader` is made of. Checkpoints that the script would write through
`job.checkpoints` are not written; files that it writes itself are its own affair. One that is to be climbed
and has no job by its first step is ended there, before anything is measured. Called by `worker.py`.
"""

from __future__ import annotations

import gc
import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import dataloader

from ridgeline.config import DdpConfig
from ridgeline.doctor.interface import tell_missing
from ridgeline.doctor.measure import (
    Facts,
    Options,
    Seen,
    explain,
    find_place,
    find_roofline,
    tell_unheeded,
)
from ridgeline.doctor.model_look import Look, look_of
from ridgeline.doctor.probe import Probe
from ridgeline.doctor.seen import SeenScript, look_at_script
from ridgeline.errors import RunError, UsageError
from ridgeline.machine.roofline import ComputeFacts
from ridgeline.train.job import Job
from ridgeline.train.own import OwnCheckpoints

LEAST_STEPS = 6
"""That can be asked for."""


class Enough(BaseException):
    """Ends the script; no `except Exception` of its own catches it."""


class _Watch:
    """The probe of a script, made when the first step shows which device it is on."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.probe: Probe | None = None
        self.optimizer: Optimizer | None = None
        self.model: nn.Module | None = None
        self.roofline: ComputeFacts | None = None
        self.num_steps = 0
        self.job: Job | None = None
        """Of a script that has given a model to `job.parallelize` or `job.engine`."""
        self.look: Look | None = None
        """Of that model, before it was arranged."""
        self.bucket_mb = DdpConfig().bucket_mb
        """Of its replicas' gradients."""
        self.seen = SeenScript(has_job=False)
        self.place = (0, 1)
        """Rank and number of ranks, after the first step."""
        self.workers = 0
        """Processes of the loader that was asked for a batch last."""
        self.streams = False
        """Whether its data set only iterates."""
        self._depth = 0
        self._is_due = False

    def opened(self) -> None:
        self._depth += 1

    def closed(self) -> None:
        """An annotation of the profiler's is over. A step counts once none is open any more."""
        self._depth -= 1
        if self._depth > 0 or not self._is_due:
            return
        self._is_due = False
        if self.probe is not None and self.probe.step_done():
            raise Enough

    @property
    def lacks_job(self) -> bool:
        """Whether what it is to be measured for cannot be done with it; known from the first step on."""
        return self._options.climbs and self.job is None

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if self.lacks_job:
            raise Enough
        if self.probe is None:
            self.optimizer, self.model = optimizer, find_model(optimizer)
            self.place = find_place()
            self.seen = SeenScript(has_job=self.job is not None)
            with suppress(Exception):  # what it says of remedies is worth no script's end
                look = self.look or (look_of(self.model) if self.model is not None else Look())
                self.seen = look_at_script(
                    self.job, look, self.workers, optimizer, self.streams, self.bucket_mb
                )
            device = next(p.device for g in optimizer.param_groups for p in g["params"])
            self.roofline = find_roofline(device, self._options.machine)
            options = self._options
            self.probe = Probe(
                device, options.steps, nvtx=options.nvtx, keep_trace=options.keep_trace
            )
        # A script with two optimizers has a step when the first of them has.
        if optimizer is self.optimizer:
            self.num_steps += 1
            self._is_due = True


def measure_script(path: Path, arguments: list[str], options: Options) -> Seen:
    """Run the script in this process; every rank does."""
    watch = _Watch(options)
    handle = register_optimizer_step_post_hook(watch.stepped)
    try:
        with _watched(watch), no_checkpoints(), suppress(Enough):
            run_script(path, arguments)
    except BaseException:
        if watch.probe is not None:
            watch.probe.close()
        raise
    finally:
        handle.remove()
    if watch.lacks_job:
        raise UsageError(tell_missing(path))
    probe = watch.probe
    if probe is None or not probe.is_enough:
        done = 0 if probe is None else probe.num_done
        needed = Probe(torch.device("cpu"), options.steps).num_steps
        if probe is not None:
            probe.close()
        if watch.num_steps > done + 1:
            raise RunError(
                f"{path} has a record_function open around its whole loop, so that no step of it can be "
                "looked at; open it inside the loop"
            )
        if probe is None:
            raise RunError(
                f"{path} ended, and no optimizer of torch's had made a step by then; let it train, for "
                f"{needed} steps or more"
            )
        least = Probe(torch.device("cpu"), LEAST_STEPS).num_steps
        fewer = f", or {least} with --steps {LEAST_STEPS}" if needed > least else ""
        raise RunError(
            f"{path} ended after {done} steps of an optimizer, and {needed} are needed{fewer}; let it "
            "train longer"
        )
    assert watch.optimizer is not None
    facts = Facts(
        source=f"script {path.name}",
        model=watch.model,
        optimizer=watch.optimizer,
        notes=tell_unheeded(options, probe.device),
        script=watch.seen,
        place=watch.place,
    )
    return explain(probe, probe.finish(), facts, watch.roofline)


def find_model(optimizer: Optimizer) -> nn.Module | None:
    """The smallest module that holds most of an optimizer's parameters, so that products can be told by
    their layers: a script says nowhere which it is. Wrappers hold as many, by longer names."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    best, least = None, (0, 0)
    for module in [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]:
        size = sum(1 for _ in module.modules())
        rank = (-sum(id(p) in wanted for p in module.parameters()), size)
        if rank < least:
            best, least = module, rank
    return best


def run_script(path: Path, arguments: list[str]) -> None:
    before, folders = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RunError(
                f"{path} ended with {end.code!r} before enough steps were seen"
            ) from None
    finally:
        sys.argv, sys.path[:] = before, folders


@contextmanager
def _watched(watch: _Watch) -> Iterator[None]:
    """Torch's loader tells when it is asked for a batch, its annotations when they begin and end, and a job
    that it was given a model."""
    loader, notes = dataloader._BaseDataLoaderIter, record_function
    before = loader.__next__, notes.__enter__, notes.__exit__

    def next_batch(self: Any) -> Any:
        watch.workers = self._num_workers
        watch.streams = self._dataset_kind == dataloader._DatasetKind.Iterable
        if watch.probe is None:
            return before[0](self)
        with watch.probe.waiting_for_data():
            return before[0](self)

    def enter(self: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            watch.opened()
        return before[1](self)

    def leave(self: Any, *error: Any) -> None:
        before[2](self, *error)
        if threading.current_thread() is threading.main_thread():
            watch.closed()

    def given(job: Job, model: nn.Module, bucket_mb: float) -> None:
        if watch.job is None:
            watch.job, watch.bucket_mb = job, bucket_mb
            with suppress(Exception):
                watch.look = look_of(model)

    loader.__next__ = next_batch  # type: ignore[method-assign]
    notes.__enter__, notes.__exit__ = enter, leave  # type: ignore[method-assign]
    try:
        with models_seen(given):
            yield
    finally:
        loader.__next__ = before[0]  # type: ignore[method-assign]
        notes.__enter__, notes.__exit__ = before[1:3]  # type: ignore[method-assign]


@contextmanager
def models_seen(given: Callable[[Job, nn.Module, float], None]) -> Iterator[None]:
    """A job tells of each model that it is given, before it is arranged, and how large buckets of its
    replicas are to be."""
    before = Job.parallelize, Job.engine

    def parallelize(self: Job, model: nn.Module, *args: Any, **options: Any) -> Any:
        given(self, model, _bucket_mb(self, options))
        return before[0](self, model, *args, **options)

    def engine(self: Job, model: nn.Module, *args: Any, **options: Any) -> Any:
        given(self, model, _bucket_mb(self, options))
        return before[1](self, model, *args, **options)

    Job.parallelize, Job.engine = parallelize, engine  # type: ignore[method-assign]
    try:
        yield
    finally:
        Job.parallelize, Job.engine = before  # type: ignore[method-assign]


def _bucket_mb(job: Job, options: Mapping[str, Any]) -> float:
    settings = job.settings.bucket_mb if job.settings is not None else 0.0
    return float(settings or options.get("bucket_mb", DdpConfig().bucket_mb))


@contextmanager
def no_checkpoints() -> Iterator[None]:
    before = OwnCheckpoints.save
    OwnCheckpoints.save = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        OwnCheckpoints.save = before  # type: ignore[method-assign]
