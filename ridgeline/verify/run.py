"""`ridgeline verify`: the recipe's training on one device and in each layout, compared.

First in float64, where the same formula agrees to 1e-9 and a wrong one does not; then in the recipe's
own precision, step by step from the layout's own weights (`follow.py`), where a layout may be as far from
the exact step as one device is, times a small factor (`rounding.py`). Where a layout's replicas are not
one device, "one device" is what `reference.py` puts in its place. Called by `cli.py` and by the parity
tests.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from ridgeline.config import RunConfig
from ridgeline.errors import RunError, UsageError
from ridgeline.launch.env import RankEnv
from ridgeline.launch.forked import Ranks
from ridgeline.layout import Layout, require_layout
from ridgeline.parallel.precision import AUTOCAST
from ridgeline.train.checks import check_batch
from ridgeline.verify.compare import Comparison
from ridgeline.verify.divided import Parts, compare_parts, judge
from ridgeline.verify.exact import compare_exact
from ridgeline.verify.follow import follow
from ridgeline.verify.overflow import compare_overflowed, overflowed
from ridgeline.verify.record import Recording, record_training
from ridgeline.verify.reference import reference_layout
from ridgeline.verify.rounding import Rounding, compare_rounded, measure
from ridgeline.verify.small import shrink


class BrokenReference(RunError):
    """One device cannot do the training, so there is nothing to prove."""


@dataclass(frozen=True)
class Row:
    """What was found of one layout."""

    layout: Layout
    precision: str
    """float64, or the recipe's own; fp32 for a model that cannot run in float64."""
    comparison: Comparison | None
    """None when the model cannot be arranged so, or when the run failed."""
    refused: str = ""
    key: str = ""
    """The setting that it was refused for."""
    failed: str = ""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    """What techniques had to say of the model, such as what they left whole."""

    @property
    def verdict(self) -> str:
        if self.refused:
            return "refused"
        if self.failed or self.comparison is None:
            return "failed"
        if not self.comparison.same:
            return "differs"
        return "unclear" if self.comparison.unclear else "same"

    @property
    def detail(self) -> str:
        """What to read when it is not the same, or not all of it was compared."""
        if self.comparison is not None:
            return _said(self.comparison)
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
        self._references: dict[tuple[object, ...], Recording] = {}
        self._roundings: dict[tuple[object, ...], Rounding] = {}
        self._divided: dict[tuple[int, bool], Comparison] = {}
        """By number of microbatches, and whether batches are even: one device that takes them beside one
        that takes the batch whole."""
        self._parts: dict[tuple[int, bool], Parts] = {}
        self._exact, self._why = "float64", ""
        """What a proof is done in first, and why where that is not float64."""
        self._notes: tuple[str, ...] = ()

    def check(self, layout: Layout, precision: str = "float64") -> Row:
        """Train in `layout` and compare with one device."""
        start, self._notes = time.perf_counter(), ()
        if precision == "float64":
            precision = self._exact
        try:
            found = self._compare(layout, precision)
        except BrokenReference as error:
            if precision != "float64" or not self._trains_in_float32():
                raise
            self._exact, self._why = "fp32", str(error.__cause__).partition("\n")[0]
            return self.check(layout)
        except UsageError as error:
            return Row(layout, precision, None, refused=str(error), key=error.key)
        except RunError as error:
            return Row(layout, precision, None, failed=str(error))
        return Row(layout, precision, found, seconds=time.perf_counter() - start, notes=self._notes)

    def _compare(self, layout: Layout, precision: str) -> Comparison:
        self._reference(layout, precision)  # first: where one device fails, no layout is at fault
        found = self._record(layout, precision, layout.compile)
        self._notes = tuple(found.notes)
        verdict = self._judge(layout, precision, found)
        if precision != self._exact:
            return verdict
        num_parts = max(layout.accumulate, layout.microbatches)
        if num_parts > 1 and verdict.same:
            verdict = self._beside_whole(verdict, precision, num_parts, layout.compile)
        if self._why:
            said = f"to rounding of fp32, since float64 is what this model cannot do ({self._why})"
            verdict = replace(verdict, note="; ".join(filter(None, (_said(verdict), said))))
        return verdict

    def _judge(
        self, layout: Layout, precision: str, found: Recording, is_divided: bool = False
    ) -> Comparison:
        """A recording in float64 or in a precision of training beside what it has to be the same as."""
        if precision == "float64":
            verdict = compare_exact(
                self._reference(layout, precision),
                found,
                lambda way: self._follow(layout, precision, found, way),
                is_divided,
            )
        else:
            verdict = self._judge_rounded(layout.replace(precision=precision), found)
        is_apart = layout.dp > 1 and reference_layout(layout).dp == 1
        if verdict.same or not (is_apart and found.has_batch_norm):
            return verdict
        if self.config.ddp.sync_batch_norm:
            return verdict
        said = "batch norms see the samples of their own rank, unless ddp.sync_batch_norm=true"
        return replace(verdict, note=f"{_said(verdict)}; {said}")

    def _beside_whole(
        self, verdict: Comparison, precision: str, num_parts: int, is_compiled: bool
    ) -> Comparison:
        """The verdict on a layout that is the same as one device with as many microbatches: what that is
        beside one that takes its batch whole."""
        key, whole = (num_parts, is_compiled), Layout(compile=is_compiled)
        if key not in self._divided:
            found = self._reference(whole.replace(accumulate=num_parts), precision)
            self._divided[key] = self._judge(whole, precision, found, is_divided=True)
        if self._divided[key].same:
            said = (_said(verdict), self._divided[key].note)
            return replace(verdict, note="; ".join(filter(None, said)))
        if key not in self._parts:
            config = self._configured(Layout(accumulate=num_parts), precision, is_compiled)
            self._parts[key] = self._on(1)(_compare_parts, config)
        return judge(verdict, self._divided[key], self._parts[key])

    def _judge_rounded(self, layout: Layout, found: Recording) -> Comparison:
        precision, rounding = layout.precision, self._rounding(layout)
        exact = self._follow(layout, self._exact, found)
        verdict = compare_rounded(exact, found, rounding)
        is_fp16 = precision == "fp16"
        if not verdict.same or (is_fp16 and overflowed(self._reference(layout, precision))):
            # Where two values nearly tie (a maximum, a kink) rounding depends on the weights: before
            # a layout is blamed, one device shows what it makes of these.
            here = [self._follow(layout, precision, found, way) for way in _ways(layout)]
            rounding = measure(exact, here, precision, reference_layout(layout).compress, rounding)
            if is_fp16:
                return compare_overflowed(exact, found, here, rounding)
            verdict = compare_rounded(exact, found, rounding)
        return verdict

    def _trains_in_float32(self) -> bool:
        try:
            self._reference(Layout(), "fp32")
        except RunError:
            return False
        return True

    def _rounding(self, layout: Layout) -> Rounding:
        """How far one device is from the exact step in the layout's precision; measured once for each."""
        precision = layout.precision
        key = _reference_key(layout, precision)
        if key not in self._roundings:
            one = self._reference(layout, precision)
            exact = self._follow(layout, self._exact, one)
            more = [self._follow(layout, precision, one, way) for way in _ways(layout)[1:]]
            compress = reference_layout(layout).compress
            self._roundings[key] = measure(exact, [one, *more], precision, compress)
        return self._roundings[key]

    def _reference(self, layout: Layout, precision: str) -> Recording:
        """The training that the layout's has to be the same as."""
        key = _reference_key(layout, precision)
        if key not in self._references:
            try:
                reference = reference_layout(layout)
                if reference.dp > 1:
                    self._references[key] = self._follow(layout, precision, None)
                else:
                    self._references[key] = self._record(reference, precision, layout.compile)
            except RunError as error:
                # Nothing to compare with: no layout is at fault.
                raise BrokenReference(
                    f"the training fails on one device already: {error}"
                ) from error
        return self._references[key]

    def _follow(
        self, layout: Layout, precision: str, track: Recording | None, way: str = "plain"
    ) -> Recording:
        """What one device finds along the training of `layout`."""
        reference = reference_layout(layout)
        config = self._configured(reference.replace(dp=1), precision, even=layout.compile)
        found: Recording = self._on(1)(_follow, config, str(reference), track, way)
        return found

    def _record(self, layout: Layout, precision: str, even: bool) -> Recording:
        ranks = self._on(layout.world_size)
        config = self._configured(layout, precision, even)
        recording: Recording = ranks(_record, config)
        return recording

    def _configured(self, layout: Layout, precision: str, even: bool) -> RunConfig:
        """Batches of one size only where `even`: for the compiler another size is half a minute."""
        dtype = "float64" if precision == "float64" else "float32"
        layout = layout.replace(precision="fp32" if precision == "float64" else precision)
        data = replace(self.config.data, drop_last=self.config.data.drop_last or even)
        text = f"dp={layout.dp}," + str(layout.replace(dp=1)).removeprefix("dp=1")
        model = replace(self.config.model, dtype=dtype)
        return replace(self.config, layout=text.rstrip(","), model=model, data=data)

    def _on(self, num_ranks: int) -> Ranks:
        ranks = self._ranks.get(num_ranks)
        if ranks is None or not ranks.alive:
            self._ranks[num_ranks] = ranks = Ranks(num_ranks)
        return ranks

    def close(self) -> None:
        for ranks in self._ranks.values():
            ranks.close()


def _said(found: Comparison) -> str:
    return found.note or (str(found.first) if found.first is not None else found.unclear)


def _reference_key(layout: Layout, precision: str) -> tuple[object, ...]:
    """Layouts of which one device's training is the same."""
    return reference_layout(layout), precision, layout.compile


def _ways(layout: Layout) -> tuple[str, str]:
    """How the reference of `layout` may take a step: as it does, and as layouts do.

    Weights in 16 bits are those of sharded replicas, which neither compress nor step by themselves.
    """
    is_narrow = layout.precision in AUTOCAST and reference_layout(layout).dp == 1
    return "plain", "narrow" if is_narrow else "reordered"


def _record(env: RankEnv, config: RunConfig) -> Recording:
    return record_training(config, env)


def _compare_parts(env: RankEnv, config: RunConfig) -> Parts:
    return compare_parts(config, env)


def _follow(
    env: RankEnv, config: RunConfig, layout: str, track: Recording | None, way: str
) -> Recording:
    return follow(config, env, Layout.parse(layout), track, way)
