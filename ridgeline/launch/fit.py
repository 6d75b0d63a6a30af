"""The same training on fewer ranks: what a layout becomes when some of its devices are gone.

The global batch stays, so the experiment does; fewer replicas go through it in more and no larger
parts. Called by `survive.py` when a run goes on without a device that keeps failing.
"""

from __future__ import annotations

from ridgeline.layout import Layout, check_layout


def fit_layout(layout: Layout, batch: int, num_ranks: int) -> Layout | None:
    """The largest layout on at most `num_ranks` that differs in `dp` alone, with `shard` and the
    number of microbatches following; None when even one replica does not fit.

    >>> str(fit_layout(Layout.parse("dp=4"), 32, 3))
    'dp=2,accumulate=2'
    """
    rest = layout.world_size // layout.dp
    for dp in range(min(layout.dp, num_ranks // rest), 0, -1):
        fitted = _with_replicas(layout, batch, dp)
        if fitted is not None:
            return fitted
    return None


def _with_replicas(layout: Layout, batch: int, dp: int) -> Layout | None:
    name = "accumulate" if layout.pp == 1 else "microbatches"
    parts = getattr(layout, name)
    most = batch // (layout.dp * parts)
    """Samples that a rank has had in a microbatch, so that it has the memory for them."""
    shard = layout.shard
    if shard is not None:
        shard = max(n for n in range(1, min(shard, dp) + 1) if dp % n == 0)
    for more in range(parts, batch // dp + 1):
        if batch % (dp * more) or batch // (dp * more) > most:
            continue
        fitted = layout.replace(dp=dp, shard=shard, **{name: more})
        if not check_layout(fitted):
            return fitted
    return None
