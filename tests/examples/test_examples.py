"""The pairs of scripts in `examples/`: few lines differ, and the losses are the same.

Within a pair, the parallel script on two processes repeats the one on a single process. Against
the single-device script the CNN is equal step by step, because both read the data in the order it
lies in; the others shuffle, in another order than torch's DataLoader, and end at the same loss.
"""

import ast
import difflib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PAIRS = ("cnn", "llama", "transformers")
NEEDS = {"cnn": "sklearn", "llama": "torch", "transformers": "transformers"}
MAX_CHANGED_LINES = 5
TIMEOUT_S = 480
LOSS = re.compile(r"loss (\d+\.\d+)")

# The same arithmetic in another order of summation, float32, over some sixty steps.
ACROSS_PROCESSES = 1e-4
# Loss of the single-device script at the end: rel. difference allowed, and why.
AGAINST_SINGLE = {
    "cnn": 1e-5,  # the same batches
    "llama": 0.05,  # another order of samples
    "transformers": 0.05,
}
START = {"cnn": 2.3, "llama": 5.5, "transformers": 3.4}


def code_lines(path):
    """The script without its docstring and blank lines."""
    text = path.read_text(encoding="utf-8")
    docstring_end = ast.parse(text).body[0].end_lineno
    return [line for line in text.splitlines()[docstring_end:] if line.strip()]


def changed_lines(before, after):
    """Lines that have to be written or deleted to get from one script to the other."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return sum(
        max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"
    )


# One process that has loaded what the scripts import, and forks one for each that is to run: half of what
# a pair takes is the imports of five processes. Told the scripts as JSON: a path, a file for what
# it prints, and variables.
WARM = """
import json, os, runpy, sys, traceback
import torch, torch._dynamo
import ridgeline
if sys.argv[1] == "transformers":
    from transformers import GPT2Config, GPT2LMHeadModel
children = []
for script, output, variables in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            file = os.open(output, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1), os.dup2(file, 2)
            os.environ.update(variables)
            sys.argv = [script]
            runpy.run_path(script, run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
sys.exit(max(map(abs, codes)))
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ranks_of(count):
    """The variables that torchrun gives each."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    shared["LOCAL_WORLD_SIZE"] = str(count)
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def printed_losses_of_forks(pair):
    """What `losses` gives, of processes that are forked."""
    single, parallel = f"{pair}_single.py", f"{pair}_parallel.py"
    with tempfile.TemporaryDirectory() as folder:
        runs = [(single, {}), (parallel, {}), *((parallel, rank) for rank in ranks_of(2))]
        outputs = [Path(folder, str(number)) for number in range(len(runs))]
        told = [
            (str(EXAMPLES / script), str(output), variables)
            for (script, variables), output in zip(runs, outputs, strict=True)
        ]
        done = subprocess.run(
            [sys.executable, "-c", WARM, NEEDS[pair]],
            input=json.dumps(told),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        texts = [output.read_text() for output in outputs if output.exists()]
    assert done.returncode == 0, "\n".join([done.stderr, *texts])[-3000:]
    found = [[float(value) for value in LOSS.findall(text)] for text in texts]
    return found[0], found[1], found[2] + found[3]


def environment():
    return {
        **os.environ,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }


def printed_losses(script, num_processes):
    """Every loss a script prints, in order."""
    command = [sys.executable]
    if num_processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(num_processes)]
    done = subprocess.run(
        [*command, str(EXAMPLES / script)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(value) for value in LOSS.findall(done.stdout)]


@cache
def losses(pair):
    """Of the single script, and of the parallel one on one and on two processes."""
    pytest.importorskip(NEEDS[pair])
    # In CI one pair is started as its reader would, the others by forks; `make test` starts all so.
    if os.environ.get("RIDGELINE_TABLES") == "reduced" and pair != "cnn":
        return printed_losses_of_forks(pair)
    # The two runs of one process go side by side: starting Python is most of their time.
    with ThreadPoolExecutor() as pool:
        single = pool.submit(printed_losses, f"{pair}_single.py", 1)
        one = pool.submit(printed_losses, f"{pair}_parallel.py", 1)
        return single.result(), one.result(), printed_losses(f"{pair}_parallel.py", 2)


@pytest.mark.parametrize("pair", PAIRS)
def test_at_most_five_lines_differ(pair):
    before = code_lines(EXAMPLES / f"{pair}_single.py")
    after = code_lines(EXAMPLES / f"{pair}_parallel.py")
    assert 0 < changed_lines(before, after) <= MAX_CHANGED_LINES


def test_every_example_has_its_pair():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == {f"{pair}_{kind}.py" for pair in PAIRS for kind in ("single", "parallel")}


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_two_processes_repeat_one(pair):
    _, one, two = losses(pair)
    assert len(two) == len(one)  # rank 1 prints nothing
    assert two == pytest.approx(one, rel=ACROSS_PROCESSES)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_parallel_reaches_the_loss_of_single(pair):
    single, one, _ = losses(pair)
    assert len(one) == len(single)
    assert one[-1] == pytest.approx(single[-1], rel=AGAINST_SINGLE[pair])
    assert single[-1] < 0.7 * START[pair]


@pytest.mark.slow
def test_cnn_equals_single_step_by_step():
    single, one, two = losses("cnn")
    tolerance = AGAINST_SINGLE["cnn"]
    assert one == pytest.approx(single, rel=tolerance)
    # Printed with six decimals, of which the last batch's small loss has four that count.
    assert two == pytest.approx(single, rel=tolerance, abs=2e-6)
