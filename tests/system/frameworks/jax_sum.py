"""A JAX script as a user would write it: nothing but the environment says who it is. Prints JSON.

`--given` names the number and index of the process in the call, as JAX asks for where it knows no launcher.
"""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
if "--given" in sys.argv:
    jax.distributed.initialize(
        num_processes=int(os.environ["WORLD_SIZE"]), process_id=int(os.environ["RANK"])
    )
else:
    jax.distributed.initialize()

rank, size = jax.process_index(), jax.process_count()
mesh = Mesh(np.array(jax.devices()), ("ranks",))
rows = jax.make_array_from_process_local_data(
    NamedSharding(mesh, PartitionSpec("ranks")), np.array([10.0 ** (rank + 1)], np.float32)
)
summed = jax.jit(
    jax.shard_map(
        lambda row: jax.lax.psum(row, "ranks"),
        mesh=mesh,
        in_specs=PartitionSpec("ranks"),
        out_specs=PartitionSpec(),
    )
)(rows)

# One step of least squares on data that differ by rank: the gradient is the mean over all of them.
targets = jax.make_array_from_process_local_data(
    NamedSharding(mesh, PartitionSpec("ranks")), np.array([float(rank + 1)], np.float32)
)
loss = lambda weight, y: jnp.mean((weight - y) ** 2)  # noqa: E731
gradient = jax.jit(jax.grad(loss))(jnp.float32(0.0), targets)
print(
    json.dumps(
        {
            "rank": rank,
            "size": size,
            "sum": float(summed[0]),
            "gradient": float(gradient),
            "torch_rank": int(os.environ["RANK"]),
        }
    ),
    flush=True,
)
jax.distributed.shutdown()
