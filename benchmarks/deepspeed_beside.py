"""The same scripts with DeepSpeed and with our interface of it: how far losses, rates and norms are apart.

    python benchmarks/deepspeed_beside.py --python PYTHON [--write]

PYTHON is one that has DeepSpeed (its C++ parts are built at the first run, for minutes); it runs on two
processes on the CPU. `--write` keeps its results in `tests/golden/deepspeed.json`, for the test that holds
ours against them without it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
MODULES = {"ours": "ridgeline.compat.deepspeed", "theirs": "deepspeed"}
RANKS = 2


def run_rank(which: str, case: str) -> None:
    """On one of the processes."""
    sys.path.insert(0, str(GOLDEN))
    script = importlib.import_module("deepspeed_script")
    deepspeed = importlib.import_module(MODULES[which])
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = script.train(deepspeed, script.CASES[case], rank, world)
    if rank == 0:
        found["version"] = getattr(deepspeed, "__version__", "")
        print("RESULT", json.dumps(found), flush=True)


def run(python: str, which: str, case: str) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(RANKS):
        place = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
        path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])  # ninja is beside it
        env = os.environ | {key: str(value) for key, value in place.items()}
        env |= {"OMP_NUM_THREADS": "1", "PATH": path}
        words = [python, __file__, "--rank", which, case]
        ranks.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate()[0] for rank in ranks]
    for line in outputs[0].splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))  # type: ignore[no-any-return]
    raise SystemExit(f"{which} did not end: {case}")


def apart(ours: list[Any], theirs: list[Any]) -> float:
    """The largest relative difference of those that both have."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs if a != b), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all where none is named")
    options = parser.parse_args()
    sys.path.insert(0, str(GOLDEN))
    cases = importlib.import_module("deepspeed_script").CASES
    kept = {}
    print(f"{'case':32}{'losses':>10}{'rates':>10}{'norms':>10}")
    for case in options.cases or cases:
        theirs, ours = run(options.python, "theirs", case), run(sys.executable, "ours", case)
        kept[case] = theirs
        figures = [apart(ours[name], theirs[name]) for name in ("losses", "rates", "norms")]
        print(f"{case:32}" + "".join(f"{value:10.1e}" for value in figures), flush=True)
    if options.write:
        (GOLDEN / "deepspeed.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(*sys.argv[2:])
    else:
        main()
