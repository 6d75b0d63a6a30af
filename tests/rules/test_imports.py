"""The house is laid out: a room imports only from rooms above it, and some rooms need no torch."""

from __future__ import annotations

import ast
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ridgeline"

# DESIGN's list, top to bottom. Rooms in one inner tuple stand side by side: they may not import
# each other either.
ROOMS: list[tuple[str, ...]] = [
    ("errors",),
    ("named",),
    ("composition",),
    ("layout",),
    ("typed",),
    ("tuning",),
    ("augmenting",),
    ("config",),
    ("rundir",),
    ("facts", "shipped"),
    ("launch",),
    ("plan",),
    ("machine",),
    ("models",),
    ("data",),
    ("optim",),
    ("parallel",),
    ("checkpoint",),
    ("train",),
    ("doctor",),
    ("verify",),
    ("scaling", "search", "export", "report"),
    ("compat",),
    ("cli_shared",),
    ("cli_answers", "cli_jobs", "cli_network", "cli_planned", "cli_validate"),
    (
        "cli_checkpoint",
        "cli_data",
        "cli_doctor",
        "cli_export",
        "cli_launch",
        "cli_machine",
        "cli_plan",
        "cli_scale",
        "cli_search",
        "cli_track",
        "cli_watch",
    ),
    ("cli",),
    ("__main__",),
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}

TORCH_FREE = (
    "ridgeline",
    "ridgeline.errors",
    "ridgeline.named",
    "ridgeline.layout",
    "ridgeline.typed",
    "ridgeline.tuning",
    "ridgeline.config",
    "ridgeline.rundir",
    "ridgeline.facts",
    "ridgeline.shipped",
    "ridgeline.train.checks",
    "ridgeline.launch.env",
    "ridgeline.launch.local",
    "ridgeline.launch.rank",
    "ridgeline.launch.host",
    "ridgeline.launch.nodes",
    "ridgeline.launch.request",
    "ridgeline.launch.supervise",
    "ridgeline.plan.validate",
    "ridgeline.plan.recipe",
    "ridgeline.plan.auto",
    "ridgeline.scaling.noise",
    "ridgeline.scaling.simulate",
    "ridgeline.scaling.curves",
    "ridgeline.scaling.show",
    "ridgeline.search.run",
    "ridgeline.search.show",
    "ridgeline.report.searched",
    "ridgeline.cli_search",
    "ridgeline.search.nodes",
    "ridgeline.search.agent",
    "ridgeline.report.track",
    "ridgeline.cli_track",
    "ridgeline.data.stage.run",
    "ridgeline.data.stage.command",
    "ridgeline.checkpoint.describe",
    "ridgeline.checkpoint.damage",
    "ridgeline.report.build",
    "ridgeline.report.terminal",
    "ridgeline.report.served",
    "ridgeline.machine.storage",
    "ridgeline.machine.verdict",
    "ridgeline.machine.record",
    "ridgeline.machine.show",
    "ridgeline.machine.roofline",
    "ridgeline.machine.link_show",
    "ridgeline.machine.groups",
    "ridgeline.machine.power",
    "ridgeline.machine.gauges",
    "ridgeline.machine.room",
    "ridgeline.cli_shared",
    "ridgeline.cli_checkpoint",
    "ridgeline.data.pack",
    "ridgeline.cli_data",
    "ridgeline.doctor.verdict",
    "ridgeline.doctor.timeline",
    "ridgeline.doctor.finished",
    "ridgeline.doctor.pictures",
    "ridgeline.doctor.climb",
    "ridgeline.doctor.interface",
    "ridgeline.cli_doctor",
    "ridgeline.cli_export",
    "ridgeline.export.request",
    "ridgeline.cli_jobs",
    "ridgeline.cli_launch",
    "ridgeline.cli_machine",
    "ridgeline.cli_network",
    "ridgeline.cli_plan",
    "ridgeline.cli_answers",
    "ridgeline.cli_planned",
    "ridgeline.cli_validate",
    "ridgeline.cli_watch",
    "ridgeline.cli",
)

# Run before anything else: makes every import of torch fail, as on a login node without it.
NO_TORCH = """
import sys
class _NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, _NoTorch())
"""


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported_rooms(path: Path) -> set[str]:
    """Rooms that a file names in its imports, inside functions as well."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
            if node.module == "ridgeline":
                names = [f"ridgeline.{alias.name}" for alias in node.names]
        rooms |= {n.split(".")[1] for n in names if n.startswith("ridgeline.")}
    return rooms


SOURCES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.stem != "__init__")


def test_every_room_is_on_the_list() -> None:
    assert {room_of(path) for path in SOURCES} <= set(LEVEL)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_upwards(path: Path) -> None:
    own = room_of(path)
    for room in imported_rooms(path) - {own, "__version__"}:
        assert room in LEVEL, f"{path.name} imports the unknown room {room}"
        assert LEVEL[room] < LEVEL[own], (
            f"{own} may not import {room}: it stands below or beside it"
        )


def test_models_say_nothing_of_parallelism() -> None:
    words = ("distributed", "DeviceMesh", "world_size", "all_reduce", "process_group")
    for path in (PACKAGE / "models").rglob("*.py"):
        found = [word for word in words if word in path.read_text()]
        assert not found, f"{path.name} speaks of {found}"


def test_step_does_not_ask_which_technique() -> None:
    tree = ast.parse((PACKAGE / "train" / "step.py").read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp))]


def test_environment_is_read_in_one_room() -> None:
    for path in SOURCES:
        if room_of(path) == "launch":
            continue
        text = path.read_text()
        for word in ("os.environ", "getenv"):
            assert word not in text, f"{path} reads the environment"


def test_files_are_of_readable_length() -> None:
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 600, f"{path} holds more than one thing"


def test_public_names_are_few_and_there() -> None:
    import ridgeline

    assert len(ridgeline.__all__) <= 8
    for name in ridgeline.__all__:
        assert getattr(ridgeline, name) is not None


@pytest.mark.parametrize("module", TORCH_FREE)
def test_imports_without_torch(module: str) -> None:
    code = f"{NO_TORCH}\nimport {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["config", "show", "digits"],
        ["recipes"],
        ["machine", "storage", "--help"],
        ["watch", "--help"],
    ],
)
def test_commands_run_without_torch(args: list[str]) -> None:
    code = f"{NO_TORCH}\nimport sys\nsys.argv = ['ridgeline', *{args!r}]\n"
    code += "from ridgeline.cli import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


WRITE_CHECKPOINT = """
import sys, zlib
from pathlib import Path
from ridgeline.checkpoint.manifest import Chunk, Manifest, Stored, StoredFile, write_manifest
path = Path("step-00000001")
path.mkdir()
(path / "f").write_bytes(b"headnumb")
chunk = Chunk((0,), (1,), "f", 4, 8, zlib.crc32(b"numb"))
files = {"f": StoredFile(8, 4, zlib.crc32(b"head"))}
write_manifest(path, Manifest(1, "dp=1", 1, 0.0, files=files,
                              tensors={"model/w": Stored("F32", (1,), (chunk,))}))
"""


def run_apart(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In an interpreter of its own, which finds the package and little else."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )


def test_checkpoints_are_looked_at_and_verified_without_torch(tmp_path: Path) -> None:
    code = f"{NO_TORCH}\n{WRITE_CHECKPOINT}\nfrom ridgeline.cli import main\n"
    code += """
def call(code, *args):
    sys.argv = ['ridgeline', 'checkpoint', *args]
    try:
        main()
    except SystemExit as end:
        assert (end.code or 0) == code, (end.code, args)
for command in ('ls', 'show', 'verify'):
    call(0, command, str(path))
(path / "f").write_bytes(b"headnumx")
call(1, 'verify', '.')
call(2, 'diff', str(path), str(path))
call(2, 'export', str(path), 'x.safetensors')
call(2, 'reshard', str(path), 'there', '--layout', 'dp=1')
"""
    done = run_apart(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "model/w is damaged" in done.stdout
    assert done.stderr.count("needs torch, which is not installed here") == 3


def test_who_starts_the_ranks_loads_no_torch(tmp_path: Path) -> None:
    """It is seconds for a process that computes nothing, before the first rank can start."""
    code = """
import sys
import ridgeline.launch.local as local
started = []
local.run_ranks = lambda *args: started.append(args)
sys.argv = ["ridgeline", "train", "digits", "-n", "2", "device=cpu"]
from ridgeline.cli import main
try:
    main()
except SystemExit as end:
    pass
assert started
assert "torch" not in sys.modules
assert "numpy" not in sys.modules
"""
    done = run_apart(code, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("args", [["train", "digits", "-n", "1"], ["data", "bench", "digits"]])
def test_training_without_torch_is_one_sentence(tmp_path: Path, args: list[str]) -> None:
    code = f"{NO_TORCH}\nimport sys\nsys.argv = ['ridgeline', *{args!r}]\n"
    code += "from ridgeline.cli import main\nmain()"
    done = run_apart(code, tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "needs torch, which is not installed here" in done.stderr


def test_help_is_quick() -> None:
    command = [sys.executable, "-m", "ridgeline.cli", "--help"]
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # What the command needs of a core, whatever else the machine is doing.
    assert min(times) < 0.4, f"ridgeline --help took {statistics.median(times):.2f} s of a core"
