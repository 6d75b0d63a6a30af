"""Runs that are killed, hung, starved and lied to, and what is left of them: "K of N survived".

    python benchmarks/chaos.py --rounds 50 --seed 0

A recipe is trained on four ranks without harm first. Then each round trains it again and, at a
random moment, does one thing to it: kills a rank, kills everything, asks it to stop, stops a rank in
the middle of whatever it does, damages the newest checkpoint, fills the disk, kills everything on a
full disk or in the middle of a save. After that the same command is given again, as a user would,
until the run ends. A round is survived when the final weights are those of the first run bit for bit,
every sample was used exactly once an epoch, and no more work was lost than since the last checkpoint.
The last line is the count; the exit code is 1 unless all were survived.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

RECIPE = (
    "digits",
    "model={name: mlp, args: {in_features: 64, hidden: 96, depth: 3, out_features: 10}}",
    "train.batch=64", "train.target={}", "train.clip=1.0",
    "train.eval_every=40", "device=cpu", "threads=1", "log.every=5", "log.samples=true",
    "log.tensorboard=no",
    "checkpoint.every=10", "checkpoint.keep=3", "watch.timeout_s=5", "watch.first_step_s=20",
)  # fmt: skip
WAIT_S = 180.0
"""How long anything may take before the round counts as lost."""
DISK = "size=48m"
FULL = ("fill the disk", "kill, disk full")
"""Harms that take a file system of their own."""


@dataclass(frozen=True)
class Size:
    """Of every run."""

    ranks: int
    epochs: int


class Lost(Exception):
    """Why a round was not survived."""


@dataclass
class Job:
    """One `ridgeline train`, started as a user starts it."""

    path: Path
    size: Size
    output: Path
    process: psutil.Popen = field(init=False)

    def start(self) -> None:
        command = [sys.executable, "-m", "ridgeline.cli", "train", *RECIPE]
        command += [f"train.epochs={self.size.epochs}", "-n", str(self.size.ranks)]
        command += ["--run", str(self.path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.output.open("a") as file:
            self.process = psutil.Popen(command, stdout=file, stderr=file, env=environment)

    def workers(self) -> list[psutil.Process]:
        """The ranks that run now."""
        found = []
        with suppress(psutil.NoSuchProcess):
            for child in self.process.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if "ridgeline.train.worker" in child.cmdline():
                        found.append(child)
        return found

    def kill_all(self) -> None:
        """Everything at once, as when a node loses its power."""
        tree = [self.process]
        with suppress(psutil.NoSuchProcess):
            tree += self.process.children(recursive=True)
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(tree, timeout=WAIT_S)

    def wait(self) -> int:
        try:
            return int(self.process.wait(WAIT_S))
        except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
            self.kill_all()
            raise Lost(f"the job did not end within {WAIT_S:.0f} s") from None

    def step(self) -> int:
        """The last step that rank 0 has taken."""
        lines = read_lines(self.path / "samples" / "rank-0.jsonl")
        return int(lines[-1]["step"]) if lines else 0

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: self.step() >= step, f"step {step}")

    def wait_until(self, condition: Callable[[], bool], what: str, pause_s: float = 0.005) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if not self.process.is_running() or self.process.status() == psutil.STATUS_ZOMBIE:
                raise Lost(f"the run ended before {what}, so nothing was tried")
            if time.monotonic() > deadline:
                raise Lost(f"{what} did not come within {WAIT_S:.0f} s")
            time.sleep(pause_s)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON file that is being written."""
    if not path.exists():
        return []
    text = path.read_text(errors="replace")
    found = []
    for line in text.splitlines():
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def checkpoints(path: Path) -> list[Path]:
    return sorted(p for p in (path / "checkpoints").glob("step-*") if p.name[5:].isdigit())


# The harms. Each gets a job that runs and the moment, and leaves it in whatever state that makes.


def kill_rank(job: Job, dice: random.Random) -> None:
    dice.choice(job.workers() or [job.process]).kill()


def kill_everything(job: Job, dice: random.Random) -> None:
    job.kill_all()


def ask_to_stop(job: Job, dice: random.Random) -> None:
    job.process.send_signal(dice.choice([signal.SIGTERM, signal.SIGUSR1]))
    code = job.wait()
    if code not in (0, 75):
        raise Lost(f"a run that was asked to stop ended with exit code {code}, not 75")


def stop_rank(job: Job, dice: random.Random) -> None:
    dice.choice(job.workers() or [job.process]).send_signal(signal.SIGSTOP)


WRITTEN_S = 20.0
"""For which the second checkpoint is waited for."""


def damage(job: Job, dice: random.Random, harm: Callable[[Path, random.Random], None]) -> None:
    # They are written beside the steps, and on a busy machine a good deal later.
    until = time.monotonic() + WRITTEN_S
    while (
        len(checkpoints(job.path)) < 2 and job.process.poll() is None and time.monotonic() < until
    ):
        time.sleep(0.05)
    job.kill_all()
    found = checkpoints(job.path)
    if len(found) < 2:
        raise Lost("there was no checkpoint but the one to damage")
    harm(dice.choice(sorted(p for p in found[-1].iterdir() if p.is_file())), dice)


def truncate(job: Job, dice: random.Random) -> None:
    damage(job, dice, lambda file, d: os.truncate(file, d.randrange(file.stat().st_size)))


def flip_byte(job: Job, dice: random.Random) -> None:
    def flip(file: Path, dice: random.Random) -> None:
        data = bytearray(file.read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        file.write_bytes(data)

    damage(job, dice, flip)


def fill_disk(job: Job, dice: random.Random, kill: bool = False) -> None:
    """For as long as a few saves fall due in; then there is room again."""
    filler = job.path / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**16))
    # Not until a step: where nothing can be written, nobody can say which step it is.
    time.sleep(0.7)
    if kill:
        job.kill_all()
    filler.unlink()


def kill_on_full_disk(job: Job, dice: random.Random) -> None:
    """What waited for room is gone with the processes."""
    fill_disk(job, dice, kill=True)


def kill_while_saving(job: Job, dice: random.Random) -> None:
    folder = job.path / "checkpoints"
    job.wait_until(lambda: any(folder.glob(".step-*.part")), "a save", pause_s=0.0)
    time.sleep(dice.choice([0.0, 0.001, 0.005, 0.01]))
    job.kill_all()


HARMS: dict[str, Callable[[Job, random.Random], None]] = {
    "SIGKILL a rank": kill_rank,
    "SIGKILL all": kill_everything,
    "SIGTERM": ask_to_stop,
    "SIGSTOP a rank": stop_rank,
    "truncate a file": truncate,
    "flip a bit": flip_byte,
    FULL[0]: fill_disk,
    FULL[1]: kill_on_full_disk,
    "kill in a save": kill_while_saving,
}


def mount_small(path: Path) -> bool:
    """A file system that is soon full, where this user may make one."""
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", str(path)]
    return subprocess.run(command, capture_output=True).returncode == 0


def can_mount(folder: Path) -> bool:
    place = folder / "probe"
    if not mount_small(place):
        return False
    subprocess.run(["umount", str(place)], check=True)
    return True


def finish(job: Job) -> int:
    """Give the same command again until the run has ended; how often that was."""
    for attempt in range(6):
        if job.wait() == 0:
            return attempt
        job.start()
    raise Lost("the run did not end in six starts")


def judge(path: Path, expected: dict[str, Any], harm: str, num_epochs: int) -> None:
    """Weights bit for bit, samples once an epoch, no more lost than since the last checkpoint."""
    import torch
    from safetensors.torch import load_file

    weights = load_file(path / "weights.safetensors")
    if weights.keys() != expected.keys():
        raise Lost("the final weights have other names")
    for name, value in expected.items():
        if not torch.equal(value, weights[name]):
            raise Lost(f"{name} is not that of the uninterrupted run")
    used: dict[int, dict[int, list[int]]] = {}
    for file in (path / "samples").glob("rank-*.jsonl"):
        newest = {line["step"]: line for line in read_lines(file)}
        for line in newest.values():
            used.setdefault(line["epoch"], {}).setdefault(line["step"], []).extend(line["samples"])
    sizes = set()
    for epoch, steps in used.items():
        samples = sorted(sample for part in steps.values() for sample in part)
        sizes.add(len(samples))
        if samples != list(range(len(samples))):
            raise Lost(f"epoch {epoch} did not use every sample exactly once")
    if len(sizes) != 1 or len(used) != num_epochs:
        raise Lost(f"{len(used)} epochs have {sorted(sizes)} samples")
    events = read_lines(path / "events.jsonl")
    saved = 0
    for line in events:
        details = line["details"]
        if line["event"] == "checkpoint":
            saved = details["step"]
        elif line["event"] == "resume":
            if details["step"] < saved and not details["passed_over"]:
                raise Lost(f"went on from step {details['step']} where {saved} was saved")
            if details["passed_over"] and harm not in ("truncate a file", "flip a bit"):
                raise Lost(f"a checkpoint was not whole: {details['passed_over'][0]}")


def reference(folder: Path, size: Size) -> tuple[dict[str, Any], int]:
    """Final weights and the number of steps of a run that nobody harms."""
    from safetensors.torch import load_file

    job = Job(folder / "whole", size, folder / "whole.txt")
    job.start()
    if job.wait() != 0:
        raise SystemExit(f"chaos: the run without harm failed:\n{job.output.read_text()}")
    return load_file(job.path / "weights.safetensors"), job.step()


def play(
    folder: Path,
    number: int,
    size: Size,
    harm: str,
    moment: int,
    dice: random.Random,
    expected: dict[str, Any],
) -> tuple[bool, str]:
    """One round: whether it was survived, and a line on it."""
    began = time.monotonic()
    home = folder / f"round-{number}"
    mounted = harm in FULL and mount_small(home)
    job = Job(home / "run" if mounted else home, size, folder / f"round-{number}.txt")
    text, starts = "survived", 0
    try:
        job.start()
        job.wait_for_step(moment)
        time.sleep(dice.uniform(0, 0.05))
        HARMS[harm](job, dice)
        starts = finish(job)
        judge(job.path, expected, harm, size.epochs)
    except Lost as error:
        text = f"LOST: {error}"
    finally:
        job.kill_all()
        if mounted:
            subprocess.run(["umount", "-l", str(home)], check=False)
    line = (
        f"round {number + 1:>3}  {harm:<16} after step {moment:>3}  started again {starts} times  "
        f"{time.monotonic() - began:5.1f} s  {text}"
    )
    return text == "survived", line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10, help="of 23 steps; 3 or more")
    parser.add_argument(
        "--jobs", type=int, default=1, help="rounds at a time, where there are cores"
    )
    parser.add_argument("--harms", nargs="+", choices=HARMS, default=list(HARMS), help="all")
    parser.add_argument("--keep", type=Path, help="a folder to leave the runs in, to look at them")
    args = parser.parse_args()
    dice, size = random.Random(args.seed), Size(args.ranks, args.epochs)
    survived = 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        expected, num_steps = reference(folder, size)
        harms = [harm for harm in args.harms if harm not in FULL or can_mount(folder)]
        if harms != args.harms:
            print("NOT DONE: this user may mount no small file system, so no disk is filled")
        order: list[str] = []
        rounds = []
        for number in range(args.rounds):
            if not order:  # every harm once before any comes again
                order = dice.sample(harms, len(harms))
            # With two checkpoints there, of which one may be damaged, and time for a signal to arrive.
            moment = dice.randrange(34, num_steps * 2 // 3)
            own = random.Random(dice.random())
            rounds.append((folder, number, size, order.pop(), moment, own, expected))
        with ThreadPoolExecutor(args.jobs) as pool:
            for done in as_completed([pool.submit(play, *one) for one in rounds]):
                ok, line = done.result()
                survived += ok
                print(line, flush=True)
    print(f"{survived} of {args.rounds} survived")
    return 0 if survived == args.rounds else 1


if __name__ == "__main__":
    raise SystemExit(main())
