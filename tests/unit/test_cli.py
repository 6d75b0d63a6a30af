"""The command line: what it prints, and one line with an exit code for what it cannot do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ridgeline import __version__, cli
from ridgeline.config import load_config, recipe_names
from ridgeline.errors import RunError, UsageError
from ridgeline.rundir import CONFIG, EvalRecord, RunDir, StepRecord


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs `ridgeline ARGS` in this process, in an empty directory, through its real entry point."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["ridgeline", *args])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


def make_run(path: Path, loss: float) -> RunDir:
    path.mkdir()
    run = RunDir(path)
    run.write_text(CONFIG, f"train:\n  lr: {loss}\n")
    run.add_event("start")
    for step in range(1, 6):
        run.append(StepRecord(step, 0, 1000.0 + step, loss / step, 0.1, 8, 0.5))
    run.append(EvalRecord(5, 0, 1005.0, 100, 0.5, {"loss": 0.125, "accuracy": 0.75}))
    run.add_event("end")
    return run


def test_version(command) -> None:
    assert command("version").out == f"{__version__}\n"


def test_a_recipe_that_the_ranks_refuse_leaves_nothing(command, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    for words in ((), ("--out", "a/b"), ("--run", "c/d")):
        ended = command("train", "digits", "model.args.foo=3", "-n", "1", *words)
        assert (ended.code, "foo" in ended.err) == (2, True)
        assert list(tmp_path.iterdir()) == []


def test_the_package_runs_as_a_module() -> None:
    called = [sys.executable, "-m", "ridgeline", "version"]
    found = subprocess.run(called, capture_output=True, text=True, check=True)
    assert found.stdout == f"{__version__}\n"


def test_recipes_are_listed_with_what_they_are(command) -> None:
    outcome = command("recipes")
    assert outcome.code == 0
    lines = [line.split(maxsplit=1) for line in outcome.out.splitlines()]
    assert [name for name, _ in lines] == recipe_names()
    assert all(len(text) > 20 and text.endswith(".") for _, text in lines)


def test_config_show_is_the_configuration(command, tmp_path: Path) -> None:
    outcome = command("config", "show", "digits", "train.lr=0.5", "layout.precision=bf16")
    assert outcome.code == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(outcome.out)
    config = load_config(shown).config
    assert config.train.lr == 0.5
    assert config.layout == "precision=bf16"
    assert yaml.safe_load(outcome.out)["name"] == "digits"
    assert any("lr: 0.5" in row and "# command line" in row for row in outcome.out.splitlines())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["train", "digit"], ["'digit'", "did you mean 'digits'?"]),
        (["train", "gone.yaml"], ["no recipe file at gone.yaml"]),
        (["train", "digits", "train.bach=3"], ["train.bach", "train.batch"]),
        (["train", "digits", "train.batch"], ["'train.batch'", "KEY=VALUE"]),
        (["train", "digits", "train.batch=0"], ["train.batch=0"]),
        (["train", "digits", "layout.precison=bf16"], ["'precison'", "'precision'"]),
        (["train", "digits", "layout=dp=2", "-n", "3"], ["dp=2", "2 processes", "there are 3"]),
        (
            ["train", "digits", "layout=sync=async", "-n", "2"],
            ["sync=async", "not in this release"],
        ),
        (["train", "digits", "layout=spatial=2x2,cp=2", "-n", "8"], ["spatial", "cp"]),
        (["train", "digits", "layout=tp=3,spatial=2", "-n", "2"], ["do not compose"]),
        (["train", "digits", "--out", "/proc/nowhere"], ["/proc/nowhere", "--out DIR"]),
        (["config", "show", "nothing"], ["'nothing'", "known:"]),
        (["config", "show", "digits", "x=1"], ["unknown key x"]),
        (["report", "gone"], ["no run directory at gone"]),
        (["report", "."], [". is not a run directory", CONFIG]),
    ],
)
def test_bad_input_is_one_line_and_code_2_and_leaves_nothing(
    command, tmp_path: Path, args: list[str], said: list[str]
) -> None:
    outcome = command(*args)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("ridgeline: ")
    assert outcome.err.count("\n") == 1
    for part in said:
        assert part in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "args", [["trian"], ["train"], ["train", "digits", "-n", "0"], ["report"], ["config", "shwo"]]
)
def test_wrong_commands_are_the_users_too(command, args: list[str]) -> None:
    outcome = command(*args)
    assert outcome.code == 2
    assert "Traceback" not in outcome.err


def test_a_broken_recipe_names_its_line(command, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: a\ntrain: {\n")
    outcome = command("train", "mine.yaml")
    assert outcome.code == 2
    assert "mine.yaml, line 3" in outcome.err


def test_report_of_one_run_goes_into_it(command, tmp_path: Path) -> None:
    make_run(tmp_path / "a", 2.0)
    outcome = command("report", "a")
    assert (outcome.code, outcome.out) == (0, "report: a/report.html\n")
    page = (tmp_path / "a" / "report.html").read_text()
    assert "accuracy" in page
    assert "0.75" in page or "75" in page
    again = command("report", "a", "--out", "b.html")
    assert again.code == 2
    assert "--out is for comparisons" in again.err


def test_report_of_two_runs_compares_them(command, tmp_path: Path) -> None:
    make_run(tmp_path / "a", 2.0)
    make_run(tmp_path / "b", 3.0)
    assert command("report", "a", "b").out == "comparison: comparison.html\n"
    assert command("report", "a", "b", "--out", "c.html").out == "comparison: c.html\n"
    for name in ("comparison.html", "c.html"):
        page = (tmp_path / name).read_text()
        assert "train.lr" in page  # the setting in which they differ
        assert ">a<" in page
        assert ">b<" in page
    assert not (tmp_path / "a" / "report.html").exists()


def test_what_needs_no_rank_needs_no_torch(tmp_path: Path) -> None:
    """In a fresh interpreter in which importing torch fails, as on a login node."""
    make_run(tmp_path / "a", 2.0)
    make_run(tmp_path / "b", 3.0)
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from ridgeline import cli\n"
        "commands = [['version'], ['recipes'], ['config', 'show', 'digits'], ['report', 'a'],\n"
        "            ['report', 'a', 'b'], ['train', '--help']]\n"
        "for args in commands:\n"
        "    sys.argv = ['ridgeline', *args]\n"
        "    try: cli.main()\n"
        "    except SystemExit as end: assert not end.code, args\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "comparison.html").exists()


def test_the_installed_command_ends_with_the_code(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("ridgeline")
    if not script.exists():
        pytest.skip("the package is not installed with its script")
    done = subprocess.run(
        [script, "train", "digit"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_a_command_that_is_refused_leaves_a_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ridgeline import cli
    from ridgeline.config import find_recipe, load_config
    from ridgeline.launch import survive
    from ridgeline.launch.env import read_limits
    from ridgeline.launch.start import Local
    from ridgeline.rundir import CONFIG, RunDir

    limits = read_limits({})

    def refuse(*_: object) -> None:
        raise UsageError("no")

    monkeypatch.setattr(survive, "run_job", refuse)
    config = load_config(find_recipe("digits")).config
    old, new = RunDir.at(tmp_path / "old"), RunDir.at(tmp_path / "new")
    old.write_text(CONFIG, "name: changed\n")
    with pytest.raises(UsageError):
        cli._run_ranks(config, Local(1, 1), old, {CONFIG: "name: before\n"}, limits)
    assert old.file(CONFIG).read_text() == "name: before\n"
    with pytest.raises(UsageError):
        cli._run_ranks(config, Local(1, 1), new, None, limits)
    assert not new.path.exists()


def test_gpus_are_asked_for_where_there_may_be_one(tmp_path: Path) -> None:
    """A driver's file, or a card whose driver makes one when it is first used."""
    from ridgeline.cli_shared import may_have_gpu

    dev, pci = tmp_path / "dev", tmp_path / "pci"
    dev.mkdir()
    assert not may_have_gpu(dev, pci)
    for name, vendor, kind in (
        ("network", "0x15b3", "0x020000"),
        ("console", "0x1a03", "0x030000"),
        ("bridge", "0x10de", "0x068000"),
    ):
        (pci / name).mkdir(parents=True)
        (pci / name / "vendor").write_text(f"{vendor}\n")
        (pci / name / "class").write_text(f"{kind}\n")
    assert not may_have_gpu(dev, pci)
    (pci / "bridge" / "class").write_text("0x030200\n")
    assert may_have_gpu(dev, pci)
    (dev / "kfd").write_text("")
    assert may_have_gpu(dev, tmp_path / "none")


@pytest.mark.parametrize("option", ["--on", "--scheduler"])
def test_a_queue_that_refuses_leaves_a_way_out(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named as the command's own option is."""
    from ridgeline import cli_jobs
    from ridgeline.launch import request

    def refuse(*_: object) -> None:
        raise RunError("sbatch refused (1): no configuration")

    monkeypatch.setattr(request, "submit_job", refuse)
    with pytest.raises(
        RunError, match=rf"no configuration; {option} local runs it on this machine"
    ):
        cli_jobs.hand_over(None, "slurm", 1, False, option)
