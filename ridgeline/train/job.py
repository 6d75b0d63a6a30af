"""For a training loop of the user's own: `job = ridgeline.start()`, then a few changed lines.

A `Job` is this process's place among the ranks with the three things a loop needs from it: the model
arranged by the layout, a loader that deals the global batch out, and the mean of a value over ranks.
On one process all of them do nothing, so the same script runs anywhere.
"""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import default_collate

from ridgeline.config import DdpConfig
from ridgeline.data.order import BatchPlan, num_batches, plan_epoch
from ridgeline.errors import OURS, UsageError
from ridgeline.launch.env import read_rank_env, tune_file
from ridgeline.layout import Layout
from ridgeline.parallel.apply import arrange_own
from ridgeline.parallel.arranged import Arranged
from ridgeline.parallel.mesh import Mesh, build_mesh, choose_device, close_mesh
from ridgeline.parallel.precision import Precision, Scaler, build_precision
from ridgeline.parallel.random import seed_apart
from ridgeline.train.checks import count_parts
from ridgeline.train.dealt import Dealt
from ridgeline.train.settings import (
    LoaderSettings,
    Settings,
    prepare_model,
    prepare_process,
    read_settings,
    with_settings,
)
from ridgeline.train.uncaught import install_sentences
from ridgeline.tuning import TuneConfig

if TYPE_CHECKING:
    from ridgeline.train.engine import Engine
    from ridgeline.train.own import OwnCheckpoints


class Job:
    """This process among the ranks of a job; made by `start`."""

    def __init__(
        self, mesh: Mesh, precision: Precision, seed: int, settings: Settings | None = None
    ) -> None:
        self._mesh, self._precision, self._seed = mesh, precision, seed
        self._settings = settings
        self._undo: Callable[[], None] = lambda: None
        self._share = Dealt()
        self._has_autocast = False
        self._engined: WeakSet[nn.Module] = WeakSet()
        self._has_engine = False

    @property
    def rank(self) -> int:
        return self._mesh.env.rank

    @property
    def world_size(self) -> int:
        return self._mesh.env.world_size

    @property
    def local_rank(self) -> int:
        """Among those of this node."""
        return self._mesh.env.local_rank

    @property
    def mesh(self) -> Mesh:
        """Where this rank stands along each axis of the layout, and the groups that it is in."""
        return self._mesh

    @property
    def data_rank(self) -> int:
        """Which of the parts of a batch this rank is to be given; ranks that hold parts of one model share
        theirs."""
        return self._mesh.data_rank

    @property
    def data_size(self) -> int:
        """Into how many parts a batch is dealt."""
        return self._mesh.data_size

    @property
    def device(self) -> torch.device:
        return self._mesh.device

    @property
    def layout(self) -> Layout:
        return self._mesh.layout

    @property
    def settings(self) -> Settings | None:
        """Those of speed that it was started with; None where there are none."""
        return self._settings

    @property
    def is_main(self) -> bool:
        """Whether this rank should print and write files."""
        return self._mesh.is_main

    def parallelize(self, model: nn.Module, example_input: Any = None, **options: Any) -> nn.Module:
        """`model` on this rank's device, arranged by the layout; weights are rank 0's.

        `example_input` is for layouts that have to see the model run once. Options are those of
        `ridgeline.config.DdpConfig`: bucket_mb, sync_batch_norm, find_unused.
        """
        ddp = self._options("parallelize", options)
        self._require_own_step(False)
        model, tune = self._prepare(model)
        arranged = arrange_own(
            model, self.layout, example_input, self._mesh, self._share, ddp, tune
        )
        vars(arranged.objective)[_HELD] = _Held(arranged)
        # The weights are made: what the model draws from now on is of this rank's own samples.
        seed_apart(self._seed, self._mesh.data_rank)
        return arranged.objective

    def engine(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        clip: float | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        example_input: Any = None,
        elementwise: bool = False,
        scaler: Scaler | None = None,
        ema: float | None = None,
        ema_warmup: bool = True,
        **options: Any,
    ) -> Engine:
        """The model in any layout, with the optimizer made over its parameters: `engine(x)`,
        `engine.backward(loss)`, `engine.step()`.

        `clip` is the largest norm of a step's gradient. `loss` takes outputs and targets: pipelines need
        it. `example_input` is for layouts that have to see the model run once (tp, cp, ep, pp).
        `elementwise` promises that an optimizer we do not know treats each number by itself. `scaler` is
        for precision=fp16, where its scale is to be another than torch's. `ema` keeps a moving average of
        the weights, as `optim.ema` and `optim.ema_warmup` of a recipe: see `engine.averaged()`. Options as
        of `parallelize`.
        """
        from ridgeline.train.engine import Engine

        ddp = self._options("engine", options)
        if model in self._engined:
            raise UsageError(
                "job.engine(model, ...) was called on this model before; make one engine of it, with one "
                "optimizer of several groups"
            )
        given, self._has_engine = model, True
        model, tune = self._prepare(model)
        engine = Engine(
            self._mesh,
            self._precision,
            self._seed,
            self._share,
            model,
            optimizer,
            clip=clip,
            loss=loss,
            example=_on_device(example_input, self.device),
            elementwise=elementwise,
            ddp=ddp,
            tune=tune,
            scaler=scaler,
            ema=ema,
            ema_warmup=ema_warmup,
        )
        self._engined.add(given)
        self._has_autocast = True
        for note in engine.notes if self.is_main else ():
            print(f"{OURS}{note}", file=sys.stderr)
        seed_apart(self._seed, self._mesh.data_rank)
        return engine

    def _options(self, name: str, options: dict[str, Any]) -> DdpConfig:
        """What the script says of replicas, and over it the settings of a climb."""
        ddp = _read_options(name, options)
        size = self._settings.bucket_mb if self._settings is not None else 0.0
        return replace(ddp, bucket_mb=size) if size else ddp

    def _prepare(self, model: nn.Module) -> tuple[nn.Module, TuneConfig | None]:
        """On its device, and as the settings of a climb have it."""
        model = model.to(self.device)
        if self._settings is None:
            return model, None
        prepare_model(model, self.layout, self._settings)
        return model, self._settings.tune

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = True,
        drop_last: bool = False,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> JobLoader:
        """Batches of this rank, already on its device. `batch_size` is that of the whole job."""
        return JobLoader(
            self._mesh,
            self._share,
            dataset,
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            workers=workers,
            collate=collate,
            seed=self._seed,
            settings=self._settings,
        )

    def checkpoints(
        self,
        directory: str | Path,
        model: nn.Module | Engine,
        optimizer: Optimizer,
        loader: JobLoader,
        *,
        every: int,
        keep: int = 2,
        also: Mapping[str, Any] | None = None,
    ) -> OwnCheckpoints:
        """Save every so many steps, and go on from the newest whole checkpoint in `directory`.

        `model` is what `parallelize` or `engine` gave. Everything is restored when this returns; any layout
        and number of ranks reads what any other has written. `also` are other things with a state: their
        `state_dict()` has to fit into JSON, as that of torch's learning-rate schedules does.
        """
        arranged = _arrangement_of(model)
        if arranged is None or arranged.mesh is not self._mesh:
            raise UsageError(
                "job.checkpoints(model=...): this is not what job.parallelize or job.engine gave; give it "
                "that"
            )
        from ridgeline.train.own import OwnCheckpoints

        engine = None if isinstance(model, nn.Module) else model
        return OwnCheckpoints(
            self._mesh,
            arranged,
            optimizer,
            loader,
            Path(directory),
            every,
            keep,
            also or {},
            engine,
        )

    def autocast(self) -> AbstractContextManager[None]:
        """The layout's precision, for the forward pass."""
        self._require_own_step(self._has_engine)
        self._has_autocast = True
        return self._precision.autocast()

    def mean(self, value: Tensor | float) -> float:
        """Mean over the ranks of a value that is itself a mean over the batch at hand.

        Exact for uneven batches too: each rank counts for the samples it really had. That holds
        inside the loop over a `loader`; after it there is no batch at hand and ranks count alike.
        """
        self._require_own_step(self._has_engine)
        self._check_precision()
        number = torch.as_tensor(value, dtype=torch.float64, device=self.device).detach()
        total = self._mesh.sum_over_data(number * self._share.scale)
        return float(total / self._mesh.data_size)

    def _require_own_step(self, has_engine: bool) -> None:
        """What an engine does for a loop, and a loop that steps itself would have to do."""
        if has_engine:
            return
        if self.layout.accumulate > 1:
            raise UsageError(
                f"accumulate={self.layout.accumulate} needs an engine (job.engine(model, optimizer)); or "
                "leave it out, and call optimizer.step() every so many batches"
            )
        if self.layout.precision == "fp16":
            raise UsageError(
                "precision=fp16 needs loss scaling, which an engine does (job.engine(model, optimizer)); "
                "or use precision=bf16"
            )

    def _check_precision(self) -> None:
        """Said once, where the loop has had a loss by now and never asked for the precision."""
        asked = self.layout.precision
        # Settings enter it around the model, and sharded weights have their own casts.
        if self._has_autocast or self._settings is not None or self.layout.zero:
            return
        if asked in ("fp32", "tf32"):
            return
        self._has_autocast = True
        if self.is_main:
            warnings.warn(
                f"precision={asked} was asked for, and no forward pass has run in `with job.autocast():`, "
                "so that it computes in its own type; put the model's call, and the loss, under it",
                stacklevel=3,
            )

    def print(self, *values: Any) -> None:
        """`print` on the main rank, nothing on the others."""
        if self.is_main:
            print(*values, flush=True)

    def close(self) -> None:
        """Leave the job; done by itself when the script ends."""
        self._undo()
        close_mesh(self._mesh)


_HELD = "_ridgeline_arranged"


class _Held:
    """How a model was arranged. The model has it, so that nothing outlives it; copies and files of the
    model do not, because they are not arranged."""

    def __init__(self, arranged: Arranged) -> None:
        self.arranged = arranged

    def __deepcopy__(self, _memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _arrangement_of(given: Any) -> Arranged | None:
    """Of what `parallelize` or `engine` gave; None of anything else."""
    from ridgeline.train.engine import Engine

    if isinstance(given, Engine):
        return given.arranged
    held = getattr(given, "__dict__", {}).get(_HELD)
    return held.arranged if held is not None and held.arranged.objective is given else None


class JobLoader:
    """Iterates over this rank's part of each global batch; a new pass is a new epoch.

    The order of samples depends on seed and epoch alone, and every sample comes exactly once an
    epoch, whatever the number of ranks. An uneven last batch is weighed, not padded.
    """

    def __init__(
        self,
        mesh: Mesh,
        dealt: Dealt,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool,
        drop_last: bool,
        workers: int,
        collate: Callable[[list[Any]], Any],
        seed: int,
        settings: Settings | None = None,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise UsageError(
                f"{type(dataset).__name__} has no length; Job.loader needs a map-style data set"
            )
        self._parts = count_parts(mesh.layout)
        pieces = mesh.data_size * self._parts
        if batch_size % pieces:
            near = batch_size // pieces * pieces
            what = f"{mesh.data_size} ranks"
            if self._parts > 1 or mesh.data_size < mesh.env.world_size:
                what = f"{mesh.data_size} replicas with {self._parts} microbatches each"
            raise UsageError(
                f"batch_size={batch_size} is that of the whole job and is not divisible by its "
                f"{what}; the nearest that are: {near or pieces} or {near + pieces}"
            )
        self._mesh, self._dealt = mesh, dealt
        self._size = len(dataset)
        self._batch, self._seed, self._epoch = batch_size, seed, 0
        self._shuffle, self._drop_last = shuffle, drop_last
        self._plans: list[BatchPlan] = []
        self._start = self._done = 0
        self._channels_last = settings is not None and settings.channels_last
        reading = settings.loader if settings is not None else LoaderSettings()
        workers = reading.workers or workers
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=_Plans(self),
            num_workers=workers,
            collate_fn=collate,
            pin_memory=mesh.device.type == "cuda",
            prefetch_factor=(reading.prefetch or None) if workers else None,
            persistent_workers=bool(reading.workers),
            # Seeds the workers, apart on each rank; leaves the generator of the user's dropout alone.
            generator=torch.Generator().manual_seed(seed * 1_000_003 + mesh.data_rank),
        )

    def __len__(self) -> int:
        """Microbatches of an epoch: batches, where a step takes one at once."""
        return self._num_batches * self._parts

    @property
    def _num_batches(self) -> int:
        return num_batches(self._size, self._batch, self._drop_last)

    def plan(self) -> list[BatchPlan]:
        mesh = self._mesh
        return list(
            plan_epoch(
                self._size,
                self._batch,
                mesh.data_rank,
                mesh.data_size,
                self._seed,
                self._epoch,
                accumulate=self._parts,
                shuffle=self._shuffle,
                drop_last=self._drop_last,
                start=self._start,
            )
        )

    @property
    def position(self) -> tuple[int, int]:
        """The epoch at hand and how many of its batches were handed out."""
        if self._done == self._num_batches:
            return self._epoch + 1, 0
        return self._epoch, self._done

    @property
    def identity(self) -> dict[str, Any]:
        """What the order of samples depends on."""
        return {
            "num_samples": self._size,
            "batch_size": self._batch,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
        }

    def go_to(self, epoch: int, batch: int) -> None:
        """Let the next pass be the rest of `epoch` from `batch` on; nothing is read to get there."""
        self._epoch, self._start, self._done = epoch, batch, batch

    def __iter__(self) -> Iterator[Any]:
        if self._done > self._start:  # a pass that was left in the middle counts as one
            self.go_to(self._epoch + 1, 0)
        self._plans = self.plan()
        # A loader may run inside the loop of another: what that one's batch counts for comes back.
        before = self._dealt.copy()
        pieces = ((plan, part) for plan in self._plans for part in range(self._parts))
        try:
            for (plan, part), batch in zip(pieces, self._loader, strict=True):
                dealt, weight = self._dealt, int(plan.weights[part])
                # Of a step's microbatches each counts for its share of all their samples.
                dealt.set(weight, plan.num_global, self._mesh.data_size * self._parts)
                dealt.samples, dealt.key = plan.parts[part], (plan.epoch << 32) + plan.step
                if part + 1 == self._parts:
                    self._done = plan.step + 1
                yield _to_device(batch, self._mesh.device, self._channels_last)
        finally:
            self._dealt.take(before)


class _Plans:
    """The indices of each batch, for torch's DataLoader."""

    def __init__(self, owner: JobLoader) -> None:
        self._owner = owner

    def __iter__(self) -> Iterator[list[int]]:
        for plan in self._owner._plans:
            for part in plan.parts:
                yield part.tolist()

    def __len__(self) -> int:
        return sum(len(plan.parts) for plan in self._owner._plans)


def _to_device(batch: Any, device: torch.device, channels_last: bool = False) -> Any:
    from torch.utils._pytree import tree_map_only

    def move(value: Tensor) -> Tensor:
        value = value.to(device, non_blocking=True)
        if channels_last and value.dim() == 4:
            return value.contiguous(memory_format=torch.channels_last)
        return value

    return tree_map_only(Tensor, move, batch)


def _read_options(name: str, options: dict[str, Any]) -> DdpConfig:
    try:
        return DdpConfig(**options)
    except TypeError as error:
        raise UsageError(f"{name}: {error}") from None


def _on_device(value: Any, device: torch.device) -> Any:
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, lambda x: x.to(device), value)


def start(
    layout: str | Layout = "", *, seed: int = 0, device: str = "auto", tune: str | Path = ""
) -> Job:
    """Join the job this process belongs to, as torchrun set it up, or be a job of one.

    `layout` may leave `dp` unsaid: it is then what the number of processes gives. Seeds torch on
    every rank alike, so that the model built next has the same weights everywhere. `tune` is a file of
    settings, as `ridgeline doctor SCRIPT.py --climb` writes one; RIDGELINE_TUNE goes before it. From now on
    an error of ours that nobody catches is one sentence and its exit code.
    """
    sentences = install_sentences()
    env = read_rank_env()
    arrangement = Layout.parse_for(str(layout), env.world_size, "start(layout=...)")
    file = tune_file() or str(tune)
    settings = read_settings(Path(file)) if file else None
    if settings is not None:
        arrangement = with_settings(arrangement, settings, file)
    chosen = choose_device(device, env)
    mesh = build_mesh(env, arrangement, chosen)
    sentences.come_first()
    torch.manual_seed(seed)
    job = Job(mesh, build_precision(arrangement.precision, chosen), seed, settings)
    if settings is not None:
        job._undo = prepare_process(settings, chosen)
    if dist.is_initialized():
        atexit.register(_leave, job)
    return job


def _leave(job: Job) -> None:
    """At exit: leave in order after success; after a failure the others are past waiting."""
    if getattr(sys, "last_value", None) is None:
        job.close()
