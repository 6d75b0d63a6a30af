"""A TensorFlow script as a user would write it: `TF_CONFIG` says who it is. Prints JSON.

Least squares by gradient descent on data that differ by worker, with a loop of its own: Keras' `fit` does
not work under this strategy with Keras 3.
"""

import json
import os

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
index = strategy.cluster_resolver.task_id
size = strategy.num_replicas_in_sync

random = np.random.default_rng(0)
features = random.normal(size=(8 * size, 3)).astype(np.float32)
labels = features @ np.array([1.0, -2.0, 3.0], np.float32)
mine = slice(8 * index, 8 * index + 8)

with strategy.scope():
    weights = tf.Variable(tf.zeros(3))


@tf.function
def step(x, y):
    def on_replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.linalg.matvec(x, weights) - y) ** 2)
        gradient = tape.gradient(loss, weights)
        context = tf.distribute.get_replica_context()
        mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradient)
        weights.assign_sub(0.1 * mean)
        return loss

    losses = strategy.run(on_replica, args=(x, y))
    return strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)


x, y = tf.constant(features[mine]), tf.constant(labels[mine])
history = [float(step(x, y)) for _ in range(20)]
print(
    json.dumps(
        {
            "rank": index,
            "size": size,
            "losses": history,
            "weights": weights.numpy().tolist(),
            "torch_rank": int(os.environ["RANK"]),
        }
    ),
    flush=True,
)
