"""One process follows a layout's training: every step anew from the weights the layout had.

In a low precision two correct trainings part by themselves: rounding changes a gradient a little, Adam
makes a whole step of a gradient near zero, and the next step starts elsewhere. So each step is taken
apart. One device gets the layout's weights and computes loss and gradients of the same batch; then it
gets the layout's gradients and does the update. What is left is one step's rounding, and one device
shows how large that is, in the same precision. Replicas that are not one device are followed in the same
way, each from its own weights and by its own gradients. Called by `run.py` on one rank.
"""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.launch.env import RankEnv
from ridgeline.layout import Layout
from ridgeline.verify.record import Recording, averages_of
from ridgeline.verify.reference import build_reference, deals


def follow(
    config: RunConfig, env: RankEnv, layout: Layout, track: Recording | None, way: str = "plain"
) -> Recording:
    """What one process finds at each step of `track`; without one, where it gets by itself.

    `layout` and `config`: see `build_reference`; `way`: see `step.backward`.
    """
    reference = build_reference(config, env, layout)
    found = Recording(num_parameters=reference.trainings[0].model_facts.num_parameters)
    for training in reference.trainings:
        training.arranged.train()
    try:
        for step, batches in enumerate(deals(reference.trainings[0], layout.dp)):
            for training in reference.trainings:
                training.set_lr(step)
            loss, gradients = reference.backward(batches, way)
            found.losses.append(loss)
            found.gradients.append(gradients)
            found.weights.append(reference.update((track or found).gradients[step]))
            if track is not None:
                reference.load(track.weights[step], track.gradients[step])
        found.metrics = reference.evaluate()
        found.averages = averages_of(reference.trainings[0], found.gradients)
    finally:
        for training in reference.trainings:
            training.close_loaders()
    return found
