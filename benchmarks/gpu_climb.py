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
(Python's standard library as bytes; 256 of the 32,768 tokens occur) in bf16 and in fp8 from the same
weights on the same samples and compares the mean of the last tenth of the losses; each of them can be run
alone, with `--states bf16`, the fp8 state's name or `climbed`, and is kept in the folder. Results are
written to `--json` after every state, nothing is begun after `--limit` seconds, and compiled code stays in
the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.climb_cases import BF16, CASES, GRID, WAYS, Case, Hand, write_fields
from benchmarks.table import print_table, spread, write_json

PARTS = ("hand", "climb", "further", "again", "text")
CHUNK = 50
"""Steps on text after which losses are written."""
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
    recipe = climbed_recipe(case, options)
    if recipe.is_file() and (options.states is None or "climbed" in options.states):
        found["climbed"] = load_config(recipe).config
    return found


def climbed_recipe(case: Case, options: argparse.Namespace) -> Path:
    """Where a climb leaves its recipe; of the one that went further, where there is one."""
    folder = options.folder / f"climb-{case.name}"
    further = folder / "further" / "recipe.yaml"
    return further if further.is_file() else folder / "recipe.yaml"


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
    """bf16, fp8 or what a climb has left for as many steps on real text, one after the other, kept in the
    folder."""
    from ridgeline.config import load_config
    from ridgeline.doctor.states import Candidate, Effort

    path = options.folder / f"text-{case.name}.json"
    known: dict[str, list[float]] = json.loads(path.read_text()) if path.is_file() else {}
    effort = Effort(timeout_s=options.timeout_s, check_steps=options.text)
    length = 64 if options.tiny else case.units_per_sample
    text = ("data.source=text", f"data.args={{seq_len: {length}}}", "schedule.warmup_steps=50")
    every = {"bf16": (*BF16, "tune.compile_mode=regional"), **case.states, **case.more}
    wanted = options.states or ("bf16", options.fp8)
    names = [n for n in (*every, "climbed") if n in wanted]
    if "climbed" in names and not climbed_recipe(case, options).is_file():
        say(f"{case.name}: no recipe of a climb in {options.folder}; --part climb leaves one")
        names.remove("climbed")
    for name in names:
        if is_late(options):
            say(f"{case.name} on text: no time for {name}")
            continue
        candidate = None
        try:
            if name == "climbed":
                config = load_config(climbed_recipe(case, options), list(text)).config
            else:
                config = configure(case, options, *every[name], *text)
            place = f"text-{case.name}-{name.replace(' ', '-')}"
            candidate = Candidate(
                config, place, options.folder, effort, options.folder / "compiled"
            )
            while len(candidate.losses) < options.text:
                candidate.run(min(CHUNK, options.text - len(candidate.losses)), 0)
                known[name] = candidate.losses
                path.write_text(json.dumps(known))
                say(f"{case.name} on text: {name}: step {len(candidate.losses)}, "
                    f"loss {candidate.losses[-1]:.4f}")  # fmt: skip
        except Exception as error:
            say(f"{case.name} on text: {name} FAILED: {str(error)[:300]}")
        finally:
            if candidate is not None:
                candidate.close()
    last = max(1, options.text // 10)
    whole = {n: losses for n, losses in known.items() if len(losses) >= options.text}
    ends = {
        n: statistics.fmean(losses[options.text - last : options.text])
        for n, losses in whole.items()
    }
    for name, end in ends.items():
        apart = (end - ends["bf16"]) / ends["bf16"] if "bf16" in ends else float("nan")
        say(f"{case.name} on text, mean of the last {last} of {options.text} losses: {name} {end:.4f} "
            f"({apart:+.2%})")  # fmt: skip
    results.put(case.name, "text", {"losses": known, "ends": ends})


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
