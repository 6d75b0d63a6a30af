"""Is a data set still what was written? Every sample is read and its checksums are compared. No torch.

Called at the end of a pack and by `ridgeline data verify`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ridgeline.data.dataset import Dataset, disk_bytes
from ridgeline.data.formats.contract import BadSample, sample_checksums
from ridgeline.data.work import Tally, run_tasks
from ridgeline.errors import RunError, UsageError

_SHOWN = 3


@dataclass(frozen=True)
class Damage:
    """What is wrong with one shard."""

    path: Path
    whole: tuple[str, ...]
    """Sentences on the shard: it is gone, it has another length."""
    samples: tuple[str, ...]
    """A sentence for each sample that cannot be used."""
    num_lost: int
    """Samples that cannot be used; of a shard that cannot be opened, all."""

    @property
    def lines(self) -> list[str]:
        return [*self.whole, *self.samples]

    @property
    def shown(self) -> list[str]:
        """The same, short enough to be read where a cut shard lost thousands."""
        if len(self.samples) <= _SHOWN + 1:
            return self.lines
        left = len(self.samples) - _SHOWN
        return [*self.whole, *self.samples[:_SHOWN], f"{self.path}: and {left} more of its samples"]


def verify(
    dataset: Dataset,
    processes: int = 1,
    tell: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> list[Damage]:
    """Read everything and compare checksums; the shards that are not whole."""
    numbers = range(len(dataset.entries))
    told = lambda done: tell("checking", done, len(dataset))  # noqa: E731
    found = run_tasks(_verify_shard, dataset, numbers, processes, told)
    return [damage for damage in found if damage is not None]


def _verify_shard(dataset: Dataset, number: int) -> Damage | None:
    entry = dataset.entries[number]
    try:
        shard = dataset.shard(number)
    except (RunError, UsageError) as error:
        return Damage(dataset.path / entry.name, (str(error),), (), entry.num_samples)
    whole, bad = [], []
    if len(shard) != entry.num_samples:
        whole.append(f"{shard.path} holds {len(shard)} samples, not {entry.num_samples}")
    if (num_bytes := disk_bytes(shard.path)) != entry.num_bytes:
        whole.append(f"{shard.path} has {num_bytes} bytes, not {entry.num_bytes}")
    checksums = shard.table.checksums
    tally = Tally()
    for row in range(len(shard)):
        try:
            sample = shard.read(row)
            if checksums is not None:
                found = sample_checksums(sample, dataset.schema)
                for name, one, other in zip(dataset.schema, found, checksums[row], strict=True):
                    if one != int(other):
                        raise shard.damaged(
                            row, f"is damaged: its field {name!r} has another checksum"
                        )
        except BadSample as error:
            bad.append(str(error))
        tally.add()
    tally.tell()
    if not whole and not bad:
        return None
    lost = len(bad) + max(0, entry.num_samples - len(shard))
    return Damage(shard.path, tuple(whole), tuple(bad), lost)
