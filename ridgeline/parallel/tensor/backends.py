"""What turns a traced block of a split model into code: torch's compiler, or nothing.

Forward and backward come from `aot_function`, which traces a function of plain tensors when it is first
called. Used by `compiled.py`, which knows what may be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Check = Callable[[torch.fx.GraphModule], None]
Backend = Callable[[Callable[..., Any], Check, Callable[[], None]], Callable[..., Any]]
"""Makes a function of plain tensors one that is traced when first called, and compiled: the trace is shown
to the second argument, and the third is called when its forward is compiled, before it first runs. Its
backward may be compiled later, and must not fail then."""


def as_written(trace: Callable[..., Any], check: Check, when_ready: Callable[[], None]) -> Any:
    """No compiler: what the trace has, one function after the other. To look for mistakes."""
    return _build(trace, check, when_ready, lambda graph, _: graph.forward, None, None)


def inductor(options: dict[str, Any]) -> Backend:
    """torch's own, as `torch.compile` has it."""

    def build(trace: Callable[..., Any], check: Check, when_ready: Callable[[], None]) -> Any:
        from torch._inductor import compile_fx, config
        from torch._inductor.decomposition import select_decomp_table

        def forward(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            with config.patch(options):
                return compile_fx.compile_fx_inner(graph, inputs)

        def backward(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            with config.patch(options):
                return compile_fx.compile_fx_inner(graph, inputs, is_backward=True)

        table = select_decomp_table()
        return _build(trace, check, when_ready, forward, backward, compile_fx.partition_fn, table)

    return build


def _build(
    trace: Callable[..., Any],
    check: Check,
    when_ready: Callable[[], None],
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None,
    partition: Callable[..., Any] | None,
    decompositions: Any = None,
) -> Any:
    from functorch.compile import aot_function, default_partition, make_boxed_func

    def boxed(compiled: Any) -> Any:
        return compiled if hasattr(compiled, "_boxed_call") else make_boxed_func(compiled)

    def first(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        check(graph)
        compiled = boxed(forward(graph, inputs))
        started = False

        def run(args: list[Any]) -> Any:
            nonlocal started
            if not started:
                started = True
                when_ready()
            return compiled(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def second(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        try:
            return boxed((backward or forward)(graph, inputs))
        except Exception:
            # Other ranks may have theirs: as written it has the same collectives in the same order.
            return boxed(graph.forward)

    def part(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        check(joint)
        return (partition or default_partition)(joint, *args, **kwargs)

    return aot_function(trace, first, second, part, decompositions=decompositions)
