"""Put every technique a layout asks for on a module, in order: `arrange` and `parallelize`.

The order is pipeline cuts, spatial, context, tensor and expert rewrites (of each stage), fp8, recompute,
compile, sharding, replication; each technique is one entry of `ORDER`, and a test holds the entries against
the table of `composition.py`. The module knows nothing of any of it. `arrange` is called by
`train/setup.py` and `verify/`, `parallelize` by loops of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ridgeline.config import DdpConfig
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout, check_available, require_layout
from ridgeline.parallel.arranged import Arranged
from ridgeline.parallel.batchnorm import apply_sync_batch_norm
from ridgeline.parallel.ddp import weigh_outputs
from ridgeline.parallel.dropout import apply_keyed_dropout
from ridgeline.parallel.mesh import Mesh, build_mesh, choose_device
from ridgeline.parallel.random import Randomness
from ridgeline.parallel.replicas import apply_replication, apply_sharding
from ridgeline.parallel.share import Share
from ridgeline.tuning import TuneConfig

_LARGEST_PROBED = 100_000_000
"""Parameters of a model that is copied and run once to see what it draws."""


def _find_samples(built: Arranged) -> None:
    """Where samples lie in what is dropped: of the whole model, since a stage cannot run alone."""
    if built.randomness is None or built.example is None:
        return
    from ridgeline.parallel.sample_dims import learn_sample_dims

    size = sum(p.numel() for p in built.model.parameters())
    may_copy = size < _LARGEST_PROBED
    built.randomness.sample_dims = learn_sample_dims(built.model, built.example, may_copy)


def _randomness(built: Arranged) -> None:
    """Dropout by sample and position, so that no technique below changes it."""
    if built.randomness is None:
        return
    # A stage cannot run alone, and a large model is not copied to be watched: they are judged by code.
    size = sum(p.numel() for p in built.model.parameters())
    example = built.example if built.staged is None and size < _LARGEST_PROBED else None
    for module in built.parts:
        done = apply_keyed_dropout(module, built.randomness, example)
        if done.left_alone:
            built.notes.append(
                f"{', '.join(done.left_alone)} draw from torch's generator, so their numbers depend "
                "on the layout"
            )


def _sync_batch_norm(built: Arranged) -> None:
    group = built.mesh.group("copies", "shard", "rows", "columns")
    if built.ddp.sync_batch_norm and group is not None:
        if built.layout.tp > 1 or built.layout.cp > 1:
            raise UsageError(
                f"ddp.sync_batch_norm=true with {built.layout}: synchronised batch norm does not know "
                "tensors that are split over tp or cp; use ddp.sync_batch_norm=false, or dp or spatial "
                "instead of these"
            )
        for module in built.parts:
            changed = apply_sync_batch_norm(module, group, built.share)
            if module is built.objective:  # a model that is nothing but a batch norm
                built.objective = built.model = changed


def _tile(built: Arranged) -> None:
    if built.layout.spatial == (1, 1):
        return
    from ridgeline.parallel.spatial import TileGrid, TileTensor, apply_spatial, tile_inputs

    mesh = built.mesh
    grid = TileGrid(
        rows=mesh.group("rows"),
        columns=mesh.group("columns"),
        row_rank=mesh.axis_rank("rows"),
        row_size=mesh.axis_size("rows"),
        column_rank=mesh.axis_rank("columns"),
        column_size=mesh.axis_size("columns"),
    )
    grid.randomness = built.randomness
    tiled = tile_inputs(built.example, grid)  # an image too small for the grid is said now
    if built.example is not None and not any(isinstance(v, TileTensor) for v in tree_leaves(tiled)):
        raise UsageError(
            f"layout spatial={grid.row_size}x{grid.column_size} cuts images, and the model is given none "
            "(no floating tensor of four dims or more); leave it out, or use dp or tp"
        )
    # In a loop of the user's own the outputs leave the library, so they are put together again.
    for module in built.callables:
        apply_spatial(module, grid, gather_outputs=built.loss is None)
    built.grid = grid
    built.notes.append(f"images cut into {grid.row_size} x {grid.column_size} tiles")


def _split(built: Arranged) -> None:
    """Tensor and context parallelism: both run the model on tensors of global shape."""
    layout = built.layout
    if built.tensor_plan is None:
        return
    from ridgeline.parallel.context import use_ring
    from ridgeline.parallel.tensor import (
        GlobalView,
        cut_layers,
        enter_stage,
        enter_view,
        use_randomness,
    )

    view = GlobalView(built.mesh.device_mesh("cp", "tp"), layout.sp)
    if built.randomness is not None:
        use_randomness(view, built.randomness)
    for module in built.parts:
        cut_layers(view, module, built.tensor_plan)
    if built.staged is not None:
        for stage in built.staged.stages:
            enter_stage(view, stage)
    else:
        for module in built.callables:
            enter_view(view, module)  # the loss is taken of outputs that are still cut
    group = built.mesh.group("cp")
    if group is not None:
        use_ring(view, group)
        built.notes.append(
            f"sequences cut over {layout.cp} ranks where the model's code lets them be; there "
            "scaled_dot_product_attention goes around a ring"
        )
    built.view = view
    built.notes += [line for line in view.report.splitlines() if line]


def _look(built: Arranged) -> None:
    """What has to be seen of the whole model as it was given."""
    if not built.tune.merge:
        return
    from ridgeline.parallel.merged import require_mergeable, try_merge
    from ridgeline.parallel.siblings import find_siblings

    require_mergeable(built.layout)
    example = built.require_example("tune.merge=true")
    paths = built.block_paths or ("",)
    built.siblings = find_siblings(built.model, paths, example, try_merge)
    if not built.siblings.groups:
        refused = ", ".join(built.siblings.refused)
        why = f"the code of {refused} needs each product alone" if refused else "there are none"
        raise UsageError(
            f"tune.merge=true found no linear layers in {type(built.model).__name__} that read the same "
            f"input and can be one product ({why}); leave it out"
        )


def _cut(built: Arranged) -> None:
    layout = built.layout
    if layout.tp > 1 or layout.cp > 1:
        from ridgeline.parallel.context import check_sequences
        from ridgeline.parallel.tensor import plan_tensor

        # Planned on the whole model, carried out on its stages.
        example = built.require_example("tensor and context parallelism")
        built.tensor_plan = plan_tensor(built.model, layout.tp, example)
        built.notes += check_sequences(built.model, layout.cp, built.tensor_plan, example)
    if layout.ep > 1:
        from ridgeline.parallel.expert import find_experts

        example = built.require_example("expert parallelism")
        built.expert_plan = find_experts(built.model, example, layout.ep)
    if layout.pp > 1:
        from ridgeline.parallel.staged import cut_into_stages

        cut_into_stages(built)


def _spread(built: Arranged) -> None:
    """Experts over the replicas, which were found in the whole model."""
    plan, groups, replicas = built.expert_plan, built.mesh.experts, built.mesh.data_group
    if plan is None or groups is None or replicas is None:
        return
    from ridgeline.parallel.expert import apply_experts

    built.experts = apply_experts(built.parts, plan, groups, replicas, _moment(built))
    counts = sorted({one.num for one in (*plan.stacked, *plan.listed)})
    built.notes.append(
        f"experts of {plan.num_layers} layers ({' or '.join(map(str, counts))} in each) spread over "
        f"{groups.size} ranks"
    )
    built.notes += [f"stays whole, {reason}" for reason in plan.refused]


def _compile_split(built: Arranged) -> None:
    """Blocks of a split model, before recompute is put around them."""
    layout = built.layout
    if not layout.compile or built.view is None:
        return
    _avoid_double_flash(built)
    from ridgeline.parallel.tensor.backends import inductor
    from ridgeline.parallel.tensor.compiled import Programs

    blocks = {path: b for part in built.parts for path, b in built.blocks_of(part).items()}
    if not blocks and built.staged is not None:
        return  # a stage that is nothing but the model's beginning or end
    if not blocks:
        built.notes.append(
            "compile=true does nothing here: a split model is compiled block by block, and this one has "
            "no repeated blocks"
        )
        return
    backend = inductor(_compiler_options(built.tune, graphs=False))
    built.programs = Programs(built.view, built.randomness, backend)
    built.programs.add(blocks)


def _narrow(built: Arranged) -> None:
    """Linear layers in fp8, and the other changes of section `tune` to the modules themselves."""
    tune = built.tune
    if built.layout.precision == "fp8":
        from ridgeline.parallel.float8 import apply_float8

        kept: dict[str, str] = {}
        num_changed = 0
        for module in built.parts:
            done = apply_float8(module, built.blocks_of(module), tune, built.block_paths)
            num_changed += len(done.changed)
            kept |= done.kept
        if not num_changed:
            why = "; ".join(f"{name}: {reason}" for name, reason in list(kept.items())[:3])
            raise UsageError(
                f"precision=fp8 found no linear layer for it ({why or 'there is none'}); use precision=bf16"
            )
        stay = (
            f"; {', '.join(kept)} stay in bf16" if len(kept) < 8 else f"; {len(kept)} stay in bf16"
        )
        built.notes.append(f"{num_changed} linear layers in fp8{stay if kept else ''}")
    if tune.residual == "bf16":
        from ridgeline.parallel.tuned import apply_narrow_residual

        blocks = [b for module in built.parts for b in built.blocks_of(module).values()]
        apply_narrow_residual(blocks, built.layout)
    if tune.norms == "fused":
        from ridgeline.parallel.fused_norms import apply_fused_norms

        for module in built.parts:
            built.notes.append(apply_fused_norms(module, built.layout))
    if tune.conv_kernels:
        from ridgeline.parallel.conv_layers import apply_conv_kernels

        found = sum(apply_conv_kernels(module, built.layout) for module in built.parts)
        if not found and built.staged is None:
            raise UsageError(
                "tune.conv_kernels=true: the model has neither a 2-D batch norm nor a 2-D max pool that it "
                "would change; leave it out"
            )
        built.notes.append(f"{found} batch norms and max pools have kernels of their own")
    if tune.pad:
        from ridgeline.parallel.tuned import apply_padding

        if built.tensor_plan is not None:
            raise UsageError(
                f"tune.pad={tune.pad} and {built.layout} do not compose: tp and cp run the layers on "
                "tensors of global shape; leave one of them out"
            )
        padded = [name for module in built.parts for name in apply_padding(module, tune.pad)]
        built.notes.append(
            f"computed in multiples of {tune.pad}: {', '.join(padded) or 'nothing, all layers are'}"
        )
    if built.siblings is not None:
        from ridgeline.parallel.merged import apply_merge, describe_merge

        groups = [g for part in built.parts for g in apply_merge(part, built.siblings.groups)]
        built.notes.append(describe_merge(groups, built.siblings))


def _recompute(built: Arranged) -> None:
    if built.layout.recompute == "none":
        return
    from ridgeline.parallel.recompute import apply_recompute

    if built.staged is not None and not built.block_paths:
        raise UsageError(
            f"recompute={built.layout.recompute} in a pipeline goes block by block, and the model has no "
            "repeated blocks; leave recompute or pp out"
        )
    for module in built.parts:
        # Without blocks of its own a stage keeps its activations; a model's layers are grouped.
        blocks = built.blocks_of(module)
        if blocks or built.staged is None:
            apply_recompute(module, built.layout.recompute, _again(built), blocks or None)


def _own_recompute(built: Arranged) -> None:
    """Checkpointing in the model's own code, inside of which a layout has to be as it was."""
    draws = built.randomness is not None and built.randomness.is_used
    if built.view is None and built.staged is None and not draws:
        return
    from ridgeline.parallel.own_recompute import apply_own_recompute

    for module in built.callables if built.staged is None else built.parts:
        apply_own_recompute(module, _moment(built))


def _again(built: Arranged) -> Callable[[], AbstractContextManager[Any]]:
    moment = _moment(built)
    return lambda: moment()()


def _moment(built: Arranged) -> Callable[[], Callable[[], AbstractContextManager[Any]]]:
    """What a recomputation finds as it was in forward: the samples at hand, and the global view."""

    def moment() -> Callable[[], AbstractContextManager[Any]]:
        replayed = built.randomness.moment() if built.randomness is not None else nullcontext
        num_real = built.share.num_real

        @contextmanager
        def enter() -> Iterator[None]:
            # In a pipeline other microbatches have run since.
            now, built.share.num_real = built.share.num_real, num_real
            # In the order of the forward pass: dropout is keyed before the view sees the call.
            try:
                with built.view.active() if built.view is not None else nullcontext(), replayed():
                    yield
            finally:
                built.share.num_real = now

        return enter

    return moment


def _offload_activations(built: Arranged) -> None:
    if built.layout.offload == "activations":
        from ridgeline.parallel.offload import apply_activation_offload

        for module in built.parts:
            apply_activation_offload(module, built.blocks_of(module).values() or [module])


def _compile(built: Arranged) -> None:
    layout, device = built.layout, built.mesh.device
    if layout.graphs and device.type != "cuda":
        raise UsageError(
            f"layout graphs=true captures CUDA graphs, but the device is {device}; leave graphs out"
        )
    if built.tune.search_tiles and not (layout.compile and device.type == "cuda"):
        raise UsageError(
            f"tune.search_tiles is for compile=true on CUDA, and here compile is {layout.compile} and the "
            f"device {device}; leave it out"
        )
    if not layout.compile:
        if (mode := built.tune.compile_mode) != "default":
            # Said and not refused: one recipe serves layouts that compile and others.
            built.notes.append(
                f"tune.compile_mode={mode} does nothing in a layout that does not compile; add "
                "compile=true to the layout, or leave the setting out"
            )
        return
    if built.view is not None:
        return  # done, inside of recompute
    _avoid_double_flash(built)
    # One compiled graph a shape: with dynamic shapes an uneven last batch would leave a slower
    # one behind that then serves the full batches too.
    options = _compiler_options(built.tune, layout.graphs)
    regional = built.tune.compile_mode == "regional"
    if layout.pp > 1 or layout.zero == 3 or regional:
        # What is between the blocks stops and sends, or gathers weights; the blocks do the work. Blocks
        # of one class are also compiled once for all of them, which starts sooner.
        blocks = [b for module in built.parts for b in built.blocks_of(module).values()]
        from ridgeline.parallel.tuned import compile_module

        for block in blocks or built.parts:
            compile_module(block, dynamic=False, options=options)
        if (
            regional
            and built.staged is None
            and isinstance(getattr(built.objective, "loss", None), Callable)
        ):
            built.objective.loss = torch.compile(
                built.objective.loss, dynamic=False, options=options
            )
        return
    built.objective.compile(dynamic=False, options=options)


def _compiler_options(tune: TuneConfig, graphs: bool) -> dict[str, bool]:
    """In torch's words; its modes are names for some of these."""
    autotune = tune.compile_mode == "autotune"
    wanted = {
        "triton.cudagraphs": graphs,
        "max_autotune": autotune,
        "coordinate_descent_tuning": autotune or tune.search_tiles,
    }
    return {name: True for name, value in wanted.items() if value}


def _avoid_double_flash(built: Arranged) -> None:
    """Before torch 2.13 a compiled backward of attention on the CPU takes float64 for float32."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    dtypes = {p.dtype for part in built.parts for p in part.parameters()}
    if version < (2, 13) and built.mesh.device.type == "cpu" and torch.float64 in dtypes:
        torch.backends.cuda.enable_flash_sdp(False)  # the switch is the CPU's as well


@dataclass(frozen=True)
class Technique:
    """One place in the order of application."""

    apply: Callable[[Arranged], None]
    covers: tuple[str, ...] = ()
    """The names of `layout.TECHNIQUES` that it carries out."""


ORDER: tuple[Technique, ...] = (
    Technique(_look),
    Technique(_find_samples),
    # Then stages: they are copies of the model's structure, and what follows changes instances.
    Technique(_cut, ("pp", "schedule=gpipe", "schedule=interleaved", "schedule=zerobubble")),
    Technique(_randomness),
    Technique(_sync_batch_norm),
    Technique(_tile, ("spatial",)),
    Technique(_split, ("tp", "sp", "cp")),
    Technique(_spread, ("ep",)),
    Technique(_compile_split),
    Technique(_narrow, ("precision=fp8",)),
    Technique(_recompute, ("recompute=selective", "recompute=full")),
    Technique(_own_recompute),
    Technique(_offload_activations, ("offload=activations",)),
    Technique(_compile, ("compile",)),
    Technique(
        apply_sharding,
        ("zero=1", "zero=2", "zero=3", "shard", "offload=optimizer", "offload=params"),
    ),
    Technique(apply_replication, ("dp", "compress", "sync=local")),
)


def arrange(
    objective: nn.Module,
    layout: Layout,
    mesh: Mesh,
    *,
    model: nn.Module | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    share: Share | None = None,
    ddp: DdpConfig | None = None,
    randomness: Randomness | None = None,
    example: tuple[Any, ...] | None = None,
    tune: TuneConfig | None = None,
    block_costs: dict[str, float] | None = None,
) -> Arranged:
    """The same computation as `objective`, arranged as `layout` says over the ranks of `mesh`.

    `model` is the part of `objective` that holds the parameters and `loss` the rest, which pipelines
    take apart. `example` are inputs of the model, for techniques that have to watch it run.
    `block_costs` are what a pipeline would measure, where another rank has done that.
    """
    require_layout(layout, "layout")
    missing = check_available(layout)
    if missing:
        raise UsageError(str(missing[0]))
    built = Arranged(
        objective=objective,
        model=model if model is not None else objective,
        loss=loss,
        layout=layout,
        mesh=mesh,
        share=share or Share(),
        ddp=ddp or DdpConfig(),
        randomness=randomness,
        example=example,
        tune=tune or TuneConfig(),
        block_costs=block_costs,
    )
    for technique in ORDER:
        technique.apply(built)
    return built


def parallelize(
    model: nn.Module,
    layout: Layout,
    example_input: Any = None,
    *,
    mesh: Mesh | None = None,
    share: Share | None = None,
    ddp: DdpConfig | None = None,
) -> nn.Module:
    """`arrange` for a loop of the user's own: a module that is called like the one given.

    Without a mesh, joins the job that torchrun set up and moves the model to this rank's device.
    `example_input` is for techniques that have to watch the module run; data parallelism needs none.
    """
    if mesh is None:
        require_layout(layout, "layout")
        env = read_rank_env()
        mesh = build_mesh(env, layout, choose_device("auto", env))
        model = model.to(mesh.device)
    return arrange_own(model, layout, example_input, mesh, share, ddp).objective


def arrange_own(
    model: nn.Module,
    layout: Layout,
    example_input: Any,
    mesh: Mesh,
    share: Share | None = None,
    ddp: DdpConfig | None = None,
    tune: TuneConfig | None = None,
) -> Arranged:
    """The same with what the techniques left behind, for whoever saves the model."""
    require_layout(layout, "layout")
    _require_own_loop(layout)
    example = example_input
    if example is not None and not isinstance(example, tuple):
        example = (example,)
    built = arrange(model, layout, mesh, share=share, ddp=ddp, example=example, tune=tune)
    if built.is_fully_sharded:
        weigh_outputs(built.objective, built.share)
    return built


def _require_own_loop(layout: Layout) -> None:
    """Techniques that drive the step or the optimizer themselves need the library's loop; so do those
    under which the user's own clipping or loss would see a part and take it for the whole."""
    for uses, field in (
        (layout.pp > 1, "pp"),
        (layout.tp > 1, "tp"),
        (layout.cp > 1, "cp"),
        (layout.ep > 1, "ep"),
        (layout.zero in (1, 2) and layout.dp > 1, "zero"),
        (layout.sync != "every", "sync"),
        (layout.offload == "optimizer", "offload"),
    ):
        if uses:
            raise UsageError(
                f"{field}={getattr(layout, field)} drives backward or the update, and cannot be had in "
                "a loop that calls optimizer.step() itself; use job.engine(model, optimizer) of "
                "ridgeline.start(), `ridgeline train`, or here dp, zero=3, spatial, recompute, compile"
            )
