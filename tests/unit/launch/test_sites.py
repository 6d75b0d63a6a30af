"""Profiles of machines: what they add, what they refuse, and that a slip in one is told."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from ridgeline.errors import UsageError
from ridgeline.launch.job import Job
from ridgeline.launch.schedulers.table import SCHEDULERS
from ridgeline.launch.sites import SHIPPED, Site, list_sites, load_site, read_site

NOWHERE = {"XDG_CONFIG_HOME": "/nowhere"}
NAMES = ["engaging", "finisterrae3", "perlmutter", "snellius", "summit"]


def site(name: str) -> Site:
    return load_site(name, environ=NOWHERE)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_profiles_make_jobs(name: str) -> None:
    one = site(name)
    assert one.source
    assert one.scheduler is None or one.scheduler in SCHEDULERS
    filled = one.fill({"nodes": 2, "partition": None})
    assert set(filled) <= {field.name for field in fields(Job)}
    job = Job(
        **{"name": "x", "body": ("true",), "folder": Path("/f"), "workdir": Path("/w"), **filled}
    )
    SCHEDULERS[one.scheduler or "slurm"].render(job)


def test_no_other_profile_is_shipped() -> None:
    assert sorted(list_sites(NOWHERE)) == NAMES


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_facts_name_their_guide(path: Path) -> None:
    """Every line that says something of the machine has a comment, on it or on the line before."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if (
            re.match(r"(source|default|partitions|notes|setup|variables):", line)
            or not line.strip()
        ):
            continue
        if line.startswith("    ") and before.startswith("  - "):  # the second line of a note
            continue
        if re.fullmatch(r"  \w+:", line):  # a kind of node that has no name of its own
            continue
        assert "#" in line or before.strip().startswith("#"), line


def test_facts_of_the_guides() -> None:
    gpu = site("snellius").partitions["gpu_a100"]
    assert (gpu.gpus, gpu.gpu_memory_gb, gpu.cores) == (4, 40, 72)
    gpu = site("perlmutter").partitions["gpu"]
    assert (gpu.gpus, gpu.cores, gpu.constraint, gpu.qos) == (4, 64, "gpu", "regular")
    node = site("summit").partitions["node"]
    assert (node.gpus, node.cores, node.memory_gb, node.gpu_memory_gb) == (6, 42, 512, 16)
    a100 = site("finisterrae3").partitions["a100"]
    assert (a100.gpus, a100.cores, a100.gpu_memory_gb) == (2, 64, 40)
    assert site("finisterrae3").local_disk == "LUSTRE_SCRATCH"
    assert site("engaging").partitions["mit_normal_gpu"].gpu_type == "h100"


def test_what_was_not_said_is_filled_in() -> None:
    filled = site("summit").fill({"nodes": 3, "per_node": None, "account": "abc"})
    assert filled["per_node"] == filled["gpus_per_node"] == 6
    assert filled["cpus_per_rank"] == 7
    assert filled["count_nodes"] is True
    assert filled["account"] == "abc"
    assert "partition" not in filled


def test_what_was_said_stays() -> None:
    filled = site("finisterrae3").fill(
        {"per_node": 1, "cpus_per_rank": 5, "setup": ("mine",), "variables": {"A": "1"}}
    )
    assert (filled["per_node"], filled["gpus_per_node"], filled["cpus_per_rank"]) == (1, 1, 5)
    assert filled["setup"] == ("module load cesga/system miniconda3/22.11", "mine")
    assert filled["variables"] == {"A": "1", "RIDGELINE_LOCAL_DISK": "LUSTRE_SCRATCH"}


def test_a_rank_has_its_share_of_the_cores() -> None:
    one = site("finisterrae3")
    assert one.fill({"per_node": 1})["cpus_per_rank"] == 32  # of one GPU of two
    assert one.fill({"per_node": 4, "gpus_per_node": 0})["cpus_per_rank"] == 16


def test_a_partition_that_the_profile_does_not_know_is_passed_on() -> None:
    filled = site("snellius").fill({"partition": "rome", "per_node": 128})
    assert filled["partition"] == "rome"
    assert "gpus_per_node" not in filled


def test_the_type_of_gpu_is_for_jobs_with_gpus() -> None:
    assert site("engaging").fill({"gpus_per_node": 2})["gpu_type"] == "h100"
    assert site("engaging").fill({})["gpus_per_node"] == 1


@pytest.mark.parametrize(
    ("name", "said", "why"),
    [
        (
            "snellius",
            {"per_node": 8, "nodes": 2},
            r"8 ranks a node are wanted, and a node of snellius \(gpu_a100\) has 4 GPUs; "
            "write --per-node 4 and --nodes 4",
        ),
        (
            "snellius",
            {"gpus_per_node": 5},
            "5 GPUs a node are wanted.* has 4; write --gpus-per-node 4",
        ),
        (
            "summit",
            {"per_node": 43, "gpus_per_node": 0},
            "has 42 cores; write --per-node 42 and --nodes 2",
        ),
        ("summit", {"cpus_per_rank": 8}, "has 42 cores; write --cpus-per-rank 7"),
    ],
)
def test_more_than_a_node_has(name: str, said: dict[str, int], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        site(name).fill(said)


def test_the_users_own_profile_comes_first(tmp_path: Path) -> None:
    folder = tmp_path / "ridgeline" / "sites"
    folder.mkdir(parents=True)
    (folder / "snellius.yaml").write_text("account: mine\n")
    (folder / "home.yaml").write_text("")
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert load_site("snellius", environ=env).account == "mine"
    assert load_site("home", environ=env) == Site("home")
    assert load_site(str(folder / "home.yaml")) == Site("home")
    (tmp_path / ".config").symlink_to(tmp_path)
    assert load_site("snellius", environ={"HOME": str(tmp_path)}).account == "mine"
    assert load_site("snellius", environ=NOWHERE).account is None


def test_unknown_site() -> None:
    with pytest.raises(
        UsageError, match=r"unknown site 'snelius' in --site; did you mean 'snellius'"
    ):
        site("snelius")
    with pytest.raises(UsageError, match=r"cannot read the site /nowhere/x.yaml: No such file"):
        load_site("/nowhere/x.yaml")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("schedular: slurm", "unknown key 'schedular' in .*did you mean 'scheduler'"),
        (
            "partitions: {gpu: {gpu: 4}}",
            r"unknown key 'gpu' in partitions.gpu of .*did you mean 'gpus'",
        ),
        ("partitions: {gpu: {gpus: many}}", r"partitions.gpu.gpus='many' is not a whole number"),
        ("partitions: {gpu: {cores: 0}}", "cores in partitions.gpu .* is 0"),
        ("partitions: [gpu]", "partitions in .* write a name"),
        ("partitions: {gpu: 4}", "holds 4; write keys"),
        ("default: gpu", "unknown partition 'gpu' in default"),
        ("setup: module load x", "setup in .* write a list"),
        ("setup: [1]", "setup in .* write a list"),
        ("variables: [A]", "variables in .* write a name"),
        ("variables: {A: [1]}", "variables in .* write a name"),
        ("container: aptainer", "unknown container runtime 'aptainer' .*did you mean 'apptainer'"),
        ("- a", "write keys and values"),
        ("a: [", "is no YAML"),
        ("name: x", "unknown key 'name'"),
    ],
)
def test_slips_in_a_profile(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=why):
        load_site(str(path))


def test_variables_are_text() -> None:
    one = read_site({"variables": {"A": 1, "B": True, "C": "x"}}, "x", "x.yaml")
    assert one.variables == {"A": "1", "B": "1", "C": "x"}
