"""One GPU: every figure of the doctor that needs one, one after the other, in two halves of half an hour.

    python benchmarks/gpu_doctor.py --half 1 --folder work             # all of it; a table at the end
    python benchmarks/gpu_doctor.py --half 2 --folder work --wait 540  # in the background; again: wait on
    python benchmarks/gpu_doctor.py --half 1 --folder work --device cpu --tiny   # the same, in small

Half 1 is the 1.3B model: climbed in bf16, climbed with fp8 in one go, both beside the loop by hand. Half 2
is the rest: the planted faults, the 124M model, ResNet-50 and the ViT, each climbed and beside the loop by
hand, and two trainings on text of each kind with the settings that half 1 has left in the folder, or those
of `benchmarks/results/climbed_1.3b_h200.yaml`, where a climb's belong if the folder does not last. A step
that is done is not done again, one that fails or takes too long ends only itself, and `source.txt` says by
a checksum of the package which code was measured, so that figures of two days can be told to be of one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import print_table

ROOT = Path(__file__).resolve().parents[1]
CLIMB = "benchmarks/gpu_climb.py"
MODELS = {"1.3b": 1.05, "124m": 1.05, "resnet50": 1.05}
"""What a climb in bf16 has to reach, as a multiple of the loop by hand."""
FP8, FIELDS_RATE, TEXT = 1.30, 150.0, 0.005
KEPT_SETTINGS = ROOT / "benchmarks" / "results" / "climbed_1.3b_h200.yaml"


@dataclass(frozen=True)
class Step:
    """One command, with what it leaves in a folder of its own."""

    name: str
    command: tuple[str, ...]
    limit_s: float


def climb(name: str, model: str, budget_s: float, *more: str) -> Step:
    wanted = (CLIMB, "--model", model, "--part", "climb", "--budget", f"{budget_s:g}", *more)
    return Step(name, wanted, budget_s + 180.0)


def hand(name: str, model: str) -> Step:
    wanted = (CLIMB, "--model", model, "--part", "hand", "--states", "climbed", "--turns", "5")
    return Step(name, wanted, 260.0)


def text(name: str) -> Step:
    wanted = (CLIMB, "--model", "1.3b", "--part", "text", "--repeat", "2")
    return Step(name, (*wanted, "--states", "bf16", "climbed"), 560.0)


HALVES = {
    1: (
        climb("1.3b-bf16", "1.3b", 405.0, "--without", "fp8"),
        hand("1.3b-bf16", "1.3b"),
        climb("1.3b-fp8", "1.3b", 860.0),
        hand("1.3b-fp8", "1.3b"),
    ),
    2: (
        Step(
            "planted",
            ("-m", "pytest", "-q", "-m", "gpu", "tests/system/doctor", "tests/gpu/test_doctor.py"),
            240.0,
        ),
        climb("124m", "124m", 150.0, "--without", "fp8"),
        hand("124m", "124m"),
        climb("resnet50", "resnet50", 255.0, "--without", "fp8"),
        hand("resnet50", "resnet50"),
        climb("vit", "vit", 150.0),
        text("1.3b-fp8"),
    ),
}


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def checksum() -> str:
    """Of the package and the benchmarks, by content."""
    found = hashlib.sha256()
    for folder in ("ridgeline", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def run(step: Step, options: argparse.Namespace) -> None:
    part = step.command[step.command.index("--part") + 1] if "--part" in step.command else "run"
    name, folder = f"half{options.half}-{step.name}-{part}", options.folder / step.name
    done = options.folder / f"{name}.done"
    if done.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    shared = options.folder / "compiled"  # what one climb has compiled serves the others
    shared.mkdir(exist_ok=True)
    if not (folder / "compiled").exists():
        (folder / "compiled").symlink_to(shared)
    climbed = folder / "climb-1.3b" / "recipe.yaml"
    if part == "text" and not climbed.is_file() and KEPT_SETTINGS.is_file():
        climbed.parent.mkdir(exist_ok=True)
        shutil.copyfile(KEPT_SETTINGS, climbed)
    command = [sys.executable, *step.command]
    if step.command[0] == CLIMB:
        command += ["--folder", str(folder), "--limit", f"{step.limit_s:g}"]
        command += ["--json", str(options.folder / f"{name}.json"), "--device", options.device]
        command += (
            ["--tiny", "--turns", "1", "--check", "12", "--text", "6"] if options.tiny else []
        )
    if options.tiny and "--budget" in command:
        command[command.index("--budget") + 1] = "5"
    say(f"{name}: begun")
    begun = time.monotonic()
    with (options.folder / f"{name}.log").open("w") as log:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=step.limit_s + 60.0
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    spent = time.monotonic() - begun
    say(f"{name}: {'done' if code == 0 else f'ENDED WITH {code}'} after {spent:.0f} s")
    if code == 0:
        done.write_text(f"{spent:.0f}\n")


def read(options: argparse.Namespace, name: str) -> dict[str, Any]:
    path = options.folder / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def figures(options: argparse.Namespace) -> list[tuple[str, ...]]:
    """Each line that has a bar, with what was reached."""
    rows: list[tuple[str, ...]] = []
    for half, name, model in (
        (1, "1.3b-bf16", "1.3b"), (1, "1.3b-fp8", "1.3b"), (2, "124m", "124m"), (2, "resnet50", "resnet50"),
        (2, "vit", "vit"),
    ):  # fmt: skip
        ladder = read(options, f"half{half}-{name}-climb").get(model, {}).get("climb")
        if not ladder:
            continue
        kept = [rung for rung in ladder["rungs"] if rung["kept"]]
        raced = ladder["raced"]
        times = raced["times"] if raced else kept[-1]["times"]
        climbed = f"{times:.2f} x the baseline, {ladder['spent_s']:.0f} s"
        if name == "vit":
            rate = (kept[0]["rate"] or 0.0) * times
            rows.append((name, climbed, f"{rate:,.0f} samples/s", f">= {FIELDS_RATE:.0f}"))
            continue
        beside = read(options, f"half{half}-{name}-hand").get(model, {}).get("hand", {})
        state = next((v for k, v in beside.items() if k.startswith("climbed")), {})
        ratio = state.get("ratio")
        bar = FP8 if name.endswith("fp8") else MODELS[model]
        rows.append((name, climbed, f"{ratio:.3f} by hand" if ratio else "", f">= {bar:.2f}"))
    last = read(options, "half2-1.3b-fp8-text").get("1.3b", {}).get("text", {})
    ends = {name: _end(run["losses"]) for name, run in last.items()}
    first = [end for name, end in ends.items() if name.startswith("bf16")]
    others = [end for name, end in ends.items() if name.startswith("climbed")]
    if first and others:
        off = (sum(others) / len(others)) / (sum(first) / len(first)) - 1
        told = f"{off:+.2%}, {len(others)} against {len(first)}"
        rows.append(("fp8 on text", "mean of the last tenth of the losses", told, f"<= {TEXT:.1%}"))
    return rows


def _end(losses: list[float]) -> float:
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", type=int, choices=sorted(HALVES), required=True)
    parser.add_argument("--folder", type=Path, required=True, help="kept between calls")
    parser.add_argument("--only", nargs="*", help="steps by name")
    parser.add_argument("--wait", type=float, help="go on in the background; wait for so long")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.wait is not None:
        follow(options)
    else:
        source = options.folder / "source.txt"
        with source.open("a") as file:
            file.write(f"half {options.half}: {checksum()}\n")
        for step in HALVES[options.half]:
            if not options.only or step.name in options.only:
                run(step, options)
    print(
        "code measured:", *(options.folder / "source.txt").read_text().split("\n")[:-1], sep="\n  "
    )
    print_table(("what", "climbed by itself", "reached", "bar"), figures(options))


def follow(options: argparse.Namespace) -> None:
    """Start what runs on by itself, if it does not yet, and wait."""
    note, log = (
        options.folder / f"half{options.half}.pid",
        options.folder / f"half{options.half}.log",
    )
    if not (note.is_file() and Path(f"/proc/{note.read_text().strip()}").exists()):
        at = [n for n, word in enumerate(sys.argv) if word == "--wait"][-1]
        again = [sys.executable, *sys.argv[:at], *sys.argv[at + 2 :]]
        with log.open("a") as file:
            process = subprocess.Popen(
                again, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True, cwd=os.getcwd(),
            )  # fmt: skip
        note.write_text(str(process.pid))
    until = time.monotonic() + options.wait
    running = Path(f"/proc/{note.read_text().strip()}/stat")
    while time.monotonic() < until and running.is_file() and " Z " not in running.read_text():
        time.sleep(1.0)
    print(log.read_text()[-4000:])
    is_over = not running.is_file() or " Z " in running.read_text()
    print("over" if is_over else "it goes on; call this again to wait for it")


if __name__ == "__main__":
    main()
