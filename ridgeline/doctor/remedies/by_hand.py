"""Remedies that a recipe cannot be changed for: said, not done."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.model_look import look_at
from ridgeline.doctor.remedies.contract import (
    MATRIX,
    Remedy,
    Step,
    amdahl,
    free_share,
    layout_of,
    on_cuda,
    seconds,
)

LEAST_STALL = 0.01
"""Share of the step that a line has to hold the device up for."""
LARGE = 16_384
"""Classes from which on the logits are worth a thought."""


def _waits_for_host(step: Step, config: RunConfig) -> str | None:
    """The lines, worst first, with what stands there."""
    stalls = [
        stall
        for stall in getattr(step, "stalls", ())
        if stall.what != "Python" and stall.seconds >= LEAST_STALL * step.step_s
    ]
    if not on_cuda(step) or not stalls:
        return None
    places = [f"{s.where}{f': `{s.code.strip()}`' if s.code else ''}" for s in stalls[:3]]
    return f"the host waits for the device at {'; at '.join(places)}"


SYNCHRONISATIONS = Remedy(
    name="host synchronisations",
    applies=_waits_for_host,
    predicted_gain=lambda step, config: amdahl(step, getattr(step, "host_s", 0.0)),
    change=lambda config: [],
    risk="none",
    advice="keep losses and metrics on the device and read them every few steps, not with .item()",
)
STAGING = Remedy(
    name="packing and staging",
    applies=lambda step, config: (
        "the step waits for data, and they are not on the node's own disk"
        if step.data_s > 0.1 * step.step_s and not config.data.stage
        else None
    ),
    predicted_gain=lambda step, config: amdahl(step, 0.7 * step.data_s),
    change=lambda config: [],
    risk="none",
    advice="`ridgeline data pack` many small files into few, and set data.stage=auto",
)
SPARSITY = Remedy(
    name="2:4 sparsity and pruning",
    applies=lambda step, config: (
        f"{seconds(step, MATRIX) / step.step_s:.0%} of the step are matrix products"
        if on_cuda(step) and seconds(step, MATRIX) > 0.5 * step.step_s
        else None
    ),
    predicted_gain=lambda step, config: 1.0,
    change=lambda config: [],
    risk="rounding",
    advice="for inference, half of the weights can go (torch.sparse.to_sparse_semi_structured, "
    "torch.nn.utils.prune) and the rest be trained on: a change of the model, to be judged by its metric",
)
CONV_NORMS = Remedy(
    name="folded norms",
    applies=lambda step, config: (
        f"{look_at(config).num_batch_norms} batch norms are passes of their own in evaluation and export"
        if look_at(config).num_batch_norms and look_at(config).num_conv2d
        else None
    ),
    predicted_gain=lambda step, config: 1.0,
    change=lambda config: [],
    risk="order",
    advice="for inference: `from ridgeline.parallel.conv_norm import fold_conv_norms; model, _ = "
    "fold_conv_norms(model, example_inputs)`",
)
OWN_LOSS = Remedy(
    name="chunked loss",
    applies=lambda step, config: (
        f"logits of {look_at(config).num_outputs:,} classes are written, read and kept in full"
        if on_cuda(step) and look_at(config).num_outputs >= LARGE
        else None
    ),
    predicted_gain=lambda step, config: 1.0,
    change=lambda config: [],
    risk="order",
    advice="have the model return its last hidden states (tokens, width), and call "
    "`linear_cross_entropy(hidden, head.weight, head.bias, targets, shares)` of "
    "ridgeline.parallel.linear_loss, with shares of 1 / number of tokens",
)
OWN_GRAPHS = Remedy(
    name="CUDA graphs",
    applies=lambda step, config: (
        f"{step.launch_s / step.step_s:.0%} of the step are pauses between launches"
        if on_cuda(step) and step.launch_s > 0.1 * step.step_s and layout_of(config).compile
        else None
    ),
    predicted_gain=lambda step, config: amdahl(step, 0.9 * step.launch_s),
    change=lambda config: [],
    risk="none",
    advice='compile the model yourself: `model = torch.compile(model, mode="reduce-overhead")`',
)
LARGER_BATCH = Remedy(
    name="larger batch",
    applies=lambda step, config: (
        "more than half of the device's memory is free"
        if on_cuda(step) and (free_share(step) or 0.0) > 0.5
        else None
    ),
    predicted_gain=lambda step, config: amdahl(step, 0.5 * step.launch_s),
    change=lambda config: [],
    risk="none",
    advice="raise train.batch, and train.lr by train.lr_rule: that is another training, so it is yours "
    "to decide",
)


BY_HAND = (SYNCHRONISATIONS, STAGING, LARGER_BATCH, SPARSITY, CONV_NORMS)
BY_HAND_IN_SCRIPTS = (SYNCHRONISATIONS, OWN_LOSS, OWN_GRAPHS, SPARSITY, CONV_NORMS)
