"""This loader in every format beside the others: samples/s of small images, bandwidth on large arrays.

    python benchmarks/loader.py                      # 50,000 images of 10 KB, 2 GB of arrays
    python benchmarks/loader.py --images 5000 --gigabytes 0.25 --rounds 1
    python benchmarks/loader.py --python litdata=VENV/bin/python --python streaming=VENV/bin/python

Every contender reads the same images with the same decoder, batch and number of workers, in a process of
its own, taking turns over the rounds so that a noisy machine is noisy for everyone; medians are printed.
Libraries that cannot live beside the others run with the interpreter given for them, and are left out
where they are missing. The bandwidth on large arrays is held against a plain read of the same files.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from loader_contender import ARRAY, SIDE
from table import print_table, spread, write_json

from ridgeline.data.dataset import open_dataset
from ridgeline.data.formats.table import FORMATS
from ridgeline.data.pack import pack

CONTENDER = Path(__file__).with_name("loader_contender.py")
NUM_CLASSES = 100
PACKED = [name for name in FORMATS if name != "folder"]
THREADS = "tar, threads"
NUM_OTHERS = 4
"""Of the others write a copy of their own: LMDB by hand, WebDataset, litdata, streaming."""


# The data


def require_room(root: Path, options: argparse.Namespace) -> None:
    """Everybody's copy has to fit: one that is cut short would only be left out of the race."""
    sizes = {"images": 10_500 * options.images, "arrays": 1e9 * options.gigabytes}
    needed = sum(sizes[kind] for kind in options.kinds) * (len(PACKED) + 1 + NUM_OTHERS)
    free = shutil.disk_usage(root).free
    if free < 1.1 * needed:
        sys.exit(
            f"{root} has {free / 1e9:.0f} GB free, all copies take about {needed / 1e9:.0f}; name another "
            "folder with --where, or fewer --images and --gigabytes"
        )


def make_image(number: int) -> bytes:
    """A picture of smooth shapes with some grain: about 10 KB as a JPEG."""
    from PIL import Image

    rng = np.random.default_rng(number)
    small = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    grain = rng.integers(-16, 17, smooth.shape, dtype=np.int16)
    pixels = np.clip(smooth.astype(np.int16) + grain, 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=94)
    return out.getvalue()


def write_images(job: tuple[Path, range]) -> None:
    root, numbers = job
    for number in numbers:
        folder = root / f"class-{number % NUM_CLASSES:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:06d}.jpg").write_bytes(make_image(number))


def write_arrays(job: tuple[Path, range]) -> None:
    root, numbers = job
    for number in numbers:
        folder = root / f"class-{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        values = np.random.default_rng(number).standard_normal(ARRAY, dtype=np.float32)
        np.save(folder / f"{number:06d}.input.npy", values)


def make_folder(kind: str, root: Path, num: int) -> Path:
    folder = root / kind / "folder"
    if not folder.exists():
        step = -(-num // 16)
        jobs = [(folder, range(i, min(i + step, num))) for i in range(0, num, step)]
        with ProcessPoolExecutor(2) as pool:
            list(pool.map(write_images if kind == "images" else write_arrays, jobs))
    return folder


def samples(kind: str, folder: Path) -> Iterator[tuple[int, bytes]]:
    """Label and contents of every file, for those that write their own format."""
    files = sorted(folder.rglob("*.*"))
    labels = {parent: number for number, parent in enumerate(sorted({f.parent for f in files}))}
    for file in files:
        data = file.read_bytes() if kind == "images" else np.load(file).tobytes()
        yield labels[file.parent], data


def write_lmdb(kind: str, folder: Path, target: Path) -> None:
    import lmdb

    env = lmdb.open(str(target), map_size=1 << 36)
    with env.begin(write=True) as transaction:
        for number, (label, data) in enumerate(samples(kind, folder)):
            transaction.put(struct.pack(">Q", number), struct.pack("<q", label) + data)
    env.close()


def write_webdataset(kind: str, folder: Path, target: Path) -> None:
    import webdataset as wds

    target.mkdir()
    name = "jpg" if kind == "images" else "raw"
    pattern = str(target / "shard-%05d.tar")
    with wds.ShardWriter(pattern, maxsize=64e6, maxcount=10**9, verbose=0) as out:
        for number, (label, data) in enumerate(samples(kind, folder)):
            out.write({"__key__": f"{number:06d}", name: data, "cls": str(label).encode()})


WRITE_LITDATA = """
import sys
from pathlib import Path
import numpy as np
from litdata import optimize
kind, folder, target = sys.argv[1:]
files = sorted(map(str, Path(folder).rglob("*.*")))
names = sorted({str(Path(f).parent) for f in files})
def one(file):
    data = Path(file).read_bytes() if kind == "images" else np.load(file).tobytes()
    return {"data": data, "label": names.index(str(Path(file).parent))}
if __name__ == "__main__":
    optimize(fn=one, inputs=files, output_dir=target, chunk_bytes="64MB", num_workers=2)
"""
WRITE_STREAMING = """
import sys
from pathlib import Path
import numpy as np
from streaming import MDSWriter
kind, folder, target = sys.argv[1:]
files = sorted(map(str, Path(folder).rglob("*.*")))
names = {n: i for i, n in enumerate(sorted({str(Path(f).parent) for f in files}))}
with MDSWriter(out=target, columns={"data": "bytes", "label": "int"}, size_limit=1 << 26) as out:
    for file in files:
        data = Path(file).read_bytes() if kind == "images" else np.load(file).tobytes()
        out.write({"data": data, "label": names[str(Path(file).parent)]})
"""


def write_elsewhere(script: str, python: str, kind: str, folder: Path, target: Path) -> None:
    code = target.with_suffix(".write.py")
    code.write_text(script)
    command = [python, str(code), kind, str(folder), str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])


def prepare(kind: str, root: Path, num: int, pythons: dict[str, str]) -> dict[str, Path]:
    """Where each contender finds the same samples; those that cannot be written are left out."""
    folder = make_folder(kind, root, num)
    places = {"folder": folder, "ours: folder": folder}
    source = open_dataset(folder)
    for name in PACKED:
        target = root / kind / f"ridgeline-{name}"
        if not target.exists():
            print(f"writing {kind} as {name}", flush=True)
            pack(source, target, FORMATS[name], shard_bytes=64 * 10**6, processes=2)
        places[f"ours: {name}"] = target
    places[f"ours: {THREADS}"] = places["ours: tar"]
    if kind == "arrays":
        places["ours: npy, threads"] = places["ours: npy"]
    writers = {
        "lmdb": lambda target: write_lmdb(kind, folder, target),
        "webdataset": lambda target: write_webdataset(kind, folder, target),
        "litdata": lambda target: write_elsewhere(
            WRITE_LITDATA, pythons["litdata"], kind, folder, target
        ),
        "streaming": lambda target: write_elsewhere(
            WRITE_STREAMING, pythons["streaming"], kind, folder, target
        ),
    }
    for name, write in writers.items():
        target = root / kind / name
        try:
            if not target.exists():
                print(f"writing {kind} for {name}", flush=True)
                write(target)
            places[name] = target
        except Exception as error:  # a library that is not there is no reason to stop
            last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            print(f"{name} is left out: {last[0][:160]}")
            shutil.rmtree(target, ignore_errors=True)
    return places


# The race


def run(
    kind: str, name: str, place: Path, workers: int, python: str, *options: str
) -> float | None:
    """Samples a second of one contender; None when it failed."""
    ours = name.startswith("ours: ")
    command = [python, str(CONTENDER), kind, "ridgeline" if ours else name, str(place), *options]
    if name.endswith(", threads"):
        command += ["--workers", "0", "--threads", str(max(1, workers))]
    else:
        command += ["--workers", str(workers)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        print(f"{name} failed: {done.stderr.strip().splitlines()[-1:]}")
        return None
    return float(json.loads(done.stdout.strip().splitlines()[-1])["rate"])


Rates = dict[tuple[str, int], list[float]]


def race(
    kind: str, places: dict[str, Path], pythons: dict[str, str], options: argparse.Namespace
) -> Rates:
    rates: Rates = defaultdict(list)
    batch, measure = ("64", options.measure) if kind == "images" else ("8", options.measure_arrays)
    for turn in range(options.rounds):
        for workers in options.workers:
            for name, place in places.items():
                python = pythons.get(name, sys.executable)
                cold = ["--cold"] if kind == "arrays" and not options.warm else []
                extra = ("--batch", batch, "--measure", str(measure), *cold)
                rate = run(kind, name, place, workers, python, *extra)
                if rate is not None:
                    rates[name, workers].append(rate)
        print(f"{kind}: round {turn + 1} of {options.rounds} done", flush=True)
    return rates


def show(title: str, rates: Rates, workers: list[int], scale: float, unit: str) -> None:
    print(f"\n{title}, {unit}, medians (half the distance of the quartiles)")
    rows = []
    for name in dict.fromkeys(name for name, _ in rates):
        cells = [name]
        for number in workers:
            found = rates.get((name, number))
            if not found:
                cells.append("-")
                continue
            middle = statistics.median(found) * scale
            cells.append(f"{middle:,.0f} ({100 * spread(found):.0f} %)")
        rows.append(cells)
    print_table(("loader", *(f"{number} workers" for number in workers)), rows)


def judge(kind: str, rates: Rates, workers: list[int]) -> bool:
    """Whether the best of ours is ahead of each of the others at every number of workers."""
    ahead = True
    for number in workers:
        found = {name: statistics.median(v) for (name, n), v in rates.items() if n == number}
        ours = {name: rate for name, rate in found.items() if name.startswith("ours: ")}
        others = {n: r for n, r in found.items() if not n.startswith("ours: ") and n != "raw"}
        if not ours or not others:
            continue
        best, other = max(ours, key=ours.__getitem__), max(others, key=others.__getitem__)
        ratio = ours[best] / others[other]
        ahead = ahead and ratio > 1
        print(
            f"{kind}, {number} workers: {best.removeprefix('ours: ')} gives {ratio:.2f} times the "
            f"best of the others ({other})"
        )
    return ahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="Of large arrays.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--measure", type=int, default=8000, help="Images timed in a turn.")
    parser.add_argument("--measure-arrays", type=int, default=400)
    parser.add_argument(
        "--warm", action="store_true", help="Large arrays from memory, not the disk."
    )
    parser.add_argument(
        "--where", type=Path, help="A folder that is kept; default: a temporary one."
    )
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--kinds", nargs="+", default=["images", "arrays"])
    parser.add_argument("--only", nargs="+", help="Names of loaders, as the table has them.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pythons = {"litdata": sys.executable, "streaming": sys.executable}
    pythons.update(pair.split("=", 1) for pair in options.python)
    root = options.where or Path(tempfile.mkdtemp(prefix="ridgeline-loader-"))
    root.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    ahead = True
    # Ended from outside it takes its copies with it, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        require_room(root, options)
        for kind in options.kinds:
            array_bytes = int(np.prod(ARRAY)) * 4
            num = options.images if kind == "images" else int(options.gigabytes * 1e9 / array_bytes)
            places = prepare(kind, root, num, pythons)
            if kind == "arrays":
                places["raw"] = places["ours: npy"]
            if options.only:
                places = {name: places[name] for name in places if name in options.only}
            rates = race(kind, places, pythons, options)
            scale, unit = (1.0, "samples/s") if kind == "images" else (array_bytes / 1e6, "MB/s")
            cold = " from the disk" if kind == "arrays" and not options.warm else ""
            show(f"{num} {kind}{cold}", rates, options.workers, scale, unit)
            ahead = judge(kind, rates, options.workers) and ahead
            results[kind] = {f"{name}, {n} workers": v for (name, n), v in rates.items()}
            if kind == "arrays":
                judge_raw(rates, options.workers)
    finally:
        if options.where is None:
            shutil.rmtree(root, ignore_errors=True)
    write_json(options.json, results)
    print("ahead of every other" if ahead else "not ahead of every other")


def judge_raw(rates: Rates, workers: list[int]) -> None:
    for number in workers:
        plain = rates.get(("raw", number))
        ours = {
            n: statistics.median(v) for (n, w), v in rates.items() if w == number and "ours" in n
        }
        if plain and ours:
            best = max(ours, key=ours.__getitem__)
            share = ours[best] / statistics.median(plain)
            name = best.removeprefix("ours: ")
            print(f"arrays, {number} workers: {name} reaches {100 * share:.0f} % of a plain read")


if __name__ == "__main__":
    main()
