"""`ridgeline verify`: the recipe's training on one device and in each layout, compared.

First in float64, where the same formula agrees to 1e-9 and a wrong one does not; then in the recipe's
own precision, where a layout may be as far from the float64 training as one device is, times a small
factor. Called by `cli.py` and by the parity tests.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from ridgeline.config import RunConfig
from ridgeline.errors import RunError, UsageError
from ridgeline.launch.env import RankEnv
from ridgeline.layout import Layout, require_layout
from ridgeline.train.setup import check_batch
from ridgeline.verify.compare import FLOAT64_BOUND, Comparison, compare
from ridgeline.verify.ranks import Ranks
from ridgeline.verify.record import Recording, record_training
from ridgeline.verify.reference import needs_simulation, simulate
from ridgeline.verify.small import shrink

_PRECISION_FACTOR = 4.0
"""How much farther than one device a layout may be from float64: sums in another order."""
_TELLING_BOUND = 0.1
"""A bound above this says nothing: rounding alone changes the training as much as a mistake would."""
_EPS = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}


class BrokenReference(RunError):
    """One device cannot do the training, so there is nothing to prove."""


@dataclass(frozen=True)
class Row:
    """What was found of one layout."""

    layout: Layout
    precision: str
    """float64, or the recipe's own."""
    comparison: Comparison | None
    """None when the model cannot be arranged so, or when the run failed."""
    refused: str = ""
    failed: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        if self.refused:
            return "refused"
        if self.failed or self.comparison is None:
            return "failed"
        if self.comparison.bound > _TELLING_BOUND:
            return "unclear"
        return "same" if self.comparison.same else "differs"

    @property
    def detail(self) -> str:
        """What to read when it is not the same."""
        if self.verdict == "unclear":
            return "on one device rounding alone moves it as far"
        if self.comparison is not None and self.comparison.first is not None:
            return str(self.comparison.first)
        return self.refused or self.failed


class Verifier:
    """Proves layouts of one configuration; keeps the references and the processes between them."""

    def __init__(self, config: RunConfig, layouts: list[Layout], steps: int) -> None:
        for layout in layouts:
            require_layout(layout, "--layout")
        self.config = shrink(config, layouts, steps)
        for layout in layouts:
            check_batch(self.config, layout)
        self._ranks: dict[int, Ranks] = {}
        self._references: dict[tuple[str, str], Recording] = {}

    def check(self, layout: Layout, precision: str = "float64") -> Row:
        """Train in `layout` and compare with one device."""
        start = time.perf_counter()
        try:
            reference = self._reference(layout, precision)
            if precision == "float64":
                recording = self._record(layout, precision)
                found = compare(reference, recording, FLOAT64_BOUND)
            else:
                found = self._compare_rounded(layout, precision, reference)
        except BrokenReference:
            raise
        except UsageError as error:
            return Row(layout, precision, None, refused=str(error))
        except RunError as error:
            return Row(layout, precision, None, failed=str(error))
        return Row(layout, precision, found, seconds=time.perf_counter() - start)

    def _compare_rounded(self, layout: Layout, precision: str, exact: Recording) -> Comparison:
        """`exact` is one device in float64; one device in `precision` says how far rounding goes."""
        alone = Layout(accumulate=max(layout.accumulate, layout.microbatches))
        one = compare(exact, self._record(alone.replace(precision=precision), precision), 0.0)
        other = self._record(layout.replace(precision=precision), precision)
        farthest = max(one.loss, one.gradient, one.weight, _EPS[precision])
        return compare(exact, other, _PRECISION_FACTOR * farthest)

    def _reference(self, layout: Layout, precision: str) -> Recording:
        """One device, with the microbatches of the layout: batch norm sees one at a time."""
        parts = max(layout.accumulate, layout.microbatches)
        alone = Layout(accumulate=parts)
        simulated = needs_simulation(layout)
        key = (str(layout) if simulated else str(alone), "float64")
        if key not in self._references:
            try:
                if simulated:
                    config = self._configured(alone, "float64")
                    self._references[key] = self._on(1)(_simulate, config, str(layout))
                else:
                    self._references[key] = self._record(alone, "float64")
            except RunError as error:
                # Nothing to compare with: no layout is at fault.
                raise BrokenReference(
                    f"the training fails on one device already: {error}"
                ) from None
        return self._references[key]

    def _record(self, layout: Layout, precision: str) -> Recording:
        ranks = self._on(layout.world_size)
        recording: Recording = ranks(_record, self._configured(layout, precision))
        return recording

    def _configured(self, layout: Layout, precision: str) -> RunConfig:
        dtype = "float64" if precision == "float64" else "float32"
        if precision == "float64":
            layout = layout.replace(precision="fp32")
        text = f"dp={layout.dp}," + str(layout.replace(dp=1)).removeprefix("dp=1")
        model = replace(self.config.model, dtype=dtype)
        return replace(self.config, layout=text.rstrip(","), model=model)

    def _on(self, num_ranks: int) -> Ranks:
        ranks = self._ranks.get(num_ranks)
        if ranks is None or not ranks.alive:
            self._ranks[num_ranks] = ranks = Ranks(num_ranks)
        return ranks

    def close(self) -> None:
        for ranks in self._ranks.values():
            ranks.close()


def _record(env: RankEnv, config: RunConfig) -> Recording:
    return record_training(config, env)


def _simulate(env: RankEnv, config: RunConfig, layout: str) -> Recording:
    return simulate(config, env, Layout.parse(layout))
