"""One GPU: the climb, and the best hand-tuned loop beside what it ends with; parts that run apart.

    python benchmarks/gpu_climb.py --model 124m --part hand            # known good states beside hand-tuned
    python benchmarks/gpu_climb.py --model 1.3b --part hand --states "fp8 tensors" --folder work
    python benchmarks/gpu_climb.py --model 1.3b --part text --folder work   # 300 steps, bf16 and fp8
    python benchmarks/gpu_climb.py --model 124m --part climb --budget 400 --folder work
    python benchmarks/gpu_climb.py --model 124m --part again --folder work   # its kept states once more
    python benchmarks/gpu_climb.py --model 1.3b --part further --budget 300 --folder work   # on from there
    python benchmarks/gpu_climb.py --model 124m --part hand --states climbed --folder work
    python benchmarks/gpu_climb.py --model 124m --part hand climb text --device cpu --tiny

`hand` lets every state and the hand-tuned loop, a process each, take turns on the device, one state after
the other; the ratio is the median of the turns' ratios. `climb` begins with plain fp32 in eager mode and
leaves its recipe in the folder, which `hand --states climbed` compares later; `further` goes on from that
recipe, as one does whose budget was over, and leaves its own for `climbed`. `again` goes up the same
ladder in new processes, over the states that were kept alone, and says how far each factor is from those of
all runs before: call it twice for three runs. `text` trains on real text
(Python's standard library as bytes; 256 of the 32,768 tokens occur), the rate falling along a cosine to
nothing, in bf16 and in fp8 from the same weights on the same samples, each `--repeat` times, and compares
the mean of the last tenth of the losses (no sample comes twice) and the loss of held-out text; each can be
run alone, with `--states bf16`, the fp8 state's name or `climbed`, and is kept in the folder. Where one
climb went further than another, `climbed` is what the last one ended with and `climbed first` what it
began with. Results are written to `--json` after every state, nothing is begun after `--limit` seconds,
and compiled code stays in the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.climb_cases import BF16, CASES, GRID, WAYS, Case, Hand, write_fields
from benchmarks.table import print_table, spread, write_json

PARTS = ("hand", "climb", "further", "again", "text")
BEGUN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGUN:6.1f} s] {text}", flush=True)


class Results:
    """What is known so far, in a file after every addition."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.values = path, {}
        if path is not None and path.is_file():
            with contextlib.suppress(ValueError):
                self.values = json.loads(path.read_text())

    def put(self, model: str, part: str, value: Any) -> None:
        self.values.setdefault(model, {})[part] = value
        write_json(self.path, self.values)


def is_late(options: argparse.Namespace) -> bool:
    return time.monotonic() - BEGUN > options.limit


def train_flops(config: Any, units_per_sample: int) -> float:
    """Of one sample, for language models: 6N + 6LdT a token."""
    import torch

    from ridgeline.models.build import build_model

    if config.model.name != "llama":
        return 0.0
    with torch.device("meta"):
        model = build_model(config.model.name, **config.model.args)
    count = sum(p.numel() for p in model.parameters())
    shape, length = model.config, units_per_sample
    return length * (6.0 * count + 6.0 * shape.depth * shape.width * length)


def configure(case: Case, options: argparse.Namespace, *more: str) -> Any:
    from ridgeline.config import load_config

    settings = [*case.recipe, *(case.small if options.tiny else ()), f"device={options.device}"]
    if case.name == "vit":
        settings.append(f"data.args={{path: {options.folder / 'fields'}, holdout: 0}}")
    if options.tiny:
        settings.append("threads=1")
        more = tuple(m.replace(",compile=true", "") for m in more if "graphs" not in m)
        more = tuple(m for m in more if not m.startswith(("tune.compile_mode", "data.threads")))
    return load_config(None, [*settings, *more]).config


def chosen_states(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Configurations by name; `climbed` is what a climb has left in the folder."""
    from ridgeline.config import load_config

    wanted = case.states
    if options.states is not None:
        known = case.states | case.more
        wanted = {n: s for n, s in known.items() if n in options.states}
        if not wanted:  # no name in full: the beginnings of names
            wanted = {n: s for n, s in known.items() if n.startswith(tuple(options.states))}
    found = {name: configure(case, options, *state) for name, state in wanted.items()}
    for name, recipe in climbed_recipes(case, options).items():
        if options.states is None or name in options.states:
            found[name] = load_config(recipe).config
    return found


def climbed_recipes(case: Case, options: argparse.Namespace) -> dict[str, Path]:
    """What climbs have left in the folder: `climbed` is the last one's, `climbed first` what it went on
    from."""
    folder = options.folder / f"climb-{case.name}"
    first, further = folder / "recipe.yaml", folder / "further" / "recipe.yaml"
    if further.is_file():
        return {"climbed first": first, "climbed": further}
    return {"climbed": first} if first.is_file() else {}


def run_hand(case: Case, options: argparse.Namespace, results: Results) -> list[tuple[str, ...]]:
    """Each state in turns with the hand-tuned loop; rows of figures."""
    import torch

    from ridgeline.config import dump_config
    from ridgeline.doctor.states import Candidate, Effort
    from ridgeline.machine.power import Power, PowerWatch, open_gauge

    folder = options.folder
    effort = Effort(timeout_s=options.timeout_s, rounds=options.turns, steps=case.steps)
    recipe = folder / f"hand-{case.name}.yaml"
    recipe.write_text(dump_config(configure(case, options)))
    spare = 2 * 14 + 2 if case.name == "vit" and not options.tiny else 0
    config = configure(case, options)
    per_step = config.train.batch * case.units_per_sample
    flops = train_flops(config, case.units_per_sample) * config.train.batch
    found: dict[str, Any] = {}
    drawn: dict[int, list[Power]] = {}
    gauge = open_gauge(torch.device(options.device))

    def begin(name: str, make: Any) -> Any:
        """The loop after ten steps, or None."""
        if is_late(options):
            say(f"{case.name}: no time for {name}")
            return None
        begun, loop = time.monotonic(), None
        try:
            loop = make()
            loop.run(10, 0)
            loop.tenth_step_s = time.monotonic() - begun
            say(f"{case.name}: {name}: tenth step after {loop.tenth_step_s:.0f} s")
            return loop
        except Exception as error:
            found[name] = {"failed": str(error)[:300]}
            say(f"{case.name}: {name} FAILED: {str(error)[:300]}")
            results.put(case.name, "hand", found)
            if loop is not None:
                loop.close()
            return None

    def keep(name: str, loop: Any, turns: list[float], ratios: list[float]) -> None:
        median = statistics.median(turns)
        found[name] = {
            "rate": per_step / median,
            "tflops": flops / median / 1e12,
            "ratio": statistics.median(ratios) if ratios else None,
            "spread": spread(turns),
            "step_ms": 1e3 * median,
            "turns_ms": [1e3 * t for t in turns],
            "peak_gb": loop.peak_bytes / 1e9,
            "tenth_step_s": loop.tenth_step_s,
            "losses": loop.losses[-3:],
            **_power(drawn.get(id(loop), [])),
        }
        say(
            f"{case.name}: {name}: {per_step / median:,.0f} {case.unit}/s, {flops / median / 1e12:.0f} "
            f"TFLOP/s, {found[name]['ratio'] or 1.0:.3f} of hand-tuned"
        )
        results.put(case.name, "hand", found)

    def run(loop: Any) -> float:
        """Seconds a step of a turn; what the device draws meanwhile is noted."""
        watch = PowerWatch(gauge)
        watch.start()
        seconds = loop.run(2, case.steps)
        if (power := watch.stop()) is not None:
            drawn.setdefault(id(loop), []).append(power)
        return seconds

    def race(name: str, loop: Any, hand: Any) -> None:
        turns, ratios = [], []
        for turn in range(options.turns):
            order = (loop, hand) if turn % 2 else (hand, loop)
            spent = {id(one): run(one) for one in order if one is not None}
            turns.append(spent[id(loop)])
            if hand is not None:
                hand_turns.append(spent[id(hand)])
                ratios.append(spent[id(hand)] / spent[id(loop)])
        keep(name, loop, turns, ratios)

    hand_turns: list[float] = []
    hand = begin("hand-tuned", lambda: Hand(case, recipe, spare))
    others: dict[str, Any] = {}
    for way in options.ways:
        room = 0 if way == "plain" else spare
        others[WAYS[way]] = lambda w=way, r=room: Hand(case, recipe, r, w)
    for number, (name, state) in enumerate(chosen_states(case, options).items()):
        others[name] = lambda c=state, n=number: Candidate(
            c, f"{case.name}-{n}", folder, effort, folder / "compiled"
        )
    for name, make in others.items():
        loop = begin(name, make)
        if loop is None:
            continue
        try:
            race(name, loop, hand)
        except Exception as error:
            found[name] = {"failed": str(error)[:300]}
            say(f"{case.name}: {name} FAILED: {str(error)[:300]}")
        finally:
            loop.close()
    if hand is not None:
        if not hand_turns:
            hand_turns.append(run(hand))
        keep("hand-tuned", hand, hand_turns, [])
        hand.close()
    results.put(case.name, "hand", found)
    return [_row(case, name, value) for name, value in found.items()]


def _power(turns: list[Any]) -> dict[str, float]:
    """What the device drew and how fast its clock was, in the middle turn."""
    if not turns:
        return {}
    return {
        "watts": statistics.median(power.watts for power in turns),
        "clock_mhz": statistics.median(power.clock_mhz for power in turns),
        "limit_watts": turns[0].limit_watts,
        "max_clock_mhz": turns[0].max_clock_mhz,
    }


def _row(case: Case, name: str, f: dict[str, Any]) -> tuple[str, ...]:
    if "failed" in f:
        return (case.name, name, "failed", *[""] * 7)
    return (
        case.name,
        name,
        f"{f['rate']:,.1f} {case.unit}/s",
        f"{f['tflops']:.0f}",
        f"{f['ratio'] or 1.0:.3f}",
        f"{f['step_ms']:.2f}",
        f"{f['spread']:.1%}",
        f"{f['peak_gb']:.1f}",
        f"{f['tenth_step_s']:.0f} s",
        f"{f['watts']:.0f} W, {f['clock_mhz']:,.0f} MHz" if "watts" in f else "",
    )


def run_text(case: Case, options: argparse.Namespace, results: Results) -> None:
    """bf16, fp8 or what a climb has left for as many steps on real text, as `ridgeline train` trains them,
    so many at the same time; each several times, since no two trainings in bf16 end alike."""
    from ridgeline.config import dump_config

    folder = options.folder / f"text-{case.name}"
    folder.mkdir(exist_ok=True)
    length = 64 if options.tiny else case.units_per_sample
    text = (
        "data.source=text", f"data.args={{seq_len: {length}}}", f"train.steps={options.text}",
        "train.eval_samples=null", "schedule.name=cosine", "schedule.warmup_steps=50", "log.every=1",
        "log.weights=false", "log.tensorboard=no", "checkpoint.at_end=false", "checkpoint.minutes=0",
    )  # fmt: skip
    waiting: list[tuple[Path, list[str]]] = []
    for name, config in text_states(case, options, text).items():
        recipe = folder / f"{name.replace(' ', '-')}.yaml"
        recipe.write_text(dump_config(config))
        for number in range(1, options.repeat + 1):
            run = folder / f"{recipe.stem}-{number}"
            if text_end(run) is None:
                waiting.append((run, [str(recipe), "--run", str(run), "--fresh"]))
    waiting.sort(key=lambda one: one[0].name[-1])  # one of each first
    going: dict[Path, subprocess.Popen[bytes]] = {}
    while waiting or going:
        while waiting and len(going) < options.at_once and not is_late(options):
            run, arguments = waiting.pop(0)
            log = (folder / f"{run.name}.log").open("wb")
            command = [sys.executable, "-m", "ridgeline", "train", *arguments, "-n", "1"]
            going[run] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
            say(f"{case.name} on text: {run.name} started")
        if waiting and not going:
            say(f"{case.name} on text: no time for {', '.join(run.name for run, _ in waiting)}")
            break
        time.sleep(1.0)
        for run in [run for run, process in going.items() if process.poll() is not None]:
            code = going.pop(run).returncode
            say(f"{case.name} on text: {run.name} {f'FAILED ({code})' if code else 'is over'}")
    show_text(case, options, folder, results)


def text_states(case: Case, options: argparse.Namespace, text: tuple[str, ...]) -> dict[str, Any]:
    """The configurations that train on text, by name: bf16, one in fp8, or what was asked for."""
    from ridgeline.config import load_config

    every = {"bf16": (*BF16, "tune.compile_mode=regional"), **case.states, **case.more}
    wanted = options.states or ("bf16", options.fp8)
    found = {n: configure(case, options, *s, *text) for n, s in every.items() if n in wanted}
    for name, recipe in climbed_recipes(case, options).items():
        if name in wanted:
            found[name] = load_config(recipe, list(text)).config
    for name in wanted:
        if name not in found:
            say(
                f"{case.name}: no state '{name}' in {options.folder}; --part climb leaves 'climbed'"
            )
    return found


def text_end(run: Path) -> dict[str, Any] | None:
    """Losses of every step, the loss of held-out text at the end, and the time of a step; None before."""
    from ridgeline.rundir import RunDir

    if not run.is_dir():
        return None
    steps, evals = RunDir(run).steps(), RunDir(run).evals()
    if not steps or not evals or "loss" not in evals[-1].metrics:
        return None
    times = [record.step_s for record in steps[len(steps) // 2 :]]
    return {
        "losses": [record.loss for record in steps],
        "held_out": evals[-1].metrics["loss"],
        "step_ms": 1e3 * statistics.median(times),
    }


def show_text(case: Case, options: argparse.Namespace, folder: Path, results: Results) -> None:
    """The end of each training, beside the mean of those in bf16."""
    found = {run.name: end for run in sorted(folder.iterdir()) if (end := text_end(run))}
    last = max(1, options.text // 10)

    def end_of(run: dict[str, Any]) -> float:
        return statistics.fmean(run["losses"][-last:])

    first = [run for name, run in found.items() if name.startswith("bf16-")]
    rows = []
    for name, run in found.items():
        beside = ["", ""]
        if first:
            mean = statistics.fmean(map(end_of, first))
            held_out = statistics.fmean(one["held_out"] for one in first)
            beside = [f"{end_of(run) / mean - 1:+.2%}", f"{run['held_out'] / held_out - 1:+.2%}"]
        rows.append(
            (case.name, name, str(len(run["losses"])), f"{end_of(run):.4f}", beside[0],
             f"{run['held_out']:.4f}", beside[1], f"{run['step_ms']:.0f}")
        )  # fmt: skip
    print_table(
        ("model", "training", "steps", f"mean of the last {last} losses", "beside bf16",
         "held-out text", "beside bf16", "step ms"),
        rows,
    )  # fmt: skip
    results.put(case.name, "text", found)


def kept_remedies(ladder: dict[str, Any]) -> dict[str, Any]:
    """The kept states of a ladder as remedies that come in the same order."""
    from ridgeline.doctor.remedies.contract import Remedy

    rungs = [rung for rung in ladder["rungs"][1:] if rung["kept"]]
    return {
        rung["name"]: Remedy(
            rung["name"],
            applies=lambda step, config: "it was kept before",
            predicted_gain=lambda step, config, place=place: 100.0 - place,
            change=lambda config, rung=rung: rung["overrides"],
            risk="none",
        )
        for place, rung in enumerate(rungs)
    }


def show_runs(case: Case, ladders: list[dict[str, Any]]) -> None:
    """Each kept state's factor over the state before it, run by run, and how far they are apart."""
    names = [rung["name"] for rung in ladders[0]["rungs"][1:] if rung["kept"]]
    factors = {
        name: [
            rung["gain"]
            for ladder in ladders
            for rung in ladder["rungs"]
            if rung["name"] == name and rung["gain"]
        ]
        for name in names
    }
    if not names:
        say(f"{case.name}: nothing was kept, so there is nothing to compare")
        return
    factors["all of them"] = [
        [rung["times"] for rung in ladder["rungs"] if rung["kept"]][-1] for ladder in ladders
    ]
    rows = [
        (
            case.name,
            name,
            ", ".join(f"{factor:.3f}" for factor in found),
            f"{(max(found) - min(found)) / 2 / statistics.median(found):.1%}",
        )
        for name, found in factors.items()
    ]
    print_table(("model", "state", "x before, run by run", "half range"), rows)


def run_climb(
    case: Case, options: argparse.Namespace, results: Results, part: str = "climb"
) -> None:
    """From plain fp32 eager, with nothing fused and nothing read ahead, as far as it goes; `again`: over
    the states that a climb before has kept; `further`: on from where it ended."""
    from ridgeline.config import load_config
    from ridgeline.doctor.climb import climb
    from ridgeline.doctor.remedies.table import REMEDIES
    from ridgeline.doctor.states import Effort

    first = options.folder / f"climb-{case.name}"
    runs = sorted(first.glob("again-*/ladder.json"))
    again, further = part == "again", part == "further"
    if part != "climb" and not (first / "ladder.json").is_file():
        say(f"{case.name}: no ladder in {first}; --part climb leaves one")
        return
    out = first / f"again-{len(runs) + 1}" if again else first / "further" if further else first
    remedies = kept_remedies(json.loads((first / "ladder.json").read_text())) if again else REMEDIES
    layout = f"layout=precision=fp32,accumulate={case.plain_parts}"
    defaults = ("tune.fused_optimizer=false", "tune.search_convolutions=false")  # as torch has them
    plain = (*defaults, "data.prefetch=0", layout)
    left = options.limit - (time.monotonic() - BEGUN)
    effort = Effort(
        rounds=options.turns, steps=case.steps, check_steps=options.check, timeout_s=options.timeout_s,
        turn_s=options.turn_s, budget_s=min(options.budget, left), loss_bound=0.005,
        without=tuple(options.without),
    )  # fmt: skip
    config = (
        load_config(first / "recipe.yaml").config if further else configure(case, options, *plain)
    )
    cache = options.folder / "compiled"
    ladder = climb(config, out, remedies=remedies, effort=effort, say=say, cache=cache)
    results.put(case.name, out.name if part != "climb" else part, dataclasses.asdict(ladder))
    if again:
        every = [first / "ladder.json", *runs, out / "ladder.json"]
        show_runs(case, [json.loads(path.read_text()) for path in every])


def prepare(case: Case, options: argparse.Namespace) -> Case:
    if options.tiny:
        per_sample = 64 if case.unit == "tokens" else 1
        case = dataclasses.replace(case, batch=2, units_per_sample=per_sample, steps=2)
    path = options.folder / "fields" / "fields.h5"
    if case.name == "vit" and not path.is_file():
        shape = (4, 32, 64) if options.tiny else GRID
        write_fields(path, 16 if options.tiny else options.samples, shape)
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=sorted(CASES), default=["124m"])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=["hand"])
    parser.add_argument("--states", nargs="*", help="only these, by name or beginning; climbed")
    parser.add_argument(
        "--ways",
        nargs="*",
        default=[],
        choices=[way for way in WAYS if way],
        help="hand: further loops by hand (plain float32, the loss not compiled, no warm-up)",
    )
    parser.add_argument("--text", type=int, default=300, help="steps on real text")
    parser.add_argument("--repeat", type=int, default=2, help="text: trainings of each state")
    parser.add_argument("--at-once", type=int, default=1, help="text: as many beside each other")
    parser.add_argument(
        "--fp8", default="fp8 tensors", help="the state that text compares with bf16"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--turn-s", type=float, default=3.0, help="climb: how long a turn may be")
    parser.add_argument("--check", type=int, default=16, help="steps of the climb's loss curve")
    parser.add_argument("--samples", type=int, default=96, help="fields in the ViT's file")
    parser.add_argument(
        "--timeout-s", type=float, default=240.0, help="for one turn, compiling in it"
    )
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="REMEDY", help="climb: not to be tried"
    )
    parser.add_argument("--budget", type=float, default=420.0, help="climb: seconds for remedies")
    parser.add_argument("--limit", type=float, default=540.0, help="nothing is begun after so long")
    parser.add_argument(
        "--folder", type=Path, help="kept between calls: compiled code, recipes, losses"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results, rows = Results(options.json), []
    with tempfile.TemporaryDirectory(prefix="ridgeline-climb-") as name:
        options.folder = (options.folder or Path(name)).resolve()
        options.folder.mkdir(parents=True, exist_ok=True)
        # For the hand-written loops; states are told themselves.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(options.folder / "compiled")
        os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "1"
        for model in options.model:
            case = prepare(CASES[model], options)
            for part in options.part:
                if is_late(options):
                    say(f"no time for {part} of {model}")
                    continue
                if part == "text" and case.unit != "tokens":
                    continue
                say(f"{model}: {part}")
                if part in ("climb", "again", "further"):
                    run_climb(case, options, results, part)
                elif part == "text":
                    run_text(case, options, results)
                else:
                    rows += run_hand(case, options, results)
    head = (
        "model", "loop", "rate", "TFLOP/s", "x hand", "step ms", "spread", "peak GB", "10th step",
        "power",
    )  # fmt: skip
    if rows:
        print_table(head, rows)


if __name__ == "__main__":
    main()
