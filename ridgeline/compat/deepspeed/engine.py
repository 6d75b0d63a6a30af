"""DeepSpeed's engine: the words of its interface over `train/engine.py`. Made by `initialize`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.checkpoint.held import hold_state
from ridgeline.checkpoint.load import find_newest, load_training, load_weights
from ridgeline.checkpoint.manifest import Manifest
from ridgeline.checkpoint.retain import Keep
from ridgeline.checkpoint.save import Saver
from ridgeline.compat.deepspeed.config import Asked
from ridgeline.compat.deepspeed.utils import RepeatingLoader
from ridgeline.errors import OURS, RunError, UsageError
from ridgeline.launch.env import recorded_environment
from ridgeline.train.engine import Engine
from ridgeline.train.job import Job, JobLoader

LATEST = "latest"
"""The file that names the newest tag."""
CLIENT = "client_state.pt"


class DeepSpeedEngine:
    """What `deepspeed.initialize` returns first."""

    def __init__(
        self,
        job: Job,
        engine: Engine,
        asked: Asked,
        loader: JobLoader | None,
        scheduler: Any,
        collate: Any,
    ) -> None:
        self._job, self._engine, self._asked = job, engine, asked
        self.training_dataloader, self.lr_scheduler, self.collate_fn = loader, scheduler, collate
        self.global_steps = self.skipped_steps = self.micro_steps = self.global_samples = 0
        self.loaded_checkpoint_tag: str | None = None
        self._batches: Iterator[Any] | None = None
        self._savers: dict[Path, Saver] = {}
        self._since = time.perf_counter()

    # Where it is

    @property
    def module(self) -> nn.Module:
        return self._engine.module

    @property
    def optimizer(self) -> Optimizer:
        return self._engine.optimizer

    @property
    def device(self) -> torch.device:
        return self._job.device

    @property
    def global_rank(self) -> int:
        return self._job.rank

    @property
    def local_rank(self) -> int:
        return self._job.local_rank

    @property
    def world_size(self) -> int:
        return self._job.world_size

    @property
    def dp_world_size(self) -> int:
        return self._job.data_size

    @property
    def layout(self) -> str:
        """Ours, which the configuration came to."""
        return str(self._job.layout)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self._engine.module, name)
        except AttributeError:
            raise AttributeError(
                f"deepspeed's engine has no {name!r} in ridgeline.compat.deepspeed, and the model has none "
                "either"
            ) from None

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        self._engine.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        return self.train(False)

    # A step

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._engine(*inputs, **named)

    forward = __call__

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool = True, **options: Any) -> Tensor:
        """Gradients of the mean loss of one forward pass; it is divided by the passes of a step here."""
        _refuse("backward", options, "it goes through the graph once; add the losses before it")
        self._engine.backward(loss if scale_wrt_gas else loss * self._engine.parts)
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        self._engine.step()
        self.micro_steps += 1
        if self._engine.has_stepped:
            self._after_update(lr_kwargs)

    def zero_grad(self) -> None:
        """Of this engine's parameters, into which another's backward may have gone; `step` does it, too."""
        self.optimizer.zero_grad()

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One update, of as many microbatches as a step has; the mean loss."""
        loss = self._engine.train_batch(self._own_batches() if data_iter is None else data_iter)
        self.micro_steps += self._engine.parts
        self._after_update(None, loss)
        return loss

    def eval_batch(
        self, data_iter: Iterator[Any], return_logits: bool = False, **options: Any
    ) -> Tensor:
        """The mean loss of as many microbatches as a step has."""
        asked = {
            "return_logits": return_logits,
            "compute_loss": options.get("compute_loss", True) is False,
        }
        _refuse("eval_batch", asked, "it gives the mean loss")
        return self._engine.eval_batch(data_iter)

    def _own_batches(self) -> Iterator[Any]:
        if self.training_dataloader is None:
            raise UsageError(
                "engine.train_batch() has no data: give it an iterator, or deepspeed.initialize its "
                "training_data"
            )
        if self._batches is None:
            self._batches = iter(RepeatingLoader(self.training_dataloader))
        return self._batches

    def set_dataloader(self, loader: Any) -> None:
        self.training_dataloader, self._batches = loader, None

    def set_dataiterator(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def _after_update(
        self, lr_kwargs: Mapping[str, Any] | None, loss: Tensor | None = None
    ) -> None:
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        skipped, self.skipped_steps = self.skipped_steps, self._engine.num_skipped
        if self.lr_scheduler is not None and skipped == self.skipped_steps:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        every = self._asked.steps_per_print
        if every and self.global_steps % every == 0 and self._job.is_main:
            now = time.perf_counter()
            rate = every * self.train_batch_size() / (now - self._since)
            self._since = now
            told = f", loss={float(loss):.4f}" if loss is not None else ""
            _say(
                f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}{told}, "
                f"{rate:.4g} samples/s"
            )

    # What it was asked for

    def train_batch_size(self) -> int:
        return self._asked.batch

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._asked.micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self._asked.parts

    def is_gradient_accumulation_boundary(self) -> bool:
        return self._engine.ends_step

    def zero_optimization_stage(self) -> int:
        return self._job.layout.zero

    def zero_optimization(self) -> bool:
        return self._job.layout.zero > 0

    def fp16_enabled(self) -> bool:
        return self._job.layout.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self._job.layout.precision == "bf16"

    def gradient_clipping(self) -> float:
        return self._asked.clip or 0.0

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Of the last update, before clipping; None where nothing is clipped."""
        norm = self._engine.grad_norm
        return None if norm is None else float(norm)

    def is_first_stage(self) -> bool:
        return self._job.mesh.axis_rank("pp") == 0

    def is_last_stage(self) -> bool:
        return self._job.mesh.axis_rank("pp") == self._job.layout.pp - 1

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, collate_fn: Any = None, **options: Any
    ) -> JobLoader:
        """A loader of this rank's microbatches; how many read and where to is its own."""
        sampler = {"data_sampler": options.get("data_sampler") is not None}
        _refuse("deepspeed_io", sampler, "use a DataLoader of your own, by engine.dp_world_size")
        size = self._asked.batch
        if batch_size is not None:
            size = batch_size * self._asked.parts * self._asked.layout.dp
        return build_loader(
            self._job, dataset, size, collate_fn or self.collate_fn, self._asked.drop_last
        )

    def compile(self, *args: Any, **options: Any) -> None:
        raise UsageError(
            'engine.compile() comes too late here; put "ridgeline": {"layout": "compile=true"} into the '
            "configuration"
        )

    # Checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """A checkpoint of ours in `save_dir/tag`, which every layout reads; all ranks call it."""
        frozen = {"exclude_frozen_parameters": exclude_frozen_parameters}
        _refuse("save_checkpoint", frozen, "a checkpoint has all weights; leave it out")
        self._engine.take_loaded()
        name = str(tag) if tag is not None else f"global_step{self.global_steps}"
        folder = Path(save_dir) / name
        folder.mkdir(parents=True, exist_ok=True)
        self._write_client(folder, dict(client_state or {}))
        arranged, optimizer = self._engine.arranged, self.optimizer
        names = arranged.state_names
        groups = [
            {k: v for k, v in group.items() if isinstance(v, (int, float, bool))}
            | ({"betas": list(group["betas"])} if "betas" in group else {})
            for group in optimizer.param_groups
        ]
        schedule = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else {}
        manifest = Manifest(
            step=self.global_steps,
            layout=str(self._job.layout),
            num_ranks=self._job.world_size,
            time=time.time(),
            state={
                "engine": self._engine.state_dict(),
                "counts": [self.global_steps, self.micro_steps, self.global_samples],
                "groups": groups,
                "scheduler": _plain(schedule, type(self.lr_scheduler).__name__),
                "tied": {name: first for name, first in names.items() if name != first},
            },
            versions=dict(recorded_environment()["packages"]),  # type: ignore[call-overload]
        )
        saver = self._saver(folder)
        saver.save(hold_state(arranged, optimizer), manifest, wait=True)
        for done in saver.outcomes():
            if done.path is None:
                raise RunError(f"no checkpoint in {folder}: {done.problem}")
        if save_latest and self._job.is_main:
            aside = Path(save_dir) / f".{LATEST}.part"
            aside.write_text(name, encoding="utf-8")
            os.replace(aside, Path(save_dir) / LATEST)
        self._wait()
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """What `save_checkpoint` wrote, by whatever layout: its path and the client's state; (None, {})
        where nothing was saved yet."""
        if not load_module_strict or custom_load_fn is not None:
            raise UsageError(
                "engine.load_checkpoint(load_module_strict=False, custom_load_fn=...) is not here; load "
                "what "
                "differs into the model before deepspeed.initialize"
            )
        name = self._agree_on_tag(Path(load_dir), tag)
        if name is None:
            if self._job.is_main:
                _say(f"nothing is loaded: there is no file {Path(load_dir) / LATEST} yet")
            return None, {}
        folder = Path(load_dir) / name
        _refuse_theirs(folder)
        found = find_newest(folder, self._job.rank, self._job.mesh.side_group("save"))
        if found is None:
            raise UsageError(
                f"engine.load_checkpoint: no checkpoint in {folder}; name the tag of another"
            )
        arranged, state = self._engine.arranged, found.manifest.state
        if load_module_only or not load_optimizer_states:
            load_weights(found.path, found.manifest, arranged)
        else:
            load_training(found.path, found.manifest, arranged, self.optimizer)
            self._engine.load_state_dict(state["engine"])
            for group, values in zip(self.optimizer.param_groups, state["groups"], strict=True):
                group.update({k: tuple(v) if k == "betas" else v for k, v in values.items()})
        if not load_module_only:
            self.global_steps, self.micro_steps, self.global_samples = state["counts"]
            self.skipped_steps = self._engine.num_skipped
            if load_lr_scheduler_states and self.lr_scheduler is not None and state["scheduler"]:
                self.lr_scheduler.load_state_dict(state["scheduler"])
        self.loaded_checkpoint_tag = name
        client = torch.load(folder / CLIENT, map_location="cpu", weights_only=True)
        return str(found.path), client

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """The whole model's weights in one file, in 16 bits where the training is; all ranks call it."""
        frozen = {"exclude_frozen_parameters": exclude_frozen_parameters}
        _refuse("save_16bit_model", frozen, "the file has all weights; leave it out")
        weights = self._engine.weights()
        if self._job.is_main:
            narrow = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self._job.layout.precision)
            found = {
                name: value.to("cpu", narrow if narrow and value.is_floating_point() else None)
                for name, value in weights.items()
            }
            path = Path(save_dir) / save_filename
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(found, path)
        self._wait()
        return True

    save_fp16_model = save_16bit_model

    def destroy(self) -> None:
        """Leave the job; done by itself when the script ends."""
        for saver in self._savers.values():
            saver.close()
        self._job.close()

    def _saver(self, folder: Path) -> Saver:
        if folder not in self._savers:
            for saver in self._savers.values():
                saver.close()
            group, world = self._job.mesh.side_group("save"), self._job.mesh.world_group
            saver = Saver(folder, self._job.rank, group, world, Keep(1), self.device)
            self._savers = {folder: saver}
        return self._savers[folder]

    def _write_client(self, folder: Path, state: dict[str, Any]) -> None:
        """By the first rank; what it may hold is looked at by all, so that all are told."""
        if strange := _strange(state):
            raise UsageError(
                f"engine.save_checkpoint(client_state=...) holds a {strange}; give plain data: numbers, "
                "strings, "
                "tensors, and lists and dictionaries of them (vars(args) for an argparse.Namespace)"
            )
        if self._job.is_main:
            torch.save(state, folder / CLIENT)

    def _agree_on_tag(self, folder: Path, tag: Any) -> str | None:
        """The first rank's answer: others may not see a new file yet."""
        box: list[str | None] = [str(tag) if tag is not None else None]
        if tag is None and self._job.is_main and (folder / LATEST).is_file():
            box = [(folder / LATEST).read_text(encoding="utf-8").strip()]
        if self._job.mesh.world_group is not None:
            dist.broadcast_object_list(box, group_src=0, group=self._job.mesh.world_group)
        return box[0]

    def _wait(self) -> None:
        if self._job.mesh.world_group is not None:
            dist.barrier(self._job.mesh.world_group)


def _refuse(method: str, options: Mapping[str, Any], instead: str) -> None:
    """What is asked for and would be ignored."""
    asked = [name for name, value in options.items() if value]
    if asked:
        raise UsageError(f"engine.{method}({asked[0]}=...) is not here; {instead}")


def build_loader(job: Job, dataset: Any, batch: int, collate: Any, drop_last: bool) -> JobLoader:
    options = {"collate": collate} if collate is not None else {}
    return job.loader(dataset, batch_size=batch, drop_last=drop_last, **options)


def _strange(value: Any) -> str:
    """The type of something in it that is no plain data; empty where all is."""
    if value is None or type(value) in (bool, int, float, str, bytes) or type(value) is Tensor:
        return ""
    if type(value) in (list, tuple):
        return next(filter(None, map(_strange, value)), "")
    if type(value) is dict:
        return next(filter(None, map(_strange, [*value, *value.values()])), "")
    return type(value).__name__


def _refuse_theirs(folder: Path) -> None:
    if any(folder.glob("*_model_states.pt")):
        raise UsageError(
            f"{folder} was written by deepspeed itself; make one file of its weights with its "
            "zero_to_fp32.py, "
            "and load that into the model before deepspeed.initialize"
        )


def _plain(state: Any, name: str) -> Any:
    """What JSON holds; of the rest no schedule's state can be known again."""
    if isinstance(state, (bool, int, float, str)) or state is None:
        return state
    if isinstance(state, (list, tuple)):
        return [_plain(one, name) for one in state]
    if isinstance(state, dict):
        return {str(key): _plain(one, name) for key, one in state.items()}
    raise UsageError(
        f"the state of {name} holds a {type(state).__name__}, which a checkpoint has no word for; keep it "
        "in "
        "client_state"
    )


def _say(text: str) -> None:
    print(f"{OURS}{text}", file=sys.stderr)
