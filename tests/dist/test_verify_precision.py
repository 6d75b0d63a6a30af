"""Proofs in a precision of training: a right layout is the same, and a mistake planted in one differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed import GradBucket

import ridgeline.verify.run as verify_run
from ridgeline.config import RunConfig, find_recipe, load_config
from ridgeline.data.batch import Batch
from ridgeline.launch.env import RankEnv
from ridgeline.layout import Layout
from ridgeline.parallel import float8, localsync
from ridgeline.parallel.arranged import Arranged
from ridgeline.parallel.compress import Compression
from ridgeline.parallel.localsync import LocalSync
from ridgeline.parallel.precision import Precision
from ridgeline.train import evaluate
from ridgeline.train.clock import Clock
from ridgeline.train.setup import Training, build_training
from ridgeline.verify import record
from ridgeline.verify.record import Recording
from ridgeline.verify.run import Row, Verifier

STEPS = 2
NEAR_ZERO = 2.0**-12
"""Of a gradient's largest element: less than what fp16 rounds that to."""
LAYOUTS = (
    "dp=2,zero=1,precision=bf16",
    "dp=2,zero=3,precision=fp16",
    "tp=2,precision=bf16",
    "spatial=2,precision=fp16",
    "pp=2,microbatches=2,precision=fp16",
    "dp=2,sync=local:2,precision=fp16",
    "dp=2,compress=powersgd:2,precision=fp16",
)
MLP = "model={name: mlp, args: {in_features: 64, hidden: 24, out_features: 10}}"


class Proofs:
    """One verifier for a model, so that what one device does is measured once."""

    def __init__(self, *overrides: str, recipe: str = "digits") -> None:
        config = load_config(find_recipe(recipe), overrides).config
        self.verifier = Verifier(config, [Layout.parse(x) for x in LAYOUTS], STEPS)

    def verdict(self, text: str) -> Row:
        layout = Layout.parse(text)
        try:
            return self.verifier.check(layout, layout.precision)
        finally:  # the next ranks of this number are forked anew, with another mistake or none
            self.verifier._ranks.pop(layout.world_size).close()


@pytest.fixture(scope="module")
def proofs() -> Iterator[dict[str, Proofs]]:
    made = {"mlp": Proofs(MLP), "cnn": Proofs(), "llama": Proofs(recipe="llama-text")}
    yield made
    for proof in made.values():
        proof.verifier.close()


# Each changes one thing in the ranks of the layout, which are forked from this process.


def _longer_gradients() -> None:
    right = Arranged.weight_of
    Arranged.weight_of = lambda *args: 1.05 * right(*args)  # type: ignore[method-assign]


def _no_all_reduce() -> None:
    def keep(state, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def build(config: RunConfig, env: RankEnv) -> Training:
        training = build_training(config, env)
        training.arranged.objective.register_comm_hook(None, keep)  # type: ignore[operator]
        return training

    record.build_training = build  # type: ignore[attr-defined]


def _wrong_loss_scale() -> None:
    right = Precision.backward
    Precision.backward = lambda self, loss: right(self, 2 * loss)  # type: ignore[method-assign]


def _update_of_scaled_gradients() -> None:
    torch.amp.GradScaler._unscale_grads_ = (  # type: ignore[method-assign]
        lambda *args: {torch.device("cpu"): torch.zeros(())}
    )


def _wrong_rate() -> None:
    right = Training.set_lr
    Training.set_lr = lambda self, step: right(self, step + 1)  # type: ignore[method-assign]


def _equal_shares() -> None:
    def share(self: Arranged, counts: tuple[int, ...], index: int, share: float) -> float:
        return self.loss_scale / (len(counts) * self.mesh.data_size)

    Arranged.weight_of = share  # type: ignore[method-assign]


def _metrics_of_one_rank() -> None:
    def means(sums: dict[str, Tensor], arranged: Arranged) -> tuple[dict[str, float], int]:
        return {name: float(total / count) for name, (total, count) in sums.items()}, 0

    evaluate._means = means


def _scales_of_half_a_row() -> None:
    """Values above the largest of the first half are cut off."""
    right = float8.largest

    def find(values: Tensor, rows: bool) -> Tensor:
        return right(values[:, : values.shape[1] // 2], rows)

    float8.largest = find  # type: ignore[attr-defined]


def _before_each_reduction(forget: Callable[[Compression], None]) -> None:
    right = Compression.reduce

    def reduce(self: Compression, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            forget(self)
        return right(self, bucket)

    Compression.reduce = reduce  # type: ignore[method-assign]


def _no_error_feedback() -> None:
    _before_each_reduction(lambda compression: compression.memory.errors.clear())


def _cold_start() -> None:
    """Every step guesses at the low rank anew."""
    _before_each_reduction(lambda compression: compression.memory.q.clear())


def _equal_replicas() -> None:
    """Replicas count the same in an average, whatever they have seen."""
    right = LocalSync.after_step
    LocalSync.after_step = lambda self, step, weight=1.0: right(self, step)  # type: ignore[method-assign]


def _average_for_the_first_only() -> None:
    right = localsync._copy_back

    def copy_back(flat: Tensor, bucket: Sequence[Tensor]) -> None:
        if torch.distributed.get_rank() == 0:
            right(flat, bucket)

    localsync._copy_back = copy_back


MISTAKES = {
    "scales of half a row": _scales_of_half_a_row,
    "longer gradients": _longer_gradients,
    "no all-reduce": _no_all_reduce,
    "wrong loss scale": _wrong_loss_scale,
    "update of scaled gradients": _update_of_scaled_gradients,
    "wrong rate": _wrong_rate,
    "equal shares of an uneven batch": _equal_shares,
    "metrics of one rank": _metrics_of_one_rank,
    "no error feedback": _no_error_feedback,
    "cold start": _cold_start,
    "equal replicas": _equal_replicas,
    "average for the first only": _average_for_the_first_only,
}
_planted = ""


def record_with_mistake(env: RankEnv, config: RunConfig) -> Recording:
    if env.world_size > 1:
        MISTAKES[_planted]()
    return record.record_training(config, env)


@pytest.mark.table(keep=11)
@pytest.mark.parametrize(
    ("mistake", "model", "layout", "kind"),
    [
        ("longer gradients", "cnn", "dp=2,precision=bf16", "gradient"),
        ("longer gradients", "mlp", "dp=2,zero=2,precision=bf16", "gradient"),
        ("longer gradients", "mlp", "dp=2,precision=fp16", "gradient"),
        ("no all-reduce", "cnn", "dp=2,precision=bf16", "gradient"),
        ("wrong loss scale", "mlp", "dp=2,precision=fp16", "gradient"),
        ("update of scaled gradients", "mlp", "dp=2,zero=1,precision=fp16", "weight"),
        ("wrong rate", "cnn", "dp=2,precision=bf16", "weight"),
        ("longer gradients", "llama", "dp=2,zero=2,precision=fp8", "gradient"),
        ("no all-reduce", "llama", "dp=2,precision=fp8", "gradient"),
        ("scales of half a row", "llama", "dp=2,precision=fp8", "gradient"),
        ("equal shares of an uneven batch", "mlp", "dp=2", "at step 2"),
        ("metrics of one rank", "mlp", "dp=2", "metric loss"),
        ("longer gradients", "mlp", "dp=2,compress=powersgd:2,precision=bf16", "gradient"),
        ("longer gradients", "mlp", "dp=2,compress=bf16,precision=fp16", "gradient"),
        ("longer gradients", "mlp", "dp=2,sync=local:2,precision=fp16", "gradient"),
        ("longer gradients", "llama", "dp=2,sync=local:2,precision=fp8", "gradient"),
        ("no error feedback", "mlp", "dp=2,compress=powersgd:2,precision=bf16", "at step 2"),
        ("cold start", "mlp", "dp=2,compress=powersgd:2,precision=fp16", "at step 2"),
        ("wrong rate", "mlp", "dp=2,compress=powersgd:2,precision=bf16", "weight"),
        ("wrong rate", "mlp", "dp=2,sync=local:2,precision=bf16", "weight"),
        ("equal replicas", "mlp", "dp=2,sync=local:2,precision=bf16", "weight"),
        ("average for the first only", "mlp", "dp=2,sync=local:2,precision=fp16", "replica/1/"),
    ],
)
def test_a_planted_mistake_differs(
    monkeypatch: pytest.MonkeyPatch,
    proofs: dict[str, Proofs],
    mistake: str,
    model: str,
    layout: str,
    kind: str,
) -> None:
    monkeypatch.setattr(verify_run, "_record", record_with_mistake)
    monkeypatch.setitem(globals(), "_planted", mistake)
    row = proofs[model].verdict(layout)
    assert row.verdict == "differs", row
    assert kind in row.detail


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_right_is_the_same(proofs: dict[str, Proofs], layout: str) -> None:
    row = proofs["cnn"].verdict(layout)
    assert row.verdict == "same", row


def _other_signs_near_zero(env: RankEnv, config: RunConfig) -> Recording:
    """A right training that has rounded gradients near zero to the other side, of one replica where each
    has its own."""
    num_turned = 0

    def build(config: RunConfig, env: RankEnv) -> Training:
        training = build_training(config, env)

        def forward_backward(batch: Batch, clock: Clock) -> Tensor:
            nonlocal num_turned
            share = training.forward_backward(batch, clock)
            for parameter in training.model.parameters():
                gradient = parameter.grad
                assert gradient is not None
                size = gradient.abs()
                is_tiny = (size > 0) & (size < NEAR_ZERO * size.amax())
                gradient.copy_(gradient.where(~is_tiny, -gradient))
                num_turned += int(is_tiny.sum())
            return share

        if training.arranged.local_sync and env.rank != 0:
            return training
        return replace(training, forward_backward=forward_backward)

    record.build_training = build  # type: ignore[attr-defined]
    recording = record.record_training(config, env)
    assert num_turned or env.rank != 0, "no gradient is near zero"
    return recording


@pytest.mark.parametrize(
    "layout", ["dp=2,sync=local:2,precision=fp16", "dp=2,compress=powersgd:2,precision=fp16"]
)
def test_signs_of_gradients_near_zero_are_no_difference(
    monkeypatch: pytest.MonkeyPatch, proofs: dict[str, Proofs], layout: str
) -> None:
    """Adam makes of such a gradient a step as long as any, in one direction or in the other."""
    monkeypatch.setattr(verify_run, "_record", _other_signs_near_zero)
    row = proofs["cnn"].verdict(layout)
    assert row.verdict == "same", row


_SCALES = {
    "high": {"init_scale": 2.0**40},
    "settles": {"init_scale": 2.0**40, "backoff_factor": 2.0**-28},
}
_overflowing: list[tuple[str, bool]] = []
"""Loss scales that trainings begin with, and whether those of one device do."""


def build_overflowing(config: RunConfig, env: RankEnv) -> Training:
    training = build_training(config, env)
    for name, alone in _overflowing:
        if alone == (env.world_size == 1) and training.precision.scaler is not None:
            training.precision.scaler.__init__("cpu", **_SCALES[name])  # type: ignore[misc]
    return training


@pytest.mark.parametrize(
    ("alone", "together", "verdict", "says"),
    [
        ("settles", "settles", "same", "at step 1 on one device too; both left that out"),
        ("high", "high", "unclear", "at steps 1, 2 on one device and in this layout, so none were"),
        (
            "",
            "settles",
            "differs",
            "at step 1 in this layout and not on one device; use precision=bf16",
        ),
        ("high", "", "unclear", "at steps 1, 2 on one device and not in this layout"),
    ],
)
def test_an_overflow_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch, alone: str, together: str, verdict: str, says: str
) -> None:
    monkeypatch.setattr(record, "build_training", build_overflowing)
    chosen = [(name, place) for name, place in ((alone, True), (together, False)) if name]
    monkeypatch.setitem(globals(), "_overflowing", chosen)
    proof = Proofs(MLP)
    try:
        row = proof.verdict("dp=2,precision=fp16")
    finally:
        proof.verifier.close()
    assert row.verdict == verdict, row
    assert f"gradients overflowed in fp16 {says}" in row.detail


def test_a_mistake_does_not_hide_behind_an_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 1 overflows on both, step 2 shows it."""
    monkeypatch.setattr(record, "build_training", build_overflowing)
    monkeypatch.setitem(globals(), "_overflowing", [("settles", True), ("settles", False)])
    monkeypatch.setattr(verify_run, "_record", record_with_mistake)
    monkeypatch.setitem(globals(), "_planted", "longer gradients")
    proof = Proofs(MLP)
    try:
        row = proof.verdict("dp=2,precision=fp16")
    finally:
        proof.verifier.close()
    assert row.verdict == "differs", row
    assert row.detail.startswith("gradient ")
    assert "at step 2" in row.detail
