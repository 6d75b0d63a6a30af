"""The layout's text form, its errors, and the composition table that everything else reads."""

from __future__ import annotations

import itertools
import random

import pytest

from ridgeline.errors import UsageError
from ridgeline.layout import (
    AVAILABLE,
    FIELDS,
    TECHNIQUES,
    Layout,
    check_available,
    check_layout,
    composition_matrix,
    override_text,
    require_layout,
    techniques,
    why_apart,
)

VALUES: dict[str, list[object]] = {
    "dp": [1, 2, 3, 8],
    "zero": [0, 1, 2, 3],
    "shard": [None, 1, 2, 3],
    "tp": [1, 2, 4],
    "sp": [False, True],
    "cp": [1, 2],
    "pp": [1, 2, 3],
    "schedule": ["gpipe", "1f1b", "interleaved", "zerobubble"],
    "microbatches": [1, 2, 7],
    "virtual": [1, 2],
    "spatial": [(1, 1), (4, 1), (1, 4), (2, 3)],
    "ep": [1, 2, 4],
    "recompute": ["none", "selective", "full"],
    "offload": ["none", "optimizer", "params", "activations"],
    "precision": ["fp32", "tf32", "bf16", "fp16", "fp8"],
    "compile": [False, True],
    "graphs": [False, True],
    "accumulate": [1, 4],
    "compress": ["none", "fp16", "bf16", "powersgd:4"],
    "sync": ["every", "local:8", "async"],
}


def random_layouts(count: int) -> list[Layout]:
    """Reproducible; each changes a few fields, so that both sound and unsound ones occur."""
    draw = random.Random(0)
    return [
        Layout().replace(**{n: draw.choice(VALUES[n]) for n in draw.sample(FIELDS, k % 9)})
        for k in range(count)
    ]


def pairs_of_values() -> list[Layout]:
    return [
        Layout().replace(**{a: x, b: y})
        for a, b in itertools.combinations(FIELDS, 2)
        for x, y in itertools.product(VALUES[a], VALUES[b])
    ]


def test_values_cover_every_field() -> None:
    assert tuple(VALUES) == FIELDS


def test_text_round_trips() -> None:
    for layout in pairs_of_values() + random_layouts(1000):
        assert Layout.parse(str(layout)) == layout
        assert str(Layout.parse(str(layout))) == str(layout)


def test_canonical_text() -> None:
    assert str(Layout()) == "dp=1"
    assert Layout.parse("") == Layout.parse("  ") == Layout()
    assert str(Layout.parse(" tp = 2 , dp=4 , compile=TRUE,zero=0")) == "dp=4,tp=2,compile=true"
    text = "dp=4,zero=3,tp=2,pp=2,schedule=1f1b,microbatches=8,recompute=selective,precision=bf16"
    assert str(Layout.parse(text)) == text.replace("schedule=1f1b,", "")
    assert str(Layout.parse("spatial=4x1")) == "spatial=4"
    assert str(Layout.parse("spatial=1x4")) == "spatial=1x4"
    assert Layout(compress="powersgd:04") == Layout.parse("compress=powersgd:4")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shcedule=gpipe", ["layout field 'shcedule'", "did you mean 'schedule'?", "here"]),
        ("dp=2,dp=4", ["dp is given twice", "2", "4", "here"]),
        ("dp", ["'dp'", "field=value", "here"]),
        ("dp=2,,tp=2", ["''", "field=value"]),
        ("dp=0", ["dp=0", "positive", "here"]),
        ("dp=-2", ["dp=-2", "positive"]),
        ("tp=two", ["tp=two", "positive"]),
        ("dp=²", ["positive"]),
        ("dp=" + "9" * 5000, ["positive"]),
        ("zero=4", ["zero=4", "0, 1, 2, 3"]),
        ("precision=fp61", ["precision=fp61", "fp32, tf32, bf16, fp16, fp8"]),
        ("compile=yes", ["compile=yes", "true, false"]),
        ("spatial=2x", ["spatial=2x", "2x4"]),
        ("spatial=2x2x2", ["spatial=2x2x2"]),
        ("compress=powersgd", ["compress=powersgd", "powersgd:r"]),
        ("compress=powersgd:0", ["compress=powersgd:0", "powersgd:r"]),
        ("sync=local:k", ["sync=local:k", "every, local:k, async"]),
        ("schedule=", ["schedule=", "gpipe, 1f1b, interleaved, zerobubble"]),
    ],
)
def test_wrong_text_is_one_sentence_that_names_the_remedy(text: str, said: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        Layout.parse(text, "here")
    for part in said:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_layout_made_in_code_is_checked_too() -> None:
    with pytest.raises(UsageError, match="dp=0"):
        Layout(dp=0)
    with pytest.raises(UsageError, match="dp=true"):
        Layout(dp=True)
    with pytest.raises(UsageError, match="precision=half"):
        Layout().replace(precision="half")
    with pytest.raises(UsageError, match="did you mean 'precision'"):
        Layout().replace(precisoin="bf16")


def test_one_field_by_text() -> None:
    layout = Layout(dp=2).with_field("precision", "bf16").with_field("spatial", "2x3")
    assert layout == Layout(dp=2, precision="bf16", spatial=(2, 3))
    assert Layout(zero=1, shard=2).with_field("shard", "none") == Layout(zero=1)
    with pytest.raises(UsageError, match=r"layout\.precision"):
        layout.with_field("precision", "bf61", "layout.precision")
    with pytest.raises(UsageError, match="did you mean 'precision'"):
        layout.with_field("precison", "bf16")


def test_override_keeps_what_was_stated() -> None:
    assert override_text("tp=2,dp=1", "precision", "bf16") == "dp=1,tp=2,precision=bf16"
    assert override_text("", "dp", "1") == "dp=1"
    with pytest.raises(UsageError, match=r"use -n 2 or dp=2"):
        Layout.parse_for(override_text("tp=2", "dp", "1"), 4)


def test_world_size_does_not_count_expert_ranks() -> None:
    assert Layout(dp=4, tp=2, cp=3, pp=5, ep=2).world_size == 120
    assert Layout(dp=2, spatial=(2, 3)).world_size == 12


def test_parse_for_fills_in_dp() -> None:
    assert Layout.parse_for("", 4) == Layout(dp=4)
    assert Layout.parse_for("tp=2", 8) == Layout(dp=4, tp=2)
    assert Layout.parse_for("dp=2,tp=2", 4) == Layout(dp=2, tp=2)
    assert Layout.parse_for("dp=1", 1) == Layout()


@pytest.mark.parametrize(
    ("text", "num_processes", "said"),
    [
        ("dp=4", 1, "needs 4 processes but there are 1; use -n 4 or dp=1"),
        ("dp=1", 4, "needs 1 processes but there are 4; use -n 1 or dp=4"),
        ("dp=2,tp=2", 6, "needs 4 processes but there are 6; use -n 4 or dp=3"),
        ("dp=2,tp=2", 3, "needs 4 processes but there are 3; use -n 4 or dp=1 with -n 2"),
        ("dp=1,tp=2", 3, "needs 2 processes but there are 3; use -n 2"),
        ("tp=4", 6, "needs a multiple of 4 processes but there are 6; use -n 4 or -n 8"),
        ("tp=4", 3, "needs a multiple of 4 processes but there are 3; use -n 4"),
        ("", 0, "0 processes"),
    ],
)
def test_parse_for_gives_remedies(text: str, num_processes: int, said: str) -> None:
    with pytest.raises(UsageError) as error:
        Layout.parse_for(text, num_processes, "--layout")
    assert said in str(error.value)
    assert "--layout" in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp=64", "needs 64 processes but there are 32; use -N 8 or dp=32"),
        ("tp=3", "needs a multiple of 3 processes but there are 32; use -N 3 or -N 6"),
        ("dp=3,tp=8", "needs 24 processes but there are 32; use -N 3 or dp=4"),
        ("dp=5,tp=3", "needs 15 processes but there are 32; use sizes whose product divides that"),
    ],
)
def test_parse_for_counts_in_nodes_where_the_command_does(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        Layout.parse_for(text, 32, "--explain", per_node=8)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "fields", "nearest"),
    [
        ("sp=true", ("tp", "sp"), "dp=1"),
        ("dp=4,shard=2", ("shard", "zero"), "dp=4,zero=1,shard=2"),
        ("dp=6,zero=3,shard=4", ("dp", "shard"), "dp=6,zero=3,shard=3"),
        ("dp=4,ep=3", ("dp", "ep"), "dp=4,ep=2"),
        ("schedule=gpipe", ("pp", "schedule"), "dp=1"),
        ("microbatches=8", ("pp", "microbatches"), "dp=1"),
        ("pp=4", ("pp", "microbatches"), "pp=4,microbatches=4"),
        ("pp=4,microbatches=6,virtual=2", ("schedule", "virtual"), "pp=4,microbatches=6"),
        (
            "pp=2,schedule=interleaved,microbatches=4",
            ("schedule", "virtual"),
            "pp=2,schedule=interleaved,microbatches=4,virtual=2",
        ),
        (
            "pp=4,schedule=interleaved,microbatches=7,virtual=2",
            ("pp", "microbatches"),
            "pp=4,schedule=interleaved,microbatches=8,virtual=2",
        ),
        ("dp=2,offload=params", ("offload", "zero"), "dp=2,zero=3,offload=params"),
        (
            "dp=2,zero=3,pp=2,schedule=zerobubble,microbatches=4",
            ("schedule", "zero"),
            "dp=2,zero=2,pp=2,schedule=zerobubble,microbatches=4",
        ),
        ("dp=2,zero=1,compress=bf16", ("zero", "compress"), "dp=2,zero=1"),
        ("dp=2,zero=1,sync=local:4", ("zero", "sync"), "dp=2,zero=1"),
        ("tp=2,spatial=2", ("spatial", "tp"), "spatial=2"),
        ("dp=2,compile=true,graphs=true", ("dp", "graphs"), "dp=2,compile=true"),
        ("graphs=true", ("graphs", "compile"), "compile=true,graphs=true"),
        ("pp=2,microbatches=2,accumulate=4", ("pp", "accumulate"), "pp=2,microbatches=2"),
        ("spatial=2,precision=fp8", ("spatial", "precision"), "spatial=2,precision=bf16"),
    ],
)
def test_what_does_not_compose(text: str, fields: tuple[str, str], nearest: str) -> None:
    layout = Layout.parse(text)
    first = check_layout(layout)[0]
    assert first.fields == fields
    assert first.nearest == nearest
    with pytest.raises(UsageError) as error:
        require_layout(layout, "recipe.yaml")
    for part in (*fields, repr(nearest), "recipe.yaml"):
        assert part in str(error.value)


def test_sound_layouts_pass() -> None:
    for text in (
        "",
        "dp=4,accumulate=2,precision=bf16,compile=true",
        "dp=4,zero=3,tp=2,pp=2,microbatches=8,recompute=selective,precision=bf16",
        "dp=8,zero=2,shard=4,ep=2",
        "dp=2,spatial=2x2,recompute=full",
        "dp=1,zero=3,offload=params",
    ):
        layout = Layout.parse(text)
        assert check_layout(layout) == []
        require_layout(layout)


def test_every_suggestion_works_and_changes_only_what_it_must() -> None:
    seen = 0
    for layout in pairs_of_values() + random_layouts(1000):
        for finding in check_layout(layout):
            seen += 1
            assert len(finding.fields) == 2
            nearest = Layout.parse(finding.nearest)
            assert nearest != layout
            assert check_layout(nearest) == []
    assert seen > 500


def test_a_single_finding_is_cured_by_changing_one_of_its_two_fields() -> None:
    for layout in pairs_of_values():
        findings = check_layout(layout)
        if len(findings) == 1:
            nearest = Layout.parse(findings[0].nearest)
            changed = [n for n in FIELDS if getattr(nearest, n) != getattr(layout, n)]
            assert len(changed) <= 2, (str(layout), str(nearest))
            assert set(changed) & set(findings[0].fields)


def test_techniques_are_named_by_the_text_that_switches_them_on() -> None:
    assert techniques(Layout()) == ()
    layout = Layout(dp=2, zero=3, precision="bf16", compress="powersgd:2", sync="local:4")
    assert techniques(layout) == ("dp", "zero=3", "precision=bf16", "compress", "sync=local")
    assert techniques(Layout(pp=2)) == ("pp",)
    reached = {name for pair in pairs_of_values() for name in techniques(pair)}
    assert reached == set(TECHNIQUES)


def test_table_is_symmetric_and_names_only_techniques() -> None:
    from ridgeline import layout as module

    for first, second in itertools.product(TECHNIQUES, TECHNIQUES):
        assert why_apart(first, second) == why_apart(second, first)
    for left, right, reason in module.APART:
        assert set(left) | set(right) <= set(TECHNIQUES)
        assert reason
    for need in module._NEEDS:
        assert set(need.fields) <= set(FIELDS)
        assert need.holds(Layout())


def test_matrix_is_symmetric_and_complete() -> None:
    lines = composition_matrix().splitlines()
    end = lines.index("")
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines[2:end]]
    names = [row[0].strip("`") for row in rows]
    cells = [row[1:] for row in rows]
    assert names == list(TECHNIQUES)
    for i, j in itertools.product(range(len(names)), repeat=2):
        assert cells[i][j] == cells[j][i]
    i, j = names.index("schedule=zerobubble"), names.index("zero=3")
    reason = why_apart("zero=3", "schedule=zerobubble")
    assert f"{cells[i][j]}. {reason}" in lines
    assert cells[names.index("dp")][names.index("tp")] == "✓"


def test_what_this_release_cannot_run_is_said() -> None:
    assert set(TECHNIQUES) >= AVAILABLE
    assert check_available(Layout(dp=2, accumulate=2, precision="fp16", compile=True)) == []


def test_unavailable_technique(monkeypatch: pytest.MonkeyPatch) -> None:
    few = frozenset({"dp", "accumulate", "compile", "precision=bf16"})
    monkeypatch.setattr("ridgeline.layout.AVAILABLE", few)
    findings = check_available(Layout.parse("dp=2,zero=2,tp=2,sp=true,precision=fp8"))
    assert [f.fields for f in findings] == [("zero",), ("tp",), ("sp",), ("precision",)]
    has = "(it has dp, precision=bf16, compile, accumulate)"
    assert findings[1].reason == f"tp=2: tensor parallelism is not in this release {has}"
    assert {f.nearest for f in findings} == {"dp=4,precision=bf16"}


def test_unavailable_suggestions_can_be_run() -> None:
    for layout in pairs_of_values():
        for finding in check_available(layout):
            nearest = Layout.parse(finding.nearest)
            assert check_available(nearest) == []
            assert check_layout(nearest) == []
            assert nearest.world_size == layout.world_size
