"""stub"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ridgeline.launch.hub import Member


def framework_variables(
    members: Sequence[Member], rank: int, environ: Mapping[str, str]
) -> dict[str, str]:
    me = members[rank]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(members)),
        "LOCAL_RANK": str(me.local_rank),
        "LOCAL_WORLD_SIZE": str(me.local_world_size),
        "GROUP_RANK": str(me.node_rank),
        "MASTER_ADDR": members[0].address,
        "MASTER_PORT": str(members[0].ports[0]),
    }
