"""What the documents say is true: commands run, examples run, links resolve."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

# These are run by CI itself, and would start this test again, or need a machine CI has not got.
# A package is compiled for a minute, which tests/unit/export do.
NOT_RUN_HERE = (
    "make setup", "make test", "make check", "git clone", "cd ", "python benchmarks/", "ridgeline export"
)  # fmt: skip


def blocks(language: str, path: Path = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines = [
        line.split("  #")[0].strip() for block in blocks("bash") for line in block.splitlines()
    ]
    return [line for line in lines if line and not line.startswith(NOT_RUN_HERE)]


def environment() -> dict[str, str]:
    bin_directory = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{bin_directory}:{os.environ['PATH']}",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


def test_readme_has_commands() -> None:
    assert any(command.startswith("make demo") for command in commands())
    assert any(command.startswith("ridgeline train") for command in commands())


@pytest.mark.slow
def test_readme_commands_run() -> None:
    """In order, in one shell each, as a reader would type them."""
    for command in commands():
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, f"`{command}` ended with {done.returncode}:\n{done.stderr}"


@pytest.mark.slow
def test_readme_example_runs(tmp_path: Path) -> None:
    examples = blocks("python")
    assert examples, "README has no example of the user's own loop"
    for number, text in enumerate(examples):
        script = tmp_path / f"example{number}.py"
        script.write_text(text)
        for launcher in ([sys.executable], ["torchrun", "--standalone", "--nproc-per-node", "2"]):
            done = subprocess.run(
                [*launcher, str(script)],
                cwd=ROOT,
                env=environment(),
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_commands_of_the_data_page_run(tmp_path: Path) -> None:
    """In order, in one directory; what they print is what the page shows, but for sizes and times."""
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(1000):
            (tmp_path / "photos" / name / f"{number:04d}.jpg").write_bytes(os.urandom(3000))
    shown: list[str] = []
    num_commands = 0
    for line in "".join(blocks("console", ROOT / "docs" / "data.md")).splitlines():
        if not line.startswith("$ "):
            assert without_figures(line) in shown, f"{line!r} is not printed any more"
            continue
        num_commands += 1
        done = subprocess.run(
            ["bash", "-c", line[2:]],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"`{line[2:]}`: {done.stderr}"
        shown = [without_figures(printed) for printed in done.stdout.splitlines()]
    assert num_commands >= 6


def without_figures(line: str) -> str:
    return re.sub(r"\d+\.\d+", "N", line)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    for target in targets:
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_tree_in_readme_is_the_tree() -> None:
    """Every path that the annotated tree names exists."""
    tree = next(block for block in blocks("text") if "ridgeline/" in block)
    folders: list[tuple[int, str]] = []
    for line in tree.splitlines():
        match = re.match(r"^(\s*)(\S+)", line)
        if match is None:
            continue
        depth, name = len(match[1]), match[2]
        while folders and folders[-1][0] >= depth:
            folders.pop()
        path = "/".join([folder for _, folder in folders] + [name.rstrip("/")])
        if name.endswith("/"):
            folders.append((depth, name.rstrip("/")))
        assert (ROOT / path).exists(), f"README's tree names {path}"


def test_composition_matrix_in_docs_is_the_tables() -> None:
    from ridgeline.layout import composition_matrix

    assert composition_matrix().strip() in (ROOT / "docs" / "layout.md").read_text()
