"""`stage`: the whole of it on one rank, from the listing to a path that can be read.

The first rank of a node leads: it lists the source, chooses the disk, takes the lock, divides the work
and writes the record; the others copy what they are given and wait. Whatever goes wrong, the answer is
the source itself and the reason, unless the copy is required. Called on every rank by
`train/staging.py`, and by the command line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.data.stage.copy import BlockWriter, SharedReader, copy_runs
from ridgeline.data.stage.held import Held, base_folder, make_private, remove_leftovers
from ridgeline.data.stage.meet import GO, RESULT, STOP, Meeting, NodePlace, Patience
from ridgeline.data.stage.plan import Listing, Run, list_source, plan_workers
from ridgeline.data.stage.problem import NoRoom, SourceChanged, StageProblem, is_useless, sentence
from ridgeline.data.stage.users import User, this_process
from ridgeline.data.stage.where import check_room, choose, human_bytes
from ridgeline.errors import RunError, UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LIMIT_S = 1800.0
"""Without any progress of those one waits for."""
Tell = Callable[[int, int], None]
"""Bytes that this process has copied, of those that it has to."""


@dataclass(frozen=True)
class Staged:
    """Where to read a data set from now on."""

    source: Path
    path: Path
    """The copy on this node, or the source itself."""
    reason: str
    """Why the copy is where it is, or why there is none."""
    total_bytes: int = 0
    """Of the data set."""
    copied_bytes: int = 0
    """That this process wrote."""
    read_bytes: int = 0
    """That this process read from the shared path."""
    seconds: float = 0.0
    _held: Held | None = None
    _user: User | None = None

    @property
    def is_local(self) -> bool:
        return self._held is not None

    def describe(self) -> str:
        """One line for the user."""
        if not self.is_local:
            return f"not staged, reading {self.source}: {self.reason}"
        rate = self.total_bytes / max(self.seconds, 1e-9)
        size = human_bytes(self.total_bytes)
        if self.reason.startswith("there already"):
            return f"{size} staged in {self.path} already"
        return f"staged {size} to {self.path} in {self.seconds:.1f} s, {human_bytes(rate)}/s"

    def verify(self) -> list[str]:
        """Read every byte of the copy; what is wrong with it."""
        if self._held is None:
            return []
        with self._held.locked():
            return self._held.check(self._held.listing(), every_byte=True)

    def release(self) -> bool:
        """This process reads it no more; whether it was the last one, and took the copy away."""
        if self._held is None or self._user is None:
            return False
        with suppress(OSError, StageProblem), self._held.locked():
            return self._held.leave(self._user)
        return False


def stage(
    source: Path,
    where: str | Path = "auto",
    *,
    place: NodePlace,
    share: str = "node",
    keep: bool = False,
    required: bool = False,
    group: ProcessGroup | None = None,
    progress: Tell | None = None,
    limit_s: float = LIMIT_S,
) -> Staged:
    """Bring a file or folder to this node; every rank calls it, and gets the same path as the others of
    its node. With `share="job"` nodes send each other what they read: `group` is then a gloo group of
    the first ranks of all nodes (None on the other ranks)."""
    if share not in ("node", "job"):
        raise UsageError(f"share={share!r} is neither 'node' nor 'job'")
    begun = time.monotonic()
    source = Path(os.path.abspath(source))
    try:
        meeting = Meeting(place, source)
    except (StageProblem, OSError) as error:
        if required or group is not None:  # other nodes would wait for this one
            raise RunError(f"cannot stage {source}: {sentence(error)}") from error
        return Staged(source, source, sentence(error))
    call = _Call(source, where, meeting, keep, progress or (lambda done, total: None), limit_s)
    try:
        if place.local_rank:
            staged = _follow(call)
        else:
            staged = _lead(call, group if share == "job" else None)
    finally:
        meeting.leave()
    if required and not staged.is_local:
        raise RunError(f"cannot stage {source}: {staged.reason}")
    return replace(staged, seconds=time.monotonic() - begun)


@dataclass
class _Call:
    """One call of `stage` on one rank."""

    source: Path
    where: str | Path
    meeting: Meeting
    keep: bool
    tell: Tell
    limit_s: float
    read_bytes: int = 0
    copied_bytes: int = 0
    user: User = field(default_factory=this_process)

    def staged(self, held: Held, listing: Listing, reason: str) -> Staged:
        path, total = held.path(listing), listing.total_bytes
        counts = (total, self.copied_bytes, self.read_bytes)
        return Staged(self.source, path, reason, *counts, _held=held, _user=self.user)

    def not_staged(self, reason: str) -> Staged:
        return Staged(self.source, self.source, reason, 0, self.copied_bytes, self.read_bytes)


# The first rank of a node.


def _lead(call: _Call, group: ProcessGroup | None) -> Staged:
    try:
        if group is None:
            staged = _lead_node(call, list_source(call.source, beat=call.meeting.beat))
        else:
            staged = _lead_job(call, group)
    except UsageError as error:
        call.meeting.say(RESULT, {"usage": str(error)})
        raise
    except (StageProblem, OSError) as error:
        call.meeting.say(RESULT, {"problem": sentence(error)})
        return call.not_staged(sentence(error))
    except BaseException as error:
        call.meeting.say(RESULT, {"problem": f"the first rank of this node failed: {error}"})
        raise
    assert staged._held is not None
    result = {"base": str(staged._held.base), "key": staged._held.key, "path": str(staged.path)}
    call.meeting.say(RESULT, {**result, "reason": staged.reason, "total_bytes": staged.total_bytes})
    return staged


def _lead_node(call: _Call, listing: Listing) -> Staged:
    """This node reads the shared path for itself."""
    held, reason = _choose(call, listing)
    patience = Patience(call.limit_s, "another job that stages the same data", held.journal_bytes)

    def wait() -> None:
        call.meeting.beat()
        patience.wait()

    with held.locked(wait):
        there = _open(call, held, listing)
        if there is None:
            _add_users(call, held, listing, None)
            return call.staged(held, listing, f"there already, in {held.base.parent}")
        try:
            missing = _missing(held, listing, there)
            work = plan_workers(listing, missing, call.meeting.place.local_world_size)
            _add_users(call, held, listing, work)
            held.finish(listing)
        except (StageProblem, OSError) as error:
            _discard_if_useless(held, error)
            raise
        return call.staged(held, listing, reason)


def _lead_job(call: _Call, group: ProcessGroup) -> Staged:
    """All nodes read together. A node that cannot keep a copy still reads its part for the others, and
    none waits for a lock while others wait for it."""
    from ridgeline.data.stage.share import agree_on_listing, exchange

    listing = agree_on_listing(lambda: list_source(call.source, beat=call.meeting.beat), group)
    with ExitStack() as stack:
        node = _open_for_exchange(call, listing, stack)
        every = set(range(listing.num_blocks))
        has = every if node.is_whole else set(node.there)
        wants = every - has if node.held is not None and not node.busy else set()
        writer = BlockWriter(node.held, listing, 0) if wants and node.held is not None else None
        reader = SharedReader(listing)
        done = 0

        def read(block: int) -> bytes:
            if block in has and node.held is not None:
                return node.held.read(listing, block)
            return reader.read(block)

        def store(block: int, data: memoryview) -> None:
            assert writer is not None
            writer.write(block, data)

        def progress(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            call.meeting.beat()
            call.tell(done, listing.total_bytes)

        try:
            problem = exchange(listing, wants, has, read, store, group, progress)
            if problem or node.problem:
                raise StageProblem(node.problem or problem)
        except StageProblem:
            if node.held is not None and not node.busy and not node.is_whole:
                node.held.remove()
            raise
        finally:
            reader.close()
            if writer is not None:
                writer.close()
                call.copied_bytes += writer.copied_bytes
            call.read_bytes += reader.read_bytes
        if not node.busy:
            assert node.held is not None
            if not node.is_whole:
                node.held.finish(listing)
            _add_users(call, node.held, listing, None)
            reason = f"there already, in {node.held.base.parent}" if node.is_whole else node.reason
            return call.staged(node.held, listing, reason)
    # Somebody else was staging the same data here; by now that has ended, or goes on by itself.
    return _lead_node(call, listing)


@dataclass
class _Node:
    """What a node brings to an exchange."""

    held: Held | None = None
    there: dict[int, int] = field(default_factory=dict)
    is_whole: bool = False
    busy: bool = False
    """Somebody else on this node holds the lock."""
    problem: str = ""
    reason: str = ""


def _open_for_exchange(call: _Call, listing: Listing, stack: ExitStack) -> _Node:
    """Raises nothing that the others would have to wait for."""
    try:
        held, reason = _choose(call, listing)
        if not stack.enter_context(held.locked_if_free()):
            return _Node(busy=True)
        there = _open(call, held, listing)
        if there is None:
            return _Node(held, is_whole=True, reason=reason)
        _missing(held, listing, there)
        return _Node(held, there, reason=reason)
    except (StageProblem, OSError) as error:
        return _Node(problem=sentence(error))


def _choose(call: _Call, listing: Listing) -> tuple[Held, str]:
    def lacks(path: Path, times: int) -> str:
        base = base_folder(path)
        need = max(0, listing.total_bytes - Held(base, listing.key).disk_bytes())
        if (text := check_room(path, need, len(listing.files), times)) and base.is_dir():
            remove_leftovers(base, but=listing.key)
            text = check_room(path, need, len(listing.files), times)
        return text

    def has_copy(path: Path) -> bool:
        return (base_folder(path) / listing.key / "record.json").exists()

    chosen = choose(call.where, lacks, has_copy)
    base = make_private(base_folder(chosen.path))
    return Held(base, listing.key), f"{chosen.name}: {chosen.reason}"


def _open(call: _Call, held: Held, listing: Listing) -> dict[int, int] | None:
    """None for a whole copy, else the blocks of it that are there. One that was damaged is not used:
    it goes, unless somebody else still reads it."""
    if held.record() is not None:
        # What was not yet on disk when the machine went down is lost, whatever the record says.
        every_byte = not held.was_of_this_boot()
        problems = held.check(listing, every_byte, call.meeting.beat)
        if not problems:
            return None
        if held.users():
            raise StageProblem(f"the copy that is there is damaged, and in use: {problems[0]}")
        held.clear()
    return held.prepare(listing, call.meeting.beat)


def _missing(held: Held, listing: Listing, there: dict[int, int]) -> list[int]:
    """Blocks to be copied, for which there is room: looked at again under the lock."""
    missing = [block for block in range(listing.num_blocks) if block not in there]
    problem = check_room(held.base, listing.bytes_of(missing), len(listing.files))
    if problem:
        raise NoRoom(f"{held.base} {problem}")
    return missing


def _add_users(call: _Call, held: Held, listing: Listing, work: list[list[Run]] | None) -> None:
    """Have the ranks of this node do their work, if there is any, and enter them all as users. What was
    meant for one that has given up is done here."""
    meeting, ranks = call.meeting, call.meeting.place.local_world_size
    runs = [[(run.first, run.stop) for run in mine] for mine in work or [[] for _ in range(ranks)]]
    meeting.say(GO, {"base": str(held.base), "key": held.key, "work": runs})
    error: Exception | None = None
    try:
        if work is not None:
            _copy(call, held, listing, work[0])
    except (StageProblem, OSError) as problem:
        error = problem
        meeting.say(STOP, sentence(problem))
    answers = meeting.from_others("done", call.limit_s, held.journal_bytes)
    present = [answer for answer in answers if answer is not None]
    failed = [answer for answer in present if answer["problem"]]
    if error is not None:
        raise error
    if failed:
        kind = SourceChanged if failed[0]["useless"] else StageProblem
        raise kind(failed[0]["problem"])
    for rank, answer in enumerate(answers, start=1):
        if answer is None and work is not None:
            _copy(call, held, listing, work[rank])
    held.add_users([call.user, *(User(**answer["user"]) for answer in present)], call.keep)


def _discard_if_useless(held: Held, error: Exception) -> None:
    """A copy that did not fit, or of a source that has changed, is in the way; any other goes on later."""
    if is_useless(error) and not held.users():
        held.remove()


# Every rank.


def _copy(call: _Call, held: Held, listing: Listing, runs: list[Run]) -> None:
    """This rank's part."""
    leads = call.meeting.place.local_rank == 0
    reader = SharedReader(listing)
    writer = BlockWriter(held, listing, call.meeting.place.local_rank)
    total = sum(listing.bytes_of(range(run.first, run.stop)) for run in runs)

    def after_block(num_bytes: int) -> bool:
        if leads:
            call.meeting.beat()
        call.tell(reader.read_bytes, total)
        return not call.meeting.is_stopped()

    try:
        copy_runs(listing, held, runs, reader, writer, after_block)
    finally:
        reader.close()
        writer.close()
        call.read_bytes += reader.read_bytes
        call.copied_bytes += writer.copied_bytes


def _follow(call: _Call) -> Staged:
    """A rank that is not the first of its node: do what it says, then read where it says."""
    meeting, rank = call.meeting, call.meeting.place.local_rank
    try:
        name, said = meeting.from_leader((RESULT, GO), call.limit_s)
        if name == GO:
            meeting.say(f"here-{rank}", asdict(call.user))
            meeting.say(f"done-{rank}", {"user": asdict(call.user), **_do(call, said)})
            _, said = meeting.from_leader((RESULT,), call.limit_s)
    except StageProblem as problem:
        return call.not_staged(str(problem))
    if "usage" in said:
        raise UsageError(said["usage"])
    if "problem" in said:
        return call.not_staged(said["problem"])
    held = Held(Path(said["base"]), said["key"])
    counts = (said["total_bytes"], call.copied_bytes, call.read_bytes)
    path = Path(said["path"])
    return Staged(call.source, path, said["reason"], *counts, _held=held, _user=call.user)


def _do(call: _Call, said: dict[str, Any]) -> dict[str, Any]:
    """Copy what the first rank said; how it went."""
    rank = call.meeting.place.local_rank
    held = Held(Path(said["base"]), said["key"])
    try:
        runs = [Run(first, stop) for first, stop in said["work"][rank]]
        if runs:
            _copy(call, held, held.listing(), runs)
    except (StageProblem, OSError) as error:
        call.meeting.say(STOP, sentence(error))
        return {"problem": sentence(error), "useless": is_useless(error)}
    return {"problem": "", "useless": False}
