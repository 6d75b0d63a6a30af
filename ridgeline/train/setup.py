"""Everything a run needs, built once: config -> mesh -> model -> layout -> optimizer -> loaders.

The functions a step is made of are chosen here, so that `step.py` and `loop.py` never ask which
technique is in use. Called by `run.py` and by benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.config import DataConfig, RunConfig, needs_evaluation
from ridgeline.data.augment.apply import build_augment
from ridgeline.data.augment.change import AugmentBatch
from ridgeline.data.batch import Batch
from ridgeline.data.build import build_sources
from ridgeline.data.feed import Feed, build_feed
from ridgeline.data.loader import Loader
from ridgeline.data.order import Blocks, shuffle_quality
from ridgeline.data.source import Source, SourceInfo
from ridgeline.data.subset import FirstSamples
from ridgeline.errors import UsageError
from ridgeline.facts import MachineFacts, ModelFacts
from ridgeline.launch.env import RankEnv, prepare_deterministic
from ridgeline.layout import Layout
from ridgeline.machine.describe import describe_machine
from ridgeline.models.build import MODELS, build_model
from ridgeline.models.count import ESTIMATED, count_model
from ridgeline.models.inputs import change_each
from ridgeline.models.weights import load_weights
from ridgeline.optim.average import averaging
from ridgeline.optim.build import Trainable, build_optimizer
from ridgeline.optim.layerwise import Whole
from ridgeline.optim.master import build_master_adamw
from ridgeline.optim.schedules import Factor, build_schedule, fit_warmup, scale_lr
from ridgeline.optim.stochastic import build_stochastic_adamw
from ridgeline.optim.update import Update, build_update
from ridgeline.parallel.apply import arrange
from ridgeline.parallel.arranged import Arranged
from ridgeline.parallel.mesh import Mesh, build_mesh, choose_device, read_order
from ridgeline.parallel.norm import build_whole
from ridgeline.parallel.precision import Precision, Scaler, build_precision
from ridgeline.parallel.random import Randomness, seed_apart
from ridgeline.parallel.tuned import prefer_attention
from ridgeline.train.checks import check_batch, count_parts
from ridgeline.train.chunked import choose_loss
from ridgeline.train.clock import Clock, build_clock
from ridgeline.train.counted import count_forward
from ridgeline.train.hang import collective_timeout
from ridgeline.train.ignored import IgnoredTargets
from ridgeline.train.objective import Objective, build_forward_backward
from ridgeline.train.staging import Staging, stage_data
from ridgeline.train.step import ForwardBackward
from ridgeline.train.tasks import Task, build_task, check_target

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


_Changes = tuple[AugmentBatch | None, AugmentBatch | None]


@dataclass(frozen=True)
class Training:
    """A run, ready to go."""

    config: RunConfig
    mesh: Mesh
    arranged: Arranged
    """The user's module as the layout has it."""
    task: Task
    optimizer: Optimizer
    precision: Precision
    loader: Loader
    eval_loader: Loader | None
    to_device: Callable[[Batch], Batch]
    feed: Feed
    """The loop's way to the device: the same as `to_device`, ahead of the step."""
    forward_backward: ForwardBackward
    update: Update
    clock: Clock
    peak_lr: float
    schedule: Factor
    num_steps: int
    model_facts: ModelFacts
    machine_facts: MachineFacts
    notes: list[str] = field(default_factory=list)
    """Sentences for the user: what was decided from the recipe."""
    late_note: Callable[[], str] = lambda: ""
    """One more, once batches have shown it."""
    staging: Staging = field(default_factory=Staging)
    """Copies of the data on this node's disk."""

    @property
    def last_step(self) -> int:
        """Where this process ends: `num_steps`, or the share of them that is asked for now."""
        share = self.config.train.stop_after
        return min(self.num_steps, max(1, math.ceil(self.num_steps * share - 1e-6)))

    @property
    def model(self) -> nn.Module:
        """The user's module itself."""
        return self.arranged.model

    def set_lr(self, step: int) -> float:
        """The learning rate of the step that comes after `step` updates, given to the optimizer."""
        rate = self.peak_lr * self.schedule(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def close_loaders(self) -> None:
        """End the loaders' worker processes, if there are any."""
        self.loader.close()
        if self.eval_loader is not None:
            self.eval_loader.close()


def build_training(
    config: RunConfig,
    env: RankEnv,
    resumes: bool = False,
    block_costs: dict[str, float] | None = None,
) -> Training:
    """Every rank calls this with the same configuration; one that `resumes` will get its weights from a
    checkpoint, so `model.weights` is not looked at. `block_costs`: see `arrange`."""
    layout = Layout.parse_for(config.layout, env.world_size, "layout")
    check_batch(config, layout)
    if layout.precision == "fp16" and config.model.dtype == "float16":
        raise UsageError(
            "precision=fp16 scales the loss and needs wider weights than model.dtype=float16; "
            "use model.dtype=float32"
        )
    device = choose_device(config.device, env)
    _prepare_process(config, device)
    precision = build_precision(layout.precision, device)

    def join() -> Mesh:
        order = read_order(config.axes, "axes")
        return build_mesh(env, layout, device, order, collective_timeout(config.watch))

    # Wrong data are better found before ranks wait for each other; only nodes that stage meet first.
    if not config.data.stage:
        sources = build_sources(config.data.source, config.data.args, config.train.seed)
        return _build_on(config, layout, device, precision, sources, join, resumes, block_costs)
    mesh = join()
    staging = stage_data(config.data, mesh)
    try:
        sources = build_sources(config.data.source, staging.args, config.train.seed)
        built = _build_on(
            config, layout, device, precision, sources, lambda: mesh, resumes, block_costs
        )
        return replace(built, staging=staging, notes=[*staging.notes, *built.notes])
    except BaseException:
        staging.release()
        raise


def _build_on(
    config: RunConfig,
    layout: Layout,
    device: torch.device,
    precision: Precision,
    sources: tuple[Source, Source],
    join: Callable[[], Mesh],
    resumes: bool,
    block_costs: dict[str, float] | None,
) -> Training:
    """The rest, once the data are there."""
    _check_vocab(config, sources[0])
    changes = _build_changes(config, sources)
    info = (
        sources[0].info if changes[0] is None else changes[0].augment.output_info(sources[0].info)
    )
    task = build_task(config.train.task, info.task)
    check_target(config.train.target, task)
    no_evaluation = _say_no_evaluation(config, sources[1])
    model_facts = _count(config, info, task)
    mesh = join()
    env = mesh.env
    model = build_weights(config, device, "" if resumes else config.model.weights)
    example = _example(config, info, device)
    if model_facts.flops_source == ESTIMATED:
        model_facts = count_forward(model_facts, model, example)
    loss = choose_loss(model, task, config.tune, layout, example)
    arranged = arrange(
        Objective(model, loss),
        layout,
        mesh,
        model=model,
        loss=loss,
        ddp=config.ddp,
        randomness=Randomness(config.train.seed),
        example=example,
        tune=config.tune,
        block_costs=block_costs,
    )
    clock = build_clock(device)
    ignored = IgnoredTargets(task, config.data.source)
    to_device = ignored.watching(build_to_device(config, device))
    loader, eval_loader = _build_loaders(config, layout, mesh, sources, changes)
    num_steps = count_steps(config, len(loader))
    rate, note = scale_lr(
        config.train.lr, config.train.batch, config.train.reference_batch, config.train.lr_rule
    )
    trainables = arranged.trainables()
    optimizer = _build_optimizer(config, layout, model, trainables, rate, build_whole(arranged))
    parameters = [t.parameter for t in trainables]
    care = arranged.care(optimizer)
    update = build_update(optimizer, parameters, config.train.clip, precision.scaler, care)
    machine_facts = describe_machine(device, layout.precision, env.local_world_size)
    schedule, warmup_note = fit_warmup(config.schedule, num_steps)
    # For a model that draws numbers itself, apart on ranks that hold different samples. Dropout does
    # not use it, and the weights were made before this.
    seed_apart(config.train.seed, mesh.data_rank)
    return Training(
        config=config,
        mesh=mesh,
        arranged=arranged,
        task=task,
        optimizer=optimizer,
        precision=precision,
        loader=loader,
        eval_loader=eval_loader,
        to_device=to_device,
        feed=build_feed(to_device, device),
        forward_backward=build_forward_backward(arranged, precision, clock, _step_begin(layout)),
        update=_with_average(config, arranged, optimizer, precision.scaler, update),
        clock=clock,
        peak_lr=rate,
        schedule=build_schedule(schedule, num_steps, len(loader)),
        num_steps=num_steps,
        model_facts=model_facts,
        machine_facts=machine_facts,
        late_note=ignored.take,
        notes=[
            note,
            *warmup_note,
            *getattr(sources[0], "notes", ()),
            *no_evaluation,
            *_say_batch(config, len(sources[0])),
            *_say_shuffle(config, len(sources[0])),
            *_say_in_line(config.data, sources[0]),
            *arranged.notes,
        ],
    )


def _build_optimizer(
    config: RunConfig,
    layout: Layout,
    model: nn.Module,
    trainables: list[Trainable],
    rate: float,
    whole: Whole | None,
) -> Optimizer:
    for name, parameter in model.named_parameters():
        if not (parameter.is_complex() and parameter.requires_grad):
            continue
        if layout.precision == "fp16":
            raise UsageError(
                f"{name} is complex, which precision=fp16 cannot train; use precision=bf16 or fp32"
            )
        if config.tune.weights != "wide":
            raise UsageError(
                f"{name} is complex, which tune.weights={config.tune.weights} cannot train; leave it out"
            )
    if config.tune.weights == "wide":
        return build_optimizer(trainables, config.optim, rate, config.tune.fused_optimizer, whole)
    alone = layout.replace(precision="bf16", compile=False, graphs=False, recompute="none")
    if layout.precision not in ("bf16", "fp8") or alone != Layout(precision="bf16"):
        raise UsageError(
            f"tune.weights={config.tune.weights} is for one device with precision=bf16 or fp8, and the "
            f"layout is {layout}; leave it out (zero=1 and up keep bf16 weights by themselves)"
        )
    if config.tune.weights == "stochastic":
        return build_stochastic_adamw(model, config.optim, rate, config.train.seed)
    return build_master_adamw(model, config.optim, rate)


def _with_average(
    config: RunConfig,
    arranged: Arranged,
    optimizer: Optimizer,
    scaler: Scaler | None,
    update: Update,
) -> Update:
    """The update, with that of a moving average of the weights where the recipe asks for one."""
    if config.optim.ema is None:
        return update
    average = arranged.keep_average(optimizer, config.optim.ema, config.optim.ema_warmup)
    return averaging(update, average, lambda: scaler is not None and scaler.overflowed)


def _check_vocab(config: RunConfig, source: Source) -> None:
    """A token without a row in the embedding is an index error without a name, or worse on a GPU."""
    vocab, tokens = config.model.args.get("vocab"), source.info.num_classes
    if source.info.unit == "tokens" and isinstance(vocab, int) and tokens and vocab < tokens:
        raise UsageError(
            f"model.args.vocab={vocab} is too small for data.source={config.data.source}, whose samples "
            f"have {tokens} different tokens; use model.args.vocab={tokens} or more"
        )


def count_steps(config: RunConfig, per_epoch: int) -> int:
    """Optimizer steps of the whole run: `steps` or `epochs`, whichever ends first."""
    limits = []
    if config.train.steps is not None:
        limits.append(config.train.steps)
    if config.train.epochs is not None:
        limits.append(config.train.epochs * per_epoch)
    return min(limits)


def _prepare_process(config: RunConfig, device: torch.device) -> None:
    """Settings of the whole process: threads, determinism, kernel search."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.train.deterministic and device.type == "cuda":
        prepare_deterministic()
    # Asked only to warn, flash attention on CUDA keeps to its backward pass that adds in any order.
    torch.use_deterministic_algorithms(config.train.deterministic, warn_only=device.type != "cuda")
    prefer_attention(config.tune.attention)
    if device.type == "cuda":
        # Batches have one shape, so the search for the fastest convolution pays after one step.
        searches = config.tune.search_convolutions and not config.train.deterministic
        torch.backends.cudnn.benchmark = searches


def _build_changes(config: RunConfig, sources: tuple[Source, Source]) -> _Changes:
    """What `data.augment` does to training batches and to those of an evaluation."""
    train, held_out = (
        build_augment(config.data.augment, source.info, config.train.seed, train=is_train)
        for source, is_train in zip(sources, (True, False), strict=True)
    )
    return train and AugmentBatch(train), held_out and AugmentBatch(held_out)


def _count(config: RunConfig, info: SourceInfo, task: Task) -> ModelFacts:
    """Facts from a copy of the model on the meta device."""
    trace = True
    try:
        with torch.device("meta"):
            model = build_model(config.model.name, **config.model.args)
    except Exception:
        # A constructor that looks at values (`x.item()`) cannot run there. If it cannot run on the
        # CPU either, this raises what the user has to know.
        model = build_model(config.model.name, **config.model.args)
        trace = False
    with torch.device("meta"):
        # Two samples, because batch norm refuses to train on one value per channel.
        inputs = info.zeros(2)
        targets = torch.zeros((2, *info.target_shape), dtype=info.target_dtype)
    return count_model(
        config.model.name,
        model,
        inputs,
        targets,
        lambda model, x, y: Objective(model, task.loss)(x, y),
        info.unit,
        info.units_per_sample,
        trace,
    )


def _example(
    config: RunConfig, info: SourceInfo, device: torch.device
) -> tuple[Tensor, ...] | dict[str, Tensor]:
    """Two samples of zeros, for techniques that have to watch the model run."""
    dtype = DTYPES[config.model.dtype]
    inputs = change_each(
        info.zeros(2, device), lambda x: x.to(dtype) if x.is_floating_point() else x
    )
    return (inputs,) if isinstance(inputs, Tensor) else inputs


def build_weights(config: RunConfig, device: torch.device, weights: str) -> nn.Module:
    """The model with its initial weights, which depend on the seed alone, or are those of a file. Also
    called by `export`, which fills it from a checkpoint."""
    torch.manual_seed(config.train.seed)
    # Ours are made on the device at once; a user's constructor may need the CPU (`x.numpy()`).
    with device if config.model.name in MODELS else nullcontext():
        model = build_model(config.model.name, **config.model.args)
    convert(model.to(device), DTYPES[config.model.dtype])
    if weights:
        load_weights(model, Path(weights))
    if config.model.channels_last:
        try:
            model.to(memory_format=torch.channels_last)
        except RuntimeError as error:
            raise UsageError(
                f"model.channels_last=true is for 2-D convolutions, and {config.model.name} has "
                f"others ({error}); leave it out"
            ) from error
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            f"no parameter of {config.model.name} is trainable, so there is nothing to optimize"
        )
    return model


def convert(model: nn.Module, dtype: torch.dtype) -> None:
    """As `model.to(dtype)`, which would take the imaginary part away from complex weights: they become
    complex numbers of the same kind, or of single precision where there are none."""
    pairs = torch.complex128 if dtype is torch.float64 else torch.complex64

    def one(value: Tensor) -> Tensor:
        if value.is_complex():
            return value.to(pairs)
        return value.to(dtype) if value.is_floating_point() else value

    model._apply(one)


def build_adapt(config: RunConfig) -> Callable[[Tensor], Tensor]:
    """How a tensor of a batch gets the model's type and memory order."""
    dtype = DTYPES[config.model.dtype]

    def adapt(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        if config.model.channels_last and value.dim() == 4:
            value = value.contiguous(memory_format=torch.channels_last)
        return value.to(dtype)

    return adapt


def build_to_device(config: RunConfig, device: torch.device) -> Callable[[Batch], Batch]:
    """How a batch gets to the device, where it is brought to the model's type and memory order: what
    files hold in half the bytes is copied in half the bytes."""
    adapt = build_adapt(config)

    def to_device(batch: Batch) -> Batch:
        batch = batch.to(device).settle()
        inputs = [change_each(part, adapt) for part in batch.inputs]
        return replace(batch, inputs=inputs, targets=[adapt(value) for value in batch.targets])

    return to_device


def _build_loaders(
    config: RunConfig,
    layout: Layout,
    mesh: Mesh,
    sources: tuple[Source, Source],
    changes: _Changes,
) -> tuple[Loader, Loader | None]:
    train_source, eval_source = sources
    data, train = config.data, config.train
    shared = {
        "rank": mesh.data_rank,
        "world": mesh.data_size,
        "one_node": mesh.env.local_world_size == mesh.env.world_size,
        "seed": train.seed,
        "workers": data.workers,
        "threads": data.threads,
        "prefetch": data.prefetch,
        "pin_memory": mesh.device.type == "cuda",
        "device": mesh.device,
        # On a CPU where it is read, beside the training; else on the device.
        "change_later": mesh.device.type != "cpu" and data.augment.where == "device",
    }
    loader = Loader(
        train_source,
        batch=train.batch,
        accumulate=count_parts(layout),
        drop_last=data.drop_last,
        blocks=_blocks(config),
        change=changes[0],
        pairs=changes[0] is not None and changes[0].augment.mixes,
        **shared,
    )
    if train.eval_samples is not None:
        eval_source = FirstSamples(eval_source, train.eval_samples)
    if not len(eval_source):
        return loader, None
    return loader, Loader(
        eval_source, batch=train.batch, shuffle=False, change=changes[1], **shared
    )


def _blocks(config: RunConfig) -> Blocks | None:
    if config.data.shuffle == "full":
        return None
    return Blocks(config.data.shuffle_block, config.data.shuffle_window)


def _say_no_evaluation(config: RunConfig, held_out: Source) -> list[str]:
    """Where the data has nothing to evaluate on; an error where something was asked of evaluations."""
    never = config.train.eval_samples == 0
    if len(held_out) and not never:
        return []
    why = f"data.source={config.data.source} has no evaluation split"
    if key := needs_evaluation(config):
        what = "train.eval_samples=0 leaves them out" if never else why
        raise UsageError(
            f"{key} needs evaluations, and {what}; leave {key} out, or evaluate on something",
            key=key,
        )
    return [] if never else [f"nothing is evaluated: {why}"]


def _say_batch(config: RunConfig, num_samples: int) -> list[str]:
    batch, source = config.train.batch, config.data.source
    if batch <= num_samples:
        return []
    return [
        f"train.batch={batch} is more than the {num_samples:,} samples of {source}: every step has all of "
        "them, at a learning rate for more"
    ]


def _say_shuffle(config: RunConfig, num_samples: int) -> list[str]:
    """How good a shuffle by blocks is, in figures."""
    blocks = _blocks(config)
    if blocks is None:
        return []
    quality = shuffle_quality(num_samples, config.train.batch, blocks)
    return [
        f"shuffled in windows of {blocks.blocks_a_window()} blocks of {blocks.block} samples: neighbours "
        f"on the disk meet in a batch {quality.neighbours_ratio:.1f} times as often as in a full shuffle, "
        f"and a batch is drawn from {quality.blocks_a_batch:.0f} blocks (full: "
        f"{quality.best_blocks_a_batch:.0f})"
    ]


def _say_in_line(data: DataConfig, source: Source) -> list[str]:
    """Which settings of the loader have no part, where the source is not read in threads."""
    if data.workers or not getattr(source, "uses_global_rng", False):
        return []
    usual = DataConfig()
    raised = [
        name for name in ("threads", "prefetch") if getattr(data, name) > getattr(usual, name)
    ]
    if not raised:
        return []
    settings = " and ".join(f"data.{name}={getattr(data, name)}" for name in raised)
    return [
        f"{settings} {'do' if len(raised) > 1 else 'does'} nothing for {data.source}: its samples may draw "
        "from the global generators, which threads would share; data.workers=N reads them ahead"
    ]


def _step_begin(layout: Layout) -> Callable[[], None]:
    """Captured CUDA graphs have to hear that the outputs of the step before are done with."""
    if layout.graphs:
        return torch.compiler.cudagraph_mark_step_begin
    return lambda: None
