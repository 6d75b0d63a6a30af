"""Who talks to whom: the device of this rank and every process group, made in this one place.

`build_mesh` joins the job and lays the ranks out along named axes, slowest links first: by default
`pp, dp, cp, spatial, tp`, so that tensor-parallel neighbours have consecutive ranks and share a node,
then the tiles of an image, then the parts of a sequence. Every technique is handed a `Mesh`, and
nothing in the package asks torch for a global group. Called by `train/setup.py` and `ridgeline.start`.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ridgeline.errors import UsageError, unknown_word
from ridgeline.launch.env import RankEnv
from ridgeline.layout import Layout
from ridgeline.parallel.rendezvous import join_store

JOIN_TIMEOUT = timedelta(minutes=10)
# torch 2.13 has renamed it, and warns of the name that 2.11 has.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_DRAIN_S = 0.25

ORDER: Final = ("pp", "dp", "cp", "spatial", "tp")
"""Axes from the slowest links to the fastest."""

_INNER: Final = {"dp": ("copies", "shard"), "spatial": ("rows", "columns")}
"""Axes that are two: replicas are groups of shards, tiles have rows and columns."""

SIDE: Final = "ridgeline-"
"""Torch's records of collectives call the group of `side_group` by this and its purpose."""

_EXPERT_AXES: Final = ("ep", "expert-shard", "expert-copies")
"""Groups within the replicas, which are no axes of their own: see `ExpertGroups`."""

GRADIENT_AXES: Final = ("copies", "shard", "cp", "rows", "columns")
"""Ranks along these hold the same parameters and parts of one gradient."""


@dataclass(frozen=True)
class ExpertGroups:
    """Who shares a model's experts: data-parallel ranks in blocks of `ep`, neighbours first."""

    rank: int
    """This rank's place in its block."""
    size: int
    group: dist.ProcessGroup
    """The ranks of the block, each with other experts; theirs alone, since tokens are sent in forward and
    backward while gradients are on their way over other groups."""
    shard: dist.ProcessGroup | None
    """Ranks of other blocks with the same experts that share out the optimizer's work on them."""
    copies: dist.ProcessGroup | None
    """Ranks with the same experts, and the same part of that work."""

    @property
    def parts(self) -> list[dist.ProcessGroup]:
        """Groups over which something is summed that is in parts on ranks with other experts or shards."""
        return [group for group in (self.group, self.shard) if group is not None]


@dataclass(frozen=True)
class Mesh:
    """This rank's device, its place along each axis, and its groups."""

    env: RankEnv
    layout: Layout
    device: torch.device
    sizes: dict[str, int]
    """Ranks along each axis, outermost first; the product is the world."""
    timeout: timedelta = JOIN_TIMEOUT
    """How long a collective may wait for a rank."""
    owns_group: bool = False
    """Whether `build_mesh` made torch's default group, so that closing the mesh has to end it."""
    _groups: dict[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict)
    experts: ExpertGroups | None = None
    """Where the layout spreads experts."""

    def axis_size(self, *axes: str) -> int:
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one along these axes only; None when it is alone."""
        used = self._used(axes)
        if not used:
            return None
        return self._groups[used]

    def axis_rank(self, *axes: str) -> int:
        """This rank's number in `group(*axes)`."""
        group = self.group(*axes)
        return dist.get_rank(group) if group is not None else 0

    def axes_of(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        """The axes along which these ranks, this one among them, differ; empty for no group of ours."""
        found = (
            a for a, g in self._groups.items() if tuple(dist.get_process_group_ranks(g)) == ranks
        )
        known = {*self.sizes, *_EXPERT_AXES}
        return next((axes for axes in found if axes and axes[0] in known), ())

    def stage_of(self, rank: int) -> int:
        """The place in the pipeline of any rank."""
        return _coordinates(rank, self.sizes)["pp"]

    def _used(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(a for a in self.sizes if a in axes and self.sizes[a] > 1)

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """The sub-mesh of these axes that this rank is in, for DTensor and FSDP2.

        An axis may be several joined by `+`, as in `device_mesh("copies+cp", "shard")`.
        """
        parts = [tuple(axis.split("+")) for axis in axes]
        groups = [self._groups[self._used(part)] for part in parts]
        ranks = torch.tensor(self._block(parts)).view([self.axis_size(*part) for part in parts])
        return DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0],
            self.device.type,
            mesh=ranks if len(groups) > 1 else None,
            mesh_dim_names=axes,
        )

    def _block(self, parts: list[tuple[str, ...]]) -> list[int]:
        """Ranks of the sub-mesh in row-major order of `parts`."""
        here = _coordinates(self.env.rank, self.sizes)
        ranges = []
        for part in parts:
            used = [a for a in self.sizes if a in part]
            ranges.append(
                [
                    dict(zip(used, place, strict=True))
                    for place in itertools.product(*(range(self.sizes[a]) for a in used))
                ]
            )
        return [
            _rank_at({**here, **{k: v for place in places for k, v in place.items()}}, self.sizes)
            for places in itertools.product(*ranges)
        ]

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """Ranks that see different samples; None when this rank sees them all."""
        return self.group("copies", "shard")

    @property
    def data_rank(self) -> int:
        return self.axis_rank("copies", "shard")

    @property
    def data_size(self) -> int:
        return self.axis_size("copies", "shard")

    @property
    def gradient_group(self) -> dist.ProcessGroup | None:
        """Ranks whose gradients of the same parameters are averaged."""
        return self.group(*GRADIENT_AXES)

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        return self.group(*self.sizes)

    def side_group(self, purpose: str) -> dist.ProcessGroup | None:
        """A group of all ranks over the CPU's network for one purpose beside training; every rank calls
        it, and gets the same one every time. None for one process."""
        if self.world_group is None:
            return None
        return self._made_group(SIDE + purpose, None, self.timeout)

    def node_groups(self, purpose: str, timeout: timedelta) -> NodeGroups:
        """Groups over the CPU's network in which nodes talk as nodes; every rank calls it."""
        world = self._made_group(SIDE + purpose, None, timeout)
        places: list[tuple[str, int]] = [("", 0)] * self.env.world_size
        dist.all_gather_object(places, (socket.gethostname(), self.env.local_rank), group=world)
        leaders = [rank for rank, (_, local_rank) in enumerate(places) if local_rank == 0]
        mine = [rank for rank in leaders if rank == self.env.rank]
        mine += [rank for rank in leaders if places[rank][0] == places[self.env.rank][0]]
        node = leaders.index(mine[0]) if mine else 0
        if len(leaders) == 1:
            return NodeGroups(node, 1, world, None)
        # Torch names a group by how many a rank has made before, so all ranks make one: the second
        # ranks of the nodes have theirs too.
        own = self.env.local_rank
        peers = [rank for rank, (_, local_rank) in enumerate(places) if local_rank == own]
        name = f"{SIDE}{purpose}-{'-'.join(map(str, peers))}"
        group = self._made_group(name, peers, timeout)
        return NodeGroups(node, len(leaders), world, group if own == 0 else None)

    def _made_group(
        self, name: str, ranks: list[int] | None, timeout: timedelta
    ) -> dist.ProcessGroup:
        """A gloo group of all ranks, or of some, who alone call this; the same one every time."""
        made, key = _groups_made(), (name,)
        if key not in made:
            made[key] = dist.new_group(
                ranks,
                timeout=timeout,
                backend="gloo",
                group_desc=name[:64],
                use_local_synchronization=ranks is not None,
            )
        self._groups[key] = made[key]
        return made[key]

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the job: writes records, owns the terminal."""
        return self.env.rank == 0

    def sum_over_data(self, value: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over the data ranks, in place; the tensor itself when there is one."""
        if self.data_group is not None:
            dist.all_reduce(value, group=self.data_group)
        return value

    def __str__(self) -> str:
        """The axes from the slowest links to the fastest, as in `pp=2 > dp=4 > tp=2`."""
        used = [f"{axis}={size}" for axis, size in self.sizes.items() if size > 1]
        return " > ".join(used) or "one process"


@dataclass(frozen=True)
class NodeGroups:
    """This rank's node among the nodes, and who speaks for it."""

    node: int
    num_nodes: int
    world: dist.ProcessGroup
    """All ranks."""
    leaders: dist.ProcessGroup | None
    """The first rank of each node; None on the others, and where there is one node."""


def choose_device(choice: str, env: RankEnv) -> torch.device:
    """The device of this rank for `device: auto|cpu|cuda`."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if choice not in ("auto", "cuda"):
        raise UsageError(f"device={choice!r} is not one of auto, cpu, cuda")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices == 0:
        raise UsageError("device=cuda but torch sees no CUDA device here; use device=cpu")
    if env.local_world_size > num_devices:
        raise UsageError(
            f"{env.local_world_size} processes on a node with {num_devices} CUDA device(s); "
            f"use -n {num_devices} or device=cpu"
        )
    return torch.device("cuda", env.local_rank)


def read_order(text: str, place: str = "axes") -> tuple[str, ...]:
    """An order of axes such as `dp,pp,cp,spatial,tp`, slowest links first; each once."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in ORDER:
            raise unknown_word("axis", name, ORDER, place)
    if sorted(names) != sorted(ORDER):
        raise UsageError(f"{place}={text} has to name each of {', '.join(ORDER)} once")
    return names


def rank_at_stage(rank: int, stage: int, sizes: dict[str, int]) -> int:
    """The rank in another place of the pipeline, where it stands along every other axis."""
    return _rank_at({**_coordinates(rank, sizes), "pp": stage}, sizes)


def axis_sizes(layout: Layout, order: tuple[str, ...] = ORDER) -> dict[str, int]:
    """Ranks along each axis, outermost first."""
    shard = layout.shard or (layout.dp if layout.zero else 1)
    sizes = {
        "pp": layout.pp,
        "copies": layout.dp // shard,
        "shard": shard,
        "cp": layout.cp,
        "rows": layout.spatial[0],
        "columns": layout.spatial[1],
        "tp": layout.tp,
    }
    names = [axis for name in order for axis in _INNER.get(name, (name,))]
    return {name: sizes[name] for name in names}


def build_mesh(
    env: RankEnv,
    layout: Layout,
    device: torch.device,
    order: tuple[str, ...] = ORDER,
    timeout: timedelta = JOIN_TIMEOUT,
) -> Mesh:
    """Join the other ranks. Every rank calls this once, before anything else distributed."""
    if layout.world_size != env.world_size:
        raise UsageError(
            f"layout {layout} is for {layout.world_size} processes but {env.world_size} were started"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    sizes = axis_sizes(layout, order)
    if env.world_size == 1:
        return Mesh(env, layout, device, sizes)
    joined = dist.is_initialized()
    if not joined:
        cuda = device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=_store(env),
            rank=env.rank,
            world_size=env.world_size,
            timeout=timeout,
            device_id=device if cuda else None,
        )
    groups = _make_groups(env.rank, sizes, layout, timeout)
    experts = _make_expert_groups(env.rank, sizes, layout, timeout)
    if experts is not None:
        made = (experts.group, experts.shard, experts.copies)
        groups |= {(n,): g for n, g in zip(_EXPERT_AXES, made, strict=True) if g is not None}
    if device.type == "cuda":
        for group in groups.values():
            # A group's first operation has to be one of all its ranks, before any pair talks.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    return Mesh(
        env, layout, device, sizes, timeout, owns_group=not joined, _groups=groups, experts=experts
    )


def _store(env: RankEnv) -> dist.Store:
    """Where ranks find each other's addresses. Torch's agent hands ranks that it started again the
    store of the ranks before them, and with it addresses of processes that are gone: look elsewhere."""
    if env.source != "torchrun":
        return join_store(env, JOIN_TIMEOUT)
    store, _, _ = next(dist.rendezvous("env://", env.rank, env.world_size, timeout=JOIN_TIMEOUT))
    return dist.PrefixStore(f"attempt-{env.attempt}", store)


def _make_groups(
    rank: int, sizes: dict[str, int], layout: Layout, timeout: timedelta
) -> dict[tuple[str, ...], dist.ProcessGroup]:
    """The groups that this rank is in, by their axes; made in the same order on every rank."""
    wanted = [(axis,) for axis in sizes]
    wanted += [
        ("copies", "shard"),
        ("copies", "cp", "rows", "columns"),
        ("rows", "columns"),
        GRADIENT_AXES,
        tuple(sizes),
    ]
    here = _coordinates(rank, sizes)
    groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
    if layout.tp > 1 or layout.cp > 1 or layout.zero == 3:
        # DTensor and FSDP2 want a group along each of their axes, also where it has one rank.
        groups[()] = _group_of([[other] for other in range(math.prod(sizes.values()))], timeout)
    for axes in wanted:
        used = tuple(a for a in sizes if a in axes and sizes[a] > 1)
        if used and used not in groups:
            others = [a for a in sizes if a not in used]
            lists = []
            for fixed in itertools.product(*(range(sizes[a]) for a in others)):
                place = dict(zip(others, fixed, strict=True))
                lists.append(_members({**here, **place}, used, sizes))
            groups[used] = _group_of(lists, timeout)
    return groups


def _make_expert_groups(
    rank: int, sizes: dict[str, int], layout: Layout, timeout: timedelta
) -> ExpertGroups | None:
    """Of the replicas in their order, blocks of `ep`: the d-th has the experts d % ep, and its shards of
    the optimizer's work are with those that stand so in the other blocks of its sharding group."""
    if layout.ep == 1:
        return None
    axes = ("copies", "shard")
    everyone = _members(_coordinates(rank, sizes), axes, sizes)
    mine = everyone.index(rank)
    block, place = divmod(mine, layout.ep)
    # Blocks within one sharding group; one block may also be several such groups.
    num_shards = max(1, sizes["shard"] // layout.ep)

    def of(blocks: Iterable[int]) -> list[int]:
        return [everyone[b * layout.ep + place] for b in blocks]

    first = block // num_shards * num_shards
    neighbours = everyone[block * layout.ep : (block + 1) * layout.ep]
    shard = of(range(first, first + num_shards))
    copies = of(range(block % num_shards, len(everyone) // layout.ep, num_shards))
    return ExpertGroups(
        place,
        layout.ep,
        _own_group("ep", neighbours, timeout),
        _own_group("expert-shard", shard, timeout) if len(shard) > 1 else None,
        _own_group("expert-copies", copies, timeout) if len(copies) > 1 else None,
    )


def _own_group(purpose: str, ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
    """A group of these ranks for one purpose, whatever other groups of the same ranks there are; the same
    one every time."""
    made, key = _groups_made(), (purpose, *map(str, ranks))
    if key not in made:
        made[key] = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    return made[key]


_Made = dict[tuple[int, ...] | tuple[str, ...], dist.ProcessGroup]
_made: dict[int, tuple[dist.ProcessGroup, _Made]] = {}
"""Groups already made under a default group, by its id and their ranks. Torch keeps them for its
lifetime anyway, and each costs threads and connections: a second mesh takes them again."""


def _groups_made() -> _Made:
    world = dist.group.WORLD
    assert world is not None
    if id(world) not in _made or _made[id(world)][0] is not world:
        _made.clear()
        _made[id(world)] = (world, {})
    return _made[id(world)][1]


def _group_of(lists: list[list[int]], timeout: timedelta) -> dist.ProcessGroup:
    """The group of the list that holds this rank; every rank calls this with the same lists."""
    if len(lists) == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    made = _groups_made()
    mine = tuple(next(ranks for ranks in lists if dist.get_rank() in ranks))
    if mine not in made:
        # Its members alone make a group; otherwise a thousand ranks would make a thousand each.
        made[mine] = dist.new_group(list(mine), timeout=timeout, use_local_synchronization=True)
    return made[mine]


def _members(place: dict[str, int], used: tuple[str, ...], sizes: dict[str, int]) -> list[int]:
    return [
        _rank_at({**place, **dict(zip(used, along, strict=True))}, sizes)
        for along in itertools.product(*(range(sizes[a]) for a in used))
    ]


def _coordinates(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    place: dict[str, int] = {}
    for axis in reversed(sizes):
        rank, place[axis] = divmod(rank, sizes[axis])
    return place


def _rank_at(place: dict[str, int], sizes: dict[str, int]) -> int:
    rank = 0
    for axis, size in sizes.items():
        rank = rank * size + place[axis]
    return rank


def close_mesh(mesh: Mesh) -> None:
    """Leave the job in order; every rank calls it when its work is done.

    A group that was there before the mesh is the caller's, and stays.
    """
    if mesh.owns_group and dist.is_initialized():
        # A communication thread may still have to clear the last collective's tensors away, for
        # which it needs Python's lock; past the end of the interpreter, asking for it is an abort.
        time.sleep(_DRAIN_S)
        _never_free(dist.group.WORLD)
        for group in mesh._groups.values():
            _never_free(group)
        dist.destroy_process_group()


def _never_free(group: dist.ProcessGroup | None) -> None:
    """Keep a group that was left from ever being destroyed, also when the interpreter ends.

    Torch's reducer, when it is the last to hold a group, joins the group's threads without letting
    go of Python's lock, and a thread that still has a finished collective to clear away waits for
    that lock: the rank would hang. Freed at the end of the process, the group can abort it instead.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
